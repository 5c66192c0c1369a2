"""Hard models, which a check of training should try: easy models hide mistakes.

    for name, model, x in hard_models(): ...                 # model(x) runs

A model's name says what is hard about it, and is printed in hints. `lab/judge.py`
draws tensors and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def hard_models() -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield (name, model, input) for each kind of hard model; the input is (3, 4).

    `model(x)` is (3, 4); every parameter that is not frozen gets a gradient. Each model
    is new, so a check may train it.
    """
    for name, change in HARD.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, x = Small(), torch.randn(3, 4)
        change(model)
        yield name, model, x.to(model.first.weight.dtype)


class Small(nn.Module):
    """Two layers with 40 parameters: (rows, 4) -> (rows, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, 4); also add the sum of any parameter of the module itself."""
        y = self.last(torch.tanh(self.first(x)))
        return sum((own.sum() for own in self.parameters(recurse=False)), y)


def _with_buffers(model: Small) -> None:
    model.register_buffer("steps", torch.tensor(3))
    model.register_buffer("table", torch.tensor([0.5, 1.5]), persistent=False)


HARD: dict[str, Callable[[Small], Any]] = {
    "a frozen layer": lambda model: model.first.requires_grad_(False),
    "a tied weight": lambda model: setattr(model.last, "weight", model.first.weight),
    "a buffer of whole numbers and one that is not saved": _with_buffers,
    "a strided weight": lambda model: setattr(
        model.last, "weight", nn.Parameter(model.last.weight.detach().T)
    ),
    "an empty parameter": lambda model: model.register_parameter(
        "nothing", nn.Parameter(torch.empty(0, 3))
    ),
    "parameters of float64": lambda model: model.double(),
    "parameters of bfloat16": lambda model: model.bfloat16(),
}
