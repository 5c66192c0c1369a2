"""The options of an optimizer's parameter groups: learning rate, betas, ..."""

from typing import Any


def copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Copy learning rates and other options from one optimizer's groups to another's.

    Schedulers change the options of the outer optimizer, and some inner optimizers
    change their own.
    """
    for theirs, ours in zip(source, target, strict=True):
        for name, value in theirs.items():
            if name not in ("params", "param_names"):
                ours[name] = value
