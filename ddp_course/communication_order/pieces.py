"""A reducer of the engine: gradients leave in pieces, in an order that all ranks keep.

Collectives are told apart by nothing but their order. So it must be the same on all
ranks, whatever is ready on each of them: if every rank made up an order from what it
has ready, one rank's first layer would be added to another's last (`naive`), and over
NCCL ranks would hang. There are two ways out:

    one rank decides, and tells the others before each piece    ByteScheduler
    all follow an order that was made from earlier times        TicTac; here

The second sends nothing but gradients, and needs neither a thread nor a queue: the hook
that makes a piece ready hands it over, if it is its turn, and the pieces after it that
are ready. (The order already takes the credit into account.) The price: if times
change, a ready piece may wait for one that is not. Chapter 15.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddp_course.mechanisms.buckets import LiveBucket
from ddp_course.mechanisms.engine import BucketReducer, Engine


class InPieces(BucketReducer):
    """Sums buckets over the ranks in pieces, by `order`, while backward goes on.

    Args:
        group: the ranks.
        all_reduce: any of this course, or PyTorch's.
        piece: bytes; None: a bucket is one piece.
        sending: a process group of the same ranks for the pieces alone, so that
            nothing else waits behind them; None: `group`.

    `order` has (number of the bucket, number of the piece); at first as buckets are
    added, the last layer's first. `under_way` has the numbers of the buckets whose
    gradients the parameters have not got.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        all_reduce: Callable[..., Any],
        piece: int | None,
        sending: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(group)
        self.all_reduce, self.piece, self.sending = all_reduce, piece, sending or group
        self.order: tuple[tuple[int, int], ...] = ()
        self.pieces: list[Sequence[Tensor]] = []  # by bucket
        self.handles: list[list[Any]] = []  # by bucket
        self.left: list[tuple[int, int]] = []  # of the order, in this pass
        self.ready: set[int] = set()
        self.under_way: set[int] = set()

    def added(self, engine: Engine, bucket: LiveBucket) -> None:
        """Allocate the memory of a bucket, and cut it."""
        super().added(engine, bucket)
        whole = bucket.flat
        size = whole.nbytes if self.piece is None else self.piece
        cut = whole.split(size // whole.element_size())
        self.pieces.append(cut)
        self.handles.append([])
        self.order += tuple((bucket.index, k) for k in range(len(cut)))

    def pass_begins(self, engine: Engine) -> None:
        """Begin the order anew."""
        for bucket in engine.buckets:  # an error may have left some under way
            self.wait_for(bucket)
        self.left, self.ready = list(self.order), set()

    def launch(self, bucket: LiveBucket) -> None:
        """A bucket is full: send all pieces whose turn it is."""
        self.ready.add(bucket.index)
        self.hand_over()

    def hand_over(self) -> None:
        """Send pieces as long as the next one is ready."""
        while self.left and self.left[0][0] in self.ready:
            self.send(*self.left.pop(0))

    def send(self, bucket: int, piece: int) -> None:
        """Send a piece, and do not wait for it."""
        tensor = self.pieces[bucket][piece]
        work = self.all_reduce(tensor, group=self.sending, async_op=True)
        self.handles[bucket].append(work)

    def settle(self, engine: Engine) -> None:
        """Note that backward has ended; wait for nothing."""
        super().settle(engine)
        self.under_way = {bucket.index for bucket in engine.buckets}

    def wait_for(self, bucket: LiveBucket) -> None:
        """Wait until all pieces of a bucket have arrived."""
        handles, self.handles[bucket.index] = self.handles[bucket.index], []
        for work in handles:
            if work is not None:
                work.wait()

    def give(self, bucket: LiveBucket, wanted: Collection[Tensor]) -> None:
        """Wait for a bucket; let the `wanted` parameters have their gradients."""
        self.wait_for(bucket)
        self.under_way.discard(bucket.index)
        for slot in bucket.slots:
            slot.parameter.grad = slot.view if slot.parameter in wanted else None
