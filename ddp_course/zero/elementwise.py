"""Can this optimizer step a part of a tensor alone? It is tried out on a small one.

A shard may begin in the middle of a matrix. AdamW does not mind: what it makes of an
element depends on that element's own numbers. Most optimizers are *elementwise* like
that (SGD, Adam and its relatives, Adagrad, RMSprop, Lion, ...). Others look at a whole
tensor: Adafactor at its rows and columns, LAMB at its norm, Muon at its singular
vectors. On parts of a tensor they would do something else, and nobody would notice.

No list of names could be complete, as everybody may write an optimizer. So a small
matrix is stepped as a whole, and in two parts: is that the same? Chapter 07.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_course.zero.states import options_of

SHAPE, CUT, STEPS = (4, 6), 7, 3  # a cut in the second row
LR = 0.1  # the real one may be 0 at first, with which everything is the same


class NotElementwiseError(ValueError):
    """The optimizer looks at whole tensors, so it cannot step parts of them."""


def element_states(
    optimizer_class: Callable[..., Optimizer],
    group: dict[str, Any],
    defaults: dict[str, Any],
    device: torch.device,
) -> frozenset[str]:
    """Return the names of the states that have a number for every element.

    Of AdamW these are exp_avg and exp_avg_sq, and not step. `group` has the options of
    a parameter group, and `defaults` the arguments of the optimizer.

    Raises:
        NotElementwiseError: parts of a tensor are stepped otherwise than the whole.
    """
    options = options_of(group)
    start = torch.linspace(-1, 1, 24, device=device)

    def stepped(*parts: Tensor) -> tuple[list[Tensor], dict[Tensor, dict[str, Any]]]:
        params = [nn.Parameter(part) for part in parts]
        optimizer = optimizer_class([{**options, "params": params}], **defaults)
        if "lr" in (only := optimizer.param_groups[0]):
            only["lr"] = only["lr"] * 0 + LR  # a tensor stays one
        for gradient in _gradients(start):
            flat = gradient.split([p.numel() for p in params])
            for p, g in zip(params, flat, strict=True):
                p.grad = g.view(p.shape).clone()
            optimizer.step()
        return params, optimizer.state

    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        try:
            (whole,), states = stepped(start.clone().view(SHAPE))
            parts, _ = stepped(*start.clone().tensor_split([CUT]))
        except Exception as error:  # whatever somebody's optimizer raises
            raise _refused(optimizer_class, f"it says {error!r}") from None
    together = torch.cat([part.detach() for part in parts]).view(SHAPE)
    if not torch.allclose(whole, together, rtol=1e-4, atol=1e-6):
        raise _refused(optimizer_class, "tried on two parts it made another step")
    return frozenset(_with_elements(optimizer_class, states.values()))


def _gradients(like: Tensor) -> Iterator[Tensor]:
    """Yield gradients of quite different sizes: an optimizer may have thresholds."""
    for step in range(STEPS):
        wave = torch.cos(torch.arange(like.numel(), device=like.device) + 2.0 * step)
        yield wave * 10.0 ** (step - 1)


def _with_elements(
    optimizer_class: Callable[..., Optimizer], states: Iterable[dict[str, Any]]
) -> Iterator[str]:
    for state in states:
        for name, value in state.items():
            if not isinstance(value, Tensor) or not value.dim():
                continue  # the same for all elements
            if value.shape != SHAPE:
                raise _refused(
                    optimizer_class,
                    f"its state {name} has the shape {[*value.shape]} for a parameter "
                    f"of {[*SHAPE]}",
                )
            yield name


def _refused(optimizer_class: Any, why: str) -> NotElementwiseError:
    name = getattr(optimizer_class, "__name__", repr(optimizer_class))
    return NotElementwiseError(
        f"optimizer_class is {name}, which cannot step parts of a tensor: {why}. "
        "NaiveZeroRedundancyOptimizer leaves tensors whole"
    )
