"""A few of the numbers, and which they are; the rest counts as zero.

Top-k takes the largest: other ones on every rank, so that indices must travel, too, and
no all-reduce can add. Random-k takes the same random ones on all ranks: no index is
sent, and an all-reduce adds, but they are seldom the ones that count. Stich et al.
2018, arXiv:1809.07599; Lin et al. 2017, arXiv:1712.01887. Chapter 14.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddp_course.compression.exchange import Exchange
from ddp_course.compression.hook import Compressor, Gathered, as_bytes


def how_many(density: float, numel: int) -> int:
    """Return k: that part of `numel`, rounded, and one at least."""
    return max(1, round(density * numel))


def check_density(density: float) -> float:
    """Return `density`, or raise ValueError."""
    if isinstance(density, bool) or not isinstance(density, (int, float)):
        raise ValueError(f"density is {density!r}; it must be a number")
    if not 0 < density <= 1:
        raise ValueError(f"density is {density}; it must be above 0, and at most 1")
    return density


class TopK(Gathered):
    """Sends the k largest numbers of a bucket, and their indices: 8 bytes for each.

    `density` is k / numel. PyTorch has none.
    """

    def __init__(
        self, density: float, feedback: bool = True, exchange: Exchange | None = None
    ) -> None:
        super().__init__(feedback, exchange)
        self.density = check_density(density)

    def encode(self, v: Tensor, index: int) -> Tensor:
        """Return the indices (int32), then the values."""
        k = how_many(self.density, v.numel())
        where = v.abs().topk(k, sorted=False).indices
        return as_bytes(where.to(torch.int32), v[where])

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        """Return those numbers at their places, and zeros."""
        k = how_many(self.density, like.numel())
        where = sent[: 4 * k].clone().view(torch.int32).long()
        values = sent[4 * k :].clone().view(like.dtype)
        return torch.zeros_like(like).index_copy_(0, where, values)


class RandomK(Compressor):
    """Sends k random numbers of a bucket, other ones in every step: 4 bytes for each.

    With feedback they are sent as they are. Without it they are multiplied by
    numel / k: then their expected value is the gradient's (it is unbiased), and their
    variance so much larger. All ranks have the same `seed`.
    """

    def __init__(
        self,
        density: float,
        seed: int = 0,
        feedback: bool = True,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__(feedback, exchange)
        self.density = check_density(density)
        self.generator = torch.Generator().manual_seed(seed)

    def mean(self, bucket: Any) -> Tensor:
        """Draw, take, add up."""
        v = self.feedback.add(bucket.index(), bucket.buffer())
        k = how_many(self.density, v.numel())
        where = torch.randperm(v.numel(), generator=self.generator)[:k].to(v.device)
        chosen = v[where]
        sent = torch.zeros_like(v).index_copy_(0, where, chosen)
        self.feedback.keep(bucket.index(), v, sent)
        self.exchange.add_up(chosen)
        scale = 1 if self.feedback.on else v.numel() / k
        return sent.index_copy_(0, where, chosen * (scale / self.exchange.size))

    def state_dict(self) -> dict[str, Any]:
        """Return the errors, and where the random numbers stand."""
        return super().state_dict() | {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        super().load_state_dict(state)
        self.generator.set_state(state["generator"])
