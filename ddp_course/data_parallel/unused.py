"""Parameters without a gradient: an expert that got no token, a head of another task.

The other ranks may have a gradient for such a parameter, so its place in the bucket is
sent, filled with something. With what, depends on `find_unused_parameters`:

    True   with zeros. A flag beside each gradient tells whether any rank had one; if
           none had, the parameter's `grad` stays as it is, None most often, so that no
           weight decay or momentum moves it.
    False  with NaN. A sum with a NaN in it is one, on all ranks; so whoever sees one at
           the beginning of a gradient asks all others what they are missing. That
           costs nothing as long as all is well, and when it is not, every rank raises
           the same error instead of waiting for a message that never comes.

If all ranks miss the same gradients in a pass, another pass may bring them (two losses,
two calls of `backward`); if it does not, the next forward raises. Chapter 05.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives import communicator
from ddp_course.data_parallel.slots import LiveBucket, Slot
from ddp_course.mechanisms.hooks import leaves_below, tensors_in

ADVICE = (
    "All parameters must take part in the loss. If they need not, pass "
    "find_unused_parameters=True."
)
SHOWN = 10  # of more parameters only the number is told
JOINED = ("*",)  # what a rank says that has run out of batches; no parameter's name


class UnusedParametersError(RuntimeError):
    """Parameters got no gradient; every rank raises it, with the same text."""


class Unused:
    """What a reducer does about parameters without a gradient; see above."""

    def __init__(self, find: bool, group: dist.ProcessGroup | None) -> None:
        self.find = find
        self.group = group
        self.owed: list[str] | None = None  # without a gradient since the last forward
        self._reached: set[int] = set()  # ids of parameters below the outputs
        self._passed = True  # a pass has ended since the outputs were looked at
        self._kept: dict[Slot, Tensor | None] = {}

    def forward_begins(self) -> None:
        """Raise UnusedParametersError if the last backward passes left something."""
        owed, self.owed, self._kept = self.owed, None, {}
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

    def out_of_reach(self, slot: Slot) -> bool:
        """Tell whether a gradient of this parameter need not be waited for."""
        return self.find and id(slot.parameter) not in self._reached

    def fill(self, slot: Slot, scale: float) -> None:
        """Fill the place of a parameter that has got no gradient."""
        gradient = slot.parameter.grad
        if not self.find:
            self._kept[slot] = None if gradient is None else gradient.clone()
            slot.view.fill_(torch.nan)
        elif gradient is None:
            slot.view.zero_()
        else:  # not new: the same on all ranks since the last time
            torch.mul(gradient, scale, out=slot.view)

    def settle(self, buckets: Sequence[LiveBucket], as_view: bool) -> None:
        """All buckets have arrived: give every parameter the gradient it should have.

        Raises UnusedParametersError if some ranks had gradients that others had not.
        """
        self._passed = True
        if self.find:
            self._give_to_unused(buckets, as_view)
            return
        kept, self._kept = self._kept, {}
        for slot, gradient in kept.items():
            slot.parameter.grad = gradient
        # On a GPU the host waits here for the end of backward.
        if some_are_missing(buckets):
            self._compare([slot.name for slot in kept])
        else:
            self.owed = []

    def _give_to_unused(self, buckets: Iterable[LiveBucket], as_view: bool) -> None:
        """A parameter that some other rank had a gradient for gets their mean."""
        for bucket in buckets:
            used = bucket.flags.tolist()
            for slot, by_any in zip(bucket.slots, used, strict=True):
                if by_any and not slot.fresh:
                    slot.fresh = True
                    if as_view:
                        slot.parameter.grad = slot.view

    def joined(self, buckets: Sequence[LiveBucket]) -> None:
        """`settle` for a rank that has run out of batches: it misses nothing."""
        if not self.find and some_are_missing(buckets):
            self._compare(JOINED)
            self.owed = None

    def _compare(self, missing: Sequence[str]) -> None:
        """Some rank has filled in a NaN, or gradients are NaN: see what all miss."""
        comm = communicator(self.group)
        told = dict(zip(comm.ranks, comm.exchange(tuple(missing)), strict=True))
        told = {rank: names for rank, names in told.items() if names != JOINED}
        if len(set(told.values())) == 1:
            before = missing if self.owed is None else self.owed
            self.owed = [name for name in missing if name in before]
            return
        self.owed = None
        named = "; ".join(
            f"rank {rank}: {_list(names)}" for rank, names in told.items() if names
        )
        raise UnusedParametersError(
            f"other ranks had gradients for parameters that these had none for: {named}"
            f". The gradients of this step are of no use. {ADVICE}"
        )


def _list(names: Sequence[str]) -> str:
    """Name some, in the order of their registration: buckets are in the reverse one."""
    names = names[::-1]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def some_are_missing(buckets: Iterable[LiveBucket]) -> bool:
    """Tell whether some gradient begins with NaN; the same on all ranks."""
    return any(torch.isnan(b.flat[b.starts]).any() for b in buckets)
