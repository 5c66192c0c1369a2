"""A barrier at which every rank shows what it came for: `Meeting`.

Explained in chapters 02 and 03.
"""

from __future__ import annotations

import hashlib

import torch

from ddp_course.collectives.mapping import LINE, PAGE, round_up
from ddp_course.collectives.segment import Segment


class Notice:
    """What a rank has come to a meeting for: a text, and its hash of 8 bytes.

    Of a text longer than 4096 bytes the others are shown as much; the hash is of all.
    """

    LONGEST = PAGE

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.hash = hashlib.blake2b(text, digest_size=8).digest()


class Meeting:
    """A barrier at which every rank shows a notice, and sees whether all are equal.

    That ranks agree on what they are about to do costs them next to nothing, as they
    must wait for each other anyhow. Nothing is written if the notice is already there.

    Chapter 03.
    """

    def __init__(self, segment: Segment, offset: int = 0) -> None:
        """Use `Meeting.nbytes(size)` bytes of the segment, from `offset` on."""
        self.segment = segment
        size, half = segment.size, self.nbytes(segment.size) // 2
        pages = segment.view(offset, (2, half), torch.uint8)
        edge = round_up(8 * size, LINE)
        self._hashes = [memoryview(page[: 8 * size].numpy()) for page in pages]
        self._texts = [
            [memoryview(text.numpy()) for text in page[edge:].view(size, -1)]
            for page in pages
        ]
        self._shown: list[bytes | None] = [None, None]  # hash of the own notice

    @staticmethod
    def nbytes(size: int) -> int:
        """Return how many bytes of a segment the meetings of `size` ranks need."""
        return 2 * (round_up(8 * size, LINE) + size * (LINE + Notice.LONGEST))

    def meet(self, notice: Notice | bytes) -> list[bytes] | None:
        """Wait for all ranks; return None if all notices are equal, else all of them.

        Raises:
            TimeoutError, RuntimeError: as `Segment.barrier`.
        """
        if isinstance(notice, bytes):
            notice = Notice(notice)
        segment = self.segment
        page = segment.count & 1
        if self._shown[page] != notice.hash:
            self._show(notice, page)
        segment.barrier()
        if self._hashes[page] == notice.hash * segment.size:
            return None
        return [self._read(text) for text in self._texts[page]]

    def _show(self, notice: Notice, page: int) -> None:
        rank, text = self.segment.rank, notice.text[: Notice.LONGEST]
        place = self._texts[page][rank]
        place[:8] = len(text).to_bytes(8, "little")
        place[LINE : LINE + len(text)] = text
        self._hashes[page][8 * rank : 8 * rank + 8] = notice.hash
        self._shown[page] = notice.hash

    @staticmethod
    def _read(place: memoryview) -> bytes:
        length = int.from_bytes(place[:8], "little")
        return bytes(place[LINE : LINE + length])
