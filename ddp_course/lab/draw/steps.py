"""Draw a plan step by step: all buffers after each step, and the step's messages.

`plan_step` draws one step, `plan_steps` all of them; `collective` is for sliders.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from ddp_course.collectives.catalog import PLANS
from ddp_course.collectives.plan import Plan, Transfer
from ddp_course.lab.draw.drawing import ROOM, Drawing
from ddp_course.lab.draw.grid import (
    HALO,
    MOST_RANKS,
    Buffers,
    Grid,
    draw_halo,
    layout,
    whole_buffer,
)
from ddp_course.lab.draw.kinds import counted
from ddp_course.lab.palette import MUTED, PANEL_EDGE, rank_color
from ddp_course.theory.checks import check_choice

MARGIN, TOP = 16, 66
NAME_W, SMALL_NAME_W, SENT_W = 66, 30, 84  # widths of the ranks' names and bytes
PANEL_TOP, PANEL_GAP = 20, 20


def collective(
    name: str = "all_reduce, ring", world_size: int = 4, step: int = 1
) -> Drawing:
    """Draw the plan `name` of the catalog among `world_size` ranks after `step` steps.

    Raises ValueError for an unknown name, a world_size outside 1 to 8 and a negative
    step.
    """
    return plan_step(plan_named(name, world_size), step)


def plan_steps(plan: Plan) -> Drawing:
    """Draw all steps of `plan` in a table with as many columns as fit.

    Raises ValueError if there are too many ranks or chunks to draw.
    """
    panels = [panel(plan, step) for step in range(plan.steps + 1)]
    w, h = panels[0].width + PANEL_GAP, panels[0].height + PANEL_GAP
    fit = max(1, int((ROOM - 2 * MARGIN + PANEL_GAP) // w))
    columns = min(fit, len(panels))
    rows = -(-len(panels) // columns)
    size = f"{counted(plan.steps, 'step')} among {plan.world_size} ranks"
    d = Drawing(
        max(360, columns * w - PANEL_GAP + 2 * MARGIN),
        40 + rows * h + legend_height(plan) + 12,
        title=f"{plan.name}: {size}",
        description=in_words(plan, plan.transfers),
    )
    d.text(MARGIN, 26, plan.name, size=15, bold=True, anchor="start")
    for step, drawing in enumerate(panels):
        row, column = divmod(step, columns)
        d.place(drawing, MARGIN + column * w, 40 + row * h)
    draw_legend(d, plan, MARGIN, 40 + rows * h)
    return d


def panel(plan: Plan, step: int, buffer_width: float = 96) -> Drawing:
    """Draw a small picture of the buffers after `step` steps, without a legend."""
    buffers = layout(plan, buffer_width)
    d = Drawing(
        max(SMALL_NAME_W + buffers.width + HALO, 120),
        PANEL_TOP + buffers.height,
        title=f"{plan.name}: {_after(step)}",
    )
    d.text(0, 13, _after(step), size=12, bold=True, anchor="start")
    with d.shifted(SMALL_NAME_W, PANEL_TOP):
        buffers.draw(d, buffers.states[step], step)
        for rank in range(plan.world_size):
            y = buffers.top(rank) + buffers.row_height / 2 - 10
            fill = rank_color(rank)
            d.block(-SMALL_NAME_W, y, 20, 20, f"{rank}", fill=fill, size=12)
    return d


def plan_step(plan: Plan, step: int) -> Drawing:
    """Draw all buffers after `step` steps of `plan`, and the last step's messages.

    Step 0 shows the buffers before anything was sent. A step beyond the last one shows
    the last, and says so. Raises ValueError for a negative step, and for more ranks or
    chunks than can be drawn.
    """
    count("step", step, 0)
    buffers, shown = layout(plan), min(step, plan.steps)
    moved = [t for t in plan.transfers if t.step == shown - 1]
    where = f"after {shown} of {counted(plan.steps, 'step')}" if shown else _after(0)
    below = TOP + buffers.height + 12
    d = Drawing(
        max(400, 2 * MARGIN + NAME_W + HALO + buffers.width + SENT_W),
        below + legend_height(plan) + 26,
        title=f"{plan.name}, {counted(plan.world_size, 'rank')}: {where}",
        description=in_words(plan, moved),
    )
    right = d.width - MARGIN
    d.text(MARGIN, 26, plan.name, size=15, bold=True, anchor="start")
    d.text(right, 26, where, anchor="end")
    d.text(MARGIN, 46, _note(plan, step, moved), size=12, anchor="start", fill=MUTED)
    with d.shifted(MARGIN + NAME_W + HALO, TOP):
        buffers.draw(d, buffers.states[shown], shown)
        _names(d, buffers)
    d.text(right, TOP + 15, "sent so far", size=11, anchor="end", fill=MUTED)
    for rank, sent in enumerate(sent_so_far(plan, shown)):
        y = TOP + buffers.top(rank) + buffers.row_height / 2 + 5
        d.text(right, y, in_buffers(sent), anchor="end", bold=sent > 0)
    draw_legend(d, plan, MARGIN, below)
    what = "the token" if plan.idempotent else "a whole buffer"
    y = below + legend_height(plan) + 12
    words = f"S: the bytes of {what}"
    if isinstance(buffers, Grid) and buffers.lines > 1:
        words += f"; a line has {buffers.columns} chunks, the first line those above"
    d.text(MARGIN, y, words, size=11, anchor="start", fill=MUTED)
    return d


def _names(d: Drawing, buffers: Buffers) -> None:
    """Write the ranks to the left of their rows, and "chunk" beside the numbers."""
    for rank in range(buffers.plan.world_size):
        y = buffers.top(rank) + buffers.row_height / 2 - 12
        place, fill = (-NAME_W - HALO, y, 54, 24), rank_color(rank)
        d.block(*place, f"rank {rank}", fill=fill, size=12)
    if isinstance(buffers, Grid) and len(buffers.chunks) > 1:
        y = buffers.top(0) - 11
        d.text(-NAME_W - HALO, y, "chunk", size=11, anchor="start", fill=MUTED)


def draw_legend(
    d: Drawing, plan: Plan, x: float, y: float, *, short: bool = False
) -> None:
    """Draw the legend of hatching and bold frames; `short` uses fewer words."""
    draw_halo(d, x + HALO, y + HALO, 22, 8)
    d.rect(x + HALO, y + HALO, 22, 8, fill="#FFFFFF", stroke=PANEL_EDGE)
    d.text(x + 40, y + 12, "is sent, and where it arrives", size=11, anchor="start")
    if layout(plan).look.adds:
        d.rect(x + 1, y + 24, 28, 14, stroke_width=2.5)
        words = "complete: the numbers of all ranks, added"
        if plan.idempotent:
            words = "complete: has heard of all ranks"
        words = "complete" if short else words
        d.text(x + 40, y + 35, words, size=11, anchor="start")


def legend_height(plan: Plan) -> float:
    """Return the height of the legend in pixels."""
    return 44 if layout(plan).look.adds else 20


def sent_so_far(plan: Plan, steps: int) -> list[Fraction]:
    """Return the amount that each rank sent in the first `steps` steps, in buffers."""
    sent = [Fraction(0)] * plan.world_size
    for t in plan.transfers:
        if t.step < steps:
            sent[t.src] += Fraction(t.last - t.first, whole_buffer(plan))
    return sent


def in_buffers(amount: Fraction) -> str:
    """Format an amount in whole buffers S: "0", "S", "3/4 S"."""
    return "0" if amount == 0 else "S" if amount == 1 else f"{amount} S"


def plan_named(name: str, world_size: int) -> Plan:
    """Return a plan of the catalog. Raises ValueError for an unknown name."""
    check_choice("name", name, PLANS)
    return PLANS[name](count("world_size", world_size, 1, MOST_RANKS))


def in_words(plan: Plan, transfers: Sequence[Transfer]) -> str:
    """Return the alternative text for a picture of `plan` that shows `transfers`."""
    says = "; ".join(map(str, transfers)).replace("step", "in step")
    ranks = counted(plan.world_size, "rank")
    return (
        f"The buffers of {ranks}, one row each, rank 0 on top, and whose numbers are "
        "in each of their chunks. "
        + (f"Messages, the first step being 0: {says}." if says else "No message.")
    )


def _after(step: int) -> str:
    return f"after {counted(step, 'step')}" if step else "at the start"


def _note(plan: Plan, step: int, moved: list[Transfer]) -> str:
    if not plan.steps:
        return "one rank has nobody to send to"
    if step > plan.steps:
        return f"there is no step {step}: step {plan.steps} is the last"
    if not moved:
        return "nothing has been sent yet"
    ways = {t.reduce for t in moved}
    what = (
        "replaces what was there" if ways == {False} else "is added to what was there"
    )
    if plan.idempotent:
        what = "is joined with what was there"
    elif len(ways) == 2:
        what = "is added, or replaces what was there"
    return f"{counted(len(moved), 'message')}: what arrives {what}"


def count(name: str, value: int, least: int, most: int | None = None) -> int:
    """Return `value` if it is a whole number from `least` to `most`, or ValueError."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        allowed = f"{least} or more" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} is {value!r}; it must be a whole number, {allowed}")
    return value
