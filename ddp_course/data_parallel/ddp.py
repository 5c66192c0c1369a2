"""DistributedDataParallel, all of it: PyTorch's name, options and behaviour.

`bucketed` has the idea; on top of it comes here what may not be so simple in real life:

    parameters that get no gradient         `unused`, another ending of the engine
    passes that begin at the outputs        of what a forward outside of `no_sync` gave
    modules that go backward by themselves  pipelines: `step`, averaged at its end
    buffers, such as BatchNorm's means      rank 0's are sent before each forward
    gradients outside of the buckets        for those who want to keep them
    buckets in shared memory                all ranks of one machine reduce them there
    uneven numbers of batches               `Join`, as follows

    with Join([ddp]):                  # torch.distributed.algorithms.Join
        for x, y in my_batches:        # more of them on some ranks than on others
            ...

A rank that has run out of batches stays in the `with` block and shadows the others: for
each of their collectives it calls the same one, with zeros, or with nothing to say.
When all have run out, everyone gets the parameters of the rank that trained longest.
The order of the collectives of a step, which both sides must keep to:

    1  how many ranks still train (`Join` itself)
    2  whose buffers count, and the buffers        if there are any to be sent
    3  is this step averaged, or in `no_sync`?
    4  the buckets, and who has had what           if it is

Explained in chapter 05.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ddp_course.collectives import communicator, shared_memory
from ddp_course.data_parallel.bucketed import BucketedDistributedDataParallel
from ddp_course.data_parallel.unused import AllReduceUsed
from ddp_course.mechanisms.agreement import attempt, start_as_replicas
from ddp_course.mechanisms.broadcast import broadcast_all
from ddp_course.mechanisms.buckets import (
    BUCKET_CAP_MB,
    FIRST_BUCKET_MB,
    Bucket,
    bucket_plan,
)
from ddp_course.mechanisms.comm_hook import CommHook, Hook
from ddp_course.mechanisms.hooks import on_backward, tensors_in
from ddp_course.mechanisms.memory_exchange import empty_for_all


class DistributedDataParallel(BucketedDistributedDataParallel, Joinable):
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
        bucket_cap_mb: MiB at which a bucket is closed (`buckets`). (PyTorch has a small
            first bucket only if this is not told.)
        find_unused_parameters: allow parameters without a gradient (`unused`).
        broadcast_buffers: send rank 0's buffers, such as BatchNorm's means, at
            construction and before each forward, unless the last one was in `no_sync`
            or recorded no gradients.
            (torch 2.13 renames it forward_sync_buffers.)
        gradient_as_bucket_view: let gradients lie in the buckets; otherwise, which is
            PyTorch's default, they are copied back, which takes as much memory again.
        all_reduce: any of this course (`ring_all_reduce`); None is PyTorch's.
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
        nn.Module.__init__(self)
        Joinable.__init__(self)
        in_memory = buckets_in_shared_memory
        empty = empty_for_all(process_group) if in_memory else torch.empty
        if all_reduce is None:
            all_reduce = shared_memory.all_reduce if in_memory else dist.all_reduce
        caps = {"bucket_cap_mb": bucket_cap_mb, "first_bucket_mb": first_bucket_mb}
        start_as_replicas(
            module,
            process_group,
            _problem(all_reduce, **caps),
            buffers=broadcast_buffers,
            **caps,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
            buckets_in_shared_memory=buckets_in_shared_memory,
            all_reduce=_name_of(all_reduce),
        )
        self.process_group = process_group
        self.broadcast_buffers = broadcast_buffers
        self.has_buffers = any(True for _ in module.buffers())
        self.require_forward_param_sync = True
        self.divide_by_initial_world_size = True
        how = all_reduce, empty, find_unused_parameters, gradient_as_bucket_view
        self.ending = AllReduceUsed(process_group, *how)
        self.fill_buckets(module, self.ending, **caps)
        self.engine.expecting = False

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The bucket plan, in the order in which buckets are sent."""
        return tuple(bucket.plan for bucket in self.engine.buckets)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and get ready for averaging in the backward that follows."""
        if torch._C._current_graph_task_id() != -1:  # backward recomputes this forward
            return self.module(*inputs, **kwargs)
        averaged = torch.is_grad_enabled() and self.require_backward_grad_sync
        self._get_ready(averaged)
        output = super().forward(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self.ending.forward_ended(output)
        if averaged:
            on_backward(tensors_in(output), self._backward_has_begun)
        return output

    def step(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the step of a module that goes backward by itself, such as a pipeline.

        Its gradients are averaged when it has ended (`mechanisms.hooks.held`).
        """
        averaged = self.require_backward_grad_sync
        self._get_ready(averaged)
        self.frozen.check()
        with nullcontext() if averaged else self.engine.hold():
            return self.module.step(*inputs, **kwargs)

    def _get_ready(self, averaged: bool) -> None:
        """Do what comes before a forward; all ranks do, also those without a batch."""
        if averaged:
            self.ending.forward_begins()
        self.engine.recover()
        work = Join.notify_join_context(self)
        if work is not None and not self.divide_by_initial_world_size:
            if isinstance(self.ending.launch, CommHook):
                raise RuntimeError(
                    "a communication hook divides by the number of all ranks, so Join "
                    "needs divide_by_initial_world_size=True with it"
                )
            self.ending.scale = 1 / work.get_future().wait()[0].item()
        if self.will_sync_buffers():
            self.sync_buffers()
        if self._join_config.enable:
            self._is_averaged(trains=True)
        self.require_forward_param_sync = averaged

    def _backward_has_begun(self) -> None:
        """A pass through an output begins; one beside the outputs is not averaged."""
        self.engine.expecting = False
        self.engine.begin()

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Let `hook(state, bucket)` send the buckets, in place of `all_reduce`.

        It returns a future of the mean (`mechanisms.comm_hook`). All ranks register the
        same, once, before the first backward. Raises RuntimeError, TypeError. Chapter
        14.
        """
        if isinstance(self.ending.launch, CommHook):
            raise RuntimeError("this module has a communication hook already")
        if any(slot.parameter.grad is not None for slot in self.engine.slots):
            raise RuntimeError(
                "register_comm_hook comes before the first backward; there are "
                "gradients already"
            )
        if not callable(hook):
            raise TypeError(f"hook is {hook!r}; it must be a function (state, bucket)")
        self.ending.launch = CommHook(state, hook, self.engine.buckets)
        self.ending.scale = 1  # a hook divides by itself

    # ---- buffers -------------------------------------------------------------------

    def will_sync_buffers(self) -> bool:
        """Tell whether the next forward begins with sending the buffers."""
        has_any = self.broadcast_buffers and self.has_buffers
        return has_any and self.require_forward_param_sync

    def sync_buffers(self, trains: bool = True) -> None:
        """Give every rank the buffers of rank 0, or of one that still has batches."""
        src = communicator(self.process_group).ranks[0]
        if self._join_config.enable:
            src = self._common_rank(trains)
        broadcast_all(self.module.buffers(), src, self.process_group)

    # ---- torch.distributed.algorithms.Join -----------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what this rank does when it has run out of batches, and when all have.

        `divide_by_initial_world_size`: a mean is over all ranks, so that every batch
        counts the same; otherwise over those that still train. As `_DDPJoinHook` in
        torch/nn/parallel/distributed.py.
        """
        name, hook = "divide_by_initial_world_size", JoinHook()
        self.divide_by_initial_world_size = kwargs.get(name, True)
        hook.main_hook, hook.post_hook = self.shadow, self.take_over
        return hook

    @property
    def join_device(self) -> torch.device:
        """Where the tensors of `Join`'s own collectives lie."""
        return next(self.module.parameters()).device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group of `Join`'s own collectives."""
        return communicator(self.process_group).group

    def shadow(self) -> None:
        """Without a batch: take part in one forward and one backward of the others."""
        if self.will_sync_buffers():
            self.sync_buffers(trains=False)
        self.require_forward_param_sync = self._is_averaged(trains=False)
        if self.require_forward_param_sync:
            self.ending.shadow(self.engine)

    def take_over(self, is_last_joiner: bool) -> None:
        """Take the numbers of the highest of the ranks that have trained longest."""
        states = list(self.module.parameters())
        if self.broadcast_buffers:
            states += self.module.buffers()
        broadcast_all(states, self._common_rank(is_last_joiner), self.process_group)

    def _is_averaged(self, trains: bool) -> bool:
        """Say whether this forward's backward is averaged, and hear it."""
        said = float(trains and self.require_backward_grad_sync)
        sum_of_all = torch.full((1,), said, device=self.join_device)
        dist.all_reduce(sum_of_all, group=self.process_group)
        return bool(sum_of_all)

    def _common_rank(self, candidate: bool) -> int:
        """Return the highest rank (of the job) that is a candidate."""
        own = dist.get_rank() if candidate else -1
        rank = torch.tensor([own], device=self.join_device)
        dist.all_reduce(rank, dist.ReduceOp.MAX, self.join_process_group)
        return int(rank)


def _problem(all_reduce: Any, **caps: float) -> str | None:
    if not callable(all_reduce):
        return f"all_reduce is {all_reduce!r}; it must be a function"
    return attempt(lambda: bucket_plan((), **caps))[0]


def _name_of(function: Any) -> str:
    """Return what tells functions apart, the same in all processes."""
    if isinstance(function, functools.partial):
        given = (_name_of(a) if callable(a) else repr(a) for a in function.args)
        return f"{_name_of(function.func)}({', '.join(given)})"
    names = (getattr(function, f"__{key}__", "") for key in ("module", "qualname"))
    return ".".join(names)
