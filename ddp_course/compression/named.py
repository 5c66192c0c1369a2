"""Compressors by name, as in `ddp-course train --compress topk:0.01`. Chapter 14."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch

from ddp_course.compression.blocks import Int8
from ddp_course.compression.course_exchange import CourseExchange
from ddp_course.compression.exchange import Exchange
from ddp_course.compression.hook import Compressor
from ddp_course.compression.powersgd import PowerSGD
from ddp_course.compression.sign import Sign
from ddp_course.compression.sixteen import SixteenBits
from ddp_course.compression.sparse import RandomK, TopK
from ddp_course.spec import compression

# name in `spec.COMPRESSORS` -> function of an exchange, and an amount if it needs one
CLASSES: MappingProxyType[str, Callable[..., Compressor]] = MappingProxyType(
    {
        "fp16": lambda exchange: SixteenBits(torch.float16, exchange),
        "bf16": lambda exchange: SixteenBits(torch.bfloat16, exchange),
        "int8": lambda exchange: Int8(exchange=exchange),
        "sign": lambda exchange: Sign(exchange=exchange),
        "topk": lambda exchange, density: TopK(density, exchange=exchange),
        "randomk": lambda exchange, density: RandomK(density, exchange=exchange),
        "powersgd": lambda exchange, rank: PowerSGD(rank, exchange=exchange),
    }
)


def compressor(words: str, exchange: Exchange | None = None) -> Compressor:
    """Return a new compressor for `words` such as "int8", "topk:0.01", "powersgd:4".

    `exchange` defaults to a `CourseExchange` of all ranks. Sends nothing. Raises
    ValueError, with the allowed names, for any other text.
    """
    name, amount = compression(words)
    exchange = CourseExchange() if exchange is None else exchange
    amounts = () if amount is None else (amount,)
    return CLASSES[name](exchange, *amounts)
