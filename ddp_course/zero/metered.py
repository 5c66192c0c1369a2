"""What meters need of ZeRO and FSDP: hand it in where something is to be measured.

    ZeroRedundancyOptimizer(params, AdamW, **metered.optimizer())
    FullyShardedDataParallel(model, **metered.module())

The classes themselves send by PyTorch's collectives, and know of no meter. With this

    collectives   are this course's: byte meters count them, slow links delay them, and
                  before each of them the ranks compare what they call
    Labels        and `LabelledStorage` tell ledgers (`measure.resident`) what memory is
                  for
    Recorded      and `RecordBackward` write what a step does into open event logs

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
from ddp_course.collectives.port import Port
from ddp_course.measure.storages import label
from ddp_course.mechanisms.buckets import LiveBucket
from ddp_course.mechanisms.engine import Engine
from ddp_course.mechanisms.timeline import RecordBackward, Timeline, span
from ddp_course.zero.shards import ShardedBucket
from ddp_course.zero.stage3 import PeerMessages
from ddp_course.zero.stage3_simple import SimpleFullyShardedDataParallel as Sharded
from ddp_course.zero.unit_storage import FlatStorage, Unit


def optimizer() -> dict[str, Any]:
    """Return what `ZeroRedundancyOptimizer` and `ShardedGradientOptimizer` take."""
    return {"collectives": course, "parts": [Labels(), RecordBackward()]}


def module(group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Return what `FullyShardedDataParallel(module, group)` takes."""
    messages = ShardMessages(group)
    return {"exchange": messages, "storage": LabelledStorage, "parts": [Recorded()]}


class ShardMessages(PeerMessages):
    """How shards are gathered and gradients are summed, with this course's collectives.

    The first one for a group is constructed by all its ranks together.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self.comm, self.port = communicator(group), Port(group)

    def ours(self, tensor: Tensor) -> bool:
        """Tell whether this course's collectives send it; over NCCL PyTorch's do."""
        return not tensor.is_cuda or self.port.staged(tensor)

    def gather(
        self,
        whole: Tensor,
        own: Tensor,
        prepare: Callable[[], None],
        async_op: bool = False,
    ) -> Any:
        """Begin to put every rank's shard into its place in `whole`.

        Collectives of this course that go on meanwhile follow each other in a thread.
        So does `prepare`: the memory for a gather is allocated when the reduce-scatter
        before it has ended and given back its own, and not already when this is called.
        """
        if not self.ours(whole):
            return super().gather(whole, own, prepare, async_op)
        self.comm.perform(prepare, async_op=True) if async_op else prepare()
        return course.all_gather_single(whole, own, self.group, async_op)

    def reduce(self, own: Tensor, whole: Tensor, then: Callable[[], None]) -> Any:
        """Begin to sum `whole`, this rank's part into `own`; then call `then`."""
        if not self.ours(whole):
            return super().reduce(own, whole, then)
        work = course.reduce_scatter_single(own, whole, group=self.group, async_op=True)

        @torch.no_grad()
        def follow() -> None:  # in the thread of the reduce-scatter
            work.wait()  # it has ended; raise what it raised
            then()

        return self.comm.perform(follow, async_op=True)

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Sum `tensor` over the ranks of another group: the replicas."""
        if not self.ours(tensor):
            super().all_reduce(tensor, group)
        else:
            course.ring_all_reduce(tensor, group=group)


class Labels:
    """Labels the memory of a sharded optimizer."""

    def row_made(
        self, optimizer: Any, bucket: ShardedBucket, parameters: dict[str, Tensor]
    ) -> None:
        """Label a row of parameters."""
        label(optimizer.rows[-1], "parameters")

    def bucket_added(self, engine: Engine, bucket: LiveBucket) -> None:
        """Label the memory of a bucket, which in stage 2 is there for a while only."""
        stays = not hasattr(engine.reducer, "shards")
        label(bucket.flat, "gradients" if stays else "communication buffers")

    def shard_kept(self, shard: Tensor) -> None:
        """Label this rank's part of the mean gradients."""
        label(shard, "gradients")


class LabelledStorage(FlatStorage):
    """A FlatStorage of whose memory ledgers know the kind."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        label(self.shard, "parameters")
        for flat in (self.whole, self.sum):
            label(flat, "communication buffers")

    def keep(self, gradient: Tensor) -> None:
        """Make the parts of `gradient` the pieces' own."""
        super().keep(label(gradient, "gradients"))


class Recorded:
    """Begin a time-line for each pass; record for how long each unit computes."""

    def __init__(self) -> None:
        self.since: dict[Unit, float] = {}  # when the unit began to compute

    def before_forward(self, fsdp: Sharded) -> None:
        """Begin a time-line, if anybody keeps a log."""
        self.timeline = Timeline.begin()
        fsdp.span = partial(span, self.timeline)

    before_backward = before_forward

    def gathered(self, fsdp: Sharded, unit: Unit) -> None:
        """Note when the unit begins to compute."""
        self.since[unit] = time.perf_counter()

    def used(self, fsdp: Sharded, unit: Unit, output: Any) -> None:
        """Record how long its forward took."""
        self._computed(fsdp, "forward", unit)

    def left(self, fsdp: Sharded, unit: Unit) -> None:
        """Record how long its backward took."""
        self._computed(fsdp, "backward", unit)

    def _computed(self, fsdp: Sharded, op: str, unit: Unit) -> None:
        since = self.since.pop(unit, None)
        if since and unit is not fsdp.root:
            self.timeline.add(op, since, "compute", unit=unit.plan.name)
