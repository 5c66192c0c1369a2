"""Stage 3: shards of every unit, and a unit or two gathered at a time. Chapter 08."""

from __future__ import annotations

from ddp_course.chapters.ch08_fsdp.fsdp_schedule import (
    FOOT,
    NAME_W,
    fsdp_schedule,
    lanes_of,
)
from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.lanes import PLOT_W, Run, draw_runs
from ddp_course.lab.palette import MUTED, PANEL_EDGE, darker, rank_color

RANKS, UNITS = 4, 4
ROW, ROW_GAP, UNIT_GAP, TOP = 26, 8, 20, 48
HEAD = TOP + RANKS * (ROW + ROW_GAP) + 58
SAYS = ("freed again", "whole: computes", "on its way", "only shards")

IN_WORDS = (
    "Above, four ranks in forward, a row each, and four units of the model. Of "
    "every unit each rank stores its own quarter. Unit 0 was used and freed again; "
    "unit 1 is whole on all ranks, which compute with it; the other quarters of unit 2 "
    "are on their way; of unit 3 there are only shards. Below, a step of rank 0, in "
    "which at most two of these units are whole at a time."
)


def fully_sharded() -> Drawing:
    """Draw what four ranks hold in the middle of forward, and a whole step. Ch. 08."""
    ops = fsdp_schedule(UNITS)
    end, run = ops[-1].end, Run(lanes_of(ops))
    now = NAME_W + PLOT_W / end * _now(ops)

    def head(d: Drawing) -> None:
        d.description = f"{IN_WORDS} {d.description}"
        d.text(0, 0, "In the middle of forward", bold=True, anchor="start")
        _draw_ranks(d)
        words = "The whole step, on rank 0"
        d.text(0, HEAD - 36, words, bold=True, anchor="start")
        d.text(now + 6, HEAD - 20, "the moment above", size=11, anchor="start")
        d.line((now, HEAD - 28), (now, HEAD - 8 + run.height), stroke_width=1.5,
               dashed=True)  # fmt: skip

    return draw_runs(
        "Stage 3: a shard of everything, and a unit or two whole",
        [run],
        "time [a unit's forward]",
        end,
        head=(HEAD, head),
        foot=FOOT,
        name_w=NAME_W,
    )


def _now(ops: list) -> float:
    """Return a time at which unit 1 computes and unit 2 is on its way."""
    one = next(op for op in ops if op.op == "forward" and op.unit == 1)
    two = next(op for op in ops if op.op == "all-gather" and op.unit == 2)
    return (max(one.start, two.start) + min(one.end, two.end)) / 2


def _draw_ranks(d: Drawing) -> None:
    """Draw the four units of all ranks; (0, 0) is the top left corner."""
    wide = (PLOT_W - (UNITS - 1) * UNIT_GAP) / UNITS
    for unit, says in enumerate(SAYS):
        x = NAME_W + unit * (wide + UNIT_GAP)
        d.text(x, TOP - 24, f"unit {unit}", size=12, bold=True, anchor="start")
        d.text(x, TOP - 8, says, size=12, anchor="start", fill=MUTED)
        for rank in range(RANKS):
            with d.shifted(x, TOP + rank * (ROW + ROW_GAP)):
                _draw_unit(d, rank, unit, wide / RANKS)
    for rank in range(RANKS):
        y = TOP + rank * (ROW + ROW_GAP) + 1
        d.block(0, y, 56, 24, f"rank {rank}", fill=rank_color(rank), size=12)


def _draw_unit(d: Drawing, rank: int, unit: int, part: float) -> None:
    """Draw a unit as `rank` has it: a cell for each rank's quarter."""
    d.rect(0, 0, RANKS * part, ROW, fill="#FFFFFF", stroke=PANEL_EDGE, dashed=True)
    for owner in range(RANKS):
        x, color = owner * part, rank_color(owner)
        if owner == rank or unit == 1:
            d.block(x, 0, part, ROW, f"{owner}", fill=color, size=12, radius=0)
        elif unit == 2:
            d.rect(x, 0, part, ROW, fill="#FFFFFF", stroke=darker(color))
            d.hatch(x, 0, part, ROW, stroke=color)
            d.rect(x + part / 2 - 8, 4, 16, ROW - 8, fill="#FFFFFF", stroke="none")
            d.text(x + part / 2, ROW / 2 + 4, f"{owner}", size=12)


IMAGES = {"08_fsdp.svg": fully_sharded}
