"""A training step under our autocast and loss scaling, and under PyTorch's, in one run.

Each rank trains alone. With bf16, forward runs under autocast; with fp16, the loss is
scaled, too. fp32 shows whether 16 bits are faster here, or slower. Chapter 12.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddp_course.bench import steps
from ddp_course.bench.turns import against
from ddp_course.precision import Autocast, GradScaler

ABOUT = "A training step in 16 bits, ours beside PyTorch's."


class Rounded(nn.Module):
    """A module that runs in a context and scales its loss; also its own optimizer."""

    def __init__(
        self,
        model: nn.Module,
        context: Callable[[], AbstractContextManager],
        scaler: Any,
    ) -> None:
        super().__init__()
        self.module, self.context, self.scaler = model, context, scaler
        self.optimizer = steps.with_adamw(model)[1]

    def forward(self, x: Tensor, y: Tensor) -> tuple[None, Tensor]:
        """Return None in place of logits, and the scaled loss."""
        with self.context():
            _, loss = self.module(x, y)
        return None, self.scaler.scale(loss)

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad()

    def step(self) -> None:
        """Step the optimizer, unless a gradient is inf or nan."""
        self.scaler.step(self.optimizer)
        self.scaler.update()


def with_precision(
    model: nn.Module,
    context: Callable[[], AbstractContextManager] = nullcontext,
    scaler: Callable[[], Any] | None = None,
) -> tuple[nn.Module, Any]:
    """Return the model, whose forward runs in `context()`, and its optimizer."""
    rounded = Rounded(model, context, scaler() if scaler else GradScaler(enabled=False))
    return rounded, rounded


torch_autocast, torch_scaler = (
    partial(torch.autocast, "cpu"),
    partial(torch.amp.GradScaler, "cpu"),
)
in_bf16 = partial(with_precision, context=partial(torch_autocast, dtype=torch.bfloat16))
in_fp16 = partial(with_precision, context=partial(torch_autocast, dtype=torch.float16))
VARIANTS: dict[str, steps.Variant] = {
    "torch.autocast": in_bf16,
    "again": in_bf16,
    "autocast": partial(with_precision, context=partial(Autocast, torch.bfloat16)),
    "fp32": with_precision,
    "torch.amp.GradScaler": partial(in_fp16, scaler=torch_scaler),
    "GradScaler": partial(in_fp16, scaler=GradScaler),
}
PAIRS = (
    *against("torch.autocast", {"autocast": 1.05, "fp32": None, "again": None}),
    *against("torch.amp.GradScaler", {"GradScaler": 1.05}),
)
bench = partial(steps.contest, variants=VARIANTS, pairs=PAIRS)
