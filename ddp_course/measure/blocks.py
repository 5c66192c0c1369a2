"""Which meters and logs are open now: the one thing of this room that is shared.

A collective does not take a meter as an argument: it asks which ones are open. The
list belongs to the process and not to a thread, since autograd calls DDP's hooks from a
thread of its own, and what they send belongs to the step that is being measured.
"""

import threading
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class OpenBlocks(Generic[T]):
    """The objects of one kind whose `with` block is open, the outermost first.

    `now` is a tuple that is replaced and never changed: reading it takes no lock, costs
    some 30 ns, and who has read it keeps what was open then.
    """

    def __init__(self) -> None:
        self.now: tuple[T, ...] = ()
        self._lock = threading.Lock()

    def open(self, block: T) -> None:
        """Add `block`. RuntimeError if it is open already: it would count twice."""
        with self._lock:
            if any(other is block for other in self.now):
                told = f"this {type(block).__name__} is open already; to measure a "
                raise RuntimeError(f"{told}block within its block, open a second one")
            self.now = (*self.now, block)

    def close(self, block: T) -> None:
        """Remove `block`, wherever it stands: threads may close out of order."""
        with self._lock:
            self.now = tuple(other for other in self.now if other is not block)


class WithoutLock:
    """An object with a `_lock` that pickles without it, to be returned from a rank."""

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:  # type: ignore[attr-defined]
            return {
                name: value.copy() if isinstance(value, (dict, list)) else value
                for name, value in self.__dict__.items()
                if name != "_lock"
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())
