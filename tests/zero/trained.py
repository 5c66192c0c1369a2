"""What a training was, and whether two are the same."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


@dataclass
class Trained:
    """What there was after each step, or after some; and in the end."""

    states: list[dict[str, Tensor]] = field(default_factory=list)  # whole, by name
    losses: list[float] = field(default_factory=list)  # mean over this rank's rows
    norms: list[float] = field(default_factory=list)  # of gradients, if clipped
    rates: list[float] = field(default_factory=list)  # in the end
    optimizer: dict = field(default_factory=dict)  # its whole state, in the end


def far_apart(a: Trained, b: Trained, atol: float = 1e-5) -> list[str]:
    """Return where two trainings differ by more than rounding.

    A mean over ranks adds the same numbers in another order, and AdamW divides by the
    root of what may be small: 1e-5 is about a hundred roundings of float32. A wrong
    scale or a missing rank is off by more than 1e-3.
    """
    found = [
        f"{step} {name}"
        for step, (x, y) in enumerate(zip(a.states, b.states, strict=True))
        for name in x
        if name.rpartition(".")[2] != "calls"  # buffers are each rank's own affair
        and not torch.allclose(x[name], y[name], rtol=1e-4, atol=atol)
    ]
    pairs = zip(a.norms, b.norms, strict=True)
    found += [f"norm {x} {y}" for x, y in pairs if abs(x - y) > 1e-4 * y]
    return found + ([] if a.rates == b.rates else [f"rates {a.rates} {b.rates}"])


def bits(trained: Trained) -> bytes:
    """Return all numbers of a training: equal bytes are equal bits."""
    told = [t for state in trained.states for t in state.values()]
    return b"".join(t.contiguous().numpy().tobytes() for t in told)


def own_norm_only(parts, max_norm: float) -> Tensor:
    """Clip what a rank has by the norm of what it has: wrong, but on one rank."""
    parts = list(parts)
    norm = get_total_norm([part.grad for part in parts if part.grad is not None])
    clip_grads_with_norm_(parts, max_norm, norm)
    return norm
