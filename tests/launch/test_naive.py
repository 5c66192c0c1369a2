"""The naive launcher works, and lacks what its docstring and chapter 01 say."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException

from ddp_course.launch import naive


def fail_unless_together():
    assert dist.get_world_size() == 2


def test_it_runs_a_function_of_a_module_on_every_rank():
    assert naive.spawn(fail_unless_together, world_size=2) is None
    with pytest.raises(ProcessException):
        naive.spawn(fail_unless_together, world_size=1)


def test_it_cannot_run_a_function_of_a_cell():
    cell = (
        "def f(): pass\n"  # as in a notebook: __main__ is no file
        "from ddp_course.launch import naive, spawn\n"
        "print(spawn(f, world_size=2))\n"
        "naive.spawn(f, world_size=2)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", cell], capture_output=True, text=True, timeout=120
    )
    assert run.stdout.endswith("[None, None]\n")
    assert "Can't get attribute 'f' on <module '__main__'" in run.stderr
    assert run.returncode != 0
