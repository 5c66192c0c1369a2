"""What the ranks print, shown so that it reads the same on every run.

The ranks run at the same time, and their output arrives in any order. In rank order the
transcript is the same every time: rank 0's lines are shown at once, those of rank r
when all lower ranks are done. With "live" every line is shown at once.
"""

import sys
from collections import defaultdict
from typing import TextIO

MAX_LINES = 500  # lines shown per rank and stream; a report has all of them
KEEP = 32 * 2**20  # bytes kept per stream of a rank; further bytes are only counted


class Transcript:
    """The printed lines of all ranks of a launch."""

    def __init__(self, world_size: int, order: str) -> None:
        self.world_size = world_size
        self.order = order
        self.max_lines = MAX_LINES
        self._text: dict[tuple[int, str], bytearray] = defaultdict(bytearray)
        self._dropped: dict[tuple[int, str], int] = defaultdict(int)
        self._shown: dict[tuple[int, str], int] = defaultdict(int)  # bytes
        self._lines: dict[tuple[int, str], int] = defaultdict(int)
        self._ended: set[tuple[int, str]] = set()

    def add(self, rank: int, stream: str, data: bytes) -> None:
        """Append what `rank` wrote to `stream` ("stdout" or "stderr")."""
        text = self._text[rank, stream]
        room = KEEP - len(text)
        text += data[:room]
        self._dropped[rank, stream] += max(0, len(data) - room)

    def end(self, rank: int, stream: str) -> None:
        """Record that `rank` has closed `stream`."""
        self._ended.add((rank, stream))

    def text(self, rank: int, stream: str) -> str:
        """Return all that `rank` has written to `stream`."""
        text = self._text[rank, stream].decode(errors="replace")
        dropped = self._dropped[rank, stream]
        return text + (f"\n... and {dropped} bytes more" if dropped else "")

    def show(self, *, final: bool = False) -> None:
        """Print the lines that are due; with `final`, all lines."""
        if self.order == "none":
            return
        for rank in range(self.world_size):
            done = final or {(rank, "stdout"), (rank, "stderr")} <= self._ended
            self._show(rank, "stdout", sys.stdout, done)
            self._show(rank, "stderr", sys.stderr, done)
            if self.order == "rank" and not done:
                break

    def _show(self, rank: int, stream: str, to: TextIO, done: bool) -> None:
        key = rank, stream
        start, text = self._shown[key], self._text[key]
        end = len(text) if done else text.rfind(b"\n", start) + 1
        if end <= start:
            return
        self._shown[key] = end
        lines = text[start:end].decode(errors="replace").removesuffix("\n").split("\n")
        before = self._lines[key]
        self._lines[key] += len(lines)
        room = max(0, self.max_lines - before)
        name = f"[rank {rank:>{len(str(self.world_size - 1))}}]"
        shown = [f"{name} {_overwritten(line)}" for line in lines[:room]]
        if before <= self.max_lines < self._lines[key]:  # only once
            shown.append(f"{name} ... more than {self.max_lines} lines, not shown")
        if shown:
            to.write("\n".join(shown) + "\n")
            to.flush()


def _overwritten(line: str) -> str:
    """Return the visible part of a line with progress bars: after the last "\\r"."""
    return line.rstrip("\r").rsplit("\r", 1)[-1]
