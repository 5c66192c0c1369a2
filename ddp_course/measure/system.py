"""The operating system's own count of what this process writes.

    with SystemBytes() as system:
        all_reduce(tensor)
    system.written

A second opinion on `ByteMeter`: it needs no line in the code that is measured, and it
cannot forget a message. It reads `wchar` and `rchar` of `/proc/self/io` (Linux, `man 5
proc_pid_io`), which psutil's `io_counters` shows, too. Found with torch 2.13 and gloo,
and held by the tests:

- gloo sends with `writev`, which `wchar` counts: the payload and 48 bytes of header for
  each message, and 48 bytes from a receiver that says it is ready. For messages of
  1 MiB that is 0.01 %, an idle process writes nothing, and other programs do not count.
- Nothing comes late. A send is done (`wait()`, or the return of a collective) when its
  last byte was handed to the kernel, which is after the receiver has asked for it;
  what was counted 0.3 s later was the same to the byte.
- gloo receives with `recv`, which `rchar` does not count: `read` stays near 0. So bytes
  are compared on the side of the sender.
- All that the process writes is counted, files and printed text included; what passes
  through shared memory is written by nobody.

Explained in chapter 02.
"""

from __future__ import annotations

from pathlib import Path


class SystemBytes:
    """Counts what this process, all its threads, writes and reads by system calls.

    A context manager; may be nested. RuntimeError where there is no `/proc/self/io`, or
    if a number is asked for within the block: it is there when the block has ended.
    """

    def __init__(self) -> None:
        self._counted: tuple[int, int] | None = (0, 0)  # None: within the block

    @property
    def written(self) -> int:
        """Bytes written within the block."""
        return self._after()[0]

    @property
    def read(self) -> int:
        """Bytes read within the block; what gloo receives is not among them.

        Some 100 of them are those of looking at the counts.
        """
        return self._after()[1]

    def _after(self) -> tuple[int, int]:
        if self._counted is None:
            raise RuntimeError("SystemBytes has its numbers when the block has ended")
        return self._counted

    def __enter__(self) -> SystemBytes:
        self._before, self._counted = _counts(), None
        return self

    def __exit__(self, *exc: object) -> None:
        written, read = _counts()
        self._counted = written - self._before[0], read - self._before[1]

    def __repr__(self) -> str:
        if self._counted is None:
            return "<SystemBytes: counting>"
        return f"<SystemBytes: {self.written:,} written, {self.read:,} read>"


def _counts(file: Path = Path("/proc/self/io")) -> tuple[int, int]:
    """Return wchar and rchar of this process, in bytes since it began."""
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise RuntimeError(
            f"SystemBytes reads {file}, which this system does not offer ({error}). "
            "It needs Linux; ByteMeter counts everywhere."
        ) from error
    fields = dict(line.split(": ") for line in lines)
    return int(fields["wchar"]), int(fields["rchar"])
