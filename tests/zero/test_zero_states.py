"""What an optimizer saves: one process, and any number of ranks, go on from it."""

import copy

import torch
import torch.distributed as dist
from on_ranks import error_of
from torch import nn
from zero_cases import (
    OPTIMIZERS,
    SMALL,
    Make,
    Odd,
    OwnStateOnly,
    Stage1,
    Stage2,
    batch,
    groups_of,
    options,
    same,
    share,
)

from ddp_course.launch import spawn


def go_on(opt, model, steps, alone: bool) -> list:
    found = []
    for step in steps:
        x, y = batch(step) if alone else map(share, batch(step))
        opt.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        opt.step()
        found.append([p.detach().clone() for p in model.parameters()])
    return found


def saved(make: Make, name: str, to: int) -> tuple:
    """On every rank: train two steps, save, and go on."""
    cls, defaults = OPTIMIZERS[name]
    model = Odd()
    opt = make(groups_of(model), cls, **defaults)
    go_on(opt, model, range(2), False)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    opt.consolidate_state_dict(to=to)
    state = opt.state_dict() if dist.get_rank() == to else None
    after = go_on(opt, model, range(2, 4), False)
    return weights, state, after, error_of(opt.state_dict)


def loaded(make: Make, name: str, weights, state) -> list:
    """On every rank: take that up, and go on."""
    cls, defaults = OPTIMIZERS[name]
    model = Odd(5)
    model.load_state_dict(weights)
    opt = make(groups_of(model), cls, **{**defaults, "lr": 7.0})  # the state has one
    opt.load_state_dict(state)
    assert opt.state is opt.optim.state  # which a ledger counts
    return go_on(opt, model, range(2, 4), False)


MAKES = {"stage 1": options(Stage1, **SMALL), "stage 2": Stage2}
STATEFUL = [("stage 2", "adamw")]
STATEFUL += [("stage 1", name) for name in ("adamw", "amsgrad", "nadam", "lion")]


def all_saved() -> dict:
    to = dist.get_world_size() - 1
    results = {(way, name): saved(MAKES[way], name, to) for way, name in STATEFUL}
    return results | {"fake": saved(OwnStateOnly, "adamw", to)}


def all_loaded(states: dict) -> dict:
    return {
        (way, name): loaded(MAKES[way], name, weights, state)
        for (way, name), (weights, state) in states.items()
    }


def plain(name: str, weights, state) -> tuple[list, dict]:
    """In one process: go on from a state; return also what the state is afterwards."""
    cls, defaults = OPTIMIZERS[name]
    model = Odd(5)
    model.load_state_dict(weights)
    opt = cls(groups_of(model), **{**defaults, "lr": 7.0})
    opt.load_state_dict(copy.deepcopy(state))  # PyTorch's steps the very tensors
    assert opt.param_groups[1]["lr"] == 0.02
    return go_on(opt, model, range(2, 4), True), opt.state_dict()


def test_one_process_and_any_number_of_ranks_go_on_from_a_state():
    results = spawn(all_saved, world_size=3, output="none")
    weights, state, after, _ = results[2].pop("fake")
    try:
        wrong = not same(plain("adamw", weights, state)[0], after)
    except (KeyError, RuntimeError):
        wrong = True
    assert wrong, "a state of one's own shard was not seen"
    states = {}
    for (way, name), (weights, state, after, error) in results[2].items():
        assert "consolidate_state_dict(to=2)" in error  # the step has made it old
        assert results[0][way, name][1] is None
        alone, plains = plain(name, weights, state)
        assert same(alone, after), (way, name)
        assert plains["param_groups"] == state["param_groups"] or name == "lion"
        if name == "lion":  # its optimizer writes into its groups
            assert [group["steps"] for group in state["param_groups"]] == [2, 2, 2]
        del plains["state"][11]  # `empty` has a state, of nothing, in one process
        for key, values in plains["state"].items():
            for what, value in values.items():
                if isinstance(value, torch.Tensor):
                    assert value.shape == state["state"][key][what].shape
        states[way, name] = weights, state
    for n in (2, 4):
        for rank in spawn(all_loaded, states, world_size=n, output="none"):
            for case, mine in rank.items():
                assert same(mine, results[0][case][2]), (n, case)
