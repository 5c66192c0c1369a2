"""DDP, ZeRO-1 and ZeRO-2: what each of four ranks stores. Chapter 07."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.palette import MUTED, PANEL_EDGE, WHOLE, darker, rank_color

RANKS, MARGIN, NAME_W = 4, 16, 26
CELL, ROW, ROW_GAP, GROUP_GAP, PANEL_GAP, TOP = 11, 26, 8, 10, 14, 108
GROUPS = (("parameters", 4), ("gradients", 4), ("optimizer states", 8))  # bytes, fp32


@dataclass(frozen=True)
class Stage:
    """A ZeRO stage; `sharded` has the kinds of memory that are cut into N parts."""

    name: str
    says: str
    sharded: tuple[str, ...]

    @property
    def nbytes(self) -> Fraction:
        """Bytes per parameter that each of four ranks stores, in fp32 with Adam."""
        return sum(
            (Fraction(n, RANKS if name in self.sharded else 1) for name, n in GROUPS),
            Fraction(0),
        )


ZERO_STAGES = (
    Stage("DDP", "everything, on every rank", ()),
    Stage("ZeRO-1", "optimizer states are sharded", ("optimizer states",)),
    Stage("ZeRO-2", "gradients, too", ("gradients", "optimizer states")),
)


def zero_stages() -> Drawing:
    """Draw what four ranks store with DDP, ZeRO-1 and ZeRO-2. Chapter 07."""
    wide = NAME_W + sum(n for _, n in GROUPS) * CELL + 2 * GROUP_GAP
    high = RANKS * (ROW + ROW_GAP)
    d = Drawing(
        2 * MARGIN + 3 * wide + 2 * PANEL_GAP,
        TOP + high + 84,
        title="What every rank stores: DDP, ZeRO-1, ZeRO-2",
        description="Four ranks, a row each. DDP: each rank stores all parameters, "
        "gradients and optimizer states, 16 bytes for every parameter of the model. "
        "ZeRO-1: each rank stores only its own quarter of the optimizer states, 10 "
        "bytes. ZeRO-2: and only its own quarter of the gradients, 7 bytes.",
    )
    d.text(MARGIN, 26, d.title, size=15, bold=True, anchor="start")
    for i, stage in enumerate(ZERO_STAGES):
        with d.shifted(MARGIN + i * (wide + PANEL_GAP), 0):
            _draw_stage(d, stage, wide, high)
    _draw_legend(d, TOP + high + 52)
    return d


def _draw_stage(d: Drawing, stage: Stage, wide: float, high: float) -> None:
    d.text(NAME_W, 56, stage.name, size=14, bold=True, anchor="start")
    d.text(NAME_W, 74, stage.says, size=12, anchor="start", fill=MUTED)
    x = float(NAME_W)
    for name, nbytes in GROUPS:
        group = nbytes * CELL
        sharded = name in stage.sharded
        label = "grad." if name == "gradients" else "param."
        label = "opt. states" if name == "optimizer states" else label
        d.text(x + group / 2, TOP - 8, label, size=11)
        for rank in range(RANKS):
            with d.shifted(x, TOP + rank * (ROW + ROW_GAP)):
                _draw_group(d, rank, group, sharded)
        x += group + GROUP_GAP
    for rank in range(RANKS):
        y = TOP + rank * (ROW + ROW_GAP) + ROW / 2 - 10
        d.block(0, y, 20, 20, f"{rank}", fill=rank_color(rank), size=12)
    words = f"{_sum(stage)} bytes"
    d.text(NAME_W, TOP + high + 16, words, size=12, bold=True, anchor="start")


def _draw_group(d: Drawing, rank: int, wide: float, sharded: bool) -> None:
    """Draw a rank's part of one kind of memory: a whole copy, or a quarter."""
    if not sharded:
        d.rect(0, 0, wide, ROW, fill=WHOLE, stroke=darker(WHOLE))
        return
    d.rect(0, 0, wide, ROW, fill="#FFFFFF", stroke=PANEL_EDGE, dashed=True)
    part = wide / RANKS
    color = rank_color(rank)
    d.block(rank * part, 0, part, ROW, f"{rank}", fill=color, size=12, radius=0)


def _sum(stage: Stage) -> str:
    """Write the bytes per parameter: "4 + 4 + 8/4 = 10"."""
    terms = [f"{n}/{RANKS}" if name in stage.sharded else f"{n}" for name, n in GROUPS]
    return f"{' + '.join(terms)} = {stage.nbytes}"


def _draw_legend(d: Drawing, y: float) -> None:
    x = MARGIN + NAME_W
    d.rect(x, y - 12, 30, 16, fill=WHOLE, stroke=darker(WHOLE))
    d.text(x + 38, y, "a whole copy on every rank", size=11, anchor="start")
    d.block(x + 226, y - 12, 30, 16, "2", fill=rank_color(2), size=12, radius=0)
    d.text(x + 264, y, "rank 2's part, stored nowhere else", size=11, anchor="start")
    d.rect(x + 484, y - 12, 30, 16, fill="#FFFFFF", stroke=PANEL_EDGE, dashed=True)
    d.text(x + 522, y, "not stored", size=11, anchor="start")
    words = "Bytes are those of one parameter: fp32 with Adam, 4 + 4 + 8."
    d.text(x, y + 22, words, size=11, anchor="start", fill=MUTED)


IMAGES = {"07_zero.svg": zero_stages}
