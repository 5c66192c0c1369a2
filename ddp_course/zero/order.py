"""In which order units are used, and which are to be gathered ahead. Pure.

In forward, while block 3 computes, block 4 can be on its way: that is a *prefetch*. So
one has to know what comes after block 3. The model's code decides that, and it is not
known before it has run: the order of the last forward is taken for that of the next,
and backward is expected to go the same way back. A wrong guess costs a gather that was
not needed, and nothing else. Chapter 08.
"""

from collections.abc import Sequence


class Order:
    """Remembers the order in which units (their numbers) are used.

    `guess` is the order before the first forward; `prefetch` is how many units are to
    be gathered ahead.
    """

    def __init__(self, guess: Sequence[int], prefetch: int) -> None:
        self.units = list(guess)
        self.prefetch = prefetch
        self._at = 0  # in forward: how many were used; in backward: how many are left

    def begin_forward(self) -> list[int]:
        """Return the units to gather ahead when a forward begins."""
        self._at = 0
        return self.units[: self.prefetch]

    def forward(self, unit: int) -> list[int]:
        """`unit` is used now: return the units to gather ahead."""
        if self._at == len(self.units) or self.units[self._at] != unit:
            self.units[self._at :] = [unit]  # another way than last time
        self._at += 1
        return self.units[self._at : self._at + self.prefetch]

    def end_forward(self) -> None:
        """Forget what was used last time, and not this time."""
        del self.units[self._at :]

    def begin_backward(self) -> list[int]:
        """Return the units to gather ahead when a backward begins, in this order."""
        self._at = len(self.units)
        return self.units[::-1][: self.prefetch]

    def backward(self, unit: int) -> list[int]:
        """Backward reaches `unit`: return the units to gather ahead, in this order."""
        for start in (self._at, len(self.units)):  # of two forwards: once more
            if unit in self.units[:start]:
                self._at = start - 1 - self.units[:start][::-1].index(unit)
                ahead = max(0, self._at - self.prefetch)
                return self.units[ahead : self._at][::-1]
        return []
