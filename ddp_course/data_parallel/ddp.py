"""The full DistributedDataParallel, with PyTorch's name, arguments and behaviour.

`bucketed` contains the idea. The rest is a list of parts, which know neither this class
nor each other:

    same_model              raises unless all ranks have the same module and arguments
    mechanisms.timeline     records each backward in the open event logs
    mechanisms.recovery     ends a backward that raised; all ranks skip a batch or none
    unused                  handles parameters that get no gradient
    mechanisms.frozen       raises if a parameter is replaced or unfrozen after wrapping
    buffers                 sends rank 0's buffers before each forward
    BeginAtOutputs          averages only backward passes through the outputs

`DDPReducer` can keep gradients outside of the buckets, and launches communication
hooks. All ranks need equally many batches; for unequal numbers use PyTorch's own class
with `Join`. Chapter 05.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.collectives.meeting import quick_exchange
from ddp_course.data_parallel.bucketed import BucketedDistributedDataParallel
from ddp_course.data_parallel.buffers import Buffers
from ddp_course.data_parallel.same_model import SameModel
from ddp_course.data_parallel.unused import UnusedParameters
from ddp_course.mechanisms.buckets import (
    BUCKET_CAP_MB,
    FIRST_BUCKET_MB,
    Bucket,
    LiveBucket,
    Slot,
)
from ddp_course.mechanisms.comm_hook import CommHook, Hook
from ddp_course.mechanisms.engine import AllReduceBuckets, Engine
from ddp_course.mechanisms.frozen import KeepFrozen
from ddp_course.mechanisms.graph import tensors_in
from ddp_course.mechanisms.hooks import on_backward
from ddp_course.mechanisms.parts import announce
from ddp_course.mechanisms.recovery import Recovery
from ddp_course.mechanisms.timeline import RecordBackward


class DDPReducer(AllReduceBuckets):
    """`AllReduceBuckets` with two options of PyTorch's class.

    Attributes:
        as_view: every `grad` is a view of its bucket; if False, it keeps its own
            memory, and the mean is copied there.
        hook: launches the buckets in place of `all_reduce`, and averages by itself.
    """

    as_view = True
    hook: CommHook | None = None

    def register(self, hook: CommHook) -> None:
        """Use `hook` to launch the buckets from now on."""
        self.hook, self.scale = hook, 1

    def launch(self, bucket: LiveBucket) -> Any:
        """Pass a full bucket to the hook, or begin its all-reduce."""
        if self.hook is not None:
            return self.hook(bucket)
        return super().launch(bucket)

    def pack(self, bucket: LiveBucket, slot: Slot) -> None:
        """Write this rank's gradient into the bucket, scaled for the mean."""
        gradient = slot.parameter.grad
        super().pack(bucket, slot)
        if not self.as_view:
            slot.parameter.grad = gradient

    def settle(self, engine: Engine) -> None:
        """Set every `grad` to its mean, in the bucket or in memory of its own."""
        if self.as_view:
            super().settle(engine)
            return
        for slot in engine.slots:
            if slot.parameter in self.unused:
                continue
            if slot.parameter.grad is None:
                slot.parameter.grad = slot.view.clone()
            else:
                slot.parameter.grad.copy_(slot.view)


class BeginAtOutputs:
    """A part that begins an averaged pass when backward reaches an output.

    A backward pass is averaged if it goes through an output of a forward that ran
    outside of `no_sync`. This part cannot see every output: one may be inside a user's
    object, or stored on the module. So the first gradient after such a forward begins a
    pass, too, as in PyTorch's class; later gradients from elsewhere do not.
    """

    def after_replication(self, model: Any) -> None:
        """Let no gradient begin a pass until a forward has run."""
        model.engine.expecting = False

    before_forward = after_replication

    def after_forward(self, model: Any, output: Any) -> None:
        """Expect a pass if this forward is to be averaged, and watch its outputs."""
        if torch.is_grad_enabled() and model.require_backward_grad_sync:
            model.engine.expecting = True
            on_backward(tensors_in(output), model.engine.begin)

    def after_backward(self, engine: Engine) -> None:
        """Expect no further pass until the next forward."""
        engine.expecting = False


class DistributedDataParallel(BucketedDistributedDataParallel):
    """A wrapper that runs `module` on this rank's batch and averages its gradients.

    Its inputs and outputs are those of `module`. When `backward` returns, every
    parameter's `grad` is the mean over the ranks, with the same bits on all of them;
    call `optimizer.step()` directly. A backward pass is averaged if it goes through an
    output of a forward that ran outside of `no_sync`; one forward may have several such
    passes. The first backward after such a forward is averaged even if it goes through
    none of its outputs. Calling the wrapped module itself (`ddp.module(x)`) is no such
    forward, as in PyTorch. Keep this object as long as you train: when it is deleted,
    its hooks are removed, as in PyTorch.

    All ranks must construct it together. Their modules must have the same names, shapes
    and types; all get rank 0's numbers. As in PyTorch, the keys of `state_dict` begin
    with "module.", and the wrapped module's own attributes are at `.module`.

    Args:
        module: on the CPU or on this rank's GPU; gradients must be dense.
        process_group: the ranks that share a batch; None means all.
        bucket_cap_mb: MiB at which a bucket is closed (`buckets`). (In PyTorch, passing
            it turns the small first bucket off.)
        find_unused_parameters: allow parameters without a gradient (`unused`).
        broadcast_buffers: send rank 0's buffers, such as BatchNorm's means, at
            construction and before each forward, unless the previous forward ran in
            `no_sync` or without gradients.
            (torch 2.13 renames it forward_sync_buffers.)
        gradient_as_bucket_view: make gradients views of the buckets; if False, which is
            PyTorch's default, gradients have their own memory, as large as the buckets,
            and the means are copied there.
        all_reduce: an all-reduce of this course, such as `ring_all_reduce`; None means
            PyTorch's.
        first_bucket_mb: the same as `bucket_cap_mb` for the first bucket.
        device_ids, output_device: the module's own GPU, as scripts pass it (inputs are
            not moved there); any other device is refused.
        static_graph: the same parameters are used in every step; here it allows unused
            parameters, as `find_unused_parameters` does, and changes nothing else.

    Raises:
        ReplicaError: the ranks' modules or arguments differ, or cannot be used.
        UnusedParametersError: from `backward`, if parameters got a gradient on some
            ranks only; from the next `forward`, if on none. All ranks raise it.

    torch/nn/parallel/distributed.py; Li et al. 2020. Chapter 05.
    """

    reducer_class = DDPReducer

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
        first_bucket_mb: float = FIRST_BUCKET_MB,
        device_ids: Any = None,
        output_device: Any = None,
        static_graph: bool = False,
    ) -> None:
        buckets = {
            "bucket_cap_mb": bucket_cap_mb,
            "first_bucket_mb": first_bucket_mb,
            "all_reduce": dist.all_reduce if all_reduce is None else all_reduce,
        }
        same = SameModel(
            **buckets,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
            static_graph=static_graph,
        )
        same.devices = device_ids, output_device
        recovery = Recovery(process_group, quick_exchange(process_group))
        find = find_unused_parameters or static_graph
        parts = [
            same,
            RecordBackward(),
            recovery,
            UnusedParameters(recovery.show, find),
            KeepFrozen(),
            *([Buffers()] if broadcast_buffers else []),
            BeginAtOutputs(),
        ]
        super().__init__(module, process_group, **buckets, parts=parts)
        self.engine.reducer.as_view = gradient_as_bucket_view
        self._recorded = False  # whether the last forward recorded a graph

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The bucket plan, in the order in which buckets are sent."""
        return tuple(bucket.plan for bucket in self.engine.buckets)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and prepare to average the backward that follows."""
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and self._recorded:  # activation checkpointing recomputes
            return self.module(*inputs, **kwargs)
        self._recorded = torch.is_grad_enabled()
        return super().forward(*inputs, **kwargs)

    def step(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run `module.step`, which runs backward itself, as a pipeline does.

        The gradients are averaged when it returns.
        """
        announce(self.parts, "before_forward", self)
        with nullcontext() if self.require_backward_grad_sync else self.engine.defer():
            output = self.module.step(*inputs, **kwargs)
        announce(self.parts, "after_forward", self, None)
        return output

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Use `hook(state, bucket)` to send the buckets, in place of `all_reduce`.

        The hook returns a future of the mean (`mechanisms.comm_hook`). All ranks must
        register the same hook, once, before the first backward. Raises RuntimeError if
        a hook or a gradient exists already, and TypeError if `hook` is not callable.
        Chapter 14.
        """
        if self.engine.reducer.hook is not None:
            raise RuntimeError(
                "this module has a communication hook already, and it can have only "
                "one; wrap the module anew to use another"
            )
        if any(slot.parameter.grad is not None for slot in self.engine.slots):
            raise RuntimeError(
                "some parameters have gradients already; call register_comm_hook "
                "before the first backward"
            )
        if not callable(hook):
            raise TypeError(f"hook is {hook!r}; it must be a function (state, bucket)")
        self.engine.reducer.register(CommHook(state, hook, self.engine.buckets))

    def join(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError; `Join` calls this method as `join_hook`."""
        raise NotImplementedError(
            "this DistributedDataParallel needs equally many batches on all ranks, as "
            "DistributedSampler provides. For uneven numbers use PyTorch's class, "
            "torch.nn.parallel.DistributedDataParallel, which supports Join"
        )

    join_hook = join
