"""Tokens that travel to their experts; busy experts, and dropped choices."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ddp_course.experts.balance import capacity
from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.plots import Drawn, canvas, plot
from ddp_course.lab.palette import MUTED, PANEL, PANEL_EDGE, darker, rank_color

CHOICES = ((2, 0, 3, 1), (0, 2, 0, 1), (3, 2, 0, 2), (1, 0, 3, 2))  # by rank and token
MARGIN, BOX, STEP, ROW, TOP = 12, 22, 26, 58, 78
COLUMNS = (78, 292, 536)  # x of tokens, experts, and tokens again
TOKENS, EXPERTS, K, RANKS = 64, 8, 2, 4  # for the drawing of loads
BAR, BARS, LEFT, BASE = 30, 120, 46, 190  # width and height of bars; x and y of 0


def journey() -> Drawing:
    """Draw how tokens of four ranks travel to four experts and back. Chapter 17."""
    queues = [
        [rank for rank, row in enumerate(CHOICES) for one in row if one == expert]
        for expert in range(RANKS)
    ]
    counts = ", ".join(f"expert {e} has {len(q)}" for e, q in enumerate(queues))
    d = Drawing(
        COLUMNS[2] + RANKS * STEP + MARGIN,
        TOP + RANKS * ROW - 20,
        title="Each token travels to its expert, and its output back",
        description="Four ranks with four tokens each, and an expert each. The number "
        f"on a token is the expert that it has chosen. After dispatch {counts} tokens, "
        "sorted by the rank that they come from. Combine sends the outputs back.",
    )
    d.text(MARGIN, 24, d.title, size=15, bold=True, anchor="start")
    heads = ("tokens", "dispatch", "experts", "combine", "outputs")
    for x, words in zip((78, 214, 292, 458, 536), heads, strict=True):
        d.text(x, 58, words, size=12, anchor="start", fill=MUTED)
    for expert, queue in enumerate(queues):
        ends = COLUMNS[0] + RANKS * STEP, COLUMNS[1] + len(queue) * STEP
        for rank in set(queue):
            look = {"stroke": rank_color(rank), "stroke_width": 2 * queue.count(rank)}
            own, its = (TOP + row * ROW + BOX / 2 for row in (rank, expert))
            d.line((ends[0], own), (COLUMNS[1] - 4, its), **look)
            d.line((ends[1], its), (COLUMNS[2] - 4, own), **look)
    for rank, row in enumerate(CHOICES):
        y = TOP + rank * ROW
        d.text(MARGIN, y + 15, f"rank {rank}", size=12, bold=True, anchor="start")
        for i, one in enumerate(row):
            for x in (COLUMNS[0], COLUMNS[2]):
                look = {"fill": rank_color(rank), "size": 12}
                d.block(x + i * STEP, y, BOX, BOX, f"{one}", **look)
        for i, source in enumerate(queues[rank]):
            x, color = COLUMNS[1] + i * STEP, rank_color(source)
            d.block(x, y, BOX, BOX, f"{rank}", fill=color, size=12)
    return d


def popular(skew: float) -> list[int]:
    """Return how often each expert is chosen.

    Each is `skew` times as popular as the next. But a token chooses an expert at most
    once, so no expert has more than TOKENS choices.
    """
    found = [0] * EXPERTS
    for _ in range(TOKENS * K):  # add a choice to the expert that lacks most
        missing = {
            e: skew**-e / (found[e] + 1) for e in range(EXPERTS) if found[e] < TOKENS
        }
        found[max(missing, key=missing.__getitem__)] += 1
    return found


def work(skew: float = 1.5, factor: float | None = None) -> Drawing:
    """Draw the load of 8 experts on 4 ranks, and what a capacity factor drops.

    Each expert is `skew` times as popular as the next. Without `factor` no choice is
    dropped. Chapter 17.
    """
    loads = popular(skew)
    limit = TOKENS if factor is None else capacity(TOKENS, EXPERTS, K, factor)
    kept = [min(load, limit) for load in loads]
    rows = [sum(kept[2 * rank : 2 * rank + 2]) for rank in range(RANKS)]
    dropped, slowest = sum(loads) - sum(kept), max(rows) * RANKS / sum(rows)
    words = ", ".join(f"expert {e} {load}" for e, load in enumerate(loads))
    d = Drawing(
        LEFT + EXPERTS * BAR + MARGIN,
        BASE + 88,
        title=f"{dropped} of {TOKENS * K} choices dropped",
        description=f"Choices: {words}. Kept: at most {limit} each. Rows of the ranks: "
        f"{', '.join(map(str, rows))}; the busiest has {slowest:.2f} times the mean.",
    )
    d.text(MARGIN, 24, d.title, size=13, bold=True, anchor="start")
    d.rect(
        LEFT, BASE - BARS - 8, EXPERTS * BAR, BARS + 8, fill=PANEL, stroke=PANEL_EDGE
    )
    high = BARS / TOKENS
    for expert, (load, its) in enumerate(zip(loads, kept, strict=True)):
        x, color = LEFT + expert * BAR + 3, rank_color(expert // 2)
        d.rect(x, BASE - load * high, BAR - 6, load * high, fill="none", stroke=MUTED)
        look = {"fill": color, "stroke": darker(color)}
        d.rect(x, BASE - its * high, BAR - 6, its * high, **look)
        d.text(x + BAR / 2 - 3, BASE + 16, f"{its}", size=11)
    if factor is not None:
        y = BASE - limit * high
        d.line((LEFT, y), (LEFT + EXPERTS * BAR, y), dashed=True)
    for label, y in ((TOKENS, BASE - BARS), (0, BASE)):
        d.text(LEFT - 6, y + 4, f"{label}", size=11, anchor="end", fill=MUTED)
    for rank, count in enumerate(rows):
        x = LEFT + 2 * BAR * rank
        look = {"fill": rank_color(rank), "size": 11}
        d.block(x + 2, BASE + 26, 2 * BAR - 4, 22, f"rank {rank}", **look)
        d.text(x + BAR, BASE + 62, f"{count}", size=11)
    verdict = f"the busiest: {slowest:.2f} times the mean"
    d.text(LEFT, BASE + 81, verdict, size=11, anchor="start")
    return d


@plot
def load_map(shares: Mapping[str, Tensor]) -> Drawn:
    """Draw the share of each expert in every step, black for the largest possible.

    `shares` maps a name to (steps, E): percentages of all choices.
    """
    figure, axes = canvas((8.5, 2.6), ncols=len(shares), sharey=True)
    words = []
    for one, (name, share) in zip(axes, shares.items(), strict=True):
        image = one.imshow(
            share.T.numpy(),
            aspect="auto",
            cmap="Greys",
            vmin=0,
            vmax=100 / K,
            origin="lower",
            interpolation="nearest",  # do not blur neighbouring experts
        )
        one.set(title=name, xlabel="step")
        last = share[-50:].mean(0).round().int().tolist()
        words.append(f"{name}: the last 50 steps' mean shares are {last} percent.")
    axes[0].set_ylabel("expert")
    figure.colorbar(image, label="share [%]")
    return figure, f"Shares of {EXPERTS} experts in every step. {' '.join(words)}"


IMAGES = {"17_experts.svg": journey}
