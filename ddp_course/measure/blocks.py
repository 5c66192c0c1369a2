"""Which meters and logs are open now: the one thing of this room that is shared.

A collective does not take a meter as an argument: it asks which ones are open. The
list belongs to the process and not to a thread, since autograd calls DDP's hooks from a
thread of its own, and what they send belongs to the step that is being measured. Who
announces messages or events imports this file alone, and neither meter nor log.
"""

import threading
from typing import Any, ClassVar, Generic, Self, TypeVar

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


class Block:
    """What measures while its `with` block is open, and is told by any thread.

    It pickles without its lock, to be returned from a rank.
    """

    opened: ClassVar[OpenBlocks[Any]]  # of each kind of meter

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self.opened.open(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self.opened.close(self)

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {
                name: value.copy() if isinstance(value, (dict, list)) else value
                for name, value in self.__dict__.items()
                if name != "_lock"
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())


METERS: OpenBlocks[Any] = OpenBlocks()  # the open `ByteMeter`s
LOGS: OpenBlocks[Any] = OpenBlocks()  # the open `EventLog`s


def active_meters() -> tuple[Any, ...]:
    """Return the byte meters whose `with` block is open now in this process.

    A collective asks once, when it is called, and counts into these until it is done,
    be it later or in another thread.
    """
    return METERS.now


def active_logs() -> tuple[Any, ...]:
    """Return the event logs whose `with` block is open now in this process."""
    return LOGS.now
