"""Keep all experts busy: a capacity, an auxiliary loss, or a bias.

A router without any of them may collapse: an expert that is chosen more learns more,
and is chosen still more. The three remedies can be combined:

    capacity         an expert computes at most C = T k factor / E tokens; the other
                     tokens that chose it are dropped: only their residual
                     connection is left
    auxiliary loss   E sum_e f_e P_e, with the expert's share of the choices f_e, and
                     its mean probability P_e; the gradient of P moves probability to
                     less busy experts
    bias             added to the scores when the experts are chosen, not when they are
                     weighted; after each step it moves against the load, without any
                     gradient

Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961, section 2.2; DeepSeek-AI
2024, "DeepSeek-V3", arXiv:2412.19437, section 2.1.2. Chapter 17.
"""

import math

import torch
from torch import Tensor


def loads(chosen: Tensor, num_experts: int) -> Tensor:
    """Return how many choices each expert has, (E,) int64; `chosen` is (N, k)."""
    if chosen.is_floating_point():
        raise ValueError(
            f"chosen is {chosen.dtype} {list(chosen.shape)}; it must be integers "
            "(N, k), the experts that each token chose; scores are another argument"
        )
    return torch.bincount(chosen.flatten(), minlength=num_experts)


def capacity(num_tokens: int, num_experts: int, k: int, factor: float) -> int:
    """Return how many tokens an expert computes at most: ceil(T k factor / E)."""
    return math.ceil(num_tokens * k * factor / num_experts)


def within_capacity(chosen: Tensor, num_experts: int, limit: int) -> Tensor:
    """Return which choices are kept, (N, k) bool: the first `limit` of each expert.

    The first choices of all tokens come before all second choices; among these, earlier
    tokens come first.
    """
    queue = chosen.T.flatten()  # all first choices, then all second ones
    one_hot = torch.nn.functional.one_hot(queue, num_experts)
    place = (one_hot.cumsum(0) * one_hot).sum(-1)  # 1 for an expert's first token
    return (place <= limit).view(chosen.T.shape).T


def auxiliary_loss(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return E sum_e f_e P_e, a scalar: 1 if shares and probabilities are uniform.

    `scores` is (N, E), `chosen` (N, k). Only P has a gradient. The value 1 is not the
    minimum: the loss is below 1 if experts with large shares have small probabilities.
    """
    num_experts = scores.shape[-1]
    share = loads(chosen, num_experts) / chosen.numel()
    return num_experts * (share * scores.softmax(-1).mean(0)).sum()


def moved_bias(bias: Tensor, load: Tensor, rate: float = 1e-3) -> Tensor:
    """Return the next bias, (E,): lower for busy experts, higher for idle ones.

    `load` is (E,); an expert is busy if its load is above the mean of all experts.
    """
    load = load.to(bias.dtype)
    return bias - rate * torch.sign(load - load.mean())
