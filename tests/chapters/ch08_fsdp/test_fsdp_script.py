"""The script to copy: sharded, resumed on other ranks, as a program; mistakes too."""

import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ddp_course.chapters.ch08_fsdp import fsdp_script
from ddp_course.launch import spawn

FILE = fsdp_script.__file__
SOURCE = Path(FILE).read_text().replace("rows: int = 320", "rows: int = 128")
CPU = {"device": "cpu", "output": "none", "timeout": 240}
pytestmark = pytest.mark.timeout(1200)  # four launches, on a busy machine
MISTAKES = {
    "one order for all epochs": ("sampler.set_epoch(epoch)", "pass"),
    "every rank reads everything": ("sampler=sampler", "shuffle=False"),
    "clipped by each shard's norm": (
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "nn.utils.clip_grad_norm_([p.grad.to_local() for p in model.parameters()], 1)",
    ),
    "the optimizer begins anew": (
        "set_state_dict(model, optimizer, **found)",
        "optimizer.state.clear()",
    ),
    "the numbers begin anew": ("done = load(folder, model, optimizer)", "done = 1"),
}


def run(folder, epochs, batch_size, before="", after=""):
    """On every rank: train with the script's `train`; tell of this rank's shards."""
    assert not before or SOURCE.count(before) == 1
    space = {"__name__": "script"}
    exec(SOURCE.replace(before, after) if before else SOURCE, space)
    seen, states = [], space["states"]
    space["states"] = lambda *its: seen.append(its) or states(*its)
    space["train"](torch.device("cpu"), epochs, batch_size, folder)
    model, optimizer = seen[-1]
    whole = {k: p.full_tensor().detach() for k, p in model.named_parameters()}
    kept = sum(p.to_local().numel() for p in model.parameters())
    moments = sum(s["exp_avg"].to_local().numel() for s in optimizer.state.values())
    return whole, kept, moments


def run_each(cases):
    return {name: run(*case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One process trains an epoch; from its checkpoint others go on, 32 rows a step."""
    base = tmp_path_factory.mktemp("runs")
    spawn(run, base / "first", 1, 32, world_size=1, **CPU)
    for name in ("1", "2", "4", *MISTAKES):
        shutil.copytree(base / "first", base / name)
    return base


@pytest.fixture(scope="module")
def ranks(folders):
    """What each rank tells, by the name of the run."""
    cases = {
        1: {"1": (folders / "1", 2, 32)},
        4: {"4": (folders / "4", 2, 8)},
        2: {"2": (folders / "2", 2, 16)}
        | {name: (folders / name, 2, 16, *MISTAKES[name]) for name in MISTAKES},
    }
    results = {}
    for n, some in cases.items():
        all_ranks = spawn(run_each, some, world_size=n, **CPU)
        results |= {name: [rank[name] for rank in all_ranks] for name in some}
    return results


def close(a, b):
    return all(torch.allclose(a[k], b[k], rtol=1e-4, atol=1e-5) for k in b)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("n", [2, 4])
def test_more_ranks_go_on_as_one_process(n, ranks, folders):
    [(alone, total, _)] = ranks["1"]
    assert sum(kept for _, kept, _ in ranks[f"{n}"]) == total
    for whole, kept, moments in ranks[f"{n}"]:
        assert close(whole, alone)
        assert kept == moments <= 1.2 * total / n  # shards, and no more
    last = folders / f"{n}" / "000002"
    assert [path.name for path in sorted(last.parent.iterdir())][-1] == last.name
    assert len(list(last.iterdir())) == n + 1
    found = {"model_state_dict": {k: torch.zeros_like(v) for k, v in alone.items()}}
    dcp.load(found, checkpoint_id=last, no_dist=True)
    assert close(found["model_state_dict"], alone)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake, ranks):
    assert not close(ranks[mistake][0][0], ranks["1"][0][0])


def test_the_file_itself_where_ranks_are_told_what_torchrun_tells(tmp_path):
    """Chapter 05's, which begins alike, is run by torchrun."""

    def as_a_program():
        sys.argv = [FILE, "--epochs=2", f"--checkpoints={tmp_path}"]
        runpy.run_path(FILE)["main"]()  # the file's last line would end the rank

    results = spawn(as_a_program, world_size=2, init=False, check=False, **CPU)
    assert [rank.status for rank in results] == ["ok", "ok"], results
    assert not results[1].output  # one rank speaks
    for epoch, line in enumerate(results[0].output.splitlines()):
        assert line.startswith(f"epoch {epoch}: mean loss ")
    assert {path.name for path in tmp_path.iterdir()} == {"000001", "000002"}
