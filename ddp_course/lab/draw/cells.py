"""One chunk of one rank's buffer, drawn: whose numbers are in it.

A chunk that holds one rank's numbers is a block in that rank's colour. A chunk in which
numbers of several ranks are added up is a stack of such blocks: beside each other are
different places of the buffer, above each other is a sum. Used by `buffers`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from ddp_course.collectives.plan import Contributions, Plan, simulate
from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.palette import PANEL_EDGE, rank_color

MOST_RANKS, MOST_CHUNKS = 8, 64
LAYER, INSET = 13, 2  # height of a block in a stack, and the white around the stack
HALO = 4  # the hatched frame of what travels


@dataclass(frozen=True)
class Look:
    """How large the chunks of a plan are drawn, and how many blocks one has room for.

    Attributes:
        width, height: of a chunk, in pixels.
        across, down: how many blocks stand beside and above each other in a stack.
    """

    width: float
    height: float
    across: int
    down: int

    @property
    def adds(self) -> bool:
        """Whether the numbers of several ranks may come together in a chunk."""
        return self.across * self.down > 1


def look_of(plan: Plan, buffer_width: float, least_height: float = 24) -> Look:
    """Choose the size of a chunk, so that a whole buffer is about `buffer_width` wide.

    Raises ValueError for a plan that has more ranks or chunks than can be drawn.
    """
    if plan.world_size > MOST_RANKS or plan.chunks > MOST_CHUNKS:
        raise ValueError(
            f"{plan.name} has {plan.world_size} ranks and {plan.chunks} chunks; it can "
            f"be drawn for up to {MOST_RANKS} ranks and {MOST_CHUNKS} chunks"
        )
    pairs = [has for state in simulate(plan) for chunks in state for has in chunks]
    often = max((n for has in pairs for n in Counter(has).values()), default=1)
    many = any(len(has) > 1 for has in pairs)
    across = (1 if plan.world_size <= 4 else 2) if many else 1
    down = math.ceil(plan.world_size / across) if many else 1
    slot = 16 if across == 1 else 15
    if often > 1:
        slot = 34  # room for "0×2"
    width = max(across * slot + 2 * INSET, buffer_width / whole_buffer(plan))
    height = max(least_height, down * LAYER + 2 * INSET if many else 0)
    return Look(width, height, across, down)


def whole_buffer(plan: Plan) -> int:
    """Return how many chunks the whole buffer has, which the bytes are compared to.

    It is what a rank has at the start or at the end, whichever is more: in an
    all_to_all of n ranks there are n * n chunks, of which each rank has n.
    """
    return max(1, *map(len, plan.start), *map(len, plan.end))


def complete(plan: Plan, chunk: int) -> Contributions:
    """Return the ranks whose numbers belong into a chunk, sorted."""
    return tuple(rank for rank, has in enumerate(plan.start) if chunk in has)


def draw_cell(
    d: Drawing,
    x: float,
    y: float,
    look: Look,
    has: Contributions,
    *,
    whole: bool = False,
    label: str = "",
) -> None:
    """Draw a chunk that holds the numbers of the ranks `has`, framed if `whole`.

    A chunk with one rank's numbers may bear a `label` in place of the rank's number.
    """
    w, h = look.width, look.height
    d.rect(x, y, w, h, fill="#FFFFFF", stroke=PANEL_EDGE)
    if not look.adds:
        for rank in has[:1]:
            color = rank_color(rank)
            d.block(x, y, w, h, label or f"{rank}", fill=color, size=12, radius=0)
        return
    slot_w, slot_h = (w - 2 * INSET) / look.across, (h - 2 * INSET) / look.down
    for rank, often in Counter(has).items():
        across, down = divmod(rank, look.down)
        at = x + INSET + across * slot_w, y + INSET + down * slot_h
        words = f"{rank}" if often == 1 else f"{rank}×{often}"
        fill = rank_color(rank)
        d.block(*at, slot_w, slot_h, words, fill=fill, size=11, radius=0)
    if whole:
        d.rect(x, y, w, h, stroke_width=2.5)


def draw_halo(d: Drawing, x: float, y: float, width: float, height: float) -> None:
    """Hatch a frame around something that travels; draw it before the thing itself."""
    x, y, width, height = x - HALO, y - HALO, width + 2 * HALO, height + 2 * HALO
    d.hatch(x, y, width, height)
    d.rect(x, y, width, height)
