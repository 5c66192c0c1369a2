"""A small GPT with mixtures in place of its MLPs, trained with or without balance."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddp_course.data import load_corpus
from ddp_course.experts.balance import auxiliary_loss, loads, moved_bias
from ddp_course.experts.naive import RoutedMixture
from ddp_course.experts.segments import Segments, compute_segments
from ddp_course.model import GPTConfig, build_gpt

CONFIG = GPTConfig(n_layer=2, n_head=4, d_model=48)
E, K = 8, 2
BALANCES = ("alone", "auxiliary loss", "bias")
ALPHA, RATE = 1e-1, 2e-2  # weight of the auxiliary loss; step of the bias


class BalancedMixture(RoutedMixture):
    """A mixture of these experts, whose router has a bias.

    Attributes:
        scores, chosen: scores and chosen experts of the last forward, (N, E), (N, k).
        bias: (E,), added to the scores for the choice, not for the weights.
    """

    def __init__(self, experts: list[nn.Module], channels: int) -> None:
        super().__init__(iter(experts).__next__, channels, len(experts), K)
        nn.init.normal_(self.router.weight, std=0.02)  # like the GPT's own matrices
        self.bias = torch.zeros(len(experts))

    def forward(self, x: Tensor) -> Tensor:
        """Return the mixture of each token: (B, T, C) -> (B, T, C)."""
        rows = x.flatten(0, 1)
        self.scores = self.router(rows)
        self.chosen = (self.scores + self.bias).topk(self.k).indices
        best = self.scores.softmax(-1).gather(1, self.chosen)
        segments = Segments(self.chosen, len(self.experts))
        sizes = segments.counts.tolist()
        outputs = compute_segments(self.experts, segments.sort(rows), sizes)
        return segments.sum(outputs, best / best.sum(-1, keepdim=True)).view_as(x)


def train_mixtures(
    balance: str, steps: int = 200, lr: float = 3e-3, batch_size: int = 8
) -> tuple[Tensor, list[float]]:
    """Train with one of BALANCES; return loads, (steps, layers, E), and losses."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, corpus = build_gpt(CONFIG), load_corpus()
    others = [build_gpt(CONFIG, seed) for seed in range(E)]  # each yields one expert
    for i, block in enumerate(model.blocks):
        block.mlp = BalancedMixture(
            [gpt.blocks[i].mlp for gpt in others], CONFIG.d_model
        )
    mixtures = [block.mlp for block in model.blocks]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    all_loads, losses = [], []
    for step in range(steps):
        _, loss = model(*corpus.batch(step, batch_size, CONFIG.block_size))
        losses.append(loss.item())
        if balance == "auxiliary loss":
            loss = loss + ALPHA * sum(
                auxiliary_loss(m.scores, m.chosen) for m in mixtures
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        all_loads.append(torch.stack([loads(m.chosen, E) for m in mixtures]))
        if balance == "bias":
            for mixture, load in zip(mixtures, all_loads[-1], strict=True):
                mixture.bias = moved_bias(mixture.bias, load, RATE)
    return torch.stack(all_loads), losses
