"""Models that compute for a while on no core, and an engine that is late."""

import time

import torch
from torch import nn

from ddp_course.measure import Event, EventLog
from ddp_course.measure.blocks import active_logs
from ddp_course.mechanisms.engine import Engine

SLEEP = 0.03
LONGEST = 30.0  # seconds to wait for a message; only one that never ends takes so long


class Sleep(torch.autograd.Function):
    """Gives its input on, and takes `forward` and `backward` seconds."""

    @staticmethod
    def forward(ctx, x, forward: float, backward: float):
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None, None


class SleepInBackward(torch.autograd.Function):
    """Gives its input on; backward takes SLEEP seconds, and until messages have ended.

    So a message that is sent beside backward overlaps with it, however late another
    rank is, or the thread that sends.
    """

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(SLEEP)
        wait_for_messages()
        now = time.perf_counter()
        for log in active_logs():
            log.add("slept", now, now)
        return gradient


def wait_for_messages() -> None:
    """Wait until all messages have ended that were launched while a log was open."""
    latest = time.monotonic() + LONGEST
    while any(map(is_sending, active_logs())) and time.monotonic() < latest:
        time.sleep(0.001)


def is_sending(log: EventLog) -> bool:
    """Tell whether more messages have been launched than have ended."""
    lanes = [event.lane for event in log.events]
    return lanes.count("launch") > lanes.count("communication")


class Sleeping(nn.Module):
    """Layers that compute for SLEEP seconds or more each in backward."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = SleepInBackward.apply(layer(x))
        return x


def send_after_backward(engine: Engine) -> None:
    """Let everything be sent when backward has ended, in the same buckets."""
    launch, ended = engine._launch_full, engine._end_backward
    engine._launch_full = lambda: None

    def at_the_end():
        engine._launch_full = launch
        ended()
        engine._launch_full = lambda: None

    engine._end_backward = at_the_end


def launched_early(events: list[Event]) -> int:
    """Return how many messages were launched before the last layer's sleep ended.

    Where the thread that computes records its launches, they count: on a busy machine
    the message itself may start late.
    """
    last = max(e.end for e in events if e.op == "slept")
    launches = [e for e in events if e.lane == "launch"]
    messages = [e for e in events if e.lane == "communication"]
    return sum(e.start < last for e in launches or messages)


def check_phases(events: list[Event], order: list[int]) -> list[Event]:
    """Assert that buckets are sent in this order, each when it is full.

    Returns the events of computing.
    """
    launches = [e for e in events if e.lane == "launch"]
    computed = [e for e in events if e.lane == "compute" and "bucket" in e.detail]
    assert [e.detail["bucket"] for e in launches] == order
    for launch, ready in zip(launches, computed, strict=True):
        assert launch.start >= ready.end
    return computed
