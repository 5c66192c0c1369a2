"""The naive launcher works, and lacks what its docstring and chapter 01 say."""

import sys

import pytest
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException

from ddp_course.launch import naive, spawn


def fail_together():
    raise ValueError(f"{dist.get_world_size()} are together")


def test_it_runs_a_function_of_a_module_on_every_rank():
    with pytest.raises(ProcessException, match="2 are together"):
        naive.spawn(fail_together, world_size=2)


def test_it_cannot_run_a_function_of_a_cell(monkeypatch, capfd):
    def cell():
        """Be in `__main__`, which is no file in a notebook."""

    cell.__module__, cell.__qualname__ = "__main__", "cell"
    monkeypatch.setattr(sys.modules["__main__"], "cell", cell, raising=False)
    assert spawn(cell, world_size=1) == [None]
    with pytest.raises(ProcessException):
        naive.spawn(cell, world_size=1)
    assert "Can't get attribute 'cell' on <module" in capfd.readouterr().err
