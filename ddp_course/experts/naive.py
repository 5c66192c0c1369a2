"""A mixture of experts in one process: many MLPs, of which each token uses a few.

    router    one matrix product: a score of each expert for each token
    top-k     the k experts with the largest probabilities, the softmax of the scores
    mixture   the weighted sum of the outputs of these experts

`NaiveMixture` lets every expert compute every token, and multiplies most outputs by 0.
`RoutedMixture` computes only the other outputs: it has the parameters of E MLPs, and
each token costs the multiplications of k. Shazeer et al. 2017, arXiv:1701.06538.
Chapter 17.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def top_k_weights(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return each token's k experts, (N, k) int64, and their weights, (N, k).

    `scores` is (N, E). The weights are the probabilities of the chosen experts, scaled
    so that they add up to 1. With k = 1 they are not scaled: the weight would be 1,
    whatever the scores are, and the router would get no gradient.
    """
    best, chosen = scores.softmax(-1).topk(k, dim=-1)
    return chosen, best if k == 1 else best / best.sum(-1, keepdim=True)


class NaiveMixture(nn.Module):
    """E experts, all of which compute all tokens: (N, C) -> (N, C).

    Args:
        make_expert: returns a new MLP, (N, C) -> (N, C).
        channels: C.
        num_experts: E.
        k: the number of experts that a token uses.
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
        zeros = x.new_zeros(len(x), len(self.experts))
        weights = zeros.scatter(1, chosen, weights)  # (N, E): k weights, and zeros
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (weights[..., None] * outputs).sum(1)


class RoutedMixture(NaiveMixture):
    """The same mixture, in which an expert computes only the tokens that chose it."""

    def forward(self, x: Tensor) -> Tensor:
        """Add the outputs of each expert to the tokens that have chosen it."""
        chosen, weights = top_k_weights(self.router(x), self.k)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, choice = (chosen == number).nonzero(as_tuple=True)
            output = weights[token, choice, None] * expert(x[token])
            y = y.index_add(0, token, output)
        return y
