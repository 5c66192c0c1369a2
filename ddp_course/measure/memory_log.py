"""Which bytes are kept when: every allocation and release within a block, by kind.

    with MemoryLog(model, optimizer) as log:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
    log.peak

Every operation of PyTorch passes the log (`TorchDispatchMode`), which looks at the
storages that come out; that one of them is gone is told by a weak reference, on
whichever thread it happens. So the log keeps nothing alive, and changes nothing but the
time that an operation takes.

It does not see what never leaves an operation (the work space of a kernel), what other
threads allocate (unless they `label` it; autograd's own are seen), memory that no
operation made (`torch.from_numpy`), what existed before and belongs to none of the
watched objects, nor what the allocator and gloo hold for themselves. How it hears of
everything: `allocations`; how it counts: `Storages`, below. Explained in chapter 06.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_course.measure.allocations import (
    Operations,
    hooks,
    tensors_in,
    watched_resizes,
)
from ddp_course.measure.memory import Ledger, census, tensors_of
from ddp_course.measure.storages import (
    KINDS,
    Part,
    check_kind,
    is_mapping,
    labels,
    open_logs,
    plain,
    span_of,
    uncovered,
)


class Moment(NamedTuple):
    """What was kept after something had happened, at `time` (`time.perf_counter()`).

    `ledger` are the bytes by kind, from this moment to the next. `what` is the
    operation that allocated ("aten.mm.default"), or "begin", "free", "resize", "label"
    (another one than before, or on what was not known) or "found" (a parameter,
    gradient or state that no operation had made).
    """

    time: float
    ledger: Ledger
    what: str


class MemoryLog:
    """Records every allocation and release within a `with` block.

    What a storage holds is told by its label, or found out when it becomes a parameter,
    a gradient or a state of the watched objects; it counts as that from then on, and
    from its birth if until then there was only a guess. The guess: an activation, if it
    was allocated in the forward of a watched module, or from something that requires a
    gradient while gradients are recorded; else "other", such as what backward computes
    on its way. A log that is entered again starts anew. It can be returned from a rank.

    What is watched is given as for `resident`. What that, and labelled tensors, hold at
    the beginning counts from the beginning. TypeError for an argument that is neither a
    module nor an optimizer; RuntimeError if it is entered when it is open. Chapter 06.
    """

    def __init__(self, *modules_and_optimizers: Any) -> None:
        self._watched = modules_and_optimizers
        tensors_of(self._watched)
        self._storages = Storages()
        self._forwards = 0  # of watched modules that are running
        self._lock = threading.RLock()
        self._open: ExitStack | None = None

    def __enter__(self) -> MemoryLog:
        open_logs.open(self)
        with ExitStack() as stack:
            stack.callback(open_logs.close, self)
            with self._lock:
                self._storages, self._forwards = Storages(), 0
                changes = self._found()
                self._storages.changes.append((time.perf_counter(), "begin", changes))
            stack.enter_context(watched_resizes())
            stack.enter_context(hooks(self, self._watched))
            stack.enter_context(Operations(self))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        opened, self._open = self._open, None
        opened.close()
        with self._lock:
            self.look()
            self._storages.close()

    # ---- what was recorded ---------------------------------------------------------

    @property
    def moments(self) -> list[Moment]:
        """What was kept from moment to moment, the first one being the beginning."""
        now, moments = dict.fromkeys(KINDS, 0), []
        with self._lock:
            if self._open is not None:
                self.look()
            for when, what, changes in self._storages.changes:
                for piece, nbytes in changes:
                    now[piece.kind] += nbytes
                moments.append(Moment(when, Ledger(now), what))
        return moments

    @property
    def peak(self) -> Ledger:
        """The ledger of the moment at which most was kept (the first of several)."""
        return max((m.ledger for m in self.moments), key=lambda ledger: ledger.total)

    def peak_of(self, kind: str) -> int:
        """Return the most bytes of one kind that were kept at any moment."""
        check_kind(kind)
        return max(moment.ledger[kind] for moment in self.moments)

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            if self._open is not None:
                self.look()
            return {"changes": self._storages.changes.copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        MemoryLog.__init__(self)
        self._storages.changes = state["changes"]

    # ---- what the log is told, on any thread ---------------------------------------

    def operated(self, name: str, given: Any, result: Any) -> None:
        """An operation has returned: which storages are new, which have grown?"""
        with self._lock:
            self._storages.note_ends()
            inputs: set[int] | None = None  # most operations return views: nobody asks
            for tensor in tensors_in(result):
                storage, changes = tensor.untyped_storage(), []
                if self._storages.knows(storage):
                    changes = self._storages.measure(storage)
                elif not is_mapping(storage):
                    if inputs is None:
                        inputs = {t.untyped_storage()._cdata for t in tensors_in(given)}
                    if storage._cdata not in inputs:
                        kind = "activations" if self._is_forward(given) else "other"
                        piece = Piece(0, storage.nbytes(), kind, sure=False)
                        changes = self._storages.add(storage, piece)
                self._storages.note(name, changes)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage was given another size."""
        with self._lock:
            self._storages.note_ends()
            if self._storages.knows(storage):
                self._storages.note("resize", self._storages.measure(storage))

    def labelled(self, tensor: Tensor, kind: str) -> None:
        """A tensor was labelled."""
        self._claimed(tensor, kind, "label")

    def accumulated(self, parameter: Tensor) -> None:
        """A parameter has got its gradient, and may have lost it again to a hook."""
        for gradient in () if parameter.grad is None else plain(parameter.grad):
            if gradient.untyped_storage() not in labels:
                self._claimed(gradient, "gradients", "found")

    def forward(self, begins: bool) -> None:
        """The forward of a watched module begins or ends."""
        with self._lock:
            self._forwards += 1 if begins else -1

    def look(self) -> None:
        """Find out what the watched objects hold now."""
        with self._lock:
            self._storages.note_ends()
            self._storages.note("found", self._found())

    def _found(self) -> list[tuple[Piece, int]]:
        return [
            change
            for storage, parts in census(self._watched).items()
            for part in parts
            for change in self._storages.claim(storage, part)
        ]

    def _claimed(self, tensor: Tensor, kind: str, what: str) -> None:
        with self._lock:
            self._storages.note_ends()
            part = Part(*span_of(tensor), kind)
            changes = self._storages.claim(tensor.untyped_storage(), part)
            self._storages.note(what, changes)

    def _is_forward(self, given: Any) -> bool:
        return self._forwards > 0 or (
            torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(given))
        )


# ---- how it counts ------------------------------------------------------------------


@dataclass(eq=False)
class Piece(Part):
    """A part that is followed; its kind is a guess until it is `sure`."""

    sure: bool = True


@dataclass
class Living:
    """A living storage: how one hears of its end, and what lies in it."""

    end: weakref.ref
    pieces: list[Piece]


Change = tuple[Piece, int]  # so many bytes more, or less


class Storages:
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
