"""A mixture of experts in one process: many MLPs, of which each token uses a few.

    router    one product: a score of each expert for each token
    top-k     the k experts with the largest scores; softmax makes weights of these k
    mixture   the weighted sum of what these experts return

`NaiveMixture` lets every expert see every token, and multiplies most results by 0.
`RoutedMixture` computes only what counts: E times the parameters of one MLP, k times
its multiplications. Shazeer et al. 2017, arXiv:1701.06538. Chapter 17.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def top_k_weights(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return each token's k experts, (N, k) int64, and their weights, (N, k).

    `scores` is (N, E). The weights of a token add up to 1. (Softmax before the choice,
    normalised afterwards, gives the same weights.)
    """
    best, chosen = scores.topk(k, dim=-1)
    return chosen, best.softmax(-1)


class NaiveMixture(nn.Module):
    """E experts, all of which compute all tokens: (N, C) -> (N, C).

    Args:
        make_expert: makes an MLP, (N, C) -> (N, C).
        channels: C.
        num_experts: E.
        k: how many experts a token uses.
    """

    def __init__(
        self,
        make_expert: Callable[[], nn.Module],
        channels: int,
        num_experts: int,
        k: int,
    ) -> None:
        super().__init__()
        self.k = k
        self.router = nn.Linear(channels, num_experts, bias=False)
        self.experts = nn.ModuleList(make_expert() for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum over all experts."""
        chosen, weights = top_k_weights(self.router(x), self.k)
        of_all = torch.zeros(len(x), len(self.experts), dtype=x.dtype, device=x.device)
        of_all = of_all.scatter(1, chosen, weights)  # (N, E): k weights, and zeros
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (of_all[..., None] * outputs).sum(1)


class RoutedMixture(NaiveMixture):
    """The same sum: each expert computes the tokens that have chosen it."""

    def forward(self, x: Tensor) -> Tensor:
        """Add what each expert returns to the tokens that it comes from."""
        chosen, weights = top_k_weights(self.router(x), self.k)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, choice = (chosen == number).nonzero(as_tuple=True)
            output = weights[token, choice, None] * expert(x[token])
            y = y.index_add(0, token, output)
        return y
