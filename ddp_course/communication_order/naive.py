"""What one would write first: every rank sends what is most urgent of what it has.

On one rank, or where a server takes what comes (P3, over a parameter server), that is
right. In a collective all ranks must send the same, and what is ready when differs: if
one rank's backward is a little slower, ranks send different layers at the same time. If
these are of one size, they are added to each other and nobody notices; if not, the
collectives of this course say so, gloo may not, and NCCL hangs. Chapter 15.
"""

from ddp_course.communication_order.pieces import InPieces
from ddp_course.communication_order.scheduled import ScheduledDataParallel
from ddp_course.mechanisms.engine import Engine


class OwnOrder(InPieces):
    """One piece at a time, the most urgent of those that are ready on this rank."""

    def hand_over(self) -> None:
        """Send the next piece if none is under way: it could not be called back."""
        sent = (work for of_bucket in self.handles for work in of_bucket)
        ready = [piece for piece in self.left if piece.layer in self.ready]
        if ready and all(work is None or work.is_completed() for work in sent):
            urgent = max(ready, key=lambda piece: (piece.layer, -piece.index))
            self.left.remove(urgent)  # the last bucket has the first layer
            self.send(urgent)

    def settle(self, engine: Engine) -> None:
        """Backward has ended: send the rest, the most urgent first."""
        for piece in sorted(self.left, key=lambda piece: (-piece.layer, piece.index)):
            self.send(piece)
        super().settle(engine)


class NaiveScheduledDataParallel(ScheduledDataParallel):
    """`ScheduledDataParallel` without an agreement about the order: do not train so."""

    make_ending = OwnOrder
