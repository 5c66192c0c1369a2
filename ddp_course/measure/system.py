"""The operating system's own count of what this process writes.

    with SystemBytes() as system:
        all_reduce(tensor)
    system.written

This count checks `ByteMeter`: it needs no line in the code that is measured, and cannot
miss a message. It reads `wchar` of `/proc/self/io` (Linux, `man 5 proc_pid_io`), as
psutil's `io_counters` does. Found with torch 2.13 and gloo, and checked by the tests:

- gloo sends with `writev`, which `wchar` counts: the payload and 48 bytes of header for
  each message, and 48 bytes from a receiver that announces that it is ready. For
  messages of 1 MiB that is 0.01 %. An idle process writes nothing, and other programs
  do not count.
- No byte is counted late. A send ends (`wait()`, or the return of a collective) when
  its last byte has been passed to the kernel, after the receiver has asked for it; the
  count 0.3 s later was the same to the byte.
- gloo receives with `recv`, which the kernel's `rchar` does not count. So only senders
  are compared.
- Everything that the process writes counts, also files and printed text, except writes
  into shared memory.

Explained in chapter 02.
"""

from pathlib import Path
from typing import Self


class SystemBytes:
    """A count of the bytes that this process writes by system calls, in all threads.

    A context manager; may be nested. Raises RuntimeError without `/proc/self/io`, or if
    `written` is read within the block.
    """

    def __init__(self) -> None:
        self._written: int | None = 0  # None: within the block

    @property
    def written(self) -> int:
        """Bytes written within the block."""
        if self._written is None:
            raise RuntimeError(
                "SystemBytes still counts: read it after the `with` block"
            )
        return self._written

    def __enter__(self) -> Self:
        self._before, self._written = _count(), None
        return self

    def __exit__(self, *exc: object) -> None:
        self._written = _count() - self._before

    def __repr__(self) -> str:
        text = "counting" if self._written is None else f"{self._written:,} written"
        return f"<SystemBytes: {text}>"


def _count(file: Path = Path("/proc/self/io")) -> int:
    """Return `wchar` of this process: the bytes written since its start."""
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise RuntimeError(
            f"SystemBytes reads {file}, which this system does not offer ({error}). "
            "It needs Linux; ByteMeter counts everywhere."
        ) from error
    return int(dict(line.split(": ") for line in lines)["wchar"])
