"""One optimizer that steps some of its parameters now, and others later.

Its groups are narrowed for a moment: so it stays the one whose state is saved, and
whose `lr` a scheduler changes. Chapter 15.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
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
