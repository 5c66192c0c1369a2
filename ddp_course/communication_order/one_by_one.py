"""One optimizer that steps some of its parameters now, and others later.

Its groups are narrowed for a moment: so it stays the one whose state is saved, and
whose `lr` a scheduler changes. Chapter 15.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@contextmanager
def only(
    optimizer: Optimizer, parameters: set[Tensor], options: Sequence[dict[str, Any]]
) -> Iterator[None]:
    """Let an optimizer have these parameters alone, and its groups these options."""
    groups = optimizer.param_groups
    own = [[p for p in group["params"] if p in parameters] for group in groups]
    pairs = zip(options, own, strict=True)
    optimizer.param_groups = [{**o, "params": some} for o, some in pairs if some]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return a copy of the options of an optimizer's groups, as they are now."""
    return [
        copy.deepcopy({name: o for name, o in group.items() if name != "params"})
        for group in optimizer.param_groups
    ]


def problem_with(optimizer: Optimizer) -> str | None:
    """Return why an optimizer cannot step parameters one by one, or None: it is tried.

    What looks at several at once, or keeps in its options what it learns, cannot.
    """
    start = torch.linspace(-1, 1, 12).view(3, 4)

    def stepped(one_by_one: bool) -> list[Tensor]:
        params = [nn.Parameter(start * k) for k in (1, 2)]
        own = object.__new__(type(optimizer))
        options = options_of(optimizer)[0]
        if "lr" in options:
            options["lr"] = options["lr"] * 0 + 0.1  # the real one may begin at 0
        group = {**options, "params": params}
        state = {"state": defaultdict(dict), "param_groups": [group]}
        own.__dict__.update(vars(optimizer) | state)
        for step in (1, 2, 3):
            for k, parameter in enumerate(params):
                parameter.grad = torch.cos(start * step + k)
            for some in [{p} for p in params] if one_by_one else [set(params)]:
                with only(own, some, options_of(own)):
                    own.step()
        return params

    name = type(optimizer).__name__
    try:
        together, apart = stepped(False), stepped(True)
    except Exception as error:  # whatever somebody's optimizer raises
        return f"{name} cannot step parameters one by one: tried, it says {error!r}"
    if all(map(torch.equal, together, apart)):
        return None
    return f"{name} cannot step parameters one by one: tried, it made another step"
