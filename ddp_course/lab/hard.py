"""Hard inputs: what every check should try, because easy ones forgive too much.

    for name, tensor in hard_tensors(rank, n): ...           # on a rank
    for name, model, x in hard_models(): ...                 # model(x) runs
    got = answer.pure(batch, sizes)                          # here: arguments kept?
    with unchanged(tensor) as told: got = function(tensor)   # on a rank: the same
    judge(where, told, KEPT)

Names say what is hard, and go into hints. Cases that an exercise has no room for are
left out by a word of their name: `hard_models(but=["tied"])`. `judge_ranks` has two,
three and one rank.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

KEPT = {  # a table of properties for `judge`
    "kept": "changed {changed} that it was given; work on a copy."
}


def hard_tensors(
    rank: int, n: int, but: Sequence[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of a rank by what is hard about them; sums and means are exact.

    Not whole, of three types, one strided, one empty, one zero, and one with more
    numbers than anybody writes down, which are all zero on rank 1: whoever takes much
    for granted is found out. Means are exact whether one divides before or after. (What
    sends them leaves out "strided": gloo raises, or adds up other numbers without a
    word, and NCCL raises.)
    """

    def numbers(*shape: int) -> Tensor:
        flat = torch.arange(math.prod(shape)) * (rank + 2) + rank
        return ((flat % 7 - 3) * n / 4).view(shape)

    tensors = {
        "a tensor of 2 x 3 numbers": numbers(2, 3) + n * rank,
        "a tensor of float64": numbers(5).double() + n * 2**-40,
        "a tensor of bfloat16": numbers(3, 1, 2).bfloat16(),
        "a strided tensor": numbers(4, 3).T[:, ::2],
        "a tensor of 11 x 13 numbers": numbers(11, 13) * (rank != 1),
        "a tensor of zeros": torch.zeros(3),
        "an empty tensor": numbers(0, 3),
    }
    yield from _without(but, tensors)


def hard_models(
    seed: int = 0, but: Sequence[str] = ()
) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield small models by what is hard about them, each with an input (3, 4) for it.

    `model(x)` is (3, 4); every parameter that is not frozen gets a gradient. The same
    seed gives the same models. Every one is new: a check may train it.
    """

    def model(change: Callable[[Small], Any]) -> tuple[nn.Module, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            small, x = Small(), torch.randn(3, 4)
        change(small)
        return small, x.to(small.first.weight.dtype)

    for name, change in _without(but, HARD):
        yield name, *model(change)


class Small(nn.Module):
    """Two layers with 40 parameters: (rows, 4) -> (rows, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, 4); parameters that a model got for itself are added."""
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


@contextmanager
def unchanged(*given: Any) -> Iterator[dict[str, Any]]:
    """Tell whether the caller's arguments are afterwards what they were before.

    Tensors (to the bit), models with their gradients, optimizers, and whatever has
    `==`, also in lists and dictionaries. What is told is for the table `KEPT`.
    """
    told: dict[str, Any] = {"kept": True, "changed": ""}
    before = [_content(one) for one in given]
    yield told
    for one, was in zip(given, before, strict=True):
        if _content(one) != was:
            told |= {"kept": False, "changed": f"the {type(one).__name__}"}


def _content(value: Any) -> Any:
    """Return a copy of all that is in a value, which can be compared by `==`."""
    if isinstance(value, Tensor):
        numbers = value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        return (value.dtype, value.shape, value.stride(), value.requires_grad, numbers)
    if isinstance(value, nn.Module):
        named = [*value.named_parameters(), *value.named_buffers()]
        return [(name, _content(one), _content(one.grad)) for name, one in named]
    if isinstance(value, torch.optim.Optimizer):
        return _content(value.state_dict())
    if isinstance(value, Mapping):
        return [(_content(key), _content(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return (type(value), [_content(one) for one in value])
    return copy.deepcopy(value)


def _without(but: Sequence[str], cases: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, case in cases.items():
        if not any(word in name for word in but):
            yield name, case
