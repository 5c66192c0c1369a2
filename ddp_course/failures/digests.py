"""Replicas compared by digests, to find a rank that computes wrong and does not fail.

After a step of data parallelism all replicas are equal, bit by bit. To compare them in
full, ranks would have to send the model; `digest` reduces it to 64 bits, which ranks
gather every few steps. If replicas differ, a rank computed wrongly after the gradients
were averaged. A wrong gradient, however, is averaged, so all replicas are wrong and
equal: only the loss shows such a fault. Chapter 19.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensors: Iterable[Tensor]) -> int:
    """Return a digest of 64 bits of all numbers; one flipped bit always changes it.

    Each number's bits, as an integer, are multiplied by an odd number for its place,
    and added modulo 2**64. So the digest also changes if two float32 numbers change
    places. (In rare cases changes of several bits cancel each other.)
    """
    total, first = 0, 1
    for tensor in tensors:
        flat = tensor.detach().flatten()
        bits = flat.view(BITS[flat.element_size()]).long()
        places = torch.arange(first, first + 2 * len(bits), 2, device=bits.device)
        total += int((bits * places).sum())  # CUDA has no integer dot
        first += 2 * len(bits)
    return (total + 2**63) % 2**64 - 2**63  # as a signed integer of 64 bits


def gather_digests(
    tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None
) -> list[int]:
    """Return the digests of all ranks' tensors, in rank order, on every rank."""
    tensors = list(tensors)
    own = torch.tensor(digest(tensors), device=tensors[0].device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group)
    return [int(each) for each in found]


def suspects(digests: Sequence[int]) -> list[int] | None:
    """Return the ranks that differ from more than half of all ranks.

    Returns [] if all agree, and None if no digest has more than half of the ranks: then
    it is unknown which ranks are right, as with two ranks that differ.
    """
    [(common, votes)] = Counter(digests).most_common(1)
    if 2 * votes <= len(digests):
        return None
    return [rank for rank, own in enumerate(digests) if own != common]


def first_spike(losses: Sequence[float]) -> int | None:
    """Return the first step whose loss exceeds 1.5 times the median of earlier losses.

    The median is taken over the last 8 losses, so that one of them cannot move it far.
    A loss of nan is a spike. Returns None if no loss is a spike.
    """
    for step, loss in enumerate(losses):
        earlier = losses[max(0, step - 8) : step] or [math.inf]
        if not loss <= 1.5 * statistics.median(earlier):
            return step
    return None
