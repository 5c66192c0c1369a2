"""ZeroRedundancyOptimizer trains as one process does, and as PyTorch's class does."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from zero_cases import (
    FAKES,
    OPTIMIZERS,
    SMALL,
    DecaysWhatIsUnused,
    Forgets,
    Make,
    Naive,
    Odd,
    OwnStateOnly,
    Stage1,
    Stage2,
    Trained,
    batch,
    bits,
    far_apart,
    groups_of,
    options,
    pytorchs,
    share,
    train,
    with_ddp,
)

from ddp_course.launch import spawn

WAYS: dict[str, dict] = {
    "naive": {"make": Naive},
    "naive, averaged": with_ddp(options(Naive, gradients="averaged")),
    "one bucket": {"make": Stage1},
    "small": {"make": options(Stage1, **SMALL)},
    "shared": {"make": options(Stage1, **SMALL, buckets_in_shared_memory=True)},
    "averaged": with_ddp(options(Stage1, **SMALL, gradients="averaged")),
    "stage 2": {"make": options(Stage2, **SMALL)},
}
PYTORCHS = {**with_ddp(pytorchs), "one_type": True}
WITH_GROUPS = {"optimizer": "momentum", "groups": True, "clip": 0.05}


def everything() -> dict:
    """On every rank: train in all ways."""
    told = {way: train(**told) for way, told in WAYS.items()}
    for way in ("small", "shared", "averaged", "stage 2"):
        told[way, "groups"] = train(**WAYS[way], **WITH_GROUPS)
        told[way, "pytorch"] = train(**WAYS[way], one_type=True)
    told["naive", "momentum"] = train(Naive, "momentum")
    told["pytorch"] = train(**PYTORCHS)
    told["pytorch", "groups"] = train(**PYTORCHS, **WITH_GROUPS)
    if dist.get_world_size() == 2:
        told |= {("fake", name): train(**fake) for name, fake in FAKES.items()}
    return told


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_same_training_as_one_process_and_as_pytorch(n):
    told = spawn(everything, world_size=n, output="none")
    alone, in_groups = train(None), train(None, **WITH_GROUPS)
    assert min(in_groups.norms) > 2 * WITH_GROUPS["clip"]  # it does clip

    def wrong(name, oracle):
        mine = [rank[name] for rank in told]
        different = len({bits(rank) for rank in mine}) > 1
        return far_apart(mine[0], oracle) or different

    for way in WAYS:
        assert not wrong(way, alone), way
    assert not wrong(("naive", "momentum"), train(None, "momentum"))
    for way in ("small", "shared", "averaged", "stage 2"):
        assert not wrong((way, "groups"), in_groups), way
        assert not wrong((way, "pytorch"), told[0]["pytorch"]), way
    assert not wrong(("pytorch", "groups"), train(None, **WITH_GROUPS, one_type=True))
    for name, fake in FAKES.items():
        if n == 2:
            arguments = {k: v for k, v in fake.items() if k != "make"}
            assert wrong(("fake", name), train(None, **arguments)), f"{name} not seen"


def optimizers() -> dict[str, Trained]:
    """On every rank: train with all optimizers."""
    return {name: train(WAYS["small"]["make"], name, 3) for name in OPTIMIZERS}


def test_any_elementwise_optimizer_steps_parts_as_it_steps_the_whole():
    told = spawn(optimizers, world_size=3, output="none")
    for name in OPTIMIZERS:
        mine = [rank[name] for rank in told]
        assert not far_apart(mine[0], train(None, name, 3)), name
        assert len({bits(rank) for rank in mine}) == 1, name


# ---- how gradients add up ------------------------------------------------------------


class Branches(nn.Module):
    """Layers of which a rank may use any."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x, used):
        return sum(self.layers[k](x * (k + 1)) for k in used).square().sum()


def rows(rank: int, pass_: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * rank + pass_))


# What happens in a step: (the layers that each rank uses, averaged?), pass by pass.
STEPS = {
    "all": [([0, 1, 2, 3], True)],
    "one is used by nobody": [([0, 1, 3], True)],
    "two passes": [([0, 1, 2], True), ([0, 1], True)],
    "no_sync before": [([0, 1, 3], False), ([0, 2], False), ([1, 2], True)],
    "no_sync between": [([0, 1], True), ([1, 2], False), ([0, 2], True)],
    "by rank": [("by rank", True), ([1, 2], True)],
    "by rank, no_sync": [("by rank", False), ("by rank", True)],
}


def layers_of(used, rank: int) -> list[int]:
    return [0, 1 + rank % 2] if used == "by rank" else used


def steps_of(make: Make | None, name: str, set_to_none: bool = True) -> list:
    """Return the parameters after each of three steps; momentum and decay tell."""
    model, n = Branches(), dist.get_world_size()
    kwargs = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}
    make = make or (lambda params, cls, **defaults: cls(params, **defaults))
    opt = make(model.parameters(), torch.optim.SGD, **kwargs)
    alone, told = isinstance(opt, torch.optim.SGD), []
    for step in range(3):
        opt.zero_grad(set_to_none=set_to_none)
        for k, (used, sync) in enumerate(STEPS["all"] if step == 0 else STEPS[name]):
            ranks = range(n) if alone else [dist.get_rank()]
            for rank in ranks:
                loss = model(rows(rank, k), layers_of(used, rank))
                if alone:
                    (loss / n).backward()
                elif sync:
                    loss.backward()
                else:
                    with opt.no_sync():
                        loss.backward()
        opt.step()
        told.append([p.detach().clone() for p in model.parameters()])
    return told


def adding_up() -> dict:
    told = {}
    for name in STEPS:
        for to_none in (True, False):
            told[name, to_none] = {
                "one process": steps_of(None, name, to_none),
                "one bucket": steps_of(Stage1, name, to_none),
                "small": steps_of(options(Stage1, **SMALL), name, to_none),
                "decays": steps_of(DecaysWhatIsUnused, name, to_none),
                "forgets": steps_of(Forgets, name, to_none),
            }
            if all(sync for _, sync in STEPS[name]):
                for limit in (1, 2):
                    stage2 = options(Stage2, **SMALL, buckets_in_flight=limit)
                    told[name, to_none][f"stage 2, {limit}"] = steps_of(
                        stage2, name, to_none
                    )
    return told


def same(a: list, b: list) -> bool:
    pairs = zip(sum(a, []), sum(b, []), strict=True)
    return all(torch.allclose(x, y, rtol=1e-4, atol=1e-6) for x, y in pairs)


def test_passes_add_up_and_what_is_unused_is_not_touched():
    told = spawn(adding_up, world_size=3, output="none")
    for case in told[0]:
        oracle = told[0][case]["one process"]
        for way, mine in told[0][case].items():
            if way not in ("decays", "forgets"):
                assert same(mine, oracle), (case, way)
                for rank in told:
                    assert all(
                        map(torch.equal, sum(mine, []), sum(rank[case][way], []))
                    )
    for name, case in (
        ("decays", ("one is used by nobody", True)),
        ("forgets", ("two passes", True)),
        ("forgets", ("no_sync between", True)),
    ):
        assert not same(told[0][case][name], told[0][case]["one process"]), name


# ---- states --------------------------------------------------------------------------


def go_on(opt, model, steps, alone: bool) -> list:
    told = []
    for step in steps:
        x, y = batch(step) if alone else map(share, batch(step))
        opt.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        opt.step()
        told.append([p.detach().clone() for p in model.parameters()])
    return told


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
    try:
        opt.state_dict()
        return weights, state, after, "no error"
    except RuntimeError as error:
        return weights, state, after, str(error)


def loaded(make: Make, name: str, weights, state) -> list:
    """On every rank: take that up, and go on."""
    cls, defaults = OPTIMIZERS[name]
    model = Odd(5)
    model.load_state_dict(weights)
    opt = make(groups_of(model), cls, **{**defaults, "lr": 7.0})  # the state has one
    opt.load_state_dict(state)
    assert opt.state is opt.optim.state  # which a ledger counts
    return go_on(opt, model, range(2, 4), False)


MAKES = {"naive": Naive, "stage 1": options(Stage1, **SMALL), "stage 2": Stage2}
STATEFUL = [("naive", "adamw"), ("stage 2", "adamw")]
STATEFUL += [("stage 1", name) for name in ("adamw", "amsgrad", "nadam", "lion")]


def all_saved() -> dict:
    to = dist.get_world_size() - 1
    told = {(way, name): saved(MAKES[way], name, to) for way, name in STATEFUL}
    return told | {"fake": saved(OwnStateOnly, "adamw", to)}


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
    told = spawn(all_saved, world_size=3, output="none")
    weights, state, after, _ = told[2].pop("fake")
    try:
        wrong = not same(plain("adamw", weights, state)[0], after)
    except (KeyError, RuntimeError):
        wrong = True
    assert wrong, "a state of one's own shard was not seen"
    states = {}
    for (way, name), (weights, state, after, error) in told[2].items():
        assert "consolidate_state_dict(to=2)" in error  # the step has made it old
        assert told[0][way, name][1] is None
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
    for n in (1, 2, 4):
        for rank in spawn(all_loaded, states, world_size=n, output="none"):
            for case, mine in rank.items():
                assert same(mine, told[0][case][2]), (n, case)
