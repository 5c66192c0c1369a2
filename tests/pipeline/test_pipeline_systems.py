"""A pipeline sends what it must, keeps what it must, and is idle as predicted."""

from __future__ import annotations

import gc
import os
import time
import weakref
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from pipeline_cases import (
    GPT_TIED,
    ROWS,
    TOKENS,
    PipelineParallel,
    batch,
    mse,
    tied,
    untied,
)
from torch import nn

from ddp_course.collectives.one_machine import has_ended
from ddp_course.launch import RankError, calls, spawn
from ddp_course.launch import rank as launched
from ddp_course.measure import ByteMeter, EventLog, MemoryLog, SystemBytes, resident
from ddp_course.pipeline import (
    SCHEDULES,
    Action,
    Costs,
    PipelineRecorder,
    SleepingLayer,
    VirtualTime,
    bubble,
    simulate_schedule,
)

ACTIVATIONS = ROWS * TOKENS * GPT_TIED.d_model * 4  # bytes of a whole batch
TIED = GPT_TIED.vocab_size * GPT_TIED.d_model * 4


# ---- bytes and messages --------------------------------------------------------------


def traffic(schedule: str, m: int, make=untied):
    pipeline = PipelineParallel(make(), schedule, m)
    pipeline.step(*batch(0))  # and one row ahead of it
    with ByteMeter() as meter:
        pipeline.step(*batch(1))
    own = sum(p.numel() for p in pipeline.parameters())
    return meter.report(), own, resident(pipeline)["parameters"]


def all_traffic() -> dict:
    return {
        case: traffic(*case)
        for case in [("naive", 1), ("1f1b", 3), ("interleaved", 5), ("zero_bubble", 4)]
    } | {
        "tied": traffic("gpipe", 3, tied),
        "fake": everything_on_every_rank(),
        "outside": seen_from_outside(),
    }


def seen_from_outside() -> int:
    """Return how many bytes more the operating system saw than the meter."""
    pipeline = PipelineParallel(untied(), "1f1b", 2)
    big = [t.repeat(40, 1) for t in batch(0)]
    pipeline.step(*big)
    dist.barrier()
    with SystemBytes() as system, ByteMeter() as meter:
        pipeline.step(*big)
        dist.barrier()
    return system.written - meter.total_sent


def everything_on_every_rank():
    """The right numbers, without any pipeline."""
    model = untied()
    with ByteMeter() as meter:
        for x, y in zip(*(t.chunk(4) for t in batch(1)), strict=True):
            (model(x, y)[1] / 4).backward()
    numel = sum(p.numel() for p in model.parameters())
    return meter.report(), numel, resident(model)["parameters"]


def predicted(schedule, p: int) -> list[dict[int, tuple[int, int]]]:
    """Return for each rank: peer -> bytes and messages to it."""
    name, m = schedule
    stages = SCHEDULES[name](p, m).num_stages
    results: list[dict[int, tuple[int, int]]] = [{} for _ in range(p)]
    for a, b in pairwise(s % p for s in range(stages)):
        for src, dst in ((a, b), (b, a)):
            nbytes, messages = results[src].get(dst, (0, 0))
            results[src][dst] = nbytes + ACTIVATIONS, messages + m
    return results


def test_bytes_and_messages_are_those_of_the_boundaries():
    p = 3
    ranks = spawn(all_traffic, world_size=p, output="none", timeout=100)
    numel = sum(parameter.numel() for parameter in untied().parameters())
    for rank in ranks:  # gloo's headers, the loss, the barrier
        assert 0 <= rank.pop("outside") < 2000 * (p - 1)
    for case in ranks[0]:
        reports = [rank[case][0] for rank in ranks]
        sent = [{k: (r.sent[k], r.messages[k]) for k in r.sent} for r in reports]
        right = case != "fake" and sent == predicted(
            ("gpipe", 3) if case == "tied" else case, p
        )
        if case == "tied":  # and the two halves of a gradient cross
            right = predicted(("gpipe", 3), p)
            for src, dst in ((0, p - 1), (p - 1, 0)):
                nbytes, messages = right[src].get(dst, (0, 0))
                right[src][dst] = nbytes + TIED, messages + 1
            assert sent == right
            continue
        peaks = [rank[case][1] for rank in ranks]
        kept = [rank[case][2] for rank in ranks]
        assert kept == [4 * n for n in peaks]
        assert right == (sum(peaks) == numel) == (case != "fake"), case


# ---- what was done, and what was kept ------------------------------------------------


class Count:
    """Of how many microbatches the layers of a rank keep activations."""

    alive = peak = 0

    def one_more(self) -> None:
        self.alive += 1
        self.peak = max(self.peak, self.alive)

    def one_less(self) -> None:
        self.alive -= 1


class Counted(nn.Module):
    """A linear layer, which keeps its input until it has its weights' gradient."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(3, 3), count

    def forward(self, x):
        x = x * 1.0
        if torch.is_grad_enabled():
            self.count.one_more()
            weakref.finalize(x, self.count.one_less)
        return torch.tanh(self.linear(x))


def done_and_kept(m: int) -> dict:
    results, p = {}, dist.get_world_size()
    gc.disable()  # so that all is dropped when it should be, not when it may be
    for name in SCHEDULES:
        stages, count = SCHEDULES[name](p, m).num_stages, Count()
        model = nn.Sequential(*(Counted(count) for _ in range(stages)))
        pipeline = PipelineParallel(
            model, name, m, loss_fn=mse, recorder=PipelineRecorder()
        )
        x = torch.ones(m, 3)
        pipeline.step(x, x)
        assert count.alive == 0
        count.peak = 0
        with EventLog() as log:
            pipeline.step(x, x)
        order = [
            f"{e.detail['stage']}{e.op}{e.detail['microbatch']}"
            for e in log.events
            if e.lane == "compute"
        ]
        mine = pipeline.schedule.ranks[dist.get_rank()]
        results[name] = order == list(map(str, mine)), Fraction(count.peak * p, stages)
    return results


@pytest.mark.parametrize(("p", "m"), [(3, 5), (4, 2)])
def test_ranks_do_what_the_schedule_says_and_keep_no_more(p, m):
    results = spawn(done_and_kept, m, world_size=p, output="none")
    for name in SCHEDULES:
        assert all(rank[name][0] for rank in results), name
        peaks = [rank[name][1] for rank in results]
        assert peaks == list(
            simulate_schedule(SCHEDULES[name](p, m)).peak_activations
        ), name
    assert [rank["gpipe"][1] for rank in results] == [m] * p
    assert [rank["1f1b"][1] for rank in results] == [min(m, p - r) for r in range(p)]


def peaks() -> dict[tuple[str, bool], int]:
    """Return the most bytes of activations in a step, by schedule and recompute."""
    results = {}
    for schedule in ("gpipe", "1f1b"):
        for again in (False, True):
            pipeline = PipelineParallel(untied(), schedule, 8, recompute=again)
            x, y = (t.repeat(8, 1) for t in batch(0))
            pipeline.step(x, y)
            with MemoryLog(pipeline) as log:
                pipeline.step(x, y)
            results[schedule, again] = max(
                moment.ledger["activations"] for moment in log.moments
            )
    return results


def test_bytes_of_activations_follow_the_schedule_and_recomputation():
    first, last = spawn(peaks, world_size=2, output="none")
    # The first rank keeps 8 microbatches or 2, the last one 8 or 1.
    assert 3 < first["gpipe", False] / first["1f1b", False] < 4.5
    assert 5 < last["gpipe", False] / last["1f1b", False] < 8.5
    for rank in (first, last):
        assert rank["gpipe", True] < 0.4 * rank["gpipe", False]


# ---- in time ------------------------------------------------------------------------

UNIT = 0.01  # seconds of F, of I and of W in all stages of a rank


def waited(m: int) -> dict:
    """Return the events of a step of each schedule, and when it began and ended."""
    results, p = {}, dist.get_world_size()
    for name in SCHEDULES:
        stages = SCHEDULES[name](p, m).num_stages
        each = UNIT * p / stages
        model = nn.Sequential(*(SleepingLayer(each, each, each) for _ in range(stages)))
        pipeline = PipelineParallel(
            model, name, m, loss_fn=mse, recorder=PipelineRecorder()
        )
        x = torch.ones(m, 1)
        pipeline.step(x, x)
        with EventLog() as log:
            pipeline.step(x, x)
        results[name] = [e for e in log.events if e.lane == "compute"]
    return results


def test_events_are_in_the_order_that_was_simulated_and_never_shorter():
    """How near the bubbles come, `ddp-course bench pp` measures on a quiet machine."""
    p, m = 3, 4
    results = spawn(waited, m, world_size=p, output="none")
    for name in SCHEDULES:
        schedule, events = SCHEDULES[name](p, m), {}
        for rank, its in enumerate(results):
            done = [Action(e.op, *map(e.detail.get, WHICH)) for e in its[name]]
            assert tuple(done) == schedule.ranks[rank], name
            events |= dict(zip(done, its[name], strict=True))
        stages_of_a_rank = schedule.num_stages // p
        for action, event in events.items():
            least = Costs().of(action) * UNIT / stages_of_a_rank
            assert event.end - event.start >= 0.99 * least
            for need in schedule.needs(action):
                assert events[need].end <= event.start, (name, action, need)
        span = max(e.end for e in events.values())
        span -= min(e.start for e in events.values())
        found = simulate_schedule(schedule).makespan / stages_of_a_rank
        assert span >= 0.99 * UNIT * found, name


WHICH = "stage", "microbatch"


def on_a_virtual_clock() -> list:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4))
    )
    pipeline = PipelineParallel(model, "1f1b", 4, loss_fn=mse, recorder=VirtualTime())
    x = torch.ones(2048, 256)
    pipeline.step(x, x)
    with EventLog() as log, ByteMeter() as meter:
        pipeline.step(x, x)
    return [log.events, meter.report()]


def test_with_real_compute_on_a_virtual_clock():
    results = spawn(on_a_virtual_clock, world_size=4, output="none")
    share = bubble(event for events, _ in results for event in events)
    assert 0.2 < share < 0.8  # 3/7 where all stages take equally long
    messages = [report.total_messages for _, report in results]
    assert messages == [8, 16, 16, 8]  # each is followed by one with the time


# ---- how a rank leaves ---------------------------------------------------------------


def first_stage_is_late(plant: bool) -> float:
    """Let the first rank come to the loss when the last one has long returned.

    With the plant, when its process has ended.
    """
    launched.STAY = 0.0  # as if the machine were much slower
    if plant:
        calls.finish = lambda: None
    processes = [None, None]
    dist.all_gather_object(processes, os.getpid())
    pipeline = PipelineParallel(untied(), "1f1b", 2)
    take_loss = pipeline._loss_of

    def late(run):
        time.sleep(0.5)
        while plant and not has_ended(processes[1]):
            time.sleep(0.01)
        return take_loss(run)

    if dist.get_rank() == 0:
        pipeline._loss_of = late
    return pipeline.step(*batch(0)).item()


def test_a_last_stage_that_returns_early_still_sends_its_loss():
    first, last = spawn(first_stage_is_late, False, world_size=2)
    assert first == last
    with pytest.raises(RankError, match="rank 1 returned while rank 0 still wanted"):
        spawn(first_stage_is_late, True, world_size=2)
