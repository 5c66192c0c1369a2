"""Parameters without a gradient: an expert that got no token, a head of another task.

The other ranks may have a gradient for such a parameter, so its place in the bucket is
sent, filled with zeros. When all buckets have arrived, every rank shows which gradients
it has had: on one machine in shared memory, where ranks agree on everything else. Then
it depends on `find_unused_parameters`:

    True   whatever some rank had a gradient for gets the mean; what none had one for
           keeps the `grad` that it has, None most often, so that no weight decay or
           momentum moves it
    False  if some had a gradient that others had not, all raise the same error instead
           of going on with a mean that is none

If all ranks miss the same gradients in a pass, another pass may bring them (two losses,
two calls of `backward`); if it does not, the next forward raises. Chapter 05.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives import communicator
from ddp_course.mechanisms.agreement import shown_by_all
from ddp_course.mechanisms.buckets import LiveBucket, Slot
from ddp_course.mechanisms.engine import AllReduce, Engine
from ddp_course.mechanisms.hooks import leaves_below, tensors_in

ADVICE = (
    "All parameters must take part in the loss. If they need not, pass "
    "find_unused_parameters=True."
)
SHOWN = 10  # of more parameters only the number is told


class UnusedParametersError(RuntimeError):
    """Parameters got no gradient; every rank raises it, with the same text."""


class AllReduceUsed(AllReduce):
    """`AllReduce` of what has a gradient; see above what becomes of the rest.

    Args:
        group, all_reduce, empty: as of `AllReduce`.
        find: allow parameters without a gradient.
        as_view: let gradients lie in the buckets; else they are copied back.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        all_reduce: Callable[..., Any],
        empty: Callable[..., Tensor],
        find: bool,
        as_view: bool,
    ) -> None:
        super().__init__(group, all_reduce, empty)
        self.find, self.as_view = find, as_view
        self.owed: list[str] | None = None  # without a gradient since the last forward
        self._reached: set[int] = set()  # ids of parameters below the outputs
        self._passed = True  # a pass has ended since the outputs were looked at

    def forward_begins(self) -> None:
        """Raise UnusedParametersError if the last backward passes left something."""
        owed, self.owed = self.owed, None
        if owed:
            raise UnusedParametersError(
                f"no rank had a gradient for {_list(owed)} since the last forward. "
                + ADVICE
            )

    def forward_ended(self, output: Any) -> None:
        """Look which parameters a backward from this output can reach."""
        if self.find:
            if self._passed:
                self._reached, self._passed = set(), False
            self._reached |= leaves_below(tensors_in(output))

    def pass_begins(self, engine: Engine) -> None:
        """A pass begins; gradients that it cannot bring are not waited for."""
        if self.find:
            engine.fill(self.without, lambda s: id(s.parameter) not in self._reached)

    def pack(self, bucket: LiveBucket, slot: Slot) -> None:
        """Put this rank's share of a gradient into the bucket."""
        gradient = slot.parameter.grad
        super().pack(bucket, slot)
        if not self.as_view:
            slot.parameter.grad = gradient

    def settle(self, engine: Engine) -> None:
        """Give its mean to every parameter that some rank had a gradient for.

        Raises UnusedParametersError if that must have been all ranks, or none.
        """
        self._passed = True
        slots = engine.slots
        notes = shown_by_all([slot.fresh for slot in slots], self.group, engine.failed)
        for slot, column in zip(slots, zip(*notes, strict=True), strict=True):
            if "1" in column:
                self._give_mean(slot)
        if not self.find:
            self._compare([slot.name for slot in slots], notes)

    def _give_mean(self, slot: Slot) -> None:
        if self.as_view:
            slot.parameter.grad = slot.view
        elif slot.parameter.grad is None:
            slot.parameter.grad = slot.view.clone()
        else:
            slot.parameter.grad.copy_(slot.view)

    def _compare(self, names: Sequence[str], notes: Sequence[str]) -> None:
        """Look what the ranks have missed, of those that have a batch at all."""
        missing = {
            rank: [name for name, flag in zip(names, note, strict=True) if flag == "0"]
            for rank, note in zip(communicator(self.group).ranks, notes, strict=True)
            if "-" not in note
        }
        own, *others = missing.values()
        if all(other == own for other in others):
            before = own if self.owed is None else self.owed
            self.owed = [name for name in own if name in before]
            return
        self.owed = None
        named = "; ".join(f"rank {r}: {_list(m)}" for r, m in missing.items() if m)
        raise UnusedParametersError(
            f"other ranks had gradients for parameters that these had none for: {named}"
            f". The gradients of this step are of no use. {ADVICE}"
        )

    def shadow(self, engine: Engine) -> None:
        """Take part in the others' averaging with nothing to say (`Join`)."""
        for slot in engine.slots:
            if slot.parameter.grad is slot.view:  # stays as it is
                slot.parameter.grad = slot.view.clone()
        for bucket in engine.buckets:
            bucket.flat.zero_()
            engine.launch(bucket)
        engine.wait()
        silent = [False for _ in engine.slots]
        notes = shown_by_all(silent, self.group, engine.failed, silent=True)
        if not self.find:
            self._compare([slot.name for slot in engine.slots], notes)
            self.owed = None


def _list(names: Sequence[str]) -> str:
    """Name some, in the order of their registration: buckets are in the reverse one."""
    names = names[::-1]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
