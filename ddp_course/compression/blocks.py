"""8 bits a number, and a scale for each block of numbers.

The largest number of a block becomes 127 or -127, the others are rounded to the nearest
of 255 steps. Two ranks' bytes cannot be added: their scales differ. So the all-reduce
is taken apart: in 8 bits every rank sends each other one that one's part (what a
reduce-scatter sends), adds up what has come in float32, and sends the mean to all, in 8
bits again. Dettmers 2016, arXiv:1511.04561; ZeRO++, arXiv:2306.10209. Chapter 14.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddp_course.compression.exchange import Exchange
from ddp_course.compression.hook import Compressor, as_bytes


class Int8(Compressor):
    """Sends a quarter of float32's bytes, and 4 more for every `block` numbers.

    No rank's error is kept: rounding to the nearest is off by half a step at most, to
    either side. PyTorch: `quantization_pertensor_hook` (one scale, and an all-gather).
    """

    def __init__(self, block: int = 64, exchange: Exchange | None = None) -> None:
        super().__init__(exchange=exchange)
        if isinstance(block, bool) or not isinstance(block, int) or block < 1:
            raise ValueError(f"block is {block!r}; it must be a whole number above 0")
        self.block = block

    def mean(self, bucket: Any) -> Tensor:
        """Swap parts, add them up, gather the means."""
        flat, n = bucket.buffer(), self.exchange.size
        parts = pad(flat.float(), (0, -flat.numel() % (n * self.block))).view(n, -1)
        arrived = self.exchange.swap(self.encode(parts))
        own = self.decode(arrived[0])
        for part in arrived[1:]:
            own += self.decode(part)
        means = self.exchange.gather(self.encode((own / n).view(1, -1))[0])
        whole = torch.cat([self.decode(part) for part in means])
        return whole[: flat.numel()].to(flat.dtype)

    def encode(self, rows: Tensor) -> Tensor:
        """Return rows of numbers as rows of bytes: first all numbers, then scales."""
        blocks = rows.reshape(len(rows), -1, self.block)
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        numbers = (blocks / scale.where(scale != 0, 1)).round_().to(torch.int8)
        both = zip(numbers, scale, strict=True)
        return torch.stack([as_bytes(*row) for row in both])

    def decode(self, sent: Tensor) -> Tensor:
        """Return the numbers [numel] of one row of bytes."""
        blocks = sent.numel() // (self.block + 4)
        numbers = sent[: blocks * self.block].view(torch.int8).view(blocks, self.block)
        scale = sent[blocks * self.block :].clone().view(torch.float32)
        return (numbers * scale[:, None]).view(-1)
