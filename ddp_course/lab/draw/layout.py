"""Which layout suits a plan: a `Grid`, or for an all_to_all an `Exchange`."""

from __future__ import annotations

from ddp_course.collectives.plan import Plan, State, simulate
from ddp_course.lab.draw.cells import draw_cell, draw_halo, look_of
from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.grid import ARROW, GAP, Buffers, Grid
from ddp_course.lab.palette import MUTED

LABEL_W = 36  # a chunk with a label such as "0→1"


def layout(plan: Plan, buffer_width: float = 160) -> Buffers:
    """Return the layout that suits a plan.

    A grid, if some rank has all chunks at the start or at the end. ValueError for a
    plan with more ranks or chunks than can be drawn.
    """
    return (Grid if shares_columns(plan) else Exchange)(plan, buffer_width)


def shares_columns(plan: Plan) -> bool:
    """Return whether some rank has all chunks that there are, first or last."""
    everything = frozenset().union(*plan.start, *plan.end)
    return any(has == everything for has in (*plan.start, *plan.end))


class Exchange(Buffers):
    """On the left what each rank starts with, on the right what it gets.

    For plans in which no rank ever has all chunks: each row shows only its own ones.
    """

    BETWEEN = 92  # room for arrows

    def __init__(self, plan: Plan, buffer_width: float) -> None:
        ranks, states = range(plan.world_size), simulate(plan)
        ever = [
            {c for state in states for c, has in enumerate(state[r]) if has}
            for r in ranks
        ]
        self.before = [sorted(plan.start[r]) for r in ranks]
        self.after = [sorted(plan.end[r] | (ever[r] - plan.start[r])) for r in ranks]
        left, right = (max(map(len, side)) for side in (self.before, self.after))
        look = look_of(plan, max(buffer_width, LABEL_W * left))
        self.pitch = look.width + GAP
        self.right = left * self.pitch - GAP + self.BETWEEN
        width = self.right + right * self.pitch - GAP
        super().__init__(plan, look, width, look.height)
        self.labels = labels(plan)

    def draw(self, d: Drawing, state: State, step: int) -> None:
        """Draw `state`, and the transfers that led to it if it is the `step`-th."""
        self._heading(d, 0, "starts with")
        self._heading(d, self.right, "gets")
        moved = [t for t in self.plan.transfers if t.step == step - 1]
        for rank in range(self.plan.world_size):
            sent = {c for t in moved if t.src == rank for c in range(t.first, t.last)}
            got = {c for t in moved if t.dst == rank for c in range(t.first, t.last)}
            self._row(d, 0, rank, self.before[rank], state, sent)
            self._row(d, self.right, rank, self.after[rank], state, got)
        middle = self.look.height / 2
        for t in moved:
            start = self.right - self.BETWEEN + 12, self.top(t.src) + middle
            end = self.right - 12, self.top(t.dst) + middle
            d.arrow(start, end, stroke_width=ARROW)

    def _heading(self, d: Drawing, x: float, words: str) -> None:
        d.text(x, self.top(0) - 11, words, size=11, anchor="start", fill=MUTED)

    def _row(
        self,
        d: Drawing,
        x: float,
        rank: int,
        chunks: list[int],
        state: State,
        moved: set[int],
    ) -> None:
        for i, chunk in enumerate(chunks):
            left, y, look = x + i * self.pitch, self.top(rank), self.look
            if chunk in moved:
                draw_halo(d, left, y, look.width, look.height)
            has, label = state[rank][chunk], self.labels[chunk]
            draw_cell(d, left, y, look, has, label=label)


def labels(plan: Plan) -> list[str]:
    """Return a name for each chunk: "0→1" if it is on its way from rank 0 to rank 1.

    Where every chunk is of use to several ranks, or columns are shared, there is none.
    """
    names = []
    for chunk in range(plan.chunks):
        first = [r for r, has in enumerate(plan.start) if chunk in has]
        last = [r for r, has in enumerate(plan.end) if chunk in has]
        alone = len(first) == len(last) == 1 and not shares_columns(plan)
        names.append(f"{first[0]}→{last[0]}" if alone else "")
    return names
