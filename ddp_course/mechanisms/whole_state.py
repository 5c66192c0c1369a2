"""The whole state of a model of which each rank has a part: in one process's form.

With the names, shapes and numbers of the plain model and its optimizer, so that a run
can go on in one process, with another strategy, or on another number of ranks. What
each rank has is told by `placements`, and they are undone from the last one to the
first: along each group, the parts come together on its first rank, which goes on with
them along the group before. Parameter by parameter, so that beside the parts and the
result only one is there twice.

    dp: pieces -> tp: parts of matrices -> pp: layers -> the plain model, on one rank

To load is easier: everybody is given the whole state, and keeps its own part.
torch.distributed.checkpoint.state_dict does this for DTensors. Chapter 08.
"""

import copyreg
import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ddp_course.collectives import communicator
from ddp_course.mechanisms.agreement import attempt, check_along
from ddp_course.mechanisms.broadcast import in_batches
from ddp_course.mechanisms.frozen import came_later
from ddp_course.mechanisms.norms import clip_grad_norm_
from ddp_course.mechanisms.placements import (
    Flat,
    Placed,
    Shard,
    Step,
    in_memory_order,
    placed,
)

State = dict[str, Any]  # of one parameter: name -> value
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

    def problem_with(self, state: Any) -> str | None:
        """Return why this is no state dict of the plain model, or None."""
        if not isinstance(state, Mapping):
            return f"state_dict is a {type(state).__name__}; it must be a dict"
        if missing := [key for key in self.keys if key not in state]:
            return f"the state_dict has no {', '.join(missing[:3])}"
        if more := [str(key) for key in state if key not in self.keys]:
            return f"the state_dict has {', '.join(more[:3])}: no such name here"
        for key, name in self.keys.items():
            shape = self.shapes[key if name is None else name]
            found = getattr(state[key], "shape", type(state[key]).__name__)
            if found != shape:
                it_is = list(found) if isinstance(found, torch.Size) else found
                return f"the state_dict has {key} as {it_is}; it must be {list(shape)}"
        return None


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
        own = {way_of(p).name: (way_of(p), {"": p.detach()}) for p in self.parameters()}
        own |= {k: (Placed(k, b.shape), {"": b}) for k, b in buffers_of(self).items()}
        whole = gathered(own, self.groups, self.plain.shapes)
        keys = self.plain.keys if whole else {}
        state = {key: whole[name or key][""] for key, name in keys.items()}
        return from_first(state, self.groups)

    @torch.no_grad()
    def load_full_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take the numbers of a plain module's `state_dict`: each rank its own part.

        Raises ReplicaError, on every rank, if names or shapes do not fit.
        """
        check_along(self.groups, self.plain.problem_with(state_dict))
        keys = {name: key for key, name in self.plain.keys.items() if name}
        for parameter in self.parameters():
            way = way_of(parameter)
            parameter.copy_(way.part(state_dict[keys[way.name]]))
        for key, buffer in buffers_of(self).items():
            buffer.copy_(state_dict[key])

    def full_optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """As `full_optimizer_state`, for all ranks; it steps parameters() of this."""
        names = names_along(optimizer, self.plain.shapes, self.groups)
        state = full_optimizer_state(optimizer, names, self.groups)
        return from_first(state, self.groups)

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


# ---- parts come together -------------------------------------------------------------

Item = tuple[Placed, State]  # the way to a part, and what was cut like it


def way_of(tensor: Tensor) -> Placed:
    """Return how a tensor was placed. Raises ValueError if it has not been."""
    if (way := placed(tensor)) is None:
        raise ValueError(
            f"a tensor of shape {[*tensor.shape]} is no part of this model; take its "
            "parameters()"
        )
    return way


def gathered(
    own: Mapping[str, Item], groups: Sequence[Group], order: Iterable[str]
) -> dict[str, State]:
    """Put what all ranks have together, by name, on the CPU; called by all ranks.

    Args:
        own: what this rank has.
        groups: along which it was divided, the first one first.
        order: all names there can be.

    The first rank along all groups gets it, the others get nothing.
    """
    names, items = list(order), {}
    copy = partial(tree_map_only, Tensor, lambda t: t.detach().to("cpu", copy=True))
    for name, (way, state) in own.items():
        items[name] = [way.step_along(group) for group in groups], copy(state)
    for group in reversed(groups):
        items = _along(group, items, names)
        if communicator(group).rank > 0:
            return {}  # handed over
    return {name: state for name, (_, state) in items.items()}


def from_first(value: Any, groups: Sequence[Group]) -> Any:
    """Send what the first rank along all groups has to all the others."""
    for group in groups:
        comm = communicator(group)
        box = [_packed(value) if comm.rank == 0 else None]
        dist.broadcast_object_list(box, comm.ranks[0], group)
        value = _unpacked(box[0]) if comm.rank else value
    return value


def _packed(value: Any) -> bytes:
    """Pickle `value`, tensors as their bytes: eight times as fast as `torch.save`."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5)
    pickler.dispatch_table = copyreg.dispatch_table | {Tensor: _as_bytes}
    pickler.dump(value)
    return file.getvalue()


def _as_bytes(tensor: Tensor) -> tuple:
    """Return how to make a tensor again; on a GPU, or sparse: as PyTorch does."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return tensor.__reduce_ex__(5)
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    data = plain.view(-1).view(torch.uint8).numpy()
    return _from_bytes, (pickle.PickleBuffer(data), tensor.dtype, tensor.shape)


def _from_bytes(data: bytearray, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.view(shape)


_unpacked = pickle.loads


Steps = list[Step | None]  # what is to be undone: one for each group


def _along(
    group: Group, own: Mapping[str, tuple[Steps, State]], names: list[str]
) -> dict[str, tuple[Steps, State]]:
    """Undo what was done along one group: the parts join on its first rank."""
    comm, joined, sizes = communicator(group), {}, {}
    mine = tuple((name, _nbytes(state)) for name, (_, state) in own.items())
    for theirs in comm.exchange(mine):
        for name, nbytes in theirs:
            sizes[name] = max(nbytes, sizes.get(name, 0))
    for some in in_batches([name for name in names if name in sizes], sizes.get):
        parts = [b""] * comm.size if comm.rank == 0 else None
        part = {name: own[name] for name in some if name in own}
        dist.gather_object(_packed(part), parts, comm.ranks[0], group)
        parts = [*map(_unpacked, parts or ())]
        for name in some if parts else ():
            found = [part[name] for part in parts if name in part]
            (*before, _), _ = found[0]
            joined[name] = before, _join([(steps[-1], s) for steps, s in found])
    return joined


def _nbytes(state: State) -> int:
    return sum(v.nbytes for v in state.values() if isinstance(v, Tensor))


def _join(parts: Sequence[tuple[Step | None, State]]) -> State:
    """Return what was cut, from its parts in the order of the ranks."""
    step, first = parts[0]
    if step is None or not isinstance(step.placement, (Shard, Flat)):
        return first
    state: State = {}
    for key in dict.fromkeys(key for _, values in parts for key in values):
        found = [(one, values[key]) for one, values in parts if key in values]
        value = found[0][1]
        if not all(_has_dims(v) and v.shape == one.part_shape for one, v in found):
            state[key] = value  # such as "step": the same for all parts
        elif isinstance(step.placement, Shard):
            state[key] = torch.cat([value for _, value in found], step.placement.dim)
        else:
            whole = torch.empty_strided(step.shape, step.stride, dtype=value.dtype)
            flat = in_memory_order(whole.zero_(), step.stride)
            for one, value in found:
                flat[one.placement.first : one.placement.last] = value
            state[key] = whole
    return state


# ---- optimizers ----------------------------------------------------------------------


Names = list[list[str]]  # what an optimizer steps in each of its groups, in order


def full_optimizer_state(
    optimizer: Optimizer, names: Names, groups: Sequence[Group]
) -> dict[str, Any]:
    """Return the state that `optimizer` would have in one process, on the CPU.

    It steps parameters that were placed along `groups`, or placed pieces of them; in
    one process it would have those of these `names`. Called by all ranks; the first
    along all groups gets it, the others an empty dict. Raises ReplicaError, on every
    rank, for states of other shapes.
    """
    check_along(groups, _partless(optimizer))
    own = {way_of(p).name: (way_of(p), state) for p, state in optimizer.state.items()}
    order = [name for those in names for name in those]
    whole = gathered(own, groups, order)
    if any(communicator(group).rank for group in groups):
        return {}
    numbers = {name: number for number, name in enumerate(order)}
    told = []
    for group, those in zip(optimizer.param_groups, names, strict=True):
        told.append({**options_of(group), "params": [numbers[n] for n in those]})
        if "param_names" in group:
            told[-1]["param_names"] = those
    states = {numbers[name]: state for name, state in whole.items() if state}
    return {"state": dict(sorted(states.items())), "param_groups": told}


def load_full_optimizer_state(
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    names: Names,
    shapes: Mapping[str, torch.Size],
    groups: Sequence[Group],
) -> None:
    """Let `optimizer` go on from the state of one process: each rank its own part.

    Called by all ranks, with the whole of it. `names` are those that it would have in
    one process, and `shapes` theirs. Raises ReplicaError, on every rank, if it does not
    fit.
    """
    check_along(groups, problem_with(state_dict, names, shapes))
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    known = dict(zip((n for those in names for n in those), keys, strict=True))
    own = {**optimizer.state_dict(), "state": {}}
    groups_of_both = own["param_groups"], state_dict["param_groups"]
    for group, saved in zip(*groups_of_both, strict=True):
        group.update(options_of(saved))
    stepped = (p for group in optimizer.param_groups for p in group["params"])
    for number, parameter in enumerate(stepped):
        way = way_of(parameter)
        state = state_dict["state"].get(known[way.name], {})
        if state:
            steps = [step for step in way.steps if step.group in groups]
            own["state"][number] = {k: _part(k, v, steps) for k, v in state.items()}
    optimizer.load_state_dict(own)


def names_along(
    optimizer: Optimizer, order: Iterable[str], groups: Sequence[Group]
) -> Names:
    """Return what the plain optimizer would have in each group, in the given order.

    Called by all ranks. Raises ReplicaError, on every rank, for other tensors.
    """
    stepped = [group["params"] for group in optimizer.param_groups]
    problem, own = attempt(lambda: [{way_of(p).name for p in ps} for ps in stepped])
    problem = problem and f"the optimizer steps what it should not: {problem}"
    check_along(groups, problem)
    for group in groups:
        parts = communicator(group).exchange(tuple(tuple(names) for names in own))
        counts = [len(part) for part in parts]
        unequal = f"the ranks' optimizers have {counts} parameter groups"
        check_along(groups, unequal if len(set(counts)) > 1 else None)
        own = [set().union(*those) for those in zip(*parts, strict=True)]
    order = list(order)
    return [[name for name in order if name in names] for names in own]


def _partless(optimizer: Optimizer) -> str | None:
    """Return which state is no part of a whole one, as of Adafactor; or None."""
    for p, state in optimizer.state.items():
        cut = any(isinstance(s.placement, (Shard, Flat)) for s in way_of(p).steps)
        for key, value in state.items():
            if cut and _has_dims(value) and value.shape != p.shape:
                return (
                    f"the state {key} of {way_of(p).name} has the shape "
                    f"{[*value.shape]}; only states of the parameter's own shape, "
                    f"{[*p.shape]}, can be put together"
                )
    return None


def problem_with(
    state_dict: Any, names: list[list[str]], shapes: Mapping[str, torch.Size]
) -> str | None:
    """Return why a state is none of an optimizer of these parameters, or None.

    Raises nothing, whatever it is: the other ranks must hear of it.
    """
    try:
        lengths = [len(group["params"]) for group in state_dict["param_groups"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        states = {key: dict(state) for key, state in state_dict["state"].items()}
    except Exception as error:
        return f"this is no state_dict of an optimizer: {error!r}"
    if lengths != (own := [len(those) for those in names]):
        return (
            f"the state_dict has groups of {lengths} parameters; this optimizer has "
            f"groups of {own}"
        )
    known = dict(zip(keys, (n for those in names for n in those), strict=True))
    for key, state in states.items():
        if key not in known:
            return f"the state_dict has a state of {key}, but no parameter {key}"
        for name, value in state.items():
            shape = shapes[known[key]]
            if _has_dims(value) and value.shape != shape:
                return (
                    f"the state {name} of {known[key]} has the shape "
                    f"{[*value.shape]}; it must be {[*shape]}"
                )
    return None


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _part(key: str, value: Any, steps: Sequence[Step]) -> Any:
    if not isinstance(value, Tensor):
        return value
    if steps and key != "step" and value.shape == steps[0].shape:
        for step in steps:
            value = step.part(value)
    return value.clone()


def _has_dims(value: Any) -> bool:
    """Tell whether a state has a number for each element, as "step" has not."""
    return isinstance(value, Tensor) and value.dim() > 0
