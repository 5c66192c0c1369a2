"""Ranks that our launcher did not start: `mp.spawn`, SLURM, MPI."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from machines import free_port

from ddp_course.cli import main

HERE = Path(__file__).parent
TOLD = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "MASTER_", "SLURM_", "OMPI_", "PMI_")
SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
TRAIN = ("-m", "ddp_course", "train", "--steps", "1", "--batch-size", "2")


def python(*words: str, **more: str) -> subprocess.Popen:
    """Start Python in an environment that says nothing about ranks but `more`."""
    env = {n: v for n, v in os.environ.items() if not n.startswith(TOLD)}
    env |= {"OMP_NUM_THREADS": "1", **more}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *words], env=env, **pipes)


@pytest.mark.timeout(240)
def test_every_strategy_under_plain_mp_spawn_equals_one_process():
    told, error = python(str(HERE / "plain_program.py")).communicate(timeout=230)
    through = [f"rank {rank} is through" for rank in range(2)]
    assert sorted(told.splitlines()) == through, told + error[-2000:]


@pytest.mark.parametrize("others", [SRUN, MPIRUN])
def test_one_of_several_processes_does_not_train_as_if_alone(
    others, monkeypatch, capfd
):
    for name, value in others.items():
        monkeypatch.setenv(name, value)
    assert main([*TRAIN[2:]]) == 1
    _, error = capfd.readouterr()
    assert "as rank 1 of 2" in error
    assert "MASTER_ADDR" in error
    assert "Traceback" not in error


def run_by_srun(words_of_rank_1: tuple[str, ...] = ()) -> list[tuple[int, str, str]]:
    """Train on two ranks that know where to meet; return code, output and errors."""
    meet = {**SRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        python(
            *TRAIN,
            *words_of_rank_1 * int(rank),
            **{**meet, "SLURM_PROCID": rank, "SLURM_LOCALID": rank},
        )
        for rank in "01"
    ]
    told = [rank.communicate(timeout=100) for rank in ranks]
    return [(r.returncode, *texts) for r, texts in zip(ranks, told, strict=True)]


def test_ranks_that_were_told_different_things_say_so():
    for code, _, error in run_by_srun(("--lr=0.2",)):
        assert code == 1
        assert re.search(r"ReplicaError: .* differ\. --lr is 0\.\d+ on rank", error), (
            error
        )


def test_ranks_of_srun_that_know_where_to_meet_train_together():
    told = run_by_srun()
    assert [code for code, *_ in told] == [0, 0], told
    assert "2 ranks, 1 step" in told[0][1]
    assert told[1][1] == ""
