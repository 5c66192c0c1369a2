"""Keep all experts busy: capacities, an auxiliary loss, or a bias.

A router that is left alone collapses: an expert that is chosen more learns more, and is
chosen still more. Three remedies, which can be combined:

    capacity         an expert takes C = T k factor / E tokens; the rest are dropped,
                     and keep their residual connection alone
    auxiliary loss   E sum_e f_e P_e: f_e the share of choices, P_e the mean
                     probability; its gradient moves probability to idle experts
    bias             added to the scores for the choice alone, not for the weights, and
                     moved after each step against the load: no gradient, no loss

Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961, section 2.2; DeepSeek-AI
2024, "DeepSeek-V3", arXiv:2412.19437, section 2.1.2. Chapter 17.
"""

import math

import torch
from torch import Tensor


def loads(chosen: Tensor, num_experts: int) -> Tensor:
    """Return how many choices fall on each expert, (E,) int64; `chosen` is (N, k)."""
    return torch.bincount(chosen.flatten(), minlength=num_experts)


def capacity(num_tokens: int, num_experts: int, k: int, factor: float) -> int:
    """Return how many tokens an expert takes: ceil(T k factor / E)."""
    return math.ceil(num_tokens * k * factor / num_experts)


def within_capacity(chosen: Tensor, num_experts: int, limit: int) -> Tensor:
    """Return which choices are kept, (N, k) bool: the first `limit` of each expert.

    All tokens' first choices come before all second ones, and earlier tokens first.
    """
    queue = chosen.T.flatten()  # first choices, then second ones
    one_hot = torch.nn.functional.one_hot(queue, num_experts)
    place = (one_hot.cumsum(0) * one_hot).sum(-1)  # 1 for an expert's first token
    return (place <= limit).view(chosen.T.shape).T


def auxiliary_loss(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return E sum_e f_e P_e, a scalar: 1 if choices and probabilities are uniform.

    `scores` is (N, E), `chosen` (N, k). Only P has a gradient. It is no minimum: where
    shares and probabilities disagree it can be less than 1.
    """
    num_experts = scores.shape[-1]
    share = loads(chosen, num_experts) / chosen.numel()
    return num_experts * (share * scores.softmax(-1).mean(0)).sum()


def moved_bias(bias: Tensor, load: Tensor, rate: float = 1e-3) -> Tensor:
    """Return the bias of each expert after a step: down if overloaded, up if idle."""
    mean = load.to(bias.dtype).mean()
    return bias - rate * torch.sign(load.to(bias.dtype) - mean)
