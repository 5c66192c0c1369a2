"""The state of a whole model of which each rank has a part, as one process has it.

It has the names, shapes and numbers of the plain model, so that a run can go on in one
process, with another strategy, or on another number of ranks. `assembly` puts the parts
together. To load is easier: all ranks have the whole state, and each keeps its own
part. torch.distributed.checkpoint.state_dict does this for DTensors. Chapter 08.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_course.mechanisms.agreement import agreed
from ddp_course.mechanisms.assembly import (
    assemble,
    full_optimizer_state,
    load_full_optimizer_state,
    names_along,
    way_of,
)
from ddp_course.mechanisms.frozen import came_later
from ddp_course.mechanisms.placements import Placed, clip_grad_norm_, placed

Group = dist.ProcessGroup


@dataclass(frozen=True)
class PlainModel:
    """What a module was before anybody divided it.

    Attributes:
        keys: of its `state_dict`, each with its parameter's name; None: a buffer. (A
            tied parameter has several keys.)
        shapes: of its parameters by name, in order, and of its buffers by key.
    """

    keys: Mapping[str, str | None]
    shapes: Mapping[str, torch.Size]

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """Describe a plain module; of one that is divided, say what it was before."""
        if isinstance(before := getattr(module, "plain", None), cls):
            return before
        names = {parameter: name for name, parameter in module.named_parameters()}
        state = module.state_dict(keep_vars=True)
        keys = {key: names.get(value) for key, value in state.items()}
        shapes = {name: parameter.shape for parameter, name in names.items()}
        shapes |= {k: state[k].shape for k, name in keys.items() if name is None}
        return cls(keys, shapes)

    def check(self, state: Any) -> None:
        """Raise ValueError if this is no state dict of the plain model."""
        if not isinstance(state, Mapping):
            raise ValueError(
                f"state_dict is a {type(state).__name__}; it must be a dict"
            )
        if missing := [key for key in self.keys if key not in state]:
            raise ValueError(f"the state_dict has no {', '.join(missing[:3])}")
        if more := [str(key) for key in state if key not in self.keys]:
            more = ", ".join(more[:3])
            raise ValueError(f"the state_dict has {more}: no such name here")
        for key, name in self.keys.items():
            shape = self.shapes[key if name is None else name]
            found = getattr(state[key], "shape", type(state[key]).__name__)
            if found != shape:
                it_is = list(found) if isinstance(found, torch.Size) else found
                raise ValueError(
                    f"the state_dict has {key} as {it_is}; it must be {list(shape)}"
                )


class WholeState:
    """A module whose parameters were placed, and what can be asked of all ranks of it.

    Attributes:
        plain: what it was, `PlainModel.of(module)` before it was divided.
        groups: along which it was divided, `groups_before(module)` and the own one.

    All methods are called by all ranks along these groups together.
    """

    plain: PlainModel
    groups: tuple[Group, ...]

    def newcomer(self) -> str | None:
        """Return what is wrong if it has a parameter that was never placed, or None."""
        for name, parameter in nn.Module.named_parameters(self):  # those computed with
            if isinstance(parameter, Tensor) and placed(parameter) is None:
                return came_later(name.removeprefix("module."))
        return None

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return what the plain module's `state_dict` would be, on the CPU."""
        own = {way_of(p).name: (way_of(p), {"": p}) for p in self.parameters()}
        own |= {k: (Placed(k, b.shape), {"": b}) for k, b in buffers_of(self).items()}
        whole = assemble(own, self.groups, self.plain.shapes, everywhere=True)
        return {key: whole[name or key][""] for key, name in self.plain.keys.items()}

    @torch.no_grad()
    def load_full_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take the numbers of a plain module's `state_dict`: each rank its own part.

        Raises ReplicaError, on every rank, if names or shapes do not fit.
        """
        agreed(lambda: self.plain.check(state_dict), *self.groups)
        keys = {name: key for key, name in self.plain.keys.items() if name}
        for parameter in self.parameters():
            way = way_of(parameter)
            parameter.copy_(way.part(state_dict[keys[way.name]]))
        for key, buffer in buffers_of(self).items():
            buffer.copy_(state_dict[key])

    def full_optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """As `full_optimizer_state`, for all ranks; it steps this one's parameters."""
        names = names_along(optimizer, self.plain.shapes, self.groups)
        return full_optimizer_state(optimizer, names, self.groups, everywhere=True)

    def load_full_optimizer_state_dict(
        self, optimizer: Optimizer, state_dict: Mapping[str, Any]
    ) -> None:
        """As `load_full_optimizer_state`."""
        shapes, groups = self.plain.shapes, self.groups
        names = names_along(optimizer, shapes, groups)
        load_full_optimizer_state(optimizer, state_dict, names, shapes, groups)

    def __getstate__(self) -> Any:
        """Raise TypeError: a copy would have neither ranks nor numbers."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: call "
            "full_state_dict(), and build the model from it"
        )

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return it.

        The norm is that of the whole model's gradient, as it was before. As
        torch.nn.utils.clip_grad_norm_.
        """
        return clip_grad_norm_(self.parameters(), max_norm, self.groups)


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return this rank's buffers that belong to the plain model's state, by key."""
    inner = getattr(module, "module", module)
    while hasattr(inner, "module"):
        inner = inner.module
    found = dict(inner.named_buffers(remove_duplicate=False))
    keys = [key for key, name in module.plain.keys.items() if name is None]
    return {key: found[key] for key in keys if key in found}


def groups_before(module: nn.Module) -> tuple[Group, ...]:
    """Return the groups along which a module was divided until now."""
    return getattr(module, "groups", ()) if isinstance(module, WholeState) else ()
