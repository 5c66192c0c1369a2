"""A module that is divided among ranks, and the plain module that it was before.

`DividedModule` is the base class of the modules that pipelines, tensor parallelism and
FSDP return. Each parameter has a note of how it was divided (`placements`); a
`PlainModel` describes the `state_dict` that the module had before. Chapters 08 to 10.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.mechanisms.placements import clip_grad_norm_, placed


@dataclass(frozen=True)
class PlainModel:
    """The names and shapes of a module before it was divided.

    Attributes:
        keys: the keys of its `state_dict`, each with its parameter's name, or None for
            a buffer. (A tied parameter has several keys.)
        shapes: the shapes of parameters, by name in order, and of buffers, by key.
    """

    keys: Mapping[str, str | None]
    shapes: Mapping[str, torch.Size]

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """Describe `module`, or the plain module that was divided into it.

        Raises ValueError for a state that is neither a parameter nor a buffer.
        """
        if isinstance(before := getattr(module, "plain", None), cls):
            return before
        names = {parameter: name for name, parameter in module.named_parameters()}
        state = module.state_dict(keep_vars=True)
        for key, value in state.items():
            extra = key.rpartition(".")[2] == "_extra_state"
            if extra or not isinstance(value, Tensor):
                raise ValueError(
                    f"the model's state_dict has {key}, which is neither a parameter "
                    "nor a buffer, so no full state can be assembled: keep such a "
                    "state in a buffer, not in get_extra_state"
                )
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


class DividedModule:
    """A module whose parameters were placed.

    Attributes:
        plain: `PlainModel.of(module)` before the module was divided.
        groups: the groups that divide it: `groups_before(module)` and its own group.
    """

    plain: PlainModel
    groups: tuple[dist.ProcessGroup, ...]

    def find_unplaced(self) -> str | None:
        """Return an error text if a parameter was never placed, or None."""
        for name, parameter in nn.Module.named_parameters(self):  # the parts in use
            if isinstance(parameter, Tensor) and placed(parameter) is None:
                return (
                    f"{name.removeprefix('module.')} was put into the model after it "
                    "was wrapped, and no rank would train it: change numbers in place, "
                    "or wrap the model again"
                )
        return None

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`.

        Returns the norm of the whole model's gradient before scaling, as
        torch.nn.utils.clip_grad_norm_ does. All ranks along `groups` must call it.
        """
        return clip_grad_norm_(self.parameters(), max_norm, self.groups, norm_type)

    def __getstate__(self) -> Any:
        """Raise TypeError: a copy would have neither ranks nor numbers."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: take its "
            "full_state_dict, and build the model from it"
        )


def groups_before(module: nn.Module) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups along which a module was divided until now."""
    return module.groups if isinstance(module, DividedModule) else ()
