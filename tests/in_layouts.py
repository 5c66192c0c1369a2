"""Train with `ddp_course.train` in several layouts, in as few launches as there can be.

To start ranks costs more than some steps of a small model.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import pytest

from ddp_course.launch import spawn
from ddp_course.train import History, largest_difference, train

Layouts = Mapping[str, tuple[int, Mapping[str, Any]]]  # name -> ranks, options
# Rounding moves no parameter of a small model by more than 7e-7 in a few steps, and
# mistakes by 1e-4 and more: Adam's step is about the learning rate, 3e-4.
TOLERANCE = 1e-5


def trained_in(layouts: Layouts, **curve: Any) -> dict[str, History]:
    """Train in each layout, all of equal ranks in one launch; return rank 0's runs.

    `curve` are the options that all have in common; `backend` is an option of `spawn`.
    """

    def launch(name: str) -> tuple[int, str]:
        ranks, options = layouts[name]
        return ranks, options.get("backend", "")

    runs = {}
    for (ranks, backend), names in groupby(sorted(layouts, key=launch), key=launch):
        how = {"timeout": 240.0} | ({"backend": backend} if backend else {})
        options = {name: curve | layouts[name][1] for name in names}
        how |= {"world_size": ranks, "output": "none", "timeout": 250}
        runs |= spawn(run_all, options, **how)[0]
    return runs


def run_all(options: Mapping[str, dict[str, Any]]) -> dict[str, History]:
    """On every rank: train with each of the options; an error says with which."""
    runs = {}
    for name, own in options.items():
        try:
            runs[name] = train(**{k: v for k, v in own.items() if k != "backend"})
        except Exception as error:
            error.add_note(f"in the layout {name!r}")
            raise
    return runs


def assert_same_run(
    found: History, expected: History, tolerance: float = TOLERANCE
) -> None:
    """Fail unless losses and parameters are those of one process."""
    assert found.losses == pytest.approx(expected.losses, abs=1e-5)
    assert largest_difference(found.state, expected.state) < tolerance
