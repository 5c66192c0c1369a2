"""The meters and logs whose blocks are open now.

A collective does not take a meter as an argument: it asks for the open meters. The list
belongs to the process and not to a thread, since autograd calls DDP's hooks from
another thread, and the hooks' messages belong to the step that is being measured. Code
that reports messages or events imports only this file, no meter and no log.
"""

import threading
from typing import Any, ClassVar, Generic, Self, TypeVar

T = TypeVar("T")


class OpenBlocks(Generic[T]):
    """The objects of one kind whose `with` block is open, the outermost first.

    `blocks` is a tuple that is replaced and never changed: reading it takes no lock,
    costs some 30 ns, and a reader keeps the blocks that were open at that moment.
    """

    def __init__(self) -> None:
        self.blocks: tuple[T, ...] = ()
        self._lock = threading.Lock()

    def open(self, block: T) -> None:
        """Add `block`; raise RuntimeError if it is open: it would count twice."""
        with self._lock:
            if any(other is block for other in self.blocks):
                text = f"this {type(block).__name__} is open already; to measure a "
                raise RuntimeError(f"{text}block within its block, open a second one")
            self.blocks = (*self.blocks, block)

    def close(self, block: T) -> None:
        """Remove `block`; threads may close blocks out of order."""
        with self._lock:
            self.blocks = tuple(other for other in self.blocks if other is not block)


class MeasuredBlock:
    """The base class of meters and logs, which measure while their block is open.

    Any thread may report to them. They pickle without their locks, so a rank can return
    them.
    """

    opened: ClassVar[OpenBlocks[Any]]  # one list for each kind of meter

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

    A collective asks once, when it is called, and counts in these meters until it has
    ended, even if their blocks end earlier.
    """
    return METERS.blocks


def active_logs() -> tuple[Any, ...]:
    """Return the event logs whose `with` block is open now in this process."""
    return LOGS.blocks
