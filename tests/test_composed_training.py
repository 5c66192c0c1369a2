"""dp x tp x pp, with ZeRO and hybrid sharding: the training of one process, 8 ranks.

After each of two steps the loss, the norm of the whole gradient (which is clipped)
and all parameters are those of one process. An average over the wrong ranks, a sum in
the place of a mean, a part counted twice in the norm: each shows in one of the three.
"""

import gc
import sys
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from trained import own_norm_only

from ddp_course import collectives
from ddp_course.data import load_corpus, shard
from ddp_course.data_parallel import DistributedDataParallel as Counted
from ddp_course.data_parallel import axis as data_parallel_axis
from ddp_course.launch import spawn
from ddp_course.measure import ByteMeter, resident
from ddp_course.mechanisms.placements import placed
from ddp_course.mechanisms.states import HasState
from ddp_course.mesh import Axes, Mesh, make_groups
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.parallelize import (
    clip_gradients,
    optimizer_for,
    parallelize,
    whole,
)
from ddp_course.spec import layout_for
from ddp_course.theory import ComposedRank
from ddp_course.train import average

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.timeout(900)  # the launch for all has 840 s

# Two layers and both ends: four stages, for two on each of two ranks.
SMALL = GPTConfig(block_size=8, n_layer=2, n_head=4, d_model=16)
TIED = replace(SMALL, tied=True)
FROZEN = ("embed.positions.weight", "blocks.0.attn.qkv.weight", "blocks.1.norm1.bias")
STEPS, ROWS, LR, MAX_NORM = 2, 8, 1e-3, 0.5

PIPELINE = {"dp": 2, "tp": 2, "pp": 2}
COMPOSITIONS = {
    "dp 2 x tp 2 x pp 2, interleaved": PIPELINE | {"schedule": "interleaved"},
    "dp 2 x tp 2 x pp 2, zero bubble": PIPELINE | {"schedule": "zero_bubble"},
    "zero1, zero bubble": PIPELINE | {"schedule": "zero_bubble", "zero": 1},
    "zero2 x tp 2 x pp 2": PIPELINE | {"zero": 2},
    "zero3 x tp 2": {"zero": 3, "dp": 4, "tp": 2},
    "hsdp 2 x 4": {"zero": 3, "dp": 8, "shard": 4},
    "hsdp 2 x 2 x tp 2": {"zero": 3, "dp": 4, "shard": 2, "tp": 2},
}
PLAIN = {"dp 2 x tp 2 x pp 2": PIPELINE}  # without ties, nothing frozen

Steps = list[tuple[float, float, dict[str, Tensor]]]  # loss, norm, parameters
# Behind the steps stands one more: 0, 0, and the optimizer's state, flat.


def frozen_in_part(config: GPTConfig) -> nn.Module:
    """Return the model; of the tied one some parameters are frozen."""
    model = build_gpt(config, seed=1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (config.tied and name in FROZEN))
    return model


def batch_of(step: int, config: GPTConfig) -> tuple[Tensor, Tensor]:
    return load_corpus().batch(step, ROWS, config.block_size)


@cache
def alone(config: GPTConfig) -> Steps:
    model, steps = frozen_in_part(config), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        _, loss = model(*batch_of(step, config))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        steps.append((loss.item(), norm.item(), state))
    return [*steps, (0.0, 0.0, flat(optimizer.state_dict()))]


def flat(state: dict) -> dict[str, Tensor]:
    """Return an optimizer's state as tensors by name, which parameters it has, too."""
    numbers = [n for group in state.get("param_groups", ()) for n in group["params"]]
    results = {"the numbers of all parameters": torch.tensor(numbers)}
    for number, values in state.get("state", {}).items():
        results |= {f"{name} of {number}": value for name, value in values.items()}
    return results


AXES_OF: dict[str, Axes] = {}


def axes_of(mesh: Mesh) -> Axes:
    """Make the groups of a mesh, once: all compositions of it have the same."""
    if str(mesh) not in AXES_OF:
        AXES_OF[str(mesh)] = make_groups(mesh)
    return AXES_OF[str(mesh)]


def together(results: dict, config: GPTConfig, wrong: str | None = None) -> Steps:
    """The same on all ranks, divided as told; perhaps with a mistake."""
    layout = layout_for(dist.get_world_size(), **results)
    axes = axes_of(layout.mesh)
    model = parallelize(frozen_in_part(config), layout, axes)
    optimizer = optimizer_for(model, layout, axes, LR)
    (states, optimizer_states), steps = whole(model, optimizer), []
    for step in range(STEPS if wrong is None else 1):
        rows = [
            shard(t, *layout.share(dist.get_rank())) for t in batch_of(step, config)
        ]
        optimizer.zero_grad()
        if "pp" in axes:
            loss = model.step(*rows)
        else:
            _, loss = model(*rows)
            loss.backward()
        if wrong == "norms of the parts":
            norm = own_norm_only(model.parameters(), MAX_NORM)
        else:
            norm = clip_gradients(model, optimizer, MAX_NORM)
        optimizer.step()
        loss = average(loss.detach()).item()
        state = states.state_dict()
        steps.append((loss, norm.item(), {} if dist.get_rank() else {**state}))
    return [*steps, (0.0, 0.0, flat(states_of(optimizer_states, model)))]


def states_of(states: HasState, model: nn.Module) -> dict:
    """Save and load: what is there afterwards is what was saved."""
    before = states.state_dict()
    everywhere = [before]
    dist.broadcast_object_list(everywhere)
    states.load_state_dict(everywhere[0])
    torch.testing.assert_close(states.state_dict(), before, rtol=0, atol=0)
    return before


def all_compositions() -> dict[str, dict]:
    """One launch for all: starting ranks takes longer than these steps."""
    return {
        "plain": {name: together(result, SMALL) for name, result in PLAIN.items()},
        "tied": {name: together(result, TIED) for name, result in COMPOSITIONS.items()},
        "wrong": {
            name: together((COMPOSITIONS | PLAIN)[name], SMALL, "norms of the parts")
            for name in ("dp 2 x tp 2 x pp 2", "zero3 x tp 2")
        },
        "metered": {name: metered(result) for name, result in METERED.items()},
    }


def problem(steps: Steps, right: Steps) -> str | None:
    """Say what is not that of one process, and after which step; None: nothing."""
    for k, ((loss, norm, state), (loss_1, norm_1, state_1)) in enumerate(
        zip(steps, right, strict=False)
    ):
        if loss != pytest.approx(loss_1, rel=2e-6):
            return f"loss of step {k}: {loss}, {loss_1}"
        if norm != pytest.approx(norm_1, rel=2e-5):
            return f"norm of step {k}: {norm}, {norm_1}"
        if state.keys() != state_1.keys():
            return f"{sorted(state.keys() ^ state_1.keys())} after step {k}"
        for name, value in state_1.items():
            if not torch.allclose(state[name], value, rtol=1e-4, atol=0.02 * LR):
                return f"{name} after step {k}"
    return None


@pytest.fixture(scope="module")
def found() -> list[dict[str, dict]]:
    return spawn(all_compositions, world_size=8, output="none", timeout=840)


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("tied", name) for name in COMPOSITIONS), *(("plain", name) for name in PLAIN)],
)
def test_a_composition_trains_as_one_process(found, kind, name):
    right = alone(TIED if kind == "tied" else SMALL)
    assert problem(found[0][kind][name], right) is None
    for result in found:  # all ranks say the same of loss and norm
        assert [s[:2] for s in result[kind][name]] == [
            s[:2] for s in found[0][kind][name]
        ]


def test_norms_of_the_parts_are_seen(found):
    right = alone(SMALL)
    for name, steps in found[0]["wrong"].items():
        assert "norm of step 0" in problem(steps, right), name


def test_what_is_compared_is_sharp_enough():
    right = alone(SMALL)[:-1]
    for factor in (0.5, 2.0):  # a mean over too many, over too few
        planted = [(loss, factor * norm, state) for loss, norm, state in right]
        assert "norm" in problem(planted, right)
    for by, words in ((1e-4, None), (0.1, "after step 0")):
        planted = [
            (loss, norm, {name: value + by * LR for name, value in state.items()})
            for loss, norm, state in right
        ]
        results = problem(planted, right)
        assert results is None if words is None else words in results


# ---- what a rank keeps, and what it sends along each axis ----------------------------

METERED = {
    "dp 2 x tp 2 x pp 2": PIPELINE,
    "zero1 x tp 2 x pp 2": PIPELINE | {"zero": 1},
    "zero2 x tp 2": {"zero": 2, "dp": 4, "tp": 2},
    "zero3 x tp 2": COMPOSITIONS["zero3 x tp 2"],
    "hsdp 2 x 4": COMPOSITIONS["hsdp 2 x 4"],
    "hsdp 2 x 2 x tp 2": COMPOSITIONS["hsdp 2 x 2 x tp 2"],
    "cp 4 x tp 2": {"cp": 4, "tp": 2},
    "cp 2 x tp 2 x pp 2": {"cp": 2, "tp": 2, "pp": 2},
    "cp 4 x tp 2 x zero 1": {"cp": 4, "tp": 2, "zero": 1},
}
KEPT = ("parameters", "gradients", "optimizer states")
ring = partial(collectives.all_reduce, algorithm="ring")


@dataclass(frozen=True)
class Metered:
    """What one rank has found: bytes sent along each axis, bytes kept by kind."""

    sent: dict[str, int]
    kept: dict[str, int]
    layers: tuple[int, ...]
    buffers: tuple[int, ...] | None
    step_counts: int


def metered(results: dict) -> Metered:
    """Train two steps, and look at the second."""
    gc.collect()  # the model before this one
    layout = layout_for(dist.get_world_size(), **results)
    axes, rank = axes_of(layout.mesh), dist.get_rank()
    dist.all_reduce = ring  # PyTorch's own are not counted
    data_parallel_axis.WRAPPERS = {"ddp": partial(Counted, all_reduce=ring)}
    model = parallelize(build_gpt(SMALL), layout, axes)
    optimizer = optimizer_for(model, layout, axes, LR)
    for step in range(2):
        rows = [shard(t, *layout.share(rank)) for t in batch_of(step, SMALL)]
        optimizer.zero_grad()
        with ByteMeter() as meter:
            if "pp" in axes:
                model.step(*rows)
            else:
                model(*rows)[1].backward()
            optimizer.step()
    sent = {}
    for axis in layout.mesh.axes:
        peers = set(dist.get_process_group_ranks(axes.group(axis))) - {rank}
        sent[axis] = sum(meter.sent.get(peer, 0) for peer in peers)
    assert sum(sent.values()) == meter.total_sent  # nobody else was sent anything
    layers = {layer_of(placed(parameter).name) for parameter in model.parameters()}
    ledger = resident(model, optimizer)
    plan = getattr(optimizer, "plan", None)
    return Metered(
        sent,
        {kind: ledger[kind] for kind in KEPT},
        tuple(sorted(layers)),
        plan and tuple(bucket.bucket.numel for bucket in plan),
        sum("step" in state for state in optimizer.state.values()),
    )


def layer_of(name: str) -> int:
    """Return which of [embed, *blocks, head] a parameter is in."""
    first, second, *_ = name.split(".")
    if first == "blocks":
        return int(second) + 1
    return {"embed": 0, "head": SMALL.n_layer + 1}[first]


def expected(
    found: Metered, results: dict
) -> tuple[dict[str, Fraction], dict[str, int]]:
    """The same by the formulas."""
    layout = layout_for(8, **results)
    mesh = layout.mesh.sizes
    replicas = mesh.get("replicate", 1)
    how = {
        "stages": [range(found.layers[0], found.layers[-1] + 1)],
        "dp": mesh.get("dp", replicas * mesh.get("shard", 1)),
        "tp": mesh.get("tp", 1),
        "replicas": replicas,
        "zero": results.get("zero", 0),
        "buffers": found.buffers,
        "precision": "fp32",
        "cp": mesh.get("cp", 1),
        "attention": results.get("attention", "ring"),
    }
    volume = ComposedRank(SMALL, **how).volume(ROWS // how["dp"])
    sent = {"tp": volume.tp, "pp": volume.pp, "dp": volume.dp, "shard": volume.dp}
    sent["replicate"] = volume.replicas
    sent["cp"] = volume.cp + volume.dp  # there is no dp beside cp here
    if found.layers[-1] == SMALL.n_layer + 1:  # and the sum of each microbatch's losses
        losses = layout.microbatches if layout.pp > 1 else 1
        sent["cp"] += losses * 2 * Fraction(layout.cp - 1, layout.cp) * 4
    kept = ComposedRank(SMALL, **how).states(found.step_counts)
    return {axis: sent[axis] for axis in mesh}, {kind: kept[kind] for kind in KEPT}


@pytest.mark.parametrize("name", METERED)
def test_bytes_sent_along_every_axis_and_kept_are_those_of_the_formulas(found, name):
    ranks = [rank["metered"][name] for rank in found]
    right = [expected(rank, METERED[name]) for rank in ranks]
    for axis in ranks[0].sent:
        total = sum(rank.sent[axis] for rank in ranks)
        assert total == sum(sent[axis] for sent, _ in right) > 0, axis
    assert [rank.kept for rank in ranks] == [kept for _, kept in right]
