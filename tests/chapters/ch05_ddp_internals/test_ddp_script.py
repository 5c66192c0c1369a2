"""The script to copy: as one process, resumed, under torchrun; mistakes are seen."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddp_course.chapters.ch05_ddp_internals import copied_script, ddp_script
from ddp_course.launch import spawn

pytestmark = pytest.mark.timeout(600)
SOURCE = Path(ddp_script.__file__).read_text()
PLAIN = ("dropout: float = 0.1", "dropout: float = 0.0")  # masks differ by rank
MISTAKES = {
    "one order for all epochs": ("sampler.set_epoch(epoch)", "pass"),
    "every rank reads everything": ("sampler=sampler", "shuffle=False"),
    "nothing is averaged": ("cross_entropy(ddp(", "cross_entropy(model("),
    "clipped before it is averaged": ("loss.backward()", "clip(loss, ddp, model)"),
    "the optimizer begins anew": ("optimizer.load_state_dict", "(lambda state: None)"),
    "the epochs begin anew": ('done = saved["epochs"]', "pass"),
}


def clip(loss, ddp, model):
    with ddp.no_sync():  # what a rank does that clips its own gradients
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    for p in model.parameters():
        torch.distributed.all_reduce(p.grad, op=torch.distributed.ReduceOp.AVG)


def run(path, batch_size, epochs, *changes):
    """On every rank: train with the script's `train`, up to each of `epochs` anew."""
    source = SOURCE
    for before, after in (PLAIN, *changes):
        assert source.count(before) == 1
        source = source.replace(before, after)
    space = {"__name__": "script", "clip": clip}
    exec(source, space)
    for last in epochs:
        space["train"](torch.device("cpu"), last, batch_size, path)
        torch.distributed.barrier()  # the file is written: who comes again reads it


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What was saved, by name: by one process, by two, and by two with a mistake."""
    folder = tmp_path_factory.mktemp("runs")

    def run_all(batch_size, cases, epochs):
        for name, changes in cases.items():
            run(folder / name, batch_size, epochs, *changes)

    mistakes = {name: [change] for name, change in MISTAKES.items()}
    for n, *case in (
        (1, 32, {"one process": []}, [3]),
        (2, 16, {"two ranks": [], **mistakes}, [1, 3]),
    ):
        how = {"world_size": n, "device": "cpu", "output": "none", "timeout": 240}
        spawn(run_all, *case, **how)
    return {path.name: torch.load(path) for path in folder.iterdir()}


def close(a, b):
    pairs = ((a["model"][name], b["model"][name]) for name in a["model"])
    return a["epochs"] == b["epochs"] and all(
        torch.allclose(x, y, rtol=1e-4, atol=1e-5) for x, y in pairs
    )


def test_two_ranks_resumed_are_one_process(saved):
    assert close(saved["two ranks"], saved["one process"])
    assert set(saved) == {"one process", "two ranks", *MISTAKES}  # and no `.new`


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake, saved):
    assert not close(saved[mistake], saved["one process"])


def test_the_copied_script_runs_for_all_its_faults(tmp_path):
    def as_a_program():
        os.chdir(tmp_path)
        runpy.run_path(copied_script.__file__, run_name="__main__")

    options = {"init": False, "check": False, "device": "cpu", "output": "none"}
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    ranks = spawn(as_a_program, world_size=2, env=no_gpu, **options)
    assert [rank.status for rank in ranks] == ["ok", "ok"], ranks
    assert ranks[1].output == "rank 1: loss of the held-out rows None\n"
    assert (tmp_path / "copied.pt").exists()  # two ranks wrote it, perhaps at once


def test_the_file_under_torchrun(tmp_path):
    command = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    run = subprocess.run(
        [sys.executable, *command, ddp_script.__file__, "--epochs=2"],
        cwd=tmp_path, timeout=500, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    for epoch, line in enumerate(run.stdout.splitlines()):  # one rank speaks
        assert line.startswith(f"epoch {epoch}: mean loss ")
    assert torch.load(tmp_path / "run.pt")["epochs"] == epoch + 1 == 2
