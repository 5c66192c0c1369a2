"""Bytes by kind: what measurements count and what formulas predict, side by side.

Plain data, without PyTorch, so that formulas answer at once. Chapter 06.
"""

from collections.abc import Iterator, Mapping

KINDS = (
    "parameters",
    "gradients",
    "optimizer states",
    "activations",
    "communication buffers",
    "other",
)


def check_kind(kind: str) -> None:
    """Raise ValueError unless `kind` is one of `KINDS`."""
    if kind not in KINDS:
        known = ", ".join(repr(known) for known in KINDS)
        raise ValueError(f"kind is {kind!r}; it can be {known}")


class Ledger(Mapping[str, int]):
    """Bytes by kind: a mapping with all of `KINDS`, in order, that prints as a table.

    A ledger equals another ledger, or a dict, with the same kinds and numbers. Raises
    ValueError for an unknown kind or a negative number. Chapter 06.
    """

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        counts = {} if counts is None else counts
        for kind, nbytes in counts.items():
            check_kind(kind)
            if nbytes < 0:
                raise ValueError(f"{kind}: {nbytes} bytes; it must be 0 or more")
        self._bytes = {kind: counts.get(kind, 0) for kind in KINDS}

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return sum(self._bytes.values())

    def __getitem__(self, kind: str) -> int:
        return self._bytes[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._bytes)

    def __len__(self) -> int:
        return len(self._bytes)

    def __repr__(self) -> str:
        rows = [*self._bytes.items(), ("total", self.total)]
        cells = [(kind, f"{nbytes:,}" if nbytes else "-") for kind, nbytes in rows]
        wide = max(len(number) for _, number in cells)
        return "\n".join(f"{kind:<21}  {number:>{wide}}" for kind, number in cells)
