"""What a step of stage 3 does, unit by unit: a schedule as data, and drawn. Chapter 08.

A unit is a part of the model that is gathered, used and freed as one: a block of the
GPT. Times are in the schedule's own measure, a unit's forward being 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.kinds import room
from ddp_course.lab.draw.steps import count
from ddp_course.lab.palette import (
    INK,
    MUTED,
    WHOLE,
    darker,
    lighter,
    rank_color,
    text_color,
)

BACKWARD, UPDATE = 1.6, 0.9  # how long, if a unit's forward takes 1
LANES = ("all-gather", "compute", "reduce-scatter", "whole in memory")
MARGIN, NAME_W, WIDE, LANE, LANE_GAP, THIN = 16, 116, 800, 26, 8, 16
MOST_UNITS = 8


@dataclass(frozen=True)
class UnitOp:
    """Something that happens to a unit, from start to end, in a lane of `LANES`.

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
    """Return the operations of a rank's step, by their start; one message at a time.

    A message (an all-gather or a reduce-scatter of a unit) takes the time `message`.
    When a unit begins to compute, the all-gathers of the `prefetch` units after it have
    been launched. Raises ValueError for less than one unit, a negative prefetch and a
    message that takes no time. Chapter 08.
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
    """A rank's clocks: when it computes next, when the network is free again."""

    def __init__(self, message: float) -> None:
        self.message = message
        self.now = self.network = 0.0
        self.ops: list[UnitOp] = []
        self.whole: dict[int, tuple[float, float]] = {}  # unit -> launched, there

    def send(self, op: str, unit: int, launched: float) -> float:
        """Send a message as soon as the network is free; return when it has arrived."""
        start = max(launched, self.network)
        self.network = start + self.message
        self.ops.append(UnitOp(op, op, unit, start, self.network))
        return self.network

    def gather(self, units: Sequence[int]) -> None:
        """Launch the all-gathers of those units that are not whole, nor on the way."""
        for unit in units:
            if unit not in self.whole:
                there = self.send("all-gather", unit, self.now)
                self.whole[unit] = self.now, there

    def compute(self, op: str, unit: int, time: float) -> None:
        """Compute, once the unit is there."""
        start = max(self.now, self.whole.get(unit, (0, 0))[1])
        self.now = start + time
        self.ops.append(UnitOp("compute", op, unit, start, self.now))

    def free(self, unit: int) -> None:
        """Free the unit: what it was whole for is an operation, too."""
        launched, _ = self.whole.pop(unit)
        self.ops.append(UnitOp("whole in memory", "whole", unit, launched, self.now))


def most_whole(ops: Sequence[UnitOp]) -> int:
    """Return how many units are whole in memory at the same time, at most."""
    whole = [op for op in ops if op.op == "whole"]
    return max(sum(a.start <= op.start < a.end for a in whole) for op in whole)


def draw_schedule(d: Drawing, ops: Sequence[UnitOp], scale: float) -> float:
    """Draw the four lanes with (0, 0) at the top left; return the height.

    `scale` is in pixels for a unit's forward.
    """
    y, color = 0.0, rank_color(0)
    for lane in LANES[:3]:
        d.text(0, y + LANE / 2 + 4, lane, size=12, anchor="start")
        for op in (op for op in ops if op.lane == lane):
            x, wide = NAME_W + op.start * scale, (op.end - op.start) * scale
            if lane != "compute":
                _message(d, x, y, wide, f"{op.unit}", color)
                continue
            fill = lighter(color) if op.op == "backward" else color
            short = {"forward": "fwd", "backward": "bwd"}.get(op.op)
            names = (f"{op.op} {op.unit}", f"{short} {op.unit}", f"{op.unit}")
            names = ("update", "upd.") if op.op == "update" else names
            said = [n for n in names if room(n, 11, True) < wide - 2][:1]
            d.rect(x, y, wide, LANE, fill=fill, stroke=darker(fill))
            for name in said:
                middle, ink = x + wide / 2, text_color(fill)
                d.text(middle, y + LANE / 2 + 4, name, size=11, bold=True, fill=ink)
        y += LANE + LANE_GAP
    d.text(0, y + LANE / 2 + 4, LANES[3], size=12, anchor="start")
    lines = _lines([op for op in ops if op.op == "whole"])
    for line in lines:
        for op in line:
            x, wide = NAME_W + op.start * scale, (op.end - op.start) * scale
            d.rect(x, y, wide, THIN, fill=WHOLE, stroke=darker(WHOLE))
            d.text(x + wide / 2, y + THIN - 4, f"unit {op.unit}" if wide > 46 else
                   f"{op.unit}", size=11)  # fmt: skip
        y += THIN + 2
    return y


def _message(
    d: Drawing, x: float, y: float, wide: float, name: str, color: str
) -> None:
    """Draw a message, hatched, and whose it is."""
    d.rect(x, y, wide, LANE, fill="#FFFFFF", stroke=darker(color))
    d.hatch(x, y, wide, LANE, stroke=color)
    if wide > 24:
        d.rect(x + wide / 2 - 8, y + 4, 16, LANE - 8, fill="#FFFFFF", stroke="none")
        d.text(x + wide / 2, y + LANE / 2 + 4, name, size=11, bold=True)


def _lines(ops: Sequence[UnitOp]) -> list[list[UnitOp]]:
    """Lay what overlaps in time on different lines."""
    lines: list[list[UnitOp]] = []
    for op in sorted(ops, key=lambda op: op.start):
        free = next((line for line in lines if line[-1].end <= op.start + 1e-9), None)
        if free is None:
            lines.append([op])
        else:
            free.append(op)
    return lines


def fsdp_step(
    units: int = 4,
    prefetch: int = 1,
    reshard_after_forward: bool = True,
    message: float = 0.7,
) -> Drawing:
    """Draw the schedule of a step: who is gathered, used, freed, and when. Chapter 08.

    For sliders. The arguments are those of `fsdp_schedule`.
    """
    ops = fsdp_schedule(units, prefetch, reshard_after_forward, message)
    end = max(op.end for op in ops)
    scale = WIDE / max(end, 1)
    height = draw_schedule(Drawing(1, 1, title="measured"), ops, scale)
    gathers = sum(op.op == "all-gather" for op in ops)
    idle = end - sum(op.end - op.start for op in ops if op.lane == "compute")
    told = (
        f"{gathers} all-gathers, {units} reduce-scatters; at most {most_whole(ops)} of "
        f"{units} units whole; not computing: {idle / end:.0%} of the time"
    )
    d = Drawing(
        2 * MARGIN + NAME_W + WIDE,
        height + 108,
        title=f"Stage 3, {units} units, prefetch {prefetch}"
        + ("" if reshard_after_forward else ", kept after forward"),
        description=f"{told}. In order: " + "; ".join(map(_in_words, ops)) + ".",
    )
    d.text(MARGIN, 26, d.title, size=15, bold=True, anchor="start")
    d.text(MARGIN, 48, told, size=12, anchor="start")
    with d.shifted(MARGIN, 64):
        draw_schedule(d, ops, scale)
    x, y = MARGIN + NAME_W, 64 + height + 16
    d.text(MARGIN, y + 4, "time", size=12, anchor="start")
    d.arrow((x, y), (x + WIDE, y), stroke=INK)
    words = "Rank 0's step; the others do the same. Numbers are units. Hatched: sent. "
    words += "A unit takes memory as soon as its all-gather is launched."
    d.text(x, y + 19, words, size=11, anchor="start", fill=MUTED)
    return d


def _in_words(op: UnitOp) -> str:
    what = "update" if op.op == "update" else f"{op.op} {op.unit}"
    return f"{what} from {op.start:.1f} to {op.end:.1f}"
