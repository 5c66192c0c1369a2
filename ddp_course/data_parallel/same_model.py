"""A part of DDP: check that all ranks have the same module, and that DDP can wrap it.

Data parallelism rests on one promise: before every step all ranks have the same
parameters. At construction the ranks compare their modules (names, shapes, types, which
parameters are trained). If the modules differed, all-reduce would add unrelated
gradients, or hang. Chapter 05.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddp_course.mechanisms.agreement import agreed
from ddp_course.mechanisms.buckets import bucket_plan
from ddp_course.mechanisms.replicable import check_module, form_of


class SameModel:
    """A part that compares the ranks' modules and arguments before replication.

    Args:
        options: arguments that must be the same on all ranks.
    """

    devices: tuple[Any, Any] = None, None  # device_ids, output_device

    def __init__(self, **options: Any) -> None:
        self.options = options

    def before_replication(self, model: Any) -> None:
        """Raise ReplicaError, on every rank, if ranks differ or one check fails."""
        named = {k: _name_of(v) if callable(v) else v for k, v in self.options.items()}
        form = form_of(model.module, **named)
        agreed(lambda: self.check(model.module), model.process_group, **form)

    def check(self, module: Any) -> None:
        """Raise ValueError if this rank's module or arguments cannot be used."""
        check_module(module)
        # an attribute of PyTorch's class and of the course's
        if any(hasattr(m, "require_backward_grad_sync") for m in module.modules()):
            raise ValueError(
                "the module is, or contains, a DistributedDataParallel, which averages "
                "the same gradients; wrap the plain module once"
            )
        all_reduce = self.options["all_reduce"]
        if not callable(all_reduce):
            raise ValueError(f"all_reduce is {all_reduce!r}; it must be a function")
        bucket_plan((), self.options["bucket_cap_mb"], self.options["first_bucket_mb"])
        check_devices(module, *self.devices)


def check_devices(module: nn.Module, device_ids: Any, output_device: Any) -> None:
    """Raise ValueError unless these arguments name the device of the parameters.

    Scripts usually pass `device_ids=[local_rank]`. One process drives one device, so
    no other device is possible.
    """
    device = next(module.parameters()).device
    if not isinstance(device_ids, (list, tuple, type(None))):
        raise ValueError(
            f"device_ids is {device_ids!r}; it must be a list with one device"
        )
    ids = [] if device_ids is None else list(device_ids)
    arguments = {"device_ids": ids} if ids else {}
    if output_device is not None:
        arguments["output_device"] = [output_device]
    for name, values in arguments.items():
        if device.type == "cpu":
            raise ValueError(
                f"{name} is {values}, but the module is on the CPU: leave it out, or "
                f"move the module to its GPU first"
            )
        devices = [
            torch.device(device.type, v) if isinstance(v, int) else v for v in values
        ]
        if [torch.device(each) for each in devices] != [device]:
            raise ValueError(
                f"{name} is {values}; it must be [{device.index}], the one device that "
                f"the module is on"
            )


def _name_of(function: Callable) -> str:
    """Return a name of the function (or partial) that is the same in all processes."""
    if isinstance(function, functools.partial):
        args = (_name_of(a) if callable(a) else repr(a) for a in function.args)
        return f"{_name_of(function.func)}({', '.join(args)})"
    names = (getattr(function, f"__{key}__", "") for key in ("module", "qualname"))
    return ".".join(names)
