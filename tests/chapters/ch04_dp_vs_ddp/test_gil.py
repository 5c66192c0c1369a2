"""The four ways do the same work, in the threads and processes that they claim.

How fast they are is for the figure of chapter 04: no test looks at it.
"""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import Tensor, nn

from ddp_course.chapters.ch04_dp_vs_ddp import gil
from ddp_course.chapters.ch04_dp_vs_ddp.gil import (
    WAYS,
    threads_against_processes,
    timings,
    ways_of,
)
from ddp_course.launch import here, spawn


def test_the_models_are_what_they_are_called():
    tiny, large = gil.ManyTinyOperations(steps=7), gil.FewLargeProducts(2, 32)
    calls = {model: count_operations(model) for model in (tiny, large)}
    assert calls[tiny] == 1 + 7 * 4
    assert calls[large] == 2
    x, h = torch.randn(3, 16), torch.zeros(3, 16)
    for _ in range(7):
        h = torch.tanh(tiny.from_input(x) + tiny.from_past(h))
    assert torch.equal(tiny(x), h)


def count_operations(model: nn.Module) -> int:
    """Count what a forward calls: PyTorch's own functions, each one once."""
    counted, x = [], torch.randn(3, model.width)

    class Counts(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            counted.append(function)
            return function(*args, **(kwargs or {}))

    with Counts():
        model(x)
    return len(counted)


class Tells(nn.Module):
    """Doubles its input, and notes in which thread."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.threads: list[int] = []
        self.entered = threading.Barrier(n)

    def forward(self, x: Tensor) -> Tensor:
        self.threads.append(threading.get_ident())
        if threading.current_thread() is not threading.main_thread():
            self.entered.wait(100)  # so that no thread ends before all have begun
        return 2 * x


def who_does_what() -> dict:
    """On every rank: outputs, number of threads and process of each way."""
    n = here().topology.world_size
    batch = torch.arange(3.0 * n)
    results = {}
    for way in WAYS:
        model = Tells(n)
        outputs = torch.cat(ways_of(model, batch, n)[way]()).tolist()
        main = threading.get_ident() in model.threads
        results[way] = outputs, len(model.threads), len(set(model.threads)), main
    return results | {"pid": os.getpid()}


@pytest.mark.parametrize("n", [1, 3])
def test_all_ways_do_the_same_work(n):
    results = spawn(who_does_what, world_size=n, output="none")
    full = [2.0 * k for k in range(3 * n)]
    for rank in results:
        assert rank["one after another"] == (full, n, 1, True)
        assert rank["threads"] == (full, n, n, False)
        if n > 1:  # one replica needs no thread
            assert rank["DataParallel"] == (full, n, n, False)
    assert [x for rank in results for x in rank["processes"][0]] == full
    assert all(rank["processes"][1:] == (1, 1, True) for rank in results)
    assert len({rank["pid"] for rank in results}) == n


def test_medians_of_pairs():
    # Two ranks, three turns; in the second, something else took half of the machine.
    alone = [(4.0, 3.0), (8.0, 3.0), (4.0, 3.0)]
    nothing = [(0.0, 0.0)] * 3
    halved = [(seconds / 2, cpu) for seconds, cpu in alone]
    first = dict.fromkeys(WAYS, alone) | {"processes": halved}
    second = dict.fromkeys(WAYS, nothing) | {"processes": [(3.0, 2.0)] * 3}
    found = {t.way: t for t in timings("it", [first, second])}
    assert list(found) == list(WAYS)
    assert found["threads"].speed_up == 1.0
    processes = found["processes"]
    # Of the slowest rank, and of all together.
    assert (processes.seconds, processes.cpu_seconds) == (3.0, 5.0)
    assert processes.speed_up == pytest.approx(4 / 3)
    assert processes.model == "it"


def test_measured():
    found = threads_against_processes(replicas=2, turns=1)
    assert [(t.model, t.way) for t in found] == [
        (m, w) for m in gil.MODELS for w in WAYS
    ]
    for timing in found:
        assert timing.seconds > 0
        assert timing.cpu_seconds > 0


@pytest.mark.parametrize("bad", [{"replicas": 0}, {"turns": 0}, {"replicas": 1.5}])
def test_bad_arguments(bad):
    with pytest.raises(ValueError, match="it must be an integer of 1 or more"):
        threads_against_processes(**bad)
