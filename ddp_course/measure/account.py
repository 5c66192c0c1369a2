"""The account of a memory log: which storages live, what they hold, and every change.

Explained in chapter 06.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from dataclasses import dataclass

import torch

from ddp_course.measure.storages import Part, is_mapping, uncovered


@dataclass(eq=False)
class Piece(Part):
    """A part that the account knows; its kind is a guess until it is `sure`."""

    sure: bool = True


@dataclass
class Living:
    """A living storage: how the account hears of its end, and what lies in it."""

    end: weakref.ref
    pieces: list[Piece]


Change = tuple[Piece, int]  # so many bytes more, or less


class Account:
    """Follows storages from their birth, or from when they are found, to their end.

    It keeps none of them alive. Whoever calls holds a lock.

    Attributes:
        changes: (seconds of `time.perf_counter()`, what happened, which pieces became
            larger or smaller), in the order of time. A piece that is not `sure` may
            still turn out to have been of another kind.
    """

    def __init__(self) -> None:
        self.changes: list[tuple[float, str, list[Change]]] = []
        self._living: dict[int, Living] = {}  # by the address of the storage
        # A storage may end at any moment, on any thread, in the midst of this code: its
        # end only leaves a note here, which is read before anything else is counted.
        self._ends: deque[tuple[float, int]] = deque()

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether it is followed."""
        return storage._cdata in self._living

    def note(self, what: str, changes: list[Change]) -> None:
        """Write down what has changed, if anything has."""
        changes = [(piece, nbytes) for piece, nbytes in changes if nbytes]
        if changes:
            self.changes.append((time.perf_counter(), what, changes))

    def note_ends(self) -> None:
        """Write down which storages have ended since the last time."""
        while self._ends:
            when, key = self._ends.popleft()
            pieces = self._living.pop(key).pieces
            changes = [(piece, -piece.nbytes) for piece in pieces if piece.nbytes]
            if changes:
                self.changes.append((when, "free", changes))

    def close(self) -> None:
        """Follow nothing any more."""
        self.note_ends()
        self._living = {}

    def add(self, storage: torch.UntypedStorage, piece: Piece) -> list[Change]:
        """Follow a storage that was not known, and return what that changes."""
        key, ends = storage._cdata, self._ends

        def end(_: weakref.ref) -> None:  # holds nothing but a number and the notes
            ends.append((time.perf_counter(), key))

        self._living[key] = Living(weakref.ref(storage, end), [piece])
        return [(piece, piece.nbytes)]

    def measure(self, storage: torch.UntypedStorage) -> list[Change]:
        """Return what it changes if a known storage has another size than before."""
        nbytes = storage.nbytes()
        piece = self._living[storage._cdata].pieces[0]
        if is_mapping(storage) or nbytes == piece.stop:
            return []
        before, piece.stop = piece.stop, nbytes
        return [(piece, nbytes - before)]

    def claim(self, storage: torch.UntypedStorage, part: Part) -> list[Change]:
        """Return what it changes that a part of a storage is known to be of a kind."""
        living = self._living.get(storage._cdata)
        if living is None:
            return self.add(storage, Piece(part.start, part.stop, part.kind))
        if is_mapping(storage):
            return self._claim_part(living, part)
        (old,) = living.pieces
        if not old.sure:  # what was guessed at its birth was wrong
            old.kind, old.sure = part.kind, True
        if old.kind == part.kind:
            return []
        new = Piece(0, old.stop, part.kind)
        living.pieces = [new]
        return [(old, -old.nbytes), (new, new.nbytes)]

    def _claim_part(self, living: Living, part: Part) -> list[Change]:
        same = [old for old in living.pieces if old.kind == part.kind]
        new = [Piece(*ab, part.kind) for ab in uncovered(same, part.start, part.stop)]
        if not new:
            return []
        rest = [
            Piece(*ab, old.kind)
            for old in living.pieces
            if old.kind != part.kind
            for ab in uncovered([part], old.start, old.stop)
        ]
        gone = [(old, -old.nbytes) for old in living.pieces]
        living.pieces = [*same, *rest, *new]
        return [*gone, *((piece, piece.nbytes) for piece in living.pieces)]
