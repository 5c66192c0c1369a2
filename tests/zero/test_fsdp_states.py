"""States of stage 3: sharded checkpoints, parameter groups, and what does not fit."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import CLASSES, GPT, MODELS, OPTIMIZERS, ROWS, Ours, batch
from on_ranks import error_of
from torch import nn
from trained import same

from ddp_course.launch import spawn
from ddp_course.mesh import Mesh, make_groups
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.zero import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    sharded_checkpoint,
)


def sharded(model: str, optimizer: str, **options):
    """Return a sharded module and its optimizer, each rank from another seed."""
    module = Ours(MODELS[model](10 + dist.get_rank()), **options)
    return module, OPTIMIZERS[optimizer](module.parameters())


def run(module: nn.Module, optimizer, steps: range) -> None:
    """Train for some steps on this rank's rows."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in steps:
        x, y = (t[rank * ROWS // n : (rank + 1) * ROWS // n] for t in batch(step))
        optimizer.zero_grad()
        module(x, y)[1].backward()
        optimizer.step()


CASES = [("gpt", "adamw"), ("odd", "sgd")]


def without(state: dict) -> dict:
    """Leave out the counters that each process counts for itself."""
    return {key: value for key, value in state.items() if "calls" not in key}


def everything(folder: str) -> dict:
    """On every rank: what the tests below look at, in one launch."""
    results = {"loaded": loaded(folder)}
    if dist.get_world_size() == 3:
        results |= {"groups": groups(), "fake": rank_0_only(folder)}
    if dist.get_world_size() == 4:
        results["replicas"] = with_replicas(folder)
    return results


@pytest.fixture(scope="module")
def saved_on_4(tmp_path_factory) -> tuple[str, dict]:
    """A folder with checkpoints, and the states of those who wrote them."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return folder, spawn(saved, folder, world_size=4, output="none")[0]


@pytest.fixture(scope="module", params=[1, 3, 4])
def ranks(request, saved_on_4) -> list[dict]:
    return spawn(everything, saved_on_4[0], world_size=request.param, output="none")


def groups() -> dict:
    """On every rank: parameter groups, and states that do not fit."""
    module = Ours(build_gpt(GPT, 0))
    pieces = module.named_parameters()
    halves = {False: [], True: []}
    for name, piece in pieces:
        halves["blocks" in name].append(piece)
    decayed = [{"params": halves[False], "weight_decay": 0.0}]
    decayed += [{"params": halves[True]}]
    optimizer = torch.optim.AdamW(decayed, lr=0.01)
    run(module, optimizer, range(2))
    state, model = full_optimizer_state_dict(module, optimizer), full_state_dict(module)

    other = build_gpt(GPTConfig(vocab_size=CLASSES, n_layer=3, d_model=12), 0)
    less = {k: v for k, v in model.items() if k != "head.norm.bias"}
    odd = less if dist.get_rank() == 1 else model
    strange = torch.optim.AdamW(other.parameters())
    load, shapes = partial(load_full_optimizer_state_dict, module), other.state_dict()
    errors = {
        "missing": error_of(lambda: load_full_state_dict(module, odd)),
        "shape": error_of(lambda: load_full_state_dict(module, shapes | less)),
        "no dict": error_of(lambda: load_full_state_dict(module, 3)),
        "groups": error_of(lambda: load(optimizer, strange.state_dict())),
        "stranger": error_of(lambda: load(strange, state)),
    }
    return {
        "state": state,
        "errors": errors,
        "after": full_state_dict(module),
        "m": model,
    }


def test_parameter_groups_and_states_that_do_not_fit(ranks):
    for rank in (rank["groups"] for rank in ranks if "groups" in rank):
        groups_of = rank["state"]["param_groups"]
        assert [g["weight_decay"] for g in groups_of] == [0.0, 0.01]
        names = [name for name, _ in build_gpt(GPT).named_parameters()]
        root = [k for k, name in enumerate(names) if not name.startswith("blocks")]
        assert len(groups_of[0]["params"]) == len(root) == 4
        assert sorted(p for g in groups_of for p in g["params"]) == [*range(len(names))]
        model = build_gpt(GPT, 0)
        of_group = [
            [p for n, p in model.named_parameters() if ("blocks" in n) == inner]
            for inner in (False, True)
        ]
        plain = torch.optim.AdamW([{"params": ps} for ps in of_group])
        plain.load_state_dict(rank["state"])
        assert plain.param_groups[0]["weight_decay"] == 0.0
        errors = rank["errors"]
        assert errors["missing"].startswith(
            "ReplicaError: rank 1: the state_dict has no head.norm.bias"
        )
        assert "has head.norm.bias as [12]; it must be" in errors["shape"]
        assert "state_dict is a int; it must be a dict" in errors["no dict"]
        assert "has groups of [" in errors["groups"]
        assert "is no part of this model" in errors["stranger"]
        assert same(rank["after"], rank["m"])  # nothing was changed


# ---- sharded checkpoints -------------------------------------------------------------


def saved(folder: str) -> dict:
    """On every rank: train for 2 steps, save, train for 2 more; return both states."""
    results = {}
    for case in CASES:
        module, optimizer = sharded(*case)
        run(module, optimizer, range(2))
        sharded_checkpoint.save(f"{folder}/{'-'.join(case)}", module, optimizer)
        middle = full_state_dict(module), full_optimizer_state_dict(module, optimizer)
        run(module, optimizer, range(2, 4))
        results[case] = middle, full_state_dict(module)
    module, _ = sharded(*CASES[0])
    sharded_checkpoint.save(f"{folder}/without", module)
    return results


def loaded(folder: str) -> dict:
    """On every rank: load, go on for 2 steps; return both states."""
    results = {}
    for case in CASES:
        module, optimizer = sharded(*case, units=[] if case == CASES[1] else None)
        optimizer.param_groups[0]["lr"] = 123.0
        sharded_checkpoint.load(f"{folder}/{'-'.join(case)}", module, optimizer)
        middle = full_state_dict(module), full_optimizer_state_dict(module, optimizer)
        run(module, optimizer, range(2, 4))
        results[case] = middle, full_state_dict(module)
    results["errors"] = {
        "no folder": refusal(f"{folder}/nothing", *sharded(*CASES[0])),
        "no optimizer": refusal(f"{folder}/without", *sharded(*CASES[0])),
        "model": refusal(f"{folder}/odd-sgd", *sharded(*CASES[0])),
        "groups": refusal(f"{folder}/gpt-adamw", *in_two_groups()),
    }
    return results


def in_two_groups():
    module, _ = sharded(*CASES[0])
    first, *others = module.parameters()
    groups = [{"params": [first]}, {"params": others}]
    return module, torch.optim.AdamW(groups)


def refusal(folder: str, module, optimizer) -> str:
    before = full_state_dict(module)
    error = error_of(lambda: sharded_checkpoint.load(folder, module, optimizer))
    assert same(before, full_state_dict(module))
    return error


def rank_0_only(folder: str) -> bool:
    """A planted fake: only rank 0 saves its numbers. Tell if nobody sees it."""
    module, _ = sharded(*CASES[0])
    honest = sharded_checkpoint.on_cpu

    def fake(value):
        first = dist.get_rank() == 0 or not isinstance(value, torch.Tensor)
        return honest(value if first else torch.zeros_like(value))

    sharded_checkpoint.on_cpu = fake
    sharded_checkpoint.save(f"{folder}/fake", module)
    sharded_checkpoint.on_cpu = honest
    before = full_state_dict(module)
    sharded_checkpoint.load(f"{folder}/fake", module)
    return same(before, full_state_dict(module))


def with_replicas(folder: str) -> tuple[str, bool]:
    """On every rank: an error of rank 3 alone, and whether a save came back."""
    axes = make_groups(Mesh({"replicate": 2, "shard": 2}))
    groups = {"group": axes.group("shard"), "replicas": axes.group("replicate")}
    wide = 5 if dist.get_rank() == 3 else 4
    error = error_of(lambda: Ours(nn.Linear(3, wide), **groups))
    module, _ = sharded(*CASES[0], **groups)
    sharded_checkpoint.save(f"{folder}/replicas", module)
    before = full_state_dict(module)
    with torch.no_grad():
        for piece in module.parameters():
            piece.zero_()
    sharded_checkpoint.load(f"{folder}/replicas", module)
    return error, same(before, full_state_dict(module))


def test_of_replicas_one_saves_and_all_are_compared(ranks):
    for error, saved in (rank["replicas"] for rank in ranks if "replicas" in rank):
        assert error.startswith("ReplicaError: ") and "rank 3" in error
        assert "weight is float32 [4, 3] on cpu" in error
        assert saved


def test_saved_on_4_ranks_and_loaded_on_4_3_and_1(ranks, saved_on_4):
    n, (_, results) = len(ranks), saved_on_4
    for rank in (rank["loaded"] for rank in ranks):
        errors = rank["errors"]
        for case in CASES:
            middle, after = results[case]
            assert same(middle[0], rank[case][0][0]), (n, case)
            assert same(middle[1], rank[case][0][1]), (n, case)
            exactly = n == 4 and case != CASES[1]  # that one has other units
            exact = {} if exactly else {"rtol": 1e-4, "atol": 1e-5}
            assert same(without(after), without(rank[case][1]), **exact)
        assert all(text.startswith("CheckpointError: ") for text in errors.values())
        assert "has no checkpoint" in errors["no folder"]
        assert "it has no optimizer states" in errors["no optimizer"]
        assert "cannot be loaded: the module has" in errors["model"]
        assert "the optimizer's groups are [['embed.tok" in errors["groups"]
    assert not any(rank.get("fake") for rank in ranks)  # it is seen
