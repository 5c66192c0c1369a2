"""16 bits a number: half the bytes, and an all-reduce can add them. Chapter 14."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddp_course.compression.exchange import Exchange
from ddp_course.compression.hook import Compressor


class SixteenBits(Compressor):
    """A compressor that sends float16 or bfloat16; sums are computed in it, too.

    Each number is divided by N before it is sent, so that the sum does not overflow:
    float16 rounds 65,520 and more to inf. PyTorch: `fp16_compress_hook`.
    """

    def __init__(
        self, dtype: torch.dtype = torch.float16, exchange: Exchange | None = None
    ) -> None:
        super().__init__(exchange=exchange)
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype is {dtype}; it must be float16 or bfloat16")
        self.dtype = dtype

    def mean(self, bucket: Any) -> Tensor:
        """Round, divide, add up."""
        small = bucket.buffer().to(self.dtype).div_(self.exchange.size)
        self.exchange.add_up(small)
        return small.to(bucket.buffer().dtype)
