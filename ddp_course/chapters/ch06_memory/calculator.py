"""The memory calculator: bytes of each stage on a GPU, and whether they fit. Ch. 06."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.kinds import draw_kinds_legend, kind_block, kinds_among
from ddp_course.lab.palette import INK, MUTED, PANEL, PANEL_EDGE
from ddp_course.measure import Ledger
from ddp_course.theory import MODELS, Model, plan
from ddp_course.theory.checks import check_choice
from ddp_course.theory.memory import check_stage, precision_named, states_of

GB = 1e9  # as GPUs are sold
WIDTH, MARGIN, NAME_W, TOTAL_W, TOP, BAR, ROW = 486, 12, 62, 104, 94, 28, 42
PLOT = WIDTH - 2 * MARGIN - NAME_W - TOTAL_W
ORDER = (
    "parameters", "gradients", "optimizer states", "activations",
    "communication buffers", "other",
)  # fmt: skip
WIDEST = 3  # a bar longer than three GPU memories is cut off

# None: unknown, since the activations are unknown.
FITS = {True: "fits", False: "does not fit", None: "fits, or not"}


def memory_calculator(
    model: str | float | Model = 7.5e9,
    optimizer: str = "adamw",
    precision: str = "mixed",
    gpus: int = 64,
    memory_gb: float = 80,
    stage: int | None = None,
    batch: int = 1,
    recompute: str = "none",
) -> Drawing:
    """Draw what a GPU stores with DDP and each ZeRO stage, and whether that fits.

    The numbers are those of `theory.plan`. Decimal GB, as GPUs are sold. Chapter 06.

    Args:
        model: a name in `theory.MODELS`, or a number of parameters; then activations
            and the buffers of stage 3 are unknown, and left out.
        optimizer, precision: names as for `theory.model_states`.
        gpus: the number of GPUs.
        memory_gb: the memory of one GPU, in 10^9 bytes.
        stage: the stage whose sum is written below, 0 (DDP) to 3; None for no stage.
        batch: rows of a microbatch on one GPU.
        recompute: "none", "selective" or "full".

    Raises ValueError for any other value.
    """
    known = _model(model)
    if stage is not None:
        check_stage(stage)
    rows = plan(known, gpus, memory_gb * GB, optimizer=optimizer, precision=precision,
                batch=batch, recompute=recompute)  # fmt: skip
    rows = [row for row in rows if not row.on_host]
    name = f"{model}, " if isinstance(model, str) else ""
    cards = "one GPU" if gpus == 1 else f"{gpus:,} GPUs"
    title = f"{name}{count(known.parameters)} parameters on {cards}"
    says = f"{optimizer}, {precision}: {_per_parameter(optimizer, precision)}"
    if any(row.ledger["activations"] for row in rows):
        lines = f"{batch} row{'s' * (batch > 1)} of {known.sequence} tokens"
        lines += "" if recompute == "none" else f", {recompute} recomputation"
    else:
        lines = "without activations, since the model's shape is unknown"
    return _draw(title, (says, lines), rows, memory_gb * GB, stage)


def _model(model: str | float | Model) -> Model:
    if isinstance(model, Model):
        return model
    if isinstance(model, str):
        check_choice("model", model, MODELS)
        return MODELS[model]
    if not 1 <= model < 1e18:
        raise ValueError(f"model is {model!r}; it must be 1 parameter or more")
    return Model(round(model))


def _per_parameter(optimizer: str, precision: str) -> str:
    """Write the bytes of a parameter: "2 + 2 + 12 bytes per parameter"."""
    of = precision_named(precision)
    states = of.master + states_of(optimizer) * of.state
    return f"{of.parameter} + {of.gradient} + {states} bytes per parameter"


def _draw(
    title: str, says: Sequence[str], rows: Sequence[Any], memory: float, stage: Any
) -> Drawing:
    """Draw a bar for each row of a plan, against the memory of a GPU."""
    most = max(row.ledger.total for row in rows)
    amount = Unit.of(most)
    scale = PLOT / max(1.12 * memory, min(1.04 * most, WIDEST * memory))
    below = TOP + ROW * len(rows)
    d = Drawing(
        WIDTH,
        below + (62 if stage is None else 110),
        title=title,
        description=f"{'; '.join(says)}. {_in_words(rows, memory, amount)}",
    )
    d.text(MARGIN, 24, title, size=14, bold=True, anchor="start")
    for k, line in enumerate(says):
        d.text(MARGIN, 43 + 16 * k, line, size=11, anchor="start", fill=MUTED)
    x, line = MARGIN + NAME_W, MARGIN + NAME_W + memory * scale
    if stage is not None:
        y = TOP + ROW * stage - (ROW - BAR) / 2
        d.rect(4, y, WIDTH - 8, ROW, fill=PANEL, stroke=PANEL_EDGE, radius=6)
    d.line((x, TOP - 6), (x, below - 4), stroke=PANEL_EDGE)
    d.line((line, TOP - 8), (line, below), stroke_width=2, dashed=True)  # bars cover it
    d.text(line, TOP - 13, f"a GPU: {Unit.of(memory)(memory)}", size=11, bold=True)
    for i, row in enumerate(rows):
        y, right = TOP + i * ROW, WIDTH - MARGIN
        d.text(MARGIN, y + BAR / 2 + 4, row.name, size=12, bold=True, anchor="start")
        with d.shifted(x, y):
            _draw_bar(d, row.ledger, scale, amount)
        total = amount(row.ledger.total)
        d.text(right, y + 12, total, size=12, bold=True, anchor="end")
        ink = MUTED if row.fits is False else INK
        d.text(right, y + 27, FITS[row.fits], size=11, anchor="end", fill=ink)
    kinds = kinds_among(row.ledger for row in rows)
    half = (len(kinds) + 1) // 2 if len(kinds) > 3 else len(kinds)
    draw_kinds_legend(d, MARGIN, below + 16, kinds[:half])
    draw_kinds_legend(d, MARGIN, below + 38, kinds[half:])
    if stage is not None:
        _spell_out(d, rows[stage], below + 68, amount)
    return d


def _spell_out(d: Drawing, row: Any, y: float, amount: Unit) -> None:
    """Write the parts of a stage's total, and the bytes that it sends."""
    parts = [amount.number(row.ledger[k]) for k in ORDER if row.ledger[k]]
    words = f"{row.name}: {' + '.join(parts)} = {amount(row.ledger.total)}"
    d.text(MARGIN, y, words, size=12, bold=True, anchor="start")
    times = "" if row.times_ddp is None else f", {row.times_ddp:.3g} times DDP"
    words = f"Each GPU sends {amount(row.bytes_sent)} in a step{times}."
    d.text(MARGIN, y + 20, words, size=12, anchor="start")


def _draw_bar(d: Drawing, ledger: Ledger, scale: float, amount: Unit) -> None:
    """Draw the kinds of memory side by side, up to the right end of the plot."""
    x = 0.0
    for kind in ORDER:
        wide = min(ledger[kind] * scale, PLOT - x)
        if wide < 0.3:
            continue
        cut = x + ledger[kind] * scale > PLOT + 0.5
        short = "" if cut else amount.number(ledger[kind])
        kind_block(d, (x, 0, wide, BAR), kind, short)
        x += wide
    if ledger.total * scale > PLOT + 0.5:  # mark the bar as cut off
        for at in (PLOT - 14, PLOT - 7):
            d.line((at - 4, BAR + 4), (at + 4, -4), stroke="#FFFFFF", stroke_width=3)


@dataclass(frozen=True)
class Unit:
    """A unit for all numbers of a figure: decimal GB, or MB if all are below a GB."""

    name: str
    size: float

    @classmethod
    def of(cls, most: float) -> Unit:
        """Return the unit that suits the largest number of bytes."""
        return cls("GB", GB) if most >= GB else cls("MB", GB / 1000)

    def number(self, nbytes: float) -> str:
        """Write bytes with three digits, at most three of them decimals."""
        size = float(nbytes) / self.size
        return f"{size:,.0f}" if size >= 1000 else f"{round(float(f'{size:.3g}'), 3):g}"

    def __call__(self, nbytes: float) -> str:
        """Write bytes with their unit."""
        return f"{self.number(nbytes)} {self.name}"


def count(parameters: int) -> str:
    """Write a number of parameters: "7.5 B", "124 M"."""
    for size, name in ((1e9, " B"), (1e6, " M"), (1e3, " thousand")):
        if parameters >= size:
            return f"{parameters / size:.3g}{name}"
    return f"{parameters}"


def _in_words(rows: Sequence[Any], memory: float, amount: Unit) -> str:
    texts = []
    for row in rows:
        has = [f"{kind} {amount(row.ledger[kind])}" for kind in row.ledger
               if row.ledger[kind]]  # fmt: skip
        texts.append(
            f"{row.name}: {amount(row.ledger.total)} ({', '.join(has)}), which "
            f"{FITS[row.fits]}"
        )
    return f"A GPU has {Unit.of(memory)(memory)}. {'; '.join(texts)}."
