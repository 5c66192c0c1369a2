"""Solutions of the exercises of chapter 17."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def my_kept(chosen: Tensor, num_experts: int, limit: int) -> Tensor:
    """Fill each expert's places with first choices, then with second choices."""
    kept = torch.zeros_like(chosen, dtype=torch.bool)
    taken = [0] * num_experts
    for choice in range(chosen.shape[1]):
        for token, expert in enumerate(chosen[:, choice].tolist()):
            kept[token, choice] = taken[expert] < limit
            taken[expert] += 1
    return kept


def my_dispatch(
    rows: Tensor, expert: Tensor, num_experts: int
) -> tuple[Tensor, list[int]]:
    """Exchange counts, then rows sorted by expert; sort the rows that arrive."""
    n = dist.get_world_size()
    to_each = torch.bincount(expert, minlength=num_experts).view(n, -1)
    from_each = torch.empty_like(to_each)
    dist.all_to_all_single(from_each, to_each)
    sent, received = to_each.sum(1).tolist(), from_each.sum(1).tolist()
    arrived = rows.new_empty(sum(received), rows.shape[1])
    leaving = rows[expert.argsort(stable=True)]
    dist.all_to_all_single(arrived, leaving, received, sent)
    own = torch.arange(num_experts // n).repeat(n)  # by rank, then by expert
    by_expert = own.repeat_interleave(from_each.flatten()).argsort(stable=True)
    return arrived[by_expert], from_each.sum(0).tolist()


def my_auxiliary_loss(scores: Tensor, chosen: Tensor) -> Tensor:
    """Add up the counts of all ranks; only this rank's probabilities have gradients."""
    num_experts = scores.shape[1]
    counts = torch.bincount(chosen.flatten(), minlength=num_experts)
    dist.all_reduce(counts)
    tokens = counts.sum() / chosen.shape[1]  # on all ranks together
    means = scores.softmax(-1).sum(0) / tokens  # this rank's part
    return num_experts * (counts / counts.sum() * means).sum()


def my_two_averages(
    dense: list[Tensor], experts: list[Tensor], replicas: dist.ProcessGroup
) -> None:
    """Sum over the ranks with the same parameters; divide by the world size."""
    for gradients, group in ((dense, None), (experts, replicas)):
        for gradient in gradients:
            dist.all_reduce(gradient, group=group)
            gradient /= dist.get_world_size()
