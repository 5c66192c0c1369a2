"""The way to the host: bytes, and a clock for each direction; no real time passes."""

from unittest import mock

import pytest
import torch

from ddp_course.launch import Link
from ddp_course.mechanisms import host_memory
from ddp_course.mechanisms.host_memory import HostMemory, Lane


class Clock:
    """A clock that only `sleep` moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


@pytest.fixture
def clock():
    with mock.patch.object(host_memory, "time", Clock()) as clock:
        yield clock


def through_both_lanes(clock, host) -> list[float]:
    """Return the moments of arrival: two copies out, one back, and one after a rest."""
    numbers, begin, arrivals = torch.arange(250.0), clock.now, []
    for _ in range(2):
        host.to_host.copy(torch.empty(250), numbers)
    host.to_device.copy(torch.empty(500), torch.zeros(500))
    for lane in (host.to_device, host.to_host):
        lane.wait()
        arrivals.append(clock.now - begin)
    clock.sleep(10)
    host.to_host.copy(torch.empty(250), numbers)
    host.settle()
    return [*arrivals, clock.now - begin]


def test_copies_of_a_direction_wait_for_each_other_and_directions_do_not(clock):
    host = HostMemory(Link(latency=1, bandwidth=1000))  # 2 s for 1000 bytes
    assert through_both_lanes(clock, host) == pytest.approx([3, 4, 16])
    assert (host.to_device.nbytes, host.to_host.nbytes) == (2000, 3000)


def test_on_a_machine_with_gpus_that_are_not_used_none_is_started():
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "current_stream") as stream,
    ):
        HostMemory(Link()).settle()
    assert torch.cuda.is_initialized() or not stream.called


class Forgets(Lane):
    """Plant: each copy begins at once."""

    def occupy(self, nbytes):
        self.free_at = 0.0
        super().occupy(nbytes)


def test_planted_lanes_are_seen(clock):
    host = HostMemory(Link(latency=1, bandwidth=1000))
    host.to_host = Forgets(host.to_host.link)
    assert through_both_lanes(clock, host) != pytest.approx([3, 4, 16])
    host = HostMemory(Link(latency=1, bandwidth=1000))
    host.to_device = host.to_host  # plant: one lane for both directions
    assert through_both_lanes(clock, host) != pytest.approx([3, 4, 16])


def test_without_a_link_nothing_waits_and_numbers_arrive(clock):
    host, numbers = HostMemory(), torch.arange(6.0)
    home = host.empty_like(numbers)
    host.to_host.copy(home, numbers)
    host.settle()
    assert clock.now == 100.0 and torch.equal(home, numbers)
    assert home.device.type == "cpu" and home.dtype == numbers.dtype
