"""The options of an optimizer's parameter groups: learning rate, betas, ..."""

from typing import Any


def copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Copy learning rates and other options from one optimizer's groups to another's.

    Schedulers change the options of the outer optimizer, and some inner optimizers
    change their own.
    """
    for source_group, target_group in zip(source, target, strict=True):
        for name, value in source_group.items():
            if name not in ("params", "param_names"):
                target_group[name] = value
