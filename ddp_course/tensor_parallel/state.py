"""The whole state of a model that is cut, in the form of one process, and back.

The parallel model has the parameters of the plain one, by the same names and in the
same order; only that some are smaller. So have the optimizer's states. Chapter 09.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ddp_course.mechanisms.exchange import MessageExchange
from ddp_course.mechanisms.replicas import check_same
from ddp_course.mechanisms.whole import unlike
from ddp_course.tensor_parallel.layout import Cut

if TYPE_CHECKING:
    from ddp_course.tensor_parallel.gpt import TensorParallelGPT


def cuts_of(model: TensorParallelGPT) -> dict[str, Cut]:
    """Return for every name in `state_dict` how its parameter is cut.

    A tied parameter has several names there.
    """
    cuts = {cut.name: cut for cut in model.layout}
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = model.state_dict(keep_vars=True)
    return {key: cuts[names[value]] for key, value in state.items()}


# ---- the model -----------------------------------------------------------------------


@torch.no_grad()
def gathered(model: TensorParallelGPT, rank0_only: bool) -> dict[str, Tensor]:
    """Return the plain model's state; see TensorParallelGPT.full_state_dict."""
    wanted = not rank0_only or model.exchange.rank == 0
    whole: dict[str, Tensor] = {}
    own = dict(model.named_parameters())
    for cut in model.layout:  # one after the other: only one is there twice
        tensor = _whole(model, cut, own[cut.name])
        if wanted:
            whole[cut.name] = tensor
    return {key: whole[cut.name] for key, cut in cuts_of(model).items() if wanted}


@torch.no_grad()
def load(model: TensorParallelGPT, state: Mapping[str, Tensor]) -> None:
    """Keep the own part of a state; see TensorParallelGPT.load_full_state_dict."""
    cuts = cuts_of(model)
    shapes = {key: cut.shape for key, cut in cuts.items()}
    check_same({}, unlike(state, shapes), model.exchange.group)
    own = model.state_dict()
    for key, cut in cuts.items():
        own[key].copy_(cut.part(state[key], model.exchange.rank))


# ---- the optimizer -------------------------------------------------------------------


@torch.no_grad()
def gathered_optimizer(
    model: TensorParallelGPT, optimizer: torch.optim.Optimizer, rank0_only: bool
) -> dict[str, Any]:
    """Return the plain optimizer's state; see full_optimizer_state_dict."""
    cuts, problem = _stepped(model, optimizer)
    own = optimizer.state_dict()
    for number, state in own["state"].items() if not problem else ():
        for key, value in state.items():
            if _has_dims(value) and value.shape != cuts[number].own_shape:
                problem = (
                    f"the state {key} of {cuts[number].name} has the shape "
                    f"{list(value.shape)}; only states of the parameter's own shape, "
                    f"{list(cuts[number].own_shape)}, can be put together"
                )
    check_same({}, problem, model.exchange.group)
    states: dict[int, dict[str, Any]] = {}
    for number, state in own["state"].items():
        states[number] = {
            key: _whole(model, cuts[number], value)
            if _has_dims(value)
            else value.to("cpu", copy=True)
            if isinstance(value, Tensor)
            else value
            for key, value in state.items()
        }
    if rank0_only and model.exchange.rank != 0:
        return {}
    return {"state": states, "param_groups": own["param_groups"]}


def load_optimizer(
    model: TensorParallelGPT, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Keep the own part of a state; see load_full_optimizer_state_dict."""
    cuts, problem = _stepped(model, optimizer)
    lengths = [len(group["params"]) for group in optimizer.param_groups]
    problem = problem or _unfit(state, cuts, lengths)
    check_same({}, problem, model.exchange.group)
    keys = [key for group in state["param_groups"] for key in group["params"]]
    own: dict[Any, dict[str, Any]] = {}
    for cut, key in zip(cuts, keys, strict=True):
        if key in state["state"]:
            own[key] = {
                name: cut.part(value, model.exchange.rank).clone()
                if _has_dims(value)
                else value
                for name, value in state["state"][key].items()
            }
    optimizer.load_state_dict({**state, "state": own})


def _stepped(
    model: TensorParallelGPT, optimizer: torch.optim.Optimizer
) -> tuple[list[Cut], str | None]:
    """Return how the optimizer's parameters are cut, in its order; or what is wrong."""
    by_name = {cut.name: cut for cut in model.layout}
    known = {parameter: by_name[name] for name, parameter in model.named_parameters()}
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in stepped:
        if parameter not in known:
            return [], (
                f"the optimizer steps a tensor of shape {list(parameter.shape)} that "
                "is none of this model; make it of the parallel model's parameters()"
            )
    return [known[parameter] for parameter in stepped], None


def _unfit(state: Any, cuts: list[Cut], lengths: list[int]) -> str | None:
    """Return why a state is none of the plain optimizer, or None; raises nothing."""
    try:
        theirs = [len(group["params"]) for group in state["param_groups"]]
        keys = [key for group in state["param_groups"] for key in group["params"]]
        states = {key: dict(state["state"].get(key, {})) for key in keys}
    except Exception as error:
        return f"this is no state_dict of an optimizer: {error!r}"
    if theirs != lengths:
        return (
            f"the state_dict has groups of {theirs} parameters; this optimizer has "
            f"groups of {lengths}"
        )
    for cut, key in zip(cuts, keys, strict=True):
        for name, value in states[key].items():
            if _has_dims(value) and value.shape != cut.shape:
                return (
                    f"the state {name} of {cut.name} has the shape "
                    f"{list(value.shape)}; it must be {list(cut.shape)}"
                )
    return None


# ---- small things --------------------------------------------------------------------


def _has_dims(value: Any) -> bool:
    """Tell whether a state has a number for each element, as "step" has not."""
    return isinstance(value, Tensor) and value.dim() > 0


def _whole(model: TensorParallelGPT, cut: Cut, part: Tensor) -> Tensor:
    """Gather one parameter, or its like, from all ranks; on the CPU."""
    exchange = model.exchange
    if cut.dim is None or exchange.size == 1:
        return part.to("cpu", copy=True)
    messages = MessageExchange(
        exchange.group
    )  # pages of memory need not become so large
    return messages.all_gather(part.detach(), cut.dim).to("cpu")
