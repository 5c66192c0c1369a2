"""Training under torchrun: killed and restarted, on two machines, and with bad luck.

The commands are those of the README, typed as a user would.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import descendants
from machines import free_port, rendezvous_on, two_machines

from ddp_course.launch import spawn
from ddp_course.train import History, train

pytestmark = [pytest.mark.endurance, pytest.mark.timeout(1800)]

ENDURANCE = bool(os.environ.get("DDP_COURSE_ENDURANCE"))  # everything, however long
STEPS, EVERY = 26, 2
SETTINGS = ("--batch-size", "4", "--every", str(EVERY))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--monitor-interval=0.1")


@contextlib.contextmanager
def torchrun(*words: str, prefix: tuple[str, ...] = (), **env: str):
    """Start torchrun; at the end, end it and its ranks, by their ids."""
    run = subprocess.Popen(
        [*prefix, *TORCHRUN, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )
    try:
        yield run
    finally:
        for pid in [*descendants(run.pid), run.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.communicate()


def ranks_of(run: subprocess.Popen) -> dict[int, int]:
    """Return rank -> process id of the ranks that a torchrun has started.

    They are alone: a rank of torchrun has no fork server, as a notebook has.
    """
    ranks = {}
    for pid in descendants(run.pid):
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            results = dict(word.split(b"=", 1) for word in environment if b"=" in word)
            if b"RANK" in results:
                assert int(results[b"RANK"]) not in ranks, Path(f"/proc/{pid}/cmdline")
                ranks[int(results[b"RANK"])] = pid
    return ranks


def newest(folder: Path) -> int:
    return max((int(p.stem[5:]) for p in folder.glob("step-*.pt")), default=0)


def wait_for(condition, run: subprocess.Popen, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert run.poll() is None, run.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def uninterrupted(world_size: int, steps: int = STEPS, **layout: int) -> History:
    """The same training, in one go, by `spawn`."""
    return spawn(
        lambda: train(steps, batch_size=4, **layout),
        world_size=world_size,
        timeout=600,
    )[0]


def same_curve(file: Path, whole: History) -> bool:
    """Tell whether losses and parameters are the same, bit by bit."""
    record = json.loads(file.read_text())
    return (record["losses"], record["checksum"]) == (whole.losses, whole.checksum)


@pytest.mark.skipif(not ENDURANCE, reason="two machines lose a rank every time")
def test_ten_ranks_killed_in_a_row_and_the_curve_is_the_same_bit_for_bit(tmp_path):
    folder, file = tmp_path / "checkpoints", tmp_path / "curve.json"
    with torchrun(
        "--nproc-per-node=2", "--max-restarts=10",
        "-m", "ddp_course", "train", *SETTINGS,
        f"--steps={STEPS}", f"--checkpoint={folder}", f"--json={file}",
    ) as run:  # fmt: skip
        for killed in range(10):
            before = newest(folder)
            wait_for(lambda at=before: newest(folder) > at, run)
            os.kill(ranks_of(run)[1 - killed % 2], signal.SIGKILL)
        _, err = run.communicate(timeout=600)
    assert run.returncode == 0, err[-3000:]
    assert same_curve(file, uninterrupted(2))
    assert json.loads(file.read_text())["resumed_at"] >= 10 * EVERY


def test_two_machines_train_together_and_survive(tmp_path):
    """Each machine has its own disk, and only one of them has written checkpoints.

    A machine has one rank; four, with DDP_COURSE_ENDURANCE=1: then these share a model,
    the machines share the batch, and the mesh is dp 2 x tp 2 x pp 2.
    """
    each = 4 if ENDURANCE else 1  # ranks of a machine
    mesh = {"dp": 2} | ({"tp": 2, "pp": 2, "microbatches": 2} if ENDURANCE else {})
    words = [f"--{name}={size}" for name, size in mesh.items()]
    folders = [tmp_path / "disk a", tmp_path / "disk b"]
    file, port = tmp_path / "curve.json", free_port()
    doom = tmp_path / "doom"
    doom.touch()
    found = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    programs = ["ddp_course", "killed_in_a_step"]  # the same, with one rank fewer
    with contextlib.ExitStack() as stack:
        machines = stack.enter_context(two_machines())
        agents = [
            stack.enter_context(
                torchrun(
                    *rendezvous_on(machines, number, port), f"--nproc-per-node={each}",
                    "--max-restarts=3", "-m", program, "train", *SETTINGS,
                    *words, "--steps=12", f"--checkpoint={folder}", f"--json={file}",
                    prefix=machine.prefix, GLOO_SOCKET_IFNAME=machine.interface,
                    DOOM=f"{doom}", PYTHONPATH=found,
                )
            )
            for number, (machine, folder, program) in enumerate(
                zip(machines, folders, programs, strict=True)
            )
        ]  # fmt: skip
        output = [agent.communicate(timeout=600) for agent in agents]
    assert not doom.exists(), "no rank was killed"
    for agent, (_, err) in zip(agents, output, strict=True):
        assert agent.returncode == 0, err[-3000:]
    lines = [line for out, _ in output for line in out.splitlines()]
    assert (
        sum(f"{2 * each} ranks, 12 steps (" in line for line in lines) == 1
    )  # on rank 0 only
    assert any("by an earlier run" in line for line in lines)
    whole = uninterrupted(2 * each, 12, **mesh)
    assert same_curve(file, whole)
    assert not same_curve(file, replace(whole, losses=whole.losses[:-1]))
    assert not same_curve(file, replace(whole, checksum=""))
    assert json.loads(file.read_text())["resumed_at"] >= 4


def test_a_rank_that_fails_ends_the_job_with_the_cause_first(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    with torchrun(
        "--nproc-per-node=2", "-m", "ddp_course.launch",
        "train_functions:bad_luck_on_rank_1",
    ) as run:  # fmt: skip
        _, err = run.communicate(timeout=600)
    assert run.returncode == 1
    first = next(line for line in err.splitlines() if re.match(r"\S.*Error: ", line))
    assert first.endswith("ZeroDivisionError: rank 1 has bad luck")
    root = err.split("Root Cause")[1]
    assert "rank      : 1 " in root and "ZeroDivisionError" in root
    assert "Connection closed" not in err  # the others' errors are nobody's cause


def test_the_readmes_slurm_script_runs(tmp_path):
    """With stand-ins for SLURM's two programs: srun starts the command on two nodes."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    [script] = [part for part in text.split("```") if "#SBATCH" in part]
    assert script.count("--nproc-per-node 4") == 1
    assert script.count("$A:29400") == 1
    script = script.replace("--nproc-per-node 4 --max", "--max")
    (tmp_path / "job").write_text(script.replace("29400", f"{free_port()}"))
    stand_ins = {"scontrol": "echo 127.0.0.1; echo other", "srun": '"$@" & "$@"; wait'}
    for name, line in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    places = [str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]
    run = subprocess.run(
        ["bash", "job"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **os.environ,
            "PATH": ":".join(places),
            "OMP_NUM_THREADS": "1",
            "SLURM_NNODES": "2",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "a[1-2]",
        },
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "2 ranks, 20 steps, loss" in run.stdout, run.stderr[-3000:]
    assert len(list(tmp_path.glob("runs/*/step-00000020.pt"))) == 1
