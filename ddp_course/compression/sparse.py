"""Send only selected values, with their indices; the others count as zero.

Top-k selects the largest values. Their places differ from rank to rank, so the indices
must be sent, too, and no all-reduce can sum the values. Random-k selects the same
random places on all ranks: no index is sent, and an all-reduce sums the values, but
they are seldom the important ones. Stich et al. 2018, arXiv:1809.07599; Lin et al.
2017, arXiv:1712.01887. Chapter 14.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddp_course.compression.exchange import Exchange
from ddp_course.compression.hook import Compressor, Gathered, as_bytes


def count_selected(density: float, numel: int) -> int:
    """Return k: density * numel, rounded, and at least 1."""
    return max(1, round(density * numel))


def check_density(density: float) -> float:
    """Return `density`; raise ValueError if it is not above 0 and at most 1."""
    if isinstance(density, bool) or not isinstance(density, (int, float)):
        raise ValueError(f"density is {density!r}; it must be a number")
    if not 0 < density <= 1:
        raise ValueError(f"density is {density}; it must be above 0, and at most 1")
    return density


class TopK(Gathered):
    """A compressor that sends a bucket's k largest values with indices, 8 bytes each.

    `density` is k / numel. PyTorch has no such hook.
    """

    def __init__(
        self, density: float, feedback: bool = True, exchange: Exchange | None = None
    ) -> None:
        super().__init__(feedback, exchange)
        self.density = check_density(density)

    def encode(self, v: Tensor, index: int) -> Tensor:
        """Return the indices (int32), then the values."""
        k = count_selected(self.density, v.numel())
        indices = v.abs().topk(k, sorted=False).indices
        return as_bytes(indices.to(torch.int32), v[indices])

    def decode(self, data: Tensor, like: Tensor) -> Tensor:
        """Return zeros, with the values at their indices."""
        k = count_selected(self.density, like.numel())
        indices = data[: 4 * k].clone().view(torch.int32).long()
        values = data[4 * k :].clone().view(like.dtype)
        return torch.zeros_like(like).index_copy_(0, indices, values)


class RandomK(Compressor):
    """A compressor that sends k random values, others in every step; 4 bytes each.

    With feedback the values are sent unchanged. Without it they are multiplied by
    numel / k: then their expected value is the gradient (they are unbiased), and their
    variance is larger. All ranks must have the same `seed`.
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
        """Draw indices, select their values, and add the values up."""
        v = self.feedback.add(bucket.index(), bucket.buffer())
        k = count_selected(self.density, v.numel())
        indices = torch.randperm(v.numel(), generator=self.generator)[:k].to(v.device)
        values = v[indices]
        result = torch.zeros_like(v).index_copy_(0, indices, values)
        self.feedback.keep(bucket.index(), v, result)
        self.exchange.add_up(values)
        scale = 1 if self.feedback.on else v.numel() / k
        return result.index_copy_(0, indices, values * (scale / self.exchange.size))

    def state_dict(self) -> dict[str, Any]:
        """Return the errors, and the state of the random generator."""
        return super().state_dict() | {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict` of this rank."""
        super().load_state_dict(state)
        self.generator.set_state(state["generator"])
