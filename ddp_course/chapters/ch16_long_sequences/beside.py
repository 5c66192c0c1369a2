"""Divided attention beside one process: numbers, bytes sent and kept, and time."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ddp_course.context_parallel import ring
from ddp_course.context_parallel.assignment import assign
from ddp_course.context_parallel.naive import gathered_attention
from ddp_course.context_parallel.pytorch import pytorch_ring
from ddp_course.context_parallel.ulysses import ulysses_attention
from ddp_course.measure import ByteMeter, SystemBytes, TorchCollectives
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.theory import attention_volume

B, H, D, T = 2, 12, 12, 256  # rows, heads of queries, channels of a head, positions


@dataclass(frozen=True)
class Seen:
    """An observation of one attention on one rank, forward and backward.

    Attributes:
        error: the largest difference from one process, of outputs and gradients.
        forward, backward: bytes that this rank sent, as metered.
        kept: bytes that autograd keeps for backward.
        u: the bytes of this rank's keys and values.
        written: bytes that this rank wrote in backward, as the system counts them.
    """

    error: float
    forward: float
    backward: float
    kept: int
    u: int
    written: int


def in_words(attention: str, seen: Seen, ranks: int = 4) -> str:
    """Describe an observation, and say whether its bytes equal the formula's."""
    sizes = {"batch": B, "length": T, "heads": H, "d_head": D}
    volume = attention_volume(attention, ranks, **sizes)
    equal = (seen.forward, seen.backward) == (volume.forward, volume.backward)
    forward, backward, kept = (
        number / seen.u for number in (seen.forward, seen.backward, seen.kept)
    )
    return (
        f"{attention:8} as one process: {seen.error < 1e-5}; sends {forward:.1f} u and "
        f"{backward:.1f} u, as the formula: {equal}; keeps {kept:.1f} u"
    )


def drawn(kv_heads: int = H, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the whole q, k, v and a gradient of the output; the same on all ranks."""
    random = torch.Generator().manual_seed(0)
    heads = H, kv_heads, kv_heads, H
    return [torch.randn(B, h, T, D, generator=random).to(dtype) for h in heads]


def against_one_process(
    attention: str, assignment: str = "contiguous", kv_heads: int = H
) -> Seen:
    """Run one kind of attention on this rank's positions; compare with one process.

    `attention` is "gathered", "ulysses", "ring" or "pytorch".
    """
    *qkv, dout = drawn(kv_heads)
    places, attend = divided(attention, assignment)
    mine = places[dist.get_rank()]
    parts = [x[:, :, mine].requires_grad_() for x in qkv]
    with counted() as forward, saved() as kept:
        out = attend(*parts)
    with counted() as backward, SystemBytes() as system:
        out.backward(dout[:, :, mine])
    whole = [x.clone().requires_grad_() for x in qkv]
    right = F.scaled_dot_product_attention(
        *whole, is_causal=True, enable_gqa=kv_heads != H
    )
    right.backward(dout)
    pairs = zip((out, *(x.grad for x in parts)), (right, *(x.grad for x in whole)),
                strict=True)  # fmt: skip
    error = max(float((a - b[:, :, mine]).abs().max()) for a, b in pairs)
    u = parts[1].nbytes + parts[2].nbytes
    return Seen(error, *forward, *backward, sum(kept.values()), u, system.written)


def divided(
    attention: str, assignment: str = "contiguous"
) -> tuple[list[Tensor], Callable[..., Tensor]]:
    """Return all ranks' positions, and a function that attends on this rank's part."""
    assigned = assign(T, dist.get_world_size(), assignment)
    places = [torch.tensor([i for some in its for i in some]) for its in assigned]
    ways: dict[str, Callable[..., Tensor]] = {
        "gathered": lambda q, k, v: gathered_attention(q, k, v, places),
        "ulysses": ulysses_attention,
        "ring": ring.Ring(assigned),
        "pytorch": pytorch_ring,
    }
    return places, ways[attention]


class ProcessorTime:
    """A part of a ring that adds up this rank's seconds of computing.

    The time of other ranks on the same cores does not count.
    """

    def __init__(self) -> None:
        self.seconds, self.since = 0.0, 0.0

    def before_compute(self, *_: object) -> None:
        """Start the clock."""
        self.since = time.thread_time()

    def after_compute(self, *_: object) -> None:
        """Add the time since `before_compute`."""
        self.seconds += time.thread_time() - self.since


def computing_time(assignment: str, length: int = 2048) -> float:
    """Return this rank's seconds of computing in a ring, the least of five runs."""
    n = dist.get_world_size()
    shape, found = (1, H, length // n, D), []
    q, k, v = (torch.randn(shape) for _ in range(3))
    for _ in range(5):
        part = ProcessorTime()
        ring.Ring(assign(length, n, assignment), parts=[part])(q, k, v)
        found.append(part.seconds)
    return min(found)


def per_character(length: int) -> tuple[float, float]:
    """Return processor time per character, in µs, of attention and of a block's MLP."""
    q, x = torch.randn(1, H, length, D), torch.randn(1, length, H * D)
    mlp = build_gpt(GPTConfig()).blocks[0].mlp
    calls = (
        lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        lambda: mlp(x),
    )
    times = (min(timeit.repeat(f, timer=time.thread_time, repeat=5, number=1))
             for f in calls)  # fmt: skip
    attention, mlp_time = (1e6 * seconds / length for seconds in times)
    return attention, mlp_time


@contextmanager
def counted() -> Iterator[list[float]]:
    """Yield a list; after the block it holds the bytes that this rank sent in it."""
    found: list[float] = []
    with ByteMeter() as meter, TorchCollectives() as torch_log:
        yield found
    found.append(meter.total_sent + sum(call.bytes_sent for call in torch_log.calls))


@contextmanager
def saved() -> Iterator[dict[int, int]]:
    """Yield a dictionary {address: bytes} of the storages that autograd keeps."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield kept


@contextmanager
def stale_keys() -> Iterator[None]:
    """Let the ring's backward compute with the keys of the step before.

    Forward is right. huggingface/diffusers#14265 was a similar mistake: every step
    took the keys of step 0.
    """
    right, before = ring.attend_backward, {}

    def stale(q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, ...]:
        old, before[k.shape] = before.get(k.shape, k), k
        return right(q, old, *others)

    with mock.patch.object(ring, "attend_backward", stale):
        yield
