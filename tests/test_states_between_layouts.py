"""What each layout has saved, the next one goes on with, in a ring of layouts.

Two steps train one model, of experts, which every layout here can divide: the first
step in one layout, the second in another, from the first one's checkpoint. A checkpoint
is one process's, so all pairs would say no more: what a layout writes is compared with
one process by whoever reads it.
"""

import shutil
from pathlib import Path

import pytest
import torch
from in_layouts import TOLERANCE, assert_same_run, trained_in

from ddp_course.checkpoint import FORMAT
from ddp_course.mechanisms.saving import read_whole, seal, unseal, write_whole
from ddp_course.model import GPTConfig
from ddp_course.train import History, largest_difference, train

pytestmark = pytest.mark.timeout(3000)  # the first test waits for all layouts

SMALL = GPTConfig(block_size=12, n_layer=2, n_head=4, d_model=16)
CURVE = {"batch_size": 24, "preset": SMALL, "clip": 0.5, "keep_state": True}
CURVE |= {"experts": 8, "balance": 0.0}  # cp refuses a balance loss
LAYOUTS = {  # the ranks, and how they share the training
    "cp 2 x tp 2": (4, {"cp": 2, "tp": 2}),
    "dp 2 x cp 2 x ZeRO-1": (4, {"dp": 2, "cp": 2, "zero": 1}),
    "ep 4 inside dp 4": (4, {"dp": 4, "ep": 4}),
    "ep 2 x tp 2": (4, {"ep": 2, "tp": 2}),
    "ep 2 x pp 2": (4, {"ep": 2, "pp": 2, "microbatches": 2}),
    "ep 2 inside dp 4 x ZeRO-2": (4, {"dp": 4, "ep": 2, "zero": 2}),
    "ZeRO-3": (2, {"zero": 3}),
    "ep 2 x ZeRO-1": (2, {"ep": 2, "zero": 1}),
    "dp 2 x cp 2 x pp 2": (8, {"dp": 2, "cp": 2, "pp": 2, "microbatches": 2}),
    "ZeRO-3 x tp 2": (4, {"zero": 3, "tp": 2}),
    "hybrid shards": (4, {"zero": 3, "shard": 2}),
    "pp 2 x tp 2": (4, {"pp": 2, "tp": 2, "schedule": "gpipe"}),
    "ZeRO-2 x tp 2": (4, {"zero": 2, "tp": 2}),
    "ZeRO-1 x tp 2 x pp 2": (
        8,
        {"zero": 1, "tp": 2, "pp": 2, "schedule": "zero_bubble", "microbatches": 2},
    ),
    "ZeRO-1 on 3 ranks": (3, {"zero": 1}),
    "flat": (2, {"data_parallel": "flat"}),
    "pp 2": (2, {"pp": 2, "schedule": "interleaved"}),
}
PAIRS = list(zip(LAYOUTS, [*LAYOUTS][1:] + [*LAYOUTS][:1], strict=True))


def run_all(steps: int, folders: dict[str, Path]) -> dict[str, History]:
    """Train until `steps` in each of these folders, in the layouts that they name."""
    layouts = {}
    for name, folder in folders.items():
        ranks, options = LAYOUTS[name.rpartition(" -> ")[2]]
        layouts[name] = ranks, options | {"checkpoint": folder, "every": 1}
    return trained_in(layouts, steps=steps, **CURVE)


@pytest.fixture(scope="module")
def one_process() -> History:
    return train(2, **CURVE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """Return each layout's folder, with a checkpoint after one step."""
    folder = tmp_path_factory.mktemp("saved")
    folders = {name: folder / str(k) for k, name in enumerate(LAYOUTS)}
    run_all(1, folders)
    return folders


@pytest.fixture(scope="module")
def resumed(saved, tmp_path_factory) -> dict[str, History]:
    folder = tmp_path_factory.mktemp("resumed")
    folders = {f"{a} -> {b}": folder / str(k) for k, (a, b) in enumerate(PAIRS)}
    for (a, _), copy in zip(PAIRS, folders.values(), strict=True):
        shutil.copytree(saved[a], copy)
    return run_all(2, folders)


@pytest.mark.parametrize("pair", PAIRS, ids=" -> ".join)
def test_each_layout_goes_on_with_the_checkpoint_of_another(pair, resumed, one_process):
    run = resumed[" -> ".join(pair)]
    assert run.resumed_at == 1
    assert_same_run(run, one_process)


# ---- plants: a checkpoint is wrong in one place --------------------------------------

EXPERTS = "blocks.1.mlp.experts.up"  # (8, 64, 16)


def swap_two(tensor: torch.Tensor) -> None:
    """Exchange two experts' numbers."""
    tensor[[0, 5]] = tensor[[5, 0]]


def swap_experts(state: dict, names: list[str]) -> None:
    """Two experts change places in the parameters of one layer."""
    swap_two(state["model"][EXPERTS])


def swap_moments(state: dict, names: list[str]) -> None:
    """Two experts change places in Adam's moments of these parameters."""
    moments = state["optimizer"]["state"][names.index(EXPERTS)]
    for name in ("exp_avg", "exp_avg_sq"):
        swap_two(moments[name])


def nothing(state: dict, names: list[str]) -> None:
    """The checkpoint is right."""


@pytest.mark.parametrize("plant", [nothing, swap_experts, swap_moments])
def test_a_wrong_place_in_a_checkpoint_is_seen(plant, saved, one_process, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(saved["ep 2 x tp 2"], copy)
    (path,) = copy.iterdir()
    state = unseal(read_whole(path, FORMAT)["state"])
    plant(state, list(one_process.state))
    write_whole({"format": FORMAT, "state": seal(state)}, path)
    found = train(2, checkpoint=copy, every=1, **CURVE)
    distance = largest_difference(found.state, one_process.state)
    assert distance < TOLERANCE if plant is nothing else distance > 10 * TOLERANCE
