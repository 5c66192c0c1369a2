"""Communication runs while backward runs: seen in the recorded events.

Nothing here depends on how fast the machine is. The layers' backward sleeps, which
takes no core, and where the link matters it is an emulated one, which waits, too.
"""

import pytest
import torch
from ddp_cases import AfterBackward, Flat, Naive, Ours
from refusals import refused
from sleeping import SLEEP, Sleeping, check_phases, launched_early
from torch import nn

from ddp_course.collectives import ring_all_reduce, shared_memory
from ddp_course.data_parallel.recorded import Recorder, record_naive, record_pytorch
from ddp_course.launch import Link, Links, spawn
from ddp_course.measure import Event, EventLog, busy, overlap

LAYERS, LATENCY = 5, 0.004
EACH = {"bucket_cap_mb": 1e-5}  # a bucket for each parameter
SLOW = Links(inside=Link(latency=LATENCY), between=Link(latency=LATENCY))


def recorded(ddp: nn.Module) -> list[Event]:
    """Return the events of the third step."""
    x = torch.ones(2, 4)
    for _ in range(2):
        ddp(x).sum().backward()
    with EventLog() as log:
        ddp(x).sum().backward()
    return log.events


def hidden(events: list[Event]) -> float:
    """Return the fraction of the communication during which backward computes."""
    assert busy(events, "communication") > 0
    return overlap(events, "compute", "communication") / busy(events, "communication")


def pytorchs() -> list[Event]:
    """Return the events of PyTorch's DDP, recorded as ours are."""
    ddp = nn.parallel.DistributedDataParallel(Sleeping(), bucket_cap_mb=1e-5)
    record_pytorch(ddp)
    return recorded(ddp)


def by_gloo() -> dict[str, list[Event]]:
    return {
        "ours": recorded(Ours(Sleeping(), **EACH)),
        "shared": recorded(
            Ours(Sleeping(), **EACH, all_reduce=shared_memory.all_reduce)
        ),
        "one bucket": recorded(Ours(Sleeping())),
        "naive": recorded(record_naive(Naive(Sleeping()))),
        "flat": recorded(record_naive(Flat(Sleeping()))),
        "fake": recorded(AfterBackward(Sleeping(), **EACH)),
        "pytorch": pytorchs(),
    }


def by_slow_ring() -> dict[str, list[Event]]:
    return {
        "ours": recorded(Ours(Sleeping(), **EACH, all_reduce=ring_all_reduce)),
        "naive": recorded(record_naive(Naive(Sleeping(), all_reduce=ring_all_reduce))),
        "fake": recorded(AfterBackward(Sleeping(), **EACH, all_reduce=ring_all_reduce)),
    }


def test_communication_is_hidden_behind_backward():
    buckets = ("ours", "shared", "pytorch")
    for _ in range(3):  # on a busy machine one rank can be late for every message
        results = spawn(by_gloo, world_size=2, output="none")
        if all(hidden(rank[name]) > 0 for rank in results for name in buckets):
            break
    for rank in results:
        for name in buckets:
            assert hidden(rank[name]) > 0, name
        for name in ("naive", "flat", "fake"):
            assert hidden(rank[name]) == 0, name
        # Counted in buckets, whose time does not matter: at least as many as PyTorch.
        assert launched_early(rank["ours"]) == LAYERS - 1
        assert launched_early(rank["ours"]) >= launched_early(rank["pytorch"]) > 0
        for name in ("naive", "flat", "one bucket", "fake"):
            assert launched_early(rank[name]) == 0, name


def test_a_slow_link_is_hidden_the_fakes_are_not_and_the_events_tell_the_phases():
    results = spawn(by_slow_ring, world_size=3, links=SLOW, output="none")
    for rank in results:
        # 4 steps of the ring take 16 ms, less than the 30 ms of a layer's backward: all
        # but the last can be hidden. How many are, a busy machine decides.
        assert busy(rank["ours"], "communication") > LAYERS * 4 * LATENCY
        assert hidden(rank["ours"]) > 0
        assert hidden(rank["naive"]) == hidden(rank["fake"]) == 0
    events = results[0]["ours"]
    computed = check_phases(events, list(range(LAYERS)))
    (wait,) = (e for e in events if e.lane == "wait")
    assert [e.detail["bucket"] for e in computed] == list(range(LAYERS))
    assert all(e.seconds >= SLEEP for e in computed)
    assert all(e.end <= wait.start for e in computed)


def test_after_a_pass_that_failed_the_next_one_is_recorded():
    model = nn.Linear(2, 2)
    Recorder(model)
    output = model(torch.ones(1, 2))
    output.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    with EventLog() as log:
        model(torch.ones(1, 2)).sum().backward()
    assert [event.op for event in log.events] == ["backward", "wait"]


test_another_wrapper_is_not_recorded = refused(
    (lambda: record_naive(nn.Linear(2, 2)), "ddp is a Linear; it must be a NaiveDist"),
    (lambda: record_pytorch(nn.Linear(2, 2)), "linear.Linear; it must be PyTorch's Di"),
)
