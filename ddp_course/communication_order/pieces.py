"""A reducer of the engine that sends gradients in pieces, in one order on all ranks.

Only their order identifies collectives. So the order must be the same on all ranks,
whichever gradients are ready on each: if every rank chose its own order, one rank's
first layer would be added to another's last (`naive`), and over NCCL ranks would hang.
There are two solutions:

    one rank decides, and tells the others before each piece    ByteScheduler
    all follow one order, derived from earlier times            TicTac; here

The second sends only gradients, and needs neither a thread nor a queue: the hook of a
ready gradient sends its pieces if it is their turn, and later pieces that are ready.
(The order already accounts for the credit.) The price: if times change, a ready piece
may wait for a piece that is not ready. Chapter 15.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddp_course.mechanisms.buckets import LiveBucket
from ddp_course.mechanisms.engine import BucketReducer, Engine


class InPieces(BucketReducer):
    """A reducer that sums buckets in pieces, by `order`, while backward goes on.

    Args:
        group: the process group that averages.
        all_reduce: any all-reduce of this course, or PyTorch's.
        piece: bytes of a piece; None means that a bucket is one piece.
        sending: a process group of the same ranks for the pieces only, so that other
            collectives need not wait behind them; None means `group`.

    Attributes:
        order: (number of the bucket, number of the piece) of all pieces; at first in
            the order of the buckets, the last layer's bucket first.
        under_way: numbers of the buckets that were sent, but not yet waited for.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        all_reduce: Callable[..., Any],
        piece: int | None,
        sending: dist.ProcessGroup | None = None,
    ) -> None:
        if piece is not None and piece < 16:  # as long as one number of any type
            raise ValueError(f"piece is {piece}; it must be 16 bytes or more, or None")
        super().__init__(group)
        self.all_reduce, self.piece, self.sending = all_reduce, piece, sending or group
        self.order: tuple[tuple[int, int], ...] = ()
        self.pieces: list[Sequence[Tensor]] = []  # by bucket
        self.handles: list[list[Any]] = []  # by bucket
        self.remaining: list[tuple[int, int]] = []  # pieces of `order` to send
        self.ready: set[int] = set()
        self.under_way: set[int] = set()

    def set_up(self, engine: Engine, bucket: LiveBucket) -> None:
        """Allocate the memory of a bucket, and cut it."""
        super().set_up(engine, bucket)
        whole = bucket.flat
        size = whole.nbytes if self.piece is None else self.piece
        cut = whole.split(size // whole.element_size())
        self.pieces.append(cut)
        self.handles.append([])
        self.order += tuple((bucket.index, k) for k in range(len(cut)))

    def pass_begins(self, engine: Engine) -> None:
        """Start again with the first piece of `order`."""
        for bucket in engine.buckets:  # an error may have left pieces under way
            self.wait_for(bucket)
        self.remaining, self.ready = list(self.order), set()

    def launch(self, bucket: LiveBucket) -> None:
        """Record that a bucket is full; send all pieces that may be sent now."""
        self.ready.add(bucket.index)
        self.hand_over()

    def hand_over(self) -> None:
        """Send pieces as long as the next one is ready."""
        while self.remaining and self.remaining[0][0] in self.ready:
            self.send(*self.remaining.pop(0))

    def send(self, bucket: int, piece: int) -> None:
        """Send a piece, and do not wait for it."""
        tensor = self.pieces[bucket][piece]
        work = self.all_reduce(tensor, group=self.sending, async_op=True)
        self.handles[bucket].append(work)

    def settle(self, engine: Engine) -> None:
        """Mark all buckets as under way, without waiting for them."""
        super().settle(engine)
        self.under_way = {bucket.index for bucket in engine.buckets}

    def wait_for(self, bucket: LiveBucket) -> None:
        """Wait until all pieces of a bucket have arrived."""
        handles, self.handles[bucket.index] = self.handles[bucket.index], []
        for work in handles:
            if work is not None:
                work.wait()

    def set_gradients(self, bucket: LiveBucket, receivers: Collection[Tensor]) -> None:
        """Wait for a bucket; set the gradients of the parameters in `receivers`."""
        self.wait_for(bucket)
        self.under_way.discard(bucket.index)
        for slot in bucket.slots:
            slot.parameter.grad = slot.view if slot.parameter in receivers else None
