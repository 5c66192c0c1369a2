"""The memory behind a bucket plan: one flat tensor for each bucket, views of it.

Explained in chapter 05.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddp_course.mechanisms.buckets import Bucket


@dataclass(eq=False)
class Slot:
    """One parameter's place in a bucket.

    `fresh` tells that it has got a gradient since the ranks were last averaged, `here`
    that its share of the bucket is in place in the present pass.
    """

    name: str
    parameter: Tensor
    view: Tensor
    fresh: bool = False
    here: bool = False

    def copy_back(self) -> None:
        """Copy the mean out of the bucket, to a gradient that lies elsewhere."""
        if self.parameter.grad is None:
            self.parameter.grad = self.view.clone()
        else:
            self.parameter.grad.copy_(self.view)


@dataclass(eq=False)
class LiveBucket:
    """A bucket of the plan with its memory: `flat`, and behind the gradients `flags`.

    There is a flag for each parameter if unused ones are looked for, otherwise none.
    """

    plan: Bucket
    flat: Tensor
    flags: Tensor
    slots: list[Slot]
    missing: int = 0  # gradients that have not come in this pass
    work: Any = None
    starts: Tensor = field(init=False)  # the first element of every gradient

    def __post_init__(self) -> None:
        """Note where the gradients begin."""
        self.starts = torch.tensor(self.plan.offsets, device=self.flat.device)


def allocate(
    plan: Bucket,
    parameters: dict[str, Tensor],
    empty: Callable[..., Tensor],
    flags: bool = False,
) -> LiveBucket:
    """Make the memory of a bucket, all zeros, with flags or without.

    `empty(numel, dtype=..., device=...)` makes a tensor; `parameters` has all names of
    the plan.
    """
    numel = plan.numel + len(plan.parameters) * flags
    flat = empty(numel, dtype=plan.dtype, device=plan.device)
    flat.zero_()
    slots = [
        Slot(name, parameters[name], _view(flat, offset, parameters[name]))
        for name, offset in zip(plan.parameters, plan.offsets, strict=True)
    ]
    return LiveBucket(plan, flat, flat[plan.numel :], slots)


def _view(flat: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """Return a parameter's part of a bucket, laid out as autograd lays its gradient."""
    part = flat[offset : offset + parameter.numel()]
    strides = torch.empty_like(parameter, device="meta").stride()
    return part.as_strided(parameter.shape, strides)
