"""A part that finds the parameters that no rank had a gradient for.

Such a parameter keeps `grad` None, as in one process, so that neither weight decay nor
momentum moves it. Where only some ranks had a gradient, zero counts for the others.
Chapters 05 and 07.
"""

from collections.abc import Callable, Sequence
from typing import Any


class AgreeUnused:
    """After every averaged pass, sets `engine.reducer.unused`.

    `show(flags)` returns what all ranks show: a "1" or "0" for each flag, one string
    per rank (`recovery.Recovery.show`).
    """

    def __init__(self, show: Callable[[Sequence[bool]], list[str]]) -> None:
        self.show = show

    def after_reduction(self, engine: Any) -> None:
        """Compare which parameters have had a gradient, now or in an earlier pass."""
        slots = engine.slots
        notes = self.show([s.fresh or s.parameter.grad is not None for s in slots])
        columns = zip(slots, zip(*notes, strict=True), strict=True)
        unused = (slot.parameter for slot, column in columns if "1" not in column)
        engine.reducer.unused = frozenset(unused)
