"""DistributedDataParallel: gradients in buckets, sent while backward still runs.

The third step after `naive`'s two, with PyTorch's name and behaviour. Read with it:

    buckets    which gradients travel together (`mechanisms`)
    slots      where they lie
    reducer    when they are sent
    hooks      how autograd tells that they are there (`mechanisms`)
    unused     what if some never are
    replicas   what makes all ranks the same at the beginning (`mechanisms`)
    join       uneven numbers of batches

Explained in chapter 05.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable

from ddp_course.collectives import communicator, shared_memory
from ddp_course.data_parallel.join import (
    ShadowHook,
    common_rank,
    tell_averaged,
    tell_join,
)
from ddp_course.data_parallel.reducer import Reducer
from ddp_course.data_parallel.unused import Unused
from ddp_course.mechanisms.buckets import (
    BUCKET_CAP_MB,
    FIRST_BUCKET_MB,
    Bucket,
    bucket_plan,
)
from ddp_course.mechanisms.hooks import on_backward, tensors_in
from ddp_course.mechanisms.replicas import (
    broadcast_all,
    check_same,
    form_of,
    problem_with,
)


class DistributedDataParallel(nn.Module, Joinable):
    """Runs `module` on this rank's part of the batch, and averages its gradients.

    Takes and returns what `module` does. When `backward` returns, every parameter's
    `grad` is the mean over the ranks, with the same bits on all of them; nothing need
    be called before `optimizer.step()`. A backward pass is averaged if it goes through
    an output of a forward that was made outside of `no_sync`; there may be several.
    Keep this object as long as you train: its hooks go with it (as PyTorch's do).

    Made by all ranks together: they must hold the same names, shapes and types, and
    rank 0's numbers are sent to all. As in PyTorch, `state_dict` has the prefix
    "module.", and the wrapped module's own attributes are at `.module`.

    Args:
        module: on the CPU or on this rank's GPU; gradients must be dense.
        process_group: the ranks that share a batch; None are all.
        bucket_cap_mb: MiB at which a bucket is closed (`buckets`).
        find_unused_parameters: allow parameters without a gradient (`unused`).
        broadcast_buffers: send rank 0's buffers, such as BatchNorm's means, at
            construction and before each forward, unless the last one was in `no_sync`
            or recorded no gradients.
            (torch 2.13 renames it forward_sync_buffers.)
        gradient_as_bucket_view: let gradients lie in the buckets; otherwise they are
            copied back, which takes as much memory again.
        all_reduce: any of this course (`ring.all_reduce`); None is PyTorch's.
        buckets_in_shared_memory: put the buckets where all ranks of one machine see
            them, and reduce them there, with nothing to copy; CPU only. That memory is
            taken until the process group ends.
        first_bucket_mb: the same as `bucket_cap_mb` for the first bucket.

    Raises:
        ReplicaError: the ranks' modules or arguments differ, or cannot be used.
        UnusedParametersError: from `backward`, if parameters got a gradient on some
            ranks only; from the next `forward`, if on none. Both on all ranks.

    torch/nn/parallel/distributed.py; Li et al. 2020. Chapter 05.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = BUCKET_CAP_MB,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
        all_reduce: Callable[..., Any] | None = None,
        *,
        buckets_in_shared_memory: bool = False,
        first_bucket_mb: float = FIRST_BUCKET_MB,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        if all_reduce is None:
            in_memory = buckets_in_shared_memory
            all_reduce = shared_memory.all_reduce if in_memory else dist.all_reduce
        plan = _agreed_plan(
            module,
            process_group,
            all_reduce,
            bucket_cap_mb=bucket_cap_mb,
            first_bucket_mb=first_bucket_mb,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
            buckets_in_shared_memory=buckets_in_shared_memory,
        )
        self.module = module
        self.process_group = process_group
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.has_buffers = any(True for _ in module.buffers())
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.divide_by_initial_world_size = True
        states = [
            *module.parameters(),
            *(module.buffers() if broadcast_buffers else ()),
        ]
        broadcast_all(states, communicator(process_group).ranks[0], process_group)
        empty = torch.empty
        if buckets_in_shared_memory:
            empty = functools.partial(_empty_in_shared_memory, group=process_group)
        unused = Unused(find_unused_parameters, process_group)
        parameters = dict(module.named_parameters())
        self.reducer = Reducer(
            parameters,
            plan,
            process_group,
            all_reduce,
            empty,
            unused,
            gradient_as_bucket_view,
        )

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The bucket plan, in the order in which buckets are sent."""
        return tuple(bucket.plan for bucket in self.reducer.buckets)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and get ready for averaging in the backward that follows."""
        if torch._C._current_graph_task_id() != -1:  # backward recomputes this forward
            return self.module(*inputs, **kwargs)
        averaged = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.reducer.forward_begins(averaged)
        tell_join(self)
        if self.will_sync_buffers():
            self.sync_buffers()
        tell_averaged(self)
        output = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self.reducer.forward_ended(output, averaged)
        if averaged:
            on_backward(tensors_in(output), self.reducer.begin)
        self.require_forward_param_sync = averaged
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate the gradients of what is run forward in this block.

        They stay this rank's own until the next averaged backward pass, which averages
        their sum. It is the forward that must be inside.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # ---- buffers -------------------------------------------------------------------

    def will_sync_buffers(self) -> bool:
        """Tell whether the next forward begins with sending the buffers."""
        return (
            self.broadcast_buffers
            and self.require_forward_param_sync
            and self.has_buffers
        )

    def sync_buffers(self, trains: bool = True) -> None:
        """Give every rank the buffers of rank 0, or of one that still has batches."""
        src = communicator(self.process_group).ranks[0]
        if self._join_config.enable:
            src = common_rank(self, trains)
        broadcast_all(self.module.buffers(), src, self.process_group)

    # ---- torch.distributed.algorithms.Join -----------------------------------------

    def join_hook(self, **kwargs: Any) -> ShadowHook:
        """Return what this rank does when it has run out of batches (`join`)."""
        return ShadowHook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """Where the tensors of `Join`'s own collectives lie."""
        return next(self.module.parameters()).device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group of `Join`'s own collectives."""
        return communicator(self.process_group).group


def _agreed_plan(
    module: nn.Module,
    group: dist.ProcessGroup | None,
    all_reduce: Callable[..., Any],
    **options: Any,
) -> tuple[Bucket, ...]:
    """Return the bucket plan, if all ranks make the same of it; else raise, on all."""
    plan, form, problem = (), {}, problem_with(module)
    if not problem and not callable(all_reduce):
        problem = f"all_reduce is {all_reduce!r}; it must be a function"
    if not problem:
        caps = options["bucket_cap_mb"], options["first_bucket_mb"]
        try:
            plan = bucket_plan(module.named_parameters(), *caps)
        except ValueError as error:
            problem = str(error)
        form = form_of(module, all_reduce=_name_of(all_reduce), **options)
    check_same(form, problem, group)
    return plan


def _empty_in_shared_memory(
    numel: int, dtype: torch.dtype, device: torch.device, group: Any
) -> Tensor:
    return shared_memory.empty(numel, dtype=dtype, group=group)


def _name_of(function: Any) -> str:
    return (
        f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    )
