"""An ending of the engine: gradients leave in pieces, in an order that all ranks keep.

Collectives are told apart by nothing but their order. So it must be the same on all
ranks, whatever is ready when on each of them: with an order that every rank makes up
for itself, from what it has ready at the moment, one rank's first layer would be added
to another's last (`naive`), and over NCCL ranks would hang. There are two ways out:

    one rank decides, and tells the others before each piece    ByteScheduler
    all follow an order that was made from times seen before    TicTac; here

The second sends nothing but gradients, and needs neither a thread nor a queue: a piece
is handed over by the hook that makes it ready, or that which makes ready what comes
before it in the order. (The credit has been spent when the order was made.) The price:
if times change, a piece that is ready may wait for one that is not. Chapter 15.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives import communicator
from ddp_course.communication_order.schedule import Piece
from ddp_course.mechanisms.agreement import check_same
from ddp_course.mechanisms.buckets import LiveBucket
from ddp_course.mechanisms.engine import AllReduceBuckets, Engine
from ddp_course.mechanisms.timeline import GpuClock

WARM = 2  # averaged passes, the last of which is the one whose times count


class UnderWay(Tensor):
    """What stands for a gradient that is under way: nobody can compute with it."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        """Raise RuntimeError, whatever is asked."""
        raise RuntimeError(
            "this gradient is still under way. Layers are stepped one by one, after "
            "model.step(), without optimizer.step(); what needs all gradients at once, "
            "such as a global norm, must wait for them: model.step(max_norm=...), or "
            "model.finish() before it"
        )


class InPieces(AllReduceBuckets):
    """Sums buckets over the ranks in pieces, by `order`, while others compute.

    Pieces have the numbers of their buckets; without an order they go as they come.
    They travel in a process group of their own: whatever else is sent does not wait for
    them. `piece` is in bytes; None: a bucket is one piece.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        all_reduce: Callable[..., Any],
        piece: int | None,
    ) -> None:
        super().__init__(group, all_reduce)
        self.sending = beside(group)
        self.piece = piece
        self.passes = 0  # that were averaged
        self.under_way: set[int] = set()  # buckets whose gradients nobody has had
        self.cut: list[Sequence[Tensor]] = []  # by bucket
        self.handles: list[list[Any]] = []  # by bucket: of what is under way
        self.moments: list[Any] = []  # by bucket: when it was ready in the last pass
        self.clock: GpuClock | None = None
        self.order: tuple[Piece, ...] = ()
        self.left: list[Piece] = []  # of the order, in this pass
        self.ready: set[int] = set()

    def added(self, engine: Engine, bucket: LiveBucket) -> None:
        """The engine has one more bucket: give it memory, and cut that."""
        super().added(engine, bucket)
        whole = bucket.flat
        size = whole.nbytes if self.piece is None else self.piece
        cut = whole.split(size // whole.element_size())
        self.cut.append(cut)
        self.handles.append([])
        self.moments.append(None)
        self.order += tuple(Piece(bucket.index, k) for k in range(len(cut)))

    def pass_begins(self, engine: Engine) -> None:
        """A backward pass has begun, with the whole order before it."""
        for bucket in engine.buckets:  # what an error has left under way
            self.arrive(bucket)
        self.left, self.ready = list(self.order), set()
        if torch.cuda.is_initialized() and self.passes < WARM:
            self.clock = GpuClock()
        self.began = self.now()

    def now(self) -> Any:
        """Return this moment, on a GPU that of its stream."""
        return self.clock.now() if self.clock else time.perf_counter()

    def ready_after(self) -> list[float]:
        """Return for each bucket the seconds that backward took until it was full."""
        seconds = self.clock.seconds if self.clock else float
        return [seconds(moment) - seconds(self.began) for moment in self.moments]

    def launch(self, bucket: LiveBucket) -> None:
        """A bucket is full: send what can be sent now, by the order."""
        self.ready.add(bucket.index)
        self.moments[bucket.index] = self.now()
        self.hand_over()

    def hand_over(self) -> None:
        """Send pieces as long as the next one is ready."""
        while self.left and self.left[0].layer in self.ready:
            self.send(self.left.pop(0))

    def send(self, piece: Piece) -> None:
        """Send a piece, and do not wait for it."""
        tensor = self.cut[piece.layer][piece.index]
        work = self.all_reduce(tensor, group=self.sending, async_op=True)
        self.handles[piece.layer].append(work)

    def arrive(self, bucket: LiveBucket) -> None:
        """Wait until all pieces of a bucket have arrived."""
        handles, self.handles[bucket.index] = self.handles[bucket.index], []
        for work in handles:
            if work is not None:
                work.wait()

    def settle(self, engine: Engine) -> None:
        """Backward has ended: nothing is waited for, and no gradient is to be had."""
        super().settle(engine)
        self.passes += 1
        self.under_way = {bucket.index for bucket in engine.buckets}
        for slot in engine.slots:
            if slot.parameter.grad is not None:
                nothing = slot.view.new_empty(()).expand(slot.view.shape)
                slot.parameter.grad = nothing.as_subclass(UnderWay)

    def give(self, bucket: LiveBucket) -> None:
        """Wait for a bucket, and let parameters have its gradients."""
        self.arrive(bucket)
        self.under_way.discard(bucket.index)
        for slot in bucket.slots:
            if slot.parameter not in self.unused:
                slot.parameter.grad = slot.view


def beside(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return another process group of the same ranks, made at the first call.

    A collective call of these ranks. Raises ReplicaError if some are members of more
    groups than others: PyTorch would give the new one other names there, and hang.
    """
    comm = communicator(group)
    if "beside" not in comm.kept:
        count = len(dist.distributed_c10d._world.pg_names)
        check_same({"process groups that it is in": str(count)}, None, group)
        everyone = comm.size == dist.get_world_size()
        other = dist.new_group(
            None if everyone else comm.ranks, use_local_synchronization=not everyone
        )
        communicator(other)  # a collective call, too
        comm.kept["beside"] = other
    return comm.kept["beside"]
