"""Check on a small tensor whether an optimizer can step a part of a tensor alone.

A shard may begin in the middle of a matrix. AdamW does not mind: its update of an
element depends only on that element's own gradient and state. Most optimizers are
*elementwise* like that (SGD, Adam and its relatives, Adagrad, RMSprop, Lion, ...).
Others use a whole tensor: Adafactor its rows and columns, LAMB its norm, Muon its
singular vectors. On parts of a tensor they would silently compute other updates.

No list of names could be complete, because anyone may write an optimizer. So a small
matrix is stepped as a whole and in two parts, and the results are compared. Chapter 07.

If only the model is divided, its user may later construct an optimizer of any class:
`trial` checks that optimizer before its first step. Chapters 08 to 10.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

SHAPE, CUT, STEPS = (4, 6), 7, 3  # the cut is in the second row
LR = 0.1  # the real one may be 0 at first, which would make all results equal


class NotElementwiseError(ValueError):
    """The optimizer uses whole tensors, so it cannot step parts of them."""


def check_elementwise(
    optimizer_class: Callable[..., Optimizer],
    options: dict[str, Any],
    defaults: dict[str, Any],
    device: torch.device,
    remedy: str = "NaiveZeroRedundancyOptimizer leaves tensors whole",
    whole_tensors: bool = False,
) -> None:
    """Raise NotElementwiseError if stepping parts gives another result than the whole.

    `options` are a parameter group's, `defaults` the optimizer's; `remedy` ends errors.
    With `whole_tensors` the parts are two tensors, and the whole is both together.
    """
    if not callable(optimizer_class):
        got = f"optimizer_class is an object of type {type(optimizer_class).__name__}"
        raise ValueError(f"{got}; pass a class, such as AdamW, and then its options")
    start = torch.linspace(-1, 1, 24, device=device)
    optimizer_class([{**options, "params": [nn.Parameter(start[None])]}], **defaults)
    together, apart = [(0, 24, SHAPE)], [(0, CUT, (CUT,)), (CUT, 24, (24 - CUT,))]
    cannot = "step parameters one by one" if whole_tensors else "step parts of a tensor"
    if whole_tensors:
        together = apart = [(0, 12, (2, 6)), (12, 24, (2, 6))]

    def stepped(*spans: tuple[int, int, tuple[int, ...]]) -> tuple[Tensor, Optimizer]:
        """Step the elements [first, last) of each span by one optimizer.

        Each part needs its own call: one optimizer could take a norm over both parts.
        """
        params = [nn.Parameter(start[a:b].clone().view(shape)) for a, b, shape in spans]
        optimizer = optimizer_class([{**options, "params": params}], **defaults)
        if "lr" in (only := optimizer.param_groups[0]):
            only["lr"] = only["lr"] * 0 + LR  # a tensor remains a tensor
        for gradient in _gradients(start):
            for p, (a, b, shape) in zip(params, spans, strict=True):
                p.grad = gradient[a:b].clone().view(shape)
            optimizer.step(lambda: torch.zeros(()))  # LBFGS asks for a loss
        return torch.cat([p.detach().flatten() for p in params]), optimizer

    def refused(why: str) -> NotElementwiseError:
        name = getattr(optimizer_class, "__name__", repr(optimizer_class))
        return NotElementwiseError(
            f"optimizer_class is {name}, which cannot {cannot}: {why}. {remedy}"
        )

    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        try:
            whole, optimizer = stepped(*together)
            parts = torch.cat([stepped(span)[0] for span in apart])
        except Exception as error:  # an optimizer may raise anything
            raise refused(f"its step with {defaults} raised {error!r}") from None
    if not torch.allclose(whole, parts, rtol=1e-4, atol=1e-6):
        raise refused("its step on two parts differs from its step on the whole")
    for state in () if whole_tensors else optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape not in ((), SHAPE):
                shapes = f"{[*value.shape]} for a parameter of shape {[*SHAPE]}"
                raise refused(f"its state {name} has the shape {shapes}")


def _gradients(like: Tensor) -> Iterator[Tensor]:
    """Yield gradients of very different sizes: an optimizer may have thresholds."""
    for step in range(STEPS):
        wave = torch.cos(torch.arange(like.numel(), device=like.device) + 2.0 * step)
        yield wave * 10.0 ** (step - 1)
