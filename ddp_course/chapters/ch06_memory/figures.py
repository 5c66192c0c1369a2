"""What a training step keeps alive, and the 16 bytes of a parameter. Chapter 06."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.kinds import draw_kinds_legend, kind_block
from ddp_course.lab.palette import INK, MUTED, PANEL_EDGE

MARGIN, NAME_W, COLUMN, GAP = 16, 66, 68, 4
LAYERS = 4
GRADIENT, ACTIVATION = 14, 30  # heights in pixels, for each layer
PARAMETERS, STATES = LAYERS * GRADIENT, 2 * LAYERS * GRADIENT  # 4 + 4 + 8 bytes
BYTE, BOX_H = 46, 34  # pixels of a byte's width and of a box's height: "16 bytes"


@dataclass(frozen=True)
class Moment:
    """Memory in use after an operation, beside parameters and optimizer states.

    Attributes:
        phase, name: such as "backward" and "layer 2".
        gradients, activations: the layers with living gradients or activations, in the
            order of the column from below.
    """

    phase: str
    name: str
    gradients: tuple[int, ...] = ()
    activations: tuple[int, ...] = ()

    @property
    def height(self) -> float:
        """The height of the column, in pixels."""
        return (
            PARAMETERS
            + STATES
            + GRADIENT * len(self.gradients)
            + ACTIVATION * len(self.activations)
        )


def moments(layers: int = LAYERS) -> list[Moment]:
    """Return the memory in use after each operation of a training step.

    Forward keeps each layer's activations; backward replaces them by gradients, the
    last layer first; `zero_grad` frees all gradients.
    """
    last = range(layers - 1, -1, -1)
    found = [
        Moment("forward", f"layer {k}", activations=tuple(range(k + 1)))
        for k in range(layers)
    ]
    found += [
        Moment("backward", f"layer {k}", tuple(last[: layers - k]), tuple(range(k)))
        for k in last
    ]
    return [*found, Moment("step", "update", tuple(last)), Moment("step", "zero_grad")]


def memory_of_a_step() -> Drawing:
    """Draw what a step keeps alive and when, and 16 bytes per parameter. Chapter 06."""
    columns = moments()
    peak = max(columns, key=lambda moment: moment.height)
    top, right = 74, MARGIN + NAME_W + COLUMN * len(columns)
    bottom = top + peak.height
    d = Drawing(
        right + MARGIN,
        bottom + 278,
        title="What a training step keeps alive, and when",
        description="Above, a step of a model with four layers, one column after each "
        "operation. Parameters and optimizer states are there all the time. Forward "
        "adds the activations of layers 0 to 3; the peak is about at its end. Backward "
        "frees them, layer 3 first, and adds that layer's gradients, which stay until "
        "zero_grad. Below, the 16 bytes of a parameter with Adam: in fp32 4 for the "
        "parameter, 4 for the gradient, 4 for exp_avg and 4 for exp_avg_sq; in mixed "
        "precision 2, 2, and 12 for the optimizer: an fp32 copy of the parameter, "
        "exp_avg and exp_avg_sq.",
    )
    d.text(MARGIN, 24, d.title, size=15, bold=True, anchor="start")
    with d.shifted(MARGIN + NAME_W, 0):
        _draw_phases(d, columns, top)
        for i, moment in enumerate(columns):
            _draw_column(d, i * COLUMN, bottom, moment)
        _draw_peak(d, columns.index(peak) * COLUMN, top)
        wide = len(columns) * COLUMN - GAP
        y = bottom - STATES - PARAMETERS
        words = "optimizer states: since the first step, all the time"
        kind_block(d, (0, y, wide, STATES), "optimizer states", words, size=12)
        box, words = (0, y + STATES, wide, PARAMETERS), "parameters: all the time"
        kind_block(d, box, "parameters", words, size=12)
    _draw_height(d, top, bottom)
    draw_kinds_legend(d, MARGIN + NAME_W, bottom + 40, ("activations", "gradients"))
    words = "The number is the layer's."
    d.text(right - GAP, bottom + 44, words, size=11, anchor="end", fill=MUTED)
    with d.shifted(MARGIN, bottom + 82):
        sixteen_bytes(d)
    return d


def _draw_phases(d: Drawing, columns: Sequence[Moment], top: float) -> None:
    for phase in ("forward", "backward", "step"):
        at = [i for i, moment in enumerate(columns) if moment.phase == phase]
        left, right = at[0] * COLUMN, (at[-1] + 1) * COLUMN - GAP
        d.text((left + right) / 2, 48, phase, bold=True)
        d.line((left, 54), (right, 54), stroke_width=2)


def _draw_column(d: Drawing, x: float, bottom: float, moment: Moment) -> None:
    """Draw the memory in use after an operation: gradients, and activations above."""
    y, wide = bottom - STATES - PARAMETERS, COLUMN - GAP
    for layer in moment.gradients:
        y -= GRADIENT
        kind_block(d, (x, y, wide, GRADIENT), "gradients", f"{layer}")
    for layer in moment.activations:
        y -= ACTIVATION
        kind_block(d, (x, y, wide, ACTIVATION), "activations", f"{layer}")
    d.text(x + wide / 2, bottom + 17, moment.name, size=11)


def _draw_peak(d: Drawing, x: float, y: float) -> None:
    d.line((x + COLUMN + 4, y), (x + 2 * COLUMN, y), stroke_width=1.5, dashed=True)
    d.text(x + 2 * COLUMN + 8, y + 5, "peak: about here", anchor="start", bold=True)


def _draw_height(d: Drawing, top: float, bottom: float) -> None:
    x = MARGIN + NAME_W - 12
    d.line((x, bottom), (x, top + 10))
    d.arrow((x, bottom), (x, top - 4))
    d.text(MARGIN, top + 12, "bytes", size=12, anchor="start")
    d.text(MARGIN, bottom + 17, "after", size=11, anchor="start", fill=MUTED)


@dataclass(frozen=True)
class Bytes:
    """Some of a parameter's 16 bytes: their number, kind of memory, and name."""

    count: int
    kind: str
    name: str


SIXTEEN = {
    "fp32": (
        Bytes(4, "parameters", "parameter"),
        Bytes(4, "gradients", "gradient"),
        Bytes(4, "optimizer states", "exp_avg"),
        Bytes(4, "optimizer states", "exp_avg_sq"),
    ),
    "mixed precision: 16 bits for parameter and gradient": (
        Bytes(2, "parameters", "parameter"),
        Bytes(2, "gradients", "gradient"),
        Bytes(4, "optimizer states", "parameter in fp32"),
        Bytes(4, "optimizer states", "exp_avg"),
        Bytes(4, "optimizer states", "exp_avg_sq"),
    ),
}


def sixteen_bytes(d: Drawing) -> None:
    """Draw the bytes of a parameter with Adam in two rows, a tick for each byte."""
    d.text(0, 0, "16 bytes for every parameter, with Adam", size=15, bold=True,
           anchor="start")  # fmt: skip
    for row, (precision, parts) in enumerate(SIXTEEN.items()):
        y = 42 + row * 76
        d.text(0, y - 10, precision, bold=True, anchor="start")
        d.text(16 * BYTE, y - 10, f"{_sum(parts)} bytes", anchor="end")
        x = 0
        for part in parts:
            wide = part.count * BYTE
            kind_block(d, (x, y, wide, BOX_H), part.kind, part.name, size=12)
            ink = PANEL_EDGE if part.kind == "parameters" else INK
            for tick in range(1, part.count):
                for edge in (y, y + BOX_H - 5):
                    at = x + tick * BYTE
                    d.line((at, edge), (at, edge + 5), stroke=ink)
            x += wide
    words = "A tick for each byte. From dark to light: parameter, gradient, states."
    d.text(0, 178, words, size=11, anchor="start", fill=MUTED)


def _sum(parts: Sequence[Bytes]) -> str:
    """Write the bytes by kind, and their sum: "4 + 4 + 8 = 16"."""
    kinds = dict.fromkeys(part.kind for part in parts)
    each = [sum(p.count for p in parts if p.kind == kind) for kind in kinds]
    return f"{' + '.join(map(str, each))} = {sum(each)}"


IMAGES = {"06_memory.svg": memory_of_a_step}
