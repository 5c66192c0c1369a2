"""The GIL, measured: n threads of one process against n processes, at the same work.

Python's global interpreter lock (全局解释器锁) lets one thread of a process run Python
at a time. PyTorch releases it while an operation computes. So threads help to the
extent that time is spent inside operations; a model of many tiny operations acquires
the lock again every few microseconds. Two extremes:

    ManyTinyOperations    a recurrent network, unrolled by a Python loop
    FewLargeProducts      a few products of large matrices

and four ways to run n replicas, each on a batch of its own:

    one after another     one thread of one process
    threads               `parallel_apply`: n threads of one process
    DataParallel          the same, plus cutting, copying and joining tensors
    processes             n processes with one replica each

Only forward is measured, without gradients: autograd runs the backward of all CPU
replicas in one thread, whatever the GIL does. Source: "global interpreter lock" in the
glossary of Python's documentation. Explained in chapter 04.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from ddp_course.collectives import meeting
from ddp_course.data_parallel.dp import DataParallel, parallel_apply
from ddp_course.launch import here, spawn
from ddp_course.theory.checks import check_count

CPU = torch.device("cpu")
WAYS = ("one after another", "threads", "DataParallel", "processes")
Way = Callable[[], list[Tensor]]
Times = dict[str, list[tuple[float, float]]]  # way -> (seconds, CPU seconds) per turn


class ManyTinyOperations(nn.Module):
    """A recurrent network whose steps are a Python loop: (B, 16) -> (B, 16).

    Each step has four operations of a few microseconds.
    """

    def __init__(self, steps: int = 1000, width: int = 16) -> None:
        super().__init__()
        self.steps, self.width = steps, width
        self.from_input = nn.Linear(width, width)
        self.from_past = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the recurrent step `steps` times to the same input."""
        h = torch.zeros_like(x)
        for _ in range(self.steps):
            h = torch.tanh(self.from_input(x) + self.from_past(h))
        return h


class FewLargeProducts(nn.Module):
    """Four products with matrices of `width` x `width`: (B, width) -> (B, width)."""

    def __init__(self, layers: int = 4, width: int = 1024) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(
            *[nn.Linear(width, width, bias=False) for _ in range(layers)]
        )

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by all matrices."""
        return self.layers(x)


# name -> the module, and the rows that each replica gets
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "many tiny operations": (ManyTinyOperations, 4),
    "few large products": (FewLargeProducts, 256),
}


@dataclass(frozen=True)
class Timing:
    """Seconds of n replicas, run in one way: medians over the turns.

    `cpu_seconds` is the sum over all threads and processes. `speed_up` is the time of
    "one after another" divided by this way's time in the same turn: it is at most about
    n, or the number of free cores.

    A single thread needs about as many seconds as CPU seconds. If "one after another"
    took far more seconds, other programs used the cores, and the measurement says
    nothing about threads.
    """

    model: str
    way: str
    seconds: float
    cpu_seconds: float
    speed_up: float


def threads_against_processes(replicas: int = 2, turns: int = 15) -> list[Timing]:
    """Measure both models in all four ways; return eight `Timing`s.

    Launches `replicas` ranks with one thread each. Every turn runs each way once, and
    begins with a different one, so that other programs disturb all ways alike. While a
    way uses one process, the other ranks wait. Chapter 04.
    """
    check_count("replicas", replicas)
    check_count("turns", turns)
    by_rank = spawn(
        measure, turns, world_size=replicas, device="cpu", threads=1, output="none"
    )
    return [
        timing
        for model in MODELS
        for timing in timings(model, [by_model[model] for by_model in by_rank])
    ]


def timings(model: str, by_rank: list[Times]) -> list[Timing]:
    """Combine the ranks' times: a way ends when its last rank has ended."""
    seconds, cpu_seconds = {}, {}
    for way in WAYS:
        turns = list(zip(*(times[way] for times in by_rank), strict=True))
        seconds[way] = [max(wall for wall, _ in ranks) for ranks in turns]
        cpu_seconds[way] = [sum(cpu for _, cpu in ranks) for ranks in turns]
    alone = seconds[WAYS[0]]
    return [
        Timing(
            model=model,
            way=way,
            seconds=median(seconds[way]),
            cpu_seconds=median(cpu_seconds[way]),
            speed_up=median(a / b for a, b in zip(alone, seconds[way], strict=True)),
        )
        for way in WAYS
    ]


# ---- on the ranks --------------------------------------------------------------------


@torch.no_grad()
def measure(turns: int) -> dict[str, Times]:
    """Run all models in all ways; return this rank's times for each model."""
    result = {}
    for name, (build, rows) in MODELS.items():
        torch.manual_seed(0)
        model = build()
        replicas = here().topology.world_size
        ways = ways_of(model, torch.randn(replicas * rows, model.width), replicas)
        times: Times = {way: [] for way in WAYS}
        for turn in range(-1, turns):  # the first turn is a warm-up
            for k in range(len(WAYS)):
                way = WAYS[(turn + k) % len(WAYS)]
                took = timed(
                    ways[way], takes_part=way == "processes" or here().rank == 0
                )
                if turn >= 0:
                    times[way].append(took)
        result[name] = times
    return result


def ways_of(model: nn.Module, batch: Tensor, replicas: int) -> dict[str, Way]:
    """Return {way: function that runs all replicas and returns their outputs}."""
    parts = batch.chunk(replicas)
    mine = parts[here().rank]
    data_parallel = DataParallel(model, [CPU] * replicas)
    calls = [((part,), {}) for part in parts]
    return {
        "one after another": lambda: [model(part) for part in parts],
        "threads": lambda: parallel_apply([model] * replicas, calls, [CPU] * replicas),
        "DataParallel": lambda: list(data_parallel(batch).chunk(replicas)),
        "processes": lambda: [model(mine)],
    }


def timed(way: Way, takes_part: bool) -> tuple[float, float]:
    """Call `way` after a barrier, if this rank takes part; return its times.

    The times are (seconds, CPU seconds of this process).
    """
    meeting().agree_now("begin")
    wall, cpu = time.perf_counter(), time.process_time()
    if takes_part:
        way()
    return time.perf_counter() - wall, time.process_time() - cpu
