"""Can this optimizer step a part of a tensor alone? It is tried out on a small one.

A shard may begin in the middle of a matrix. AdamW does not mind: what it makes of an
element depends on that element's own numbers. Most optimizers are *elementwise* like
that (SGD, Adam and its relatives, Adagrad, RMSprop, Lion, ...). Others look at a whole
tensor: Adafactor at its rows and columns, LAMB at its norm, Muon at its singular
vectors. On parts of a tensor they would do something else, and nobody would notice.

No list of names could be complete, as everybody may write an optimizer. So a small
matrix is stepped as a whole, and in two parts: is that the same? Chapter 07.

If the model is divided, and not the optimizer, an optimizer of any class may be
constructed later: `trial` tries it out before its first step. Chapters 08 to 10.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

SHAPE, CUT, STEPS = (4, 6), 7, 3  # a cut in the second row
LR = 0.1  # the real one may be 0 at first, with which everything is the same


class NotElementwiseError(ValueError):
    """The optimizer looks at whole tensors, so it cannot step parts of them."""


def check_elementwise(
    optimizer_class: Callable[..., Optimizer],
    options: dict[str, Any],
    defaults: dict[str, Any],
    device: torch.device,
    remedy: str = "NaiveZeroRedundancyOptimizer leaves tensors whole",
    whole_tensors: bool = False,
) -> None:
    """Raise NotElementwiseError if parts are stepped otherwise than the whole.

    `options` are those of a parameter group, `defaults` the arguments of the optimizer.
    With `whole_tensors` the parts are two tensors, and the whole is both together.
    """
    start = torch.linspace(-1, 1, 24, device=device)
    together, apart = [(0, 24, SHAPE)], [(0, CUT, (CUT,)), (CUT, 24, (24 - CUT,))]
    cannot = "step parts of a tensor"
    if whole_tensors:
        together = apart = [(0, 12, (2, 6)), (12, 24, (2, 6))]
        cannot = "step parameters one by one"

    def stepped(*spans: tuple[int, int, tuple[int, ...]]) -> tuple[Tensor, Optimizer]:
        """Step the elements [first, last) of each span, by one optimizer for all.

        Parts have an optimizer each: one of both could take a norm over all.
        """
        params = [nn.Parameter(start[a:b].clone().view(shape)) for a, b, shape in spans]
        optimizer = optimizer_class([{**options, "params": params}], **defaults)
        if "lr" in (only := optimizer.param_groups[0]):
            only["lr"] = only["lr"] * 0 + LR  # a tensor stays one
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
        except Exception as error:  # whatever somebody's optimizer raises
            raise refused(f"it says {error!r}") from None
    if not torch.allclose(whole, parts, rtol=1e-4, atol=1e-6):
        raise refused("tried on two parts it made another step")
    for state in () if whole_tensors else optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape not in ((), SHAPE):
                of = f"the shape {[*value.shape]} for a parameter of {[*SHAPE]}"
                raise refused(f"its state {name} has {of}")


def _gradients(like: Tensor) -> Iterator[Tensor]:
    """Yield gradients of quite different sizes: an optimizer may have thresholds."""
    for step in range(STEPS):
        wave = torch.cos(torch.arange(like.numel(), device=like.device) + 2.0 * step)
        yield wave * 10.0 ** (step - 1)
