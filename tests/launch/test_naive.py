"""The naive launcher, which chapter 01 runs, lacks what that chapter says."""

import sys

import pytest
from torch.multiprocessing.spawn import ProcessException

from ddp_course.launch import naive, spawn


def test_it_cannot_run_a_function_of_a_cell(monkeypatch, capfd):
    def cell():
        """Be in `__main__`, which is no file in a notebook."""

    cell.__module__, cell.__qualname__ = "__main__", "cell"
    monkeypatch.setattr(sys.modules["__main__"], "cell", cell, raising=False)
    assert spawn(cell, world_size=1) == [None]
    with pytest.raises(ProcessException):
        naive.spawn(cell, world_size=1)
    assert "Can't get attribute 'cell' on <module" in capfd.readouterr().err
