"""8 bits a number, and a scale for each block of numbers.

The largest number of a block becomes 127 or -127, the others are rounded to the nearest
of 255 steps. An all-reduce cannot add two ranks' bytes, as their scales differ. So the
all-reduce is done in two steps: every rank sends each other rank its part in 8 bits (as
many bytes as a reduce-scatter), adds the received parts in float32, and sends the mean
to all, in 8 bits again. Dettmers 2016, arXiv:1511.04561; ZeRO++, arXiv:2306.10209.
Chapter 14.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddp_course.compression.exchange import Exchange
from ddp_course.compression.hook import Compressor, as_bytes


class Int8(Compressor):
    """A compressor that sends a byte per number, and 4 bytes per `block` numbers.

    It has no error feedback: rounding to the nearest is off by half a step at most, in
    either direction. PyTorch: `quantization_pertensor_hook` (one scale, and an
    all-gather).
    """

    def __init__(self, block: int = 64, exchange: Exchange | None = None) -> None:
        super().__init__(exchange=exchange)
        if isinstance(block, bool) or not isinstance(block, int) or block < 1:
            raise ValueError(f"block is {block!r}; it must be a whole number above 0")
        self.block = block

    def mean(self, bucket: Any) -> Tensor:
        """Exchange parts, add them up, and gather the means."""
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
        """Return each row of numbers as bytes: first all numbers, then all scales."""
        blocks = rows.reshape(len(rows), -1, self.block)
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        numbers = (blocks / scale.where(scale != 0, 1)).round_().to(torch.int8)
        both = zip(numbers, scale, strict=True)
        return torch.stack([as_bytes(*row) for row in both])

    def decode(self, data: Tensor) -> Tensor:
        """Return the numbers [numel] of one row of bytes."""
        blocks = data.numel() // (self.block + 4)
        numbers = data[: blocks * self.block].view(torch.int8).view(blocks, self.block)
        scale = data[blocks * self.block :].clone().view(torch.float32)
        return (numbers * scale[:, None]).view(-1)
