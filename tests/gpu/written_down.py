"""Writes down what passed on a GPU, and when, for `ddp-course doctor` to tell."""

from __future__ import annotations

import json
from datetime import date

import pytest
import torch

from ddp_course.commands.doctor import RESULTS


class WrittenDown:
    """A plugin of a run of all tests in `tests/gpu`, on a machine with GPUs."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}  # by the name of a test

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has ended."""
        name = report.nodeid.partition("::test_")[2]
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[name] = report.outcome

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """All have; none of them was left out."""
        if len(self.outcomes) == session.testscollected:
            self.write([torch.cuda.get_device_name(0)] * torch.cuda.device_count())

    def write(self, gpus: list[str]) -> None:
        """Write the file."""
        record = {"date": date.today().isoformat(), "gpus": gpus}
        record |= {"torch": torch.__version__, "nccl": torch.version.cuda and nccl()}
        for outcome in ("passed", "failed", "skipped"):
            record[outcome] = [n for n, was in self.outcomes.items() if was == outcome]
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def nccl() -> str:
    """Return NCCL's version: "2.27.3"."""
    return ".".join(map(str, torch.cuda.nccl.version()))
