"""Attention in pieces: one block of keys at a time, merged exactly.

A query's output is a mean of values, weighted by the exponentials of its scores:

    out = sum_j e^(s_j) v_j / sum_j e^(s_j)

Two blocks of keys, 1 and 2, give two outputs and two sums of exponentials. To have the
output of both, weigh each block's output by its sum. The sums are kept as logarithms,
lse = log(sum_j e^(s_j)), as a sum of exponentials soon overflows:

    lse = log(e^lse1 + e^lse2)
    out = e^(lse1 - lse) out1 + e^(lse2 - lse) out2

The second weight is a sigmoid of lse2 - lse1, and so no exponential is ever larger
than 1. Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022,
"FlashAttention", arXiv:2205.14135.
"""

import torch
from torch import Tensor


def merge(
    out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge the outputs and lses of two blocks of keys; return the merged pair.

    Outputs are (..., T, D), lses (..., T). For a query that sees no key of a block, the
    block's lse is -inf, and its output can be anything.
    """
    for out, lse in ((out1, lse1), (out2, lse2)):
        check_lse(out, lse)
    share = torch.sigmoid(lse2 - lse1)[..., None]  # weight of block 2
    share = torch.where(lse2.isneginf()[..., None], 0.0, share)  # 0 if both are -inf
    out = out1 - share * (out1 - out2)
    return out, torch.logaddexp(lse1, lse2)


def check_lse(out: Tensor, lse: Tensor) -> None:
    """Raise ValueError unless there is one lse for each output of a query."""
    if lse.shape != out.shape[:-1]:
        raise ValueError(
            f"an lse has shape {tuple(lse.shape)}; for outputs of shape "
            f"{tuple(out.shape)} it must be {tuple(out.shape[:-1])}"
        )


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output over this block of keys, (..., Tq, D), and lse, (..., Tq).

    Args:
        q: (..., Tq, D).
        k, v: (..., Tk, D); their other dimensions are those of q, or 1.
        visible: (Tq, Tk) bool, which query sees which key; None: every query sees all.
    """
    scores = _scores(q, k, visible)
    lse = scores.logsumexp(-1)
    return _weights(scores, lse) @ v.to(lse.dtype), lse


def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    lse: Tensor,
    dout: Tensor,
    delta: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what this block adds to the gradient of q, and the gradients of k and v.

    The weights are computed again, with the `lse` over *all* blocks: then they are a
    part of the whole softmax, whose gradient is dscore = weight (dweight - delta).
    `delta`, (..., Tq), is (dout * out).sum(-1), also with the output over all blocks.
    """
    q, k, v, dout = (x.to(lse.dtype) for x in (q, k, v, dout))
    weights = _weights(_scores(q, k, visible), lse)
    dscores = weights * (dout @ v.mT - delta[..., None]) * q.shape[-1] ** -0.5
    dk, dv = dscores.mT @ q, weights.mT @ dout
    return dscores @ k, dk.sum_to_size(k.shape), dv.sum_to_size(v.shape)


def _scores(q: Tensor, k: Tensor, visible: Tensor | None) -> Tensor:
    """Return the scaled products, in float32 at least; -inf for keys that are hidden.

    The absolute error of a score is the relative error of its exponential, and bfloat16
    rounds a score of 60 by up to .12.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).mT * q.shape[-1] ** -0.5
    return scores if visible is None else scores.masked_fill(~visible, -torch.inf)


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return the weights of softmax; all 0 for a query that sees no key."""
    lse = lse.masked_fill(lse.isneginf(), 0.0)  # e^(-inf - 0) is 0, and not nan
    return torch.exp(scores - lse[..., None])
