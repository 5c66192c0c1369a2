"""Compressors by name, as `ddp-course train --compress topk:0.01` says them."""

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

PLAIN: MappingProxyType[str, Callable[..., Compressor]] = MappingProxyType(
    {
        "fp16": lambda exchange: SixteenBits(torch.float16, exchange),
        "bf16": lambda exchange: SixteenBits(torch.bfloat16, exchange),
        "int8": lambda exchange: Int8(exchange=exchange),
        "sign": lambda exchange: Sign(exchange=exchange),
    }
)
OF_AMOUNT = MappingProxyType(  # name -> how its amount is read, and what it makes
    {"topk": (float, TopK), "randomk": (float, RandomK), "powersgd": (int, PowerSGD)}
)
KNOWN = "fp16, bf16, int8, sign, topk:0.01, randomk:0.01 or powersgd:4"


def compressor(words: str, exchange: Exchange | None = None) -> Compressor:
    """Return a new compressor for `words` such as "int8", "topk:0.01", "powersgd:4".

    `exchange` defaults to a `CourseExchange` of all ranks. Raises ValueError, which
    lists the words that are allowed. Nothing is sent.
    """
    exchange = CourseExchange() if exchange is None else exchange
    name, colon, amount = words.partition(":")
    if name in PLAIN and not colon:
        return PLAIN[name](exchange)
    try:
        read, make = OF_AMOUNT[name]
        value = read(amount)
    except (KeyError, ValueError):
        raise ValueError(f"compress is {words!r}; it can be {KNOWN}") from None
    try:
        return make(value, exchange=exchange)
    except ValueError as error:
        raise ValueError(f"compress is {words!r}: {error}") from None
