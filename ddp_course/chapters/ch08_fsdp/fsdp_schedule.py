"""The schedule of a step of stage 3: as data, and as a drawing. Chapter 08.

A unit is a part of the model that is gathered, used and freed as one: a block of the
GPT. The unit of time is the forward of a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.lanes import Block, Lane, Run, draw_runs
from ddp_course.lab.draw.steps import count

BACKWARD, UPDATE = 1.6, 0.9  # durations; a unit's forward takes 1
LANES = ("all-gather", "compute", "reduce-scatter", "whole in memory")
SHORT = {"forward": "fwd", "backward": "bwd", "update": "upd."}
NAME_W, MOST_UNITS = 116, 8
FOOT = "Rank 0; numbers are units. Lighter: backward; hatched: sent; dotted: in memory."


@dataclass(frozen=True)
class UnitOp:
    """An operation on a unit, from `start` to `end`, in a lane of `LANES`.

    `op` is "all-gather", "forward", "backward", "reduce-scatter", "update" or "whole",
    which means: all of the unit's parameters are in this rank's memory.
    """

    lane: str
    op: str
    unit: int
    start: float
    end: float


def fsdp_schedule(
    units: int = 4,
    prefetch: int = 1,
    reshard_after_forward: bool = True,
    message: float = 0.7,
) -> list[UnitOp]:
    """Return the operations of a rank's step, sorted by their start.

    A message (an all-gather or a reduce-scatter of a unit) takes the time `message`;
    one message is sent at a time. When a unit begins to compute, the all-gathers of the
    next `prefetch` units have been launched. Raises ValueError for numbers of units or
    prefetches out of range, and unless 0 < message <= 4. Chapter 08.
    """
    count("units", units, 1, MOST_UNITS)
    count("prefetch", prefetch, 0, MOST_UNITS)
    if not 0 < message <= 4:
        raise ValueError(f"message is {message!r}; it must be above 0 and at most 4")
    step = _Step(message)
    forward, backward = list(range(units)), list(range(units))[::-1]
    for k, unit in enumerate(forward):
        step.gather(forward[k : k + 1 + prefetch])
        step.compute("forward", unit, 1.0)
        if reshard_after_forward:
            step.free(unit)
    for k, unit in enumerate(backward):
        step.gather(backward[k : k + 1 + prefetch])
        step.compute("backward", unit, BACKWARD)
        step.free(unit)
        step.send("reduce-scatter", unit, step.now)
    step.now = max(step.now, step.network)
    step.compute("update", -1, UPDATE)
    return sorted(step.ops, key=lambda op: (op.start, LANES.index(op.lane)))


class _Step:
    """A rank's clocks: when it can compute next, when its network is free again."""

    def __init__(self, message: float) -> None:
        self.message = message
        self.now = self.network = 0.0
        self.ops: list[UnitOp] = []
        self.whole: dict[int, tuple[float, float]] = {}  # unit -> launch, arrival

    def send(self, op: str, unit: int, launched: float) -> float:
        """Send a message as soon as the network is free; return when it has arrived."""
        start = max(launched, self.network)
        self.network = start + self.message
        self.ops.append(UnitOp(op, op, unit, start, self.network))
        return self.network

    def gather(self, units: Sequence[int]) -> None:
        """Launch the all-gathers of units that are neither whole nor on the way."""
        for unit in units:
            if unit not in self.whole:
                arrival = self.send("all-gather", unit, self.now)
                self.whole[unit] = self.now, arrival

    def compute(self, op: str, unit: int, time: float) -> None:
        """Compute `op` for the time `time`, as soon as the unit has arrived."""
        start = max(self.now, self.whole.get(unit, (0, 0))[1])
        self.now = start + time
        self.ops.append(UnitOp("compute", op, unit, start, self.now))

    def free(self, unit: int) -> None:
        """Free the unit; add an event for the time in which it was gathered."""
        launched, _ = self.whole.pop(unit)
        self.ops.append(UnitOp("whole in memory", "whole", unit, launched, self.now))


def most_whole(ops: Sequence[UnitOp]) -> int:
    """Return the largest number of units that are gathered at the same time."""
    whole = [op for op in ops if op.op == "whole"]
    return max(sum(a.start <= op.start < a.end for a in whole) for op in whole)


def lanes_of(ops: Sequence[UnitOp]) -> list[Lane]:
    """Return rank 0's lanes; units gathered at the same time have separate lanes.

    A unit takes memory as soon as its all-gather is launched.
    """
    lanes = [
        Lane(name, 0, [_block(op) for op in ops if op.lane == name], boxed=False)
        for name in LANES[:3]
    ]
    whole: list[list[UnitOp]] = []
    whole_ops = [op for op in ops if op.op == "whole"]
    for op in sorted(whole_ops, key=lambda op: (op.start, op.unit)):
        free = next((line for line in whole if line[-1].end <= op.start + 1e-9), None)
        if free is None:
            whole.append(free := [])
        free.append(op)
    names = [LANES[3], *["also in memory"] * len(whole)]
    return lanes + [
        Lane(name, 0, [_block(op) for op in line], boxed=False)
        for name, line in zip(names, whole, strict=False)
    ]


def _block(op: UnitOp) -> Block:
    sent = op.op in ("all-gather", "reduce-scatter")
    look = "sent" if sent else {"backward": "B", "whole": "W"}.get(op.op, "F")
    names = (f"{op.op} {op.unit}", f"{SHORT.get(op.op, op.op)} {op.unit}", f"{op.unit}")
    names = (f"unit {op.unit}", f"{op.unit}") if op.op == "whole" else names
    names = (f"{op.unit}",) if sent else ("update", "upd.") if op.unit < 0 else names
    return Block(op.start, op.end, look, names)


def fsdp_step(
    units: int = 4,
    prefetch: int = 1,
    reshard_after_forward: bool = True,
    message: float = 0.7,
) -> Drawing:
    """Draw when each unit is gathered, used and freed in a step. Chapter 08.

    For sliders. The arguments are those of `fsdp_schedule`.
    """
    ops = fsdp_schedule(units, prefetch, reshard_after_forward, message)
    end = max(op.end for op in ops)
    gathers = sum(op.op == "all-gather" for op in ops)
    idle = end - sum(op.end - op.start for op in ops if op.lane == "compute")
    summary = (
        f"{gathers} all-gathers, {units} reduce-scatters; at most {most_whole(ops)} of "
        f"{units} units whole; not computing: {idle / end:.0%} of the time"
    )
    kept = "" if reshard_after_forward else ", kept after forward"
    title, runs = f"Stage 3, {units} units, prefetch {prefetch}{kept}", lanes_of(ops)
    words = {"says": summary, "foot": FOOT, "name_w": NAME_W}
    return draw_runs(title, [Run(runs)], "time [a unit's forward]", end, **words)
