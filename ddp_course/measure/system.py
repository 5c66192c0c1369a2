"""The operating system's own count of what this process writes.

    with SystemBytes() as system:
        all_reduce(tensor)
    system.written

A second opinion on `ByteMeter`: it needs no line in the code that is measured, and it
cannot forget a message. It reads `wchar` of `/proc/self/io` (Linux, `man 5
proc_pid_io`), which psutil's `io_counters` shows, too. Found with torch 2.13 and gloo,
and held by the tests:

- gloo sends with `writev`, which `wchar` counts: the payload and 48 bytes of header for
  each message, and 48 bytes from a receiver that says it is ready. For messages of
  1 MiB that is 0.01 %, an idle process writes nothing, and other programs do not count.
- Nothing comes late. A send is done (`wait()`, or the return of a collective) when its
  last byte was handed to the kernel, which is after the receiver has asked for it;
  what was counted 0.3 s later was the same to the byte.
- gloo receives with `recv`, which the kernel's `rchar` does not count. So bytes are
  compared on the side of the sender.
- All that the process writes is counted, files and printed text included; what passes
  through shared memory is written by nobody.

Explained in chapter 02.
"""

from pathlib import Path
from typing import Self


class SystemBytes:
    """Counts what this process, all its threads, writes by system calls.

    A context manager; may be nested. RuntimeError where there is no `/proc/self/io`, or
    if the number is asked for within the block: it is there when the block has ended.
    """

    def __init__(self) -> None:
        self._written: int | None = 0  # None: within the block

    @property
    def written(self) -> int:
        """Bytes written within the block."""
        if self._written is None:
            raise RuntimeError("SystemBytes has its number when the block has ended")
        return self._written

    def __enter__(self) -> Self:
        self._before, self._written = _count(), None
        return self

    def __exit__(self, *exc: object) -> None:
        self._written = _count() - self._before

    def __repr__(self) -> str:
        told = "counting" if self._written is None else f"{self._written:,} written"
        return f"<SystemBytes: {told}>"


def _count(file: Path = Path("/proc/self/io")) -> int:
    """Return `wchar` of this process, in bytes since it began."""
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise RuntimeError(
            f"SystemBytes reads {file}, which this system does not offer ({error}). "
            "It needs Linux; ByteMeter counts everywhere."
        ) from error
    return int(dict(line.split(": ") for line in lines)["wchar"])
