"""The bytes that are kept over time: all allocations and releases in a block, by kind.

    with MemoryLog(model, optimizer) as log:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
    log.peak

Every operation of PyTorch reports its results to the log (`TorchDispatchMode`), which
records their storages; a weak reference reports the end of a storage, on any thread. So
the log keeps nothing alive, and changes only the time that an operation takes.

It does not see temporary memory of an operation (the workspace of a kernel),
allocations of other threads (except autograd's, and tensors that they `label`), memory
that no operation allocated (`torch.from_numpy`), earlier tensors that belong to none of
the watched objects, or the memory of the allocator and gloo. The module `allocations`
reports the operations; the class `Storages` counts the bytes. Explained in chapter 06.
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

from ddp_course.ledger import KINDS, Ledger, check_kind
from ddp_course.measure.allocations import (
    Operations,
    report_resizes,
    report_to,
    tensors_in,
)
from ddp_course.measure.memory import census, tensors_of
from ddp_course.measure.storages import (
    Part,
    is_mapping,
    labels,
    open_logs,
    plain_tensors,
    span_of,
    uncovered,
)


class Moment(NamedTuple):
    """The bytes kept from one moment to the next; `time` is `time.perf_counter()`.

    `ledger` has the bytes by kind. `what` is the operation that allocated
    ("aten.mm.default"), or "begin", "free", "resize", "label" (new or changed) or
    "found" (a parameter, gradient or state that no operation had allocated).
    """

    time: float
    ledger: Ledger
    what: str


class MemoryLog:
    """A record of every allocation and release within a `with` block.

    A storage's kind is its label. Without a label, the log learns the kind when the
    storage turns out to be a parameter, a gradient or a state of the watched objects.
    Until then the kind is a guess, which the log later replaces back to the allocation:
    "activations" if the storage was allocated in the forward of a watched module, or
    from a tensor that requires a gradient while gradients are recorded; otherwise
    "other", for example for intermediate results of backward. A log that is entered
    again starts anew. A rank can return its log.

    The arguments are those of `resident`. The memory of these objects and of labelled
    tensors counts from the beginning. Raises TypeError for an argument that is neither
    a module nor an optimizer; RuntimeError if it is entered while it is open. Chapter
    06.
    """

    def __init__(self, *modules_and_optimizers: Any) -> None:
        self._watched = modules_and_optimizers
        tensors_of(self._watched)
        self._storages = Storages()
        self._forwards = 0  # the running forwards of watched modules
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
            stack.enter_context(report_resizes())
            stack.enter_context(report_to(self, self._watched))
            stack.enter_context(Operations(self))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        opened, self._open = self._open, None
        opened.close()
        with self._lock:
            self.record_watched()
            self._storages.close()

    # ---- the record ----------------------------------------------------------------

    @property
    def moments(self) -> list[Moment]:
        """The moments so far; the first one is the beginning of the block."""
        now, moments = dict.fromkeys(KINDS, 0), []
        with self._lock:
            if self._open is not None:
                self.record_watched()
            for when, what, changes in self._storages.changes:
                for piece, nbytes in changes:
                    now[piece.kind] += nbytes
                moments.append(Moment(when, Ledger(now), what))
        return moments

    @property
    def peak(self) -> Ledger:
        """The ledger of the moment with the most bytes, the first if several tie."""
        return max((m.ledger for m in self.moments), key=lambda ledger: ledger.total)

    @property
    def requests(self) -> list[tuple[int, int]]:
        """The requests to an allocator, in order: (number of a storage, its bytes).

        A storage is numbered when it is allocated, and appears again with its new size
        when it is resized; 0 bytes: it was freed.
        """
        sizes: dict[int, int] = {}
        requests = []
        with self._lock:
            if self._open is not None:
                self.record_watched()
            for _, _, changes in self._storages.changes:
                before = {
                    part.storage: sizes.get(part.storage, 0) for part, _ in changes
                }
                for part, nbytes in changes:
                    sizes[part.storage] = sizes.get(part.storage, 0) + nbytes
                requests += [(n, sizes[n]) for n in before if sizes[n] != before[n]]
        return requests

    def peak_of(self, kind: str) -> int:
        """Return the largest number of bytes of one kind at any moment."""
        check_kind(kind)
        return max(moment.ledger[kind] for moment in self.moments)

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            if self._open is not None:
                self.record_watched()
            return {"changes": self._storages.changes.copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        MemoryLog.__init__(self)
        self._storages.changes = state["changes"]

    # ---- reports to the log, on any thread -----------------------------------------

    def record_operation(self, name: str, inputs: Any, result: Any) -> None:
        """Record the new and grown storages in an operation's result."""
        with self._lock:
            self._storages.note_ends()
            input_storages: set[int] | None = None  # computed only if needed
            for tensor in tensors_in(result):
                storage, changes = tensor.untyped_storage(), []
                if self._storages.knows(storage):
                    changes = self._storages.measure(storage)
                elif not is_mapping(storage):
                    if input_storages is None:
                        input_storages = {
                            t.untyped_storage()._cdata for t in tensors_in(inputs)
                        }
                    if storage._cdata not in input_storages:
                        kind = "activations" if self._is_forward(inputs) else "other"
                        piece = TrackedPart(0, storage.nbytes(), kind, sure=False)
                        changes = self._storages.add(storage, piece)
                self._storages.note(name, changes)

    def record_resize(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage was resized."""
        with self._lock:
            self._storages.note_ends()
            if self._storages.knows(storage):
                self._storages.note("resize", self._storages.measure(storage))

    def record_label(self, tensor: Tensor, kind: str) -> None:
        """Record that a tensor was labelled."""
        self._claimed(tensor, kind, "label")

    def record_gradient(self, parameter: Tensor) -> None:
        """Record a parameter's gradient, unless a hook has removed it again."""
        for gradient in () if parameter.grad is None else plain_tensors(parameter.grad):
            if gradient.untyped_storage() not in labels:
                self._claimed(gradient, "gradients", "found")

    def record_forward(self, begins: bool) -> None:
        """Record that the forward of a watched module begins or ends."""
        with self._lock:
            self._forwards += 1 if begins else -1

    def record_watched(self) -> None:
        """Record the tensors that the watched objects have now."""
        with self._lock:
            self._storages.note_ends()
            self._storages.note("found", self._found())

    def _found(self) -> list[tuple[TrackedPart, int]]:
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

    def _is_forward(self, inputs: Any) -> bool:
        return self._forwards > 0 or (
            torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(inputs))
        )


# ---- counting ------------------------------------------------------------------------


@dataclass(eq=False)
class TrackedPart(Part):
    """A part of a storage; its kind is a guess until it is `sure`.

    `storage` is the number of its storage in the log.
    """

    sure: bool = True
    storage: int = 0


@dataclass
class Living:
    """A living storage: a weak reference that reports its end, and its parts."""

    end: weakref.ref
    pieces: list[TrackedPart]


Change = tuple[TrackedPart, int]  # a part, and the change of its bytes


class Storages:
    """The storages that a log follows until they end, and their changes.

    It keeps no storage alive. Callers must hold the log's lock.

    Attributes:
        changes: (`time.perf_counter()`, operation, parts with the bytes by which they
            grew or shrank), in order of time. The kind of a part that is not `sure` may
            still change.
    """

    def __init__(self) -> None:
        self.changes: list[tuple[float, str, list[Change]]] = []
        self._living: dict[int, Living] = {}  # by the address of the storage
        self._count = 0  # the number of storages so far
        # A storage may end at any moment, on any thread, also while this code runs: its
        # end is only appended here, and processed before the next change.
        self._ends: deque[tuple[float, int]] = deque()

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Return whether the storage is followed."""
        return storage._cdata in self._living

    def note(self, what: str, changes: list[Change]) -> None:
        """Record changes, unless there are none."""
        changes = [(piece, nbytes) for piece, nbytes in changes if nbytes]
        if changes:
            self.changes.append((time.perf_counter(), what, changes))

    def note_ends(self) -> None:
        """Record the storages that have ended since the last call."""
        while self._ends:
            when, key = self._ends.popleft()
            pieces = self._living.pop(key).pieces
            changes = [(piece, -piece.nbytes) for piece in pieces if piece.nbytes]
            if changes:
                self.changes.append((when, "free", changes))

    def close(self) -> None:
        """Stop following all storages."""
        self.note_ends()
        self._living = {}

    def add(self, storage: torch.UntypedStorage, piece: TrackedPart) -> list[Change]:
        """Follow a new storage; return the change."""
        key, ends = storage._cdata, self._ends

        def end(_: weakref.ref) -> None:  # refers to no tensor and no storage
            ends.append((time.perf_counter(), key))

        self._count += 1
        piece.storage = self._count
        self._living[key] = Living(weakref.ref(storage, end), [piece])
        return [(piece, piece.nbytes)]

    def measure(self, storage: torch.UntypedStorage) -> list[Change]:
        """Return the change of a known storage's size, if any."""
        nbytes = storage.nbytes()
        piece = self._living[storage._cdata].pieces[0]
        if is_mapping(storage) or nbytes == piece.stop:
            return []
        before, piece.stop = piece.stop, nbytes
        return [(piece, nbytes - before)]

    def claim(self, storage: torch.UntypedStorage, part: Part) -> list[Change]:
        """Set the kind of a part of a storage; return the changes."""
        living = self._living.get(storage._cdata)
        if living is None:
            return self.add(storage, TrackedPart(part.start, part.stop, part.kind))
        if is_mapping(storage):
            return self._claim_part(living, part)
        (old,) = living.pieces
        if not old.sure:  # replace the guess, from the allocation on
            old.kind, old.sure = part.kind, True
        if old.kind == part.kind:
            return []
        new = TrackedPart(0, old.stop, part.kind, storage=old.storage)
        living.pieces = [new]
        return [(old, -old.nbytes), (new, new.nbytes)]

    def _claim_part(self, living: Living, part: Part) -> list[Change]:
        same = [old for old in living.pieces if old.kind == part.kind]
        new = [
            TrackedPart(*ab, part.kind) for ab in uncovered(same, part.start, part.stop)
        ]
        if not new:
            return []
        rest = [
            TrackedPart(*ab, old.kind)
            for old in living.pieces
            if old.kind != part.kind
            for ab in uncovered([part], old.start, old.stop)
        ]
        gone = [(old, -old.nbytes) for old in living.pieces]
        living.pieces = [*same, *rest, *new]
        for piece in living.pieces:
            piece.storage = gone[0][0].storage
        return [*gone, *((piece, piece.nbytes) for piece in living.pieces)]
