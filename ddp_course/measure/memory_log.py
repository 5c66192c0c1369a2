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
threads allocate (unless they `label` it, or run `with log.in_this_thread()`; autograd's
own threads are seen), memory that no operation made (`torch.from_numpy`), what existed
before and belongs to none of the watched objects, nor what the allocator and gloo hold
for themselves. How it hears of everything: `allocations`; how it counts: `account`.
Explained in chapter 06.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_course.measure.account import Account, Piece
from ddp_course.measure.allocations import Operations, Tensors, hooks, watched_resizes
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
)


class Moment(NamedTuple):
    """What was kept after something had happened.

    Attributes:
        time: seconds of `time.perf_counter()`, as in an `EventLog`.
        ledger: the bytes by kind, from this moment to the next.
        what: the operation that allocated ("aten.mm.default"), or "begin", "free",
            "resize", "label" (another one than before, or on what was not known) or
            "found" (a parameter, gradient or state that no operation had made).
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

    Args:
        modules_and_optimizers: what is watched, as for `resident`. What they, and
            labelled tensors, hold at the beginning counts from the beginning.

    Raises:
        TypeError: for an argument that is neither a module nor an optimizer.
        RuntimeError: entered when it is open already.

    Chapter 06.
    """

    def __init__(self, *modules_and_optimizers: Any) -> None:
        self._watched = modules_and_optimizers
        tensors_of(self._watched)
        self._account = Account()
        self._forwards = 0  # of watched modules that are running
        self._lock = threading.RLock()
        self._open: ExitStack | None = None

    def __enter__(self) -> MemoryLog:
        open_logs.open(self)
        with ExitStack() as stack:
            stack.callback(open_logs.close, self)
            with self._lock:
                self._account, self._forwards = Account(), 0
                changes = self._found()
                begin = time.perf_counter(), "begin", changes
                self._account.changes.append(begin)
            stack.enter_context(watched_resizes())
            stack.enter_context(hooks(self, self._watched))
            stack.enter_context(self.in_this_thread())
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        opened, self._open = self._open, None
        opened.close()
        with self._lock:
            self.look()
            self._account.close()

    def in_this_thread(self) -> AbstractContextManager[Any]:
        """Return a block in which what the calling thread allocates is seen, too."""
        return Operations(self)

    # ---- what was recorded ---------------------------------------------------------

    @property
    def moments(self) -> list[Moment]:
        """What was kept from moment to moment, the first one being the beginning."""
        now, moments = dict.fromkeys(KINDS, 0), []
        with self._lock:
            if self._open is not None:
                self.look()
            for when, what, changes in self._account.changes:
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
            return {"changes": self._account.changes.copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        MemoryLog.__init__(self)
        self._account.changes = state["changes"]

    # ---- what the log is told, on any thread ---------------------------------------

    def operated(self, name: str, inputs: Tensors, outputs: Tensors) -> None:
        """An operation has returned: which storages are new, which have grown?"""
        with self._lock:
            self._account.note_ends()
            given: set[int] | None = None
            for tensor in outputs:
                storage, changes = tensor.untyped_storage(), []
                if self._account.knows(storage):
                    changes = self._account.measure(storage)
                elif not is_mapping(storage):
                    if given is None:
                        given = {t.untyped_storage()._cdata for t in inputs}
                    if storage._cdata not in given:
                        kind = "activations" if self._is_forward(inputs) else "other"
                        piece = Piece(0, storage.nbytes(), kind, sure=False)
                        changes = self._account.add(storage, piece)
                self._account.note(name, changes)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage was given another size."""
        with self._lock:
            self._account.note_ends()
            if self._account.knows(storage):
                self._account.note("resize", self._account.measure(storage))

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
            self._account.note_ends()
            self._account.note("found", self._found())

    def _found(self) -> list[tuple[Piece, int]]:
        return [
            change
            for storage, parts in census(self._watched).items()
            for part in parts
            for change in self._account.claim(storage, part)
        ]

    def _claimed(self, tensor: Tensor, kind: str, what: str) -> None:
        with self._lock:
            self._account.note_ends()
            part = Part(*span_of(tensor), kind)
            changes = self._account.claim(tensor.untyped_storage(), part)
            self._account.note(what, changes)

    def _is_forward(self, inputs: Tensors) -> bool:
        return self._forwards > 0 or (
            torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        )
