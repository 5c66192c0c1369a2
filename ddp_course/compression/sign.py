"""One bit a number: its sign.

All numbers of a bucket become plus or minus the mean of their absolute values. That is
far from most of the numbers: without error feedback most of a gradient is lost. Seide
et al. 2014; Bernstein et al. 2018, arXiv:1802.04434. Chapter 14.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddp_course.compression.exchange import Exchange
from ddp_course.compression.hook import Gathered, as_bytes

BITS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


class Sign(Gathered):
    """A compressor that sends one bit per number, and one float32 per bucket."""

    def __init__(self, feedback: bool = True, exchange: Exchange | None = None) -> None:
        super().__init__(feedback, exchange)

    def encode(self, v: Tensor, index: int) -> Tensor:
        """Return the bits, eight to a byte, and the scale."""
        size = v.abs().mean(dtype=torch.float32).view(1)
        positive = pad((v >= 0).to(torch.uint8), (0, -v.numel() % 8))
        return as_bytes(pack(positive), size)

    def decode(self, data: Tensor, like: Tensor) -> Tensor:
        """Return plus or minus the scale for each bit."""
        size = data[-4:].clone().view(torch.float32)
        values = unpack(data[:-4], torch.cat([-size, size]))
        return values[: like.numel()].to(like.dtype)


def pack(bits: Tensor) -> Tensor:
    """Return zeros and ones, [8 n], as n bytes."""
    return (bits.view(-1, 8) * BITS.to(bits.device)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, values: Tensor) -> Tensor:
    """Return n bytes as 8 n numbers: `values[0]` for a zero, `values[1]` for a one."""
    every = torch.arange(256, dtype=torch.uint8, device=packed.device)
    bits = (every[:, None] & BITS.to(packed.device)).ne(0).int()  # [256, 8]
    return values[bits][packed.int()].view(-1)  # one look-up yields eight numbers
