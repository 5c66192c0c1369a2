"""Arguments for ZeRO and FSDP that make their bytes, memory and time measurable.

    ZeroRedundancyOptimizer(params, AdamW, **metered.optimizer())
    FullyShardedDataParallel(model, **metered.module())

By default these classes use PyTorch's collectives and are not measured. These arguments
replace

    collectives   by this course's: byte meters count them, slow links delay them, and
                  the ranks compare their calls before each collective
    memory        by labelled memory (`Labels`, `LabelledStorage`), so that ledgers
                  (`measure.resident`) know its purpose

and `RecordUnits` and `RecordBackward` write the events of each step into open logs.

Chapters 07 and 08.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ddp_course.collectives as course
from ddp_course.collectives import communicator
from ddp_course.collectives.endpoint import Endpoint
from ddp_course.measure.storages import label
from ddp_course.mechanisms.buckets import LiveBucket
from ddp_course.mechanisms.engine import Engine
from ddp_course.mechanisms.timeline import RecordBackward, Timeline, span
from ddp_course.zero.shards import ShardedBucket
from ddp_course.zero.stage3 import PeerMessages
from ddp_course.zero.stage3_simple import SimpleFullyShardedDataParallel as Sharded
from ddp_course.zero.unit_storage import FlatStorage, Unit


def optimizer() -> dict[str, Any]:
    """Return arguments for `ZeroRedundancyOptimizer` or `ShardedGradientOptimizer`."""
    return {"collectives": course, "parts": [Labels(), RecordBackward()]}


def module(group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Return arguments for `FullyShardedDataParallel(module, group)`."""
    messages = MeteredMessages(group)
    parts = [RecordUnits()]
    return {"exchange": messages, "storage": LabelledStorage, "parts": parts}


class MeteredMessages(PeerMessages):
    """The gathers and reductions of FSDP, with this course's collectives.

    All ranks of a group must construct the first object for the group together.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self.comm, self.endpoint = communicator(group), Endpoint(group)

    def is_metered(self, tensor: Tensor) -> bool:
        """Return whether this course's collectives send it; over NCCL, PyTorch's do."""
        return not tensor.is_cuda or self.endpoint.staged(tensor)

    def gather(
        self,
        whole: Tensor,
        own: Tensor,
        prepare: Callable[[], None],
        async_op: bool = False,
    ) -> Any:
        """Begin to gather every rank's shard into its place in `whole`.

        This course's asynchronous collectives run one after the other in a thread, and
        so does `prepare`: memory for the gather is allocated only when the previous
        reduce-scatter has ended and freed its memory, not when this method is called.
        """
        if not self.is_metered(whole):
            return super().gather(whole, own, prepare, async_op)
        self.comm.perform(prepare, async_op=True) if async_op else prepare()
        return course.all_gather_single(whole, own, self.group, async_op)

    def reduce(self, own: Tensor, whole: Tensor, then: Callable[[], None]) -> Any:
        """Begin to sum `whole`, keep this rank's part in `own`, and call `then()`."""
        if not self.is_metered(whole):
            return super().reduce(own, whole, then)
        work = course.reduce_scatter_single(own, whole, group=self.group, async_op=True)

        @torch.no_grad()
        def follow() -> None:  # in the thread of the reduce-scatter
            work.wait()  # returns at once; raises the collective's error, if any
            then()

        return self.comm.perform(follow, async_op=True)

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Sum `tensor` over the ranks of another group: the replicas."""
        if not self.is_metered(tensor):
            super().all_reduce(tensor, group)
        else:
            course.ring_all_reduce(tensor, group=group)


class Labels:
    """A part of a sharded optimizer that labels its memory for ledgers."""

    def row_made(
        self, optimizer: Any, bucket: ShardedBucket, parameters: dict[str, Tensor]
    ) -> None:
        """Label a row of parameters."""
        label(optimizer.rows[-1], "parameters")

    def bucket_added(self, engine: Engine, bucket: LiveBucket) -> None:
        """Label the memory of a bucket; in stage 2 it is only a buffer for messages."""
        permanent = not hasattr(engine.reducer, "shards")
        label(bucket.flat, "gradients" if permanent else "communication buffers")

    def shard_kept(self, shard: Tensor) -> None:
        """Label this rank's part of the mean gradients."""
        label(shard, "gradients")


class LabelledStorage(FlatStorage):
    """A FlatStorage that labels its memory for ledgers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        label(self.shard, "parameters")
        for flat in (self.whole, self.sum):
            label(flat, "communication buffers")

    def keep(self, gradient: Tensor) -> None:
        """Set the pieces' `grad` to their parts of `gradient`."""
        super().keep(label(gradient, "gradients"))


class RecordUnits:
    """A part of FSDP that records a timeline of each pass, unit by unit."""

    def __init__(self) -> None:
        self.since: dict[Unit, float] = {}  # start time of the unit's computation

    def before_forward(self, fsdp: Sharded) -> None:
        """Begin a timeline, if an event log is open."""
        self.timeline = Timeline.begin()
        fsdp.span = partial(span, self.timeline)

    before_backward = before_forward

    def gathered(self, fsdp: Sharded, unit: Unit) -> None:
        """Record the start time of the unit's computation."""
        self.since[unit] = time.perf_counter()

    def used(self, fsdp: Sharded, unit: Unit, output: Any) -> None:
        """Record the duration of the unit's forward."""
        self._computed(fsdp, "forward", unit)

    def left(self, fsdp: Sharded, unit: Unit) -> None:
        """Record the duration of the unit's backward."""
        self._computed(fsdp, "backward", unit)

    def _computed(self, fsdp: Sharded, op: str, unit: Unit) -> None:
        since = self.since.pop(unit, None)
        if since and unit is not fsdp.root:
            self.timeline.add(op, since, "compute", unit=unit.plan.name)
