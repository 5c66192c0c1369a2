"""Numbers as bits, gradients by their exponents, and the error of sums. Chapter 12."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.plots import CURVES, GRID, Drawn, canvas, plot
from ddp_course.lab.palette import INK, MUTED, PANEL, PANEL_EDGE, WHOLE
from ddp_course.precision import FORMATS, Format, bits_of
from ddp_course.theory.checks import check_choice

PARTS = {"sign": "#FFFFFF", "exponent": MUTED, "fraction": WHOLE}
BIT, HIGH, LEFT = 17, 24, 100
STEP = (
    ("weights", "32 bits"),
    ("forward, back", "products: 16 bits"),
    ("gradients", "32 bits"),
    ("all ranks", "sum; inf anywhere?"),
    ("step, or none", "32 bits"),
)


def _draw_bits(d: Drawing, format: Format, digits: str = "") -> None:
    """Draw a format's bits from (0, 0) on, with the `digits` in them, if any."""
    widths = (1, format.exponent, format.fraction)
    parts = [p for p, n in zip(PARTS, widths, strict=True) for _ in range(n)]
    for k, part in enumerate(parts):
        digit = digits[k : k + 1] or " "
        d.block(k * BIT, 0, BIT, HIGH, digit, fill=PARTS[part], size=12, radius=0)


def formats_and_a_step() -> Drawing:
    """Draw the bits of six formats, and the formats in a step of mixed precision."""
    row, foot = HIGH + 12, 40 + len(FORMATS) * (HIGH + 12)
    bits = [f"{f.name}: {f.exponent} and {f.fraction}." for f in FORMATS.values()]
    words = "Above, bits of six formats: a sign, exponent bits and fraction bits. "
    words += f"{' '.join(bits)} Below, a step: "
    words += f"{', '.join(f'{name} ({how})' for name, how in STEP)}."
    title = "Formats of numbers, and a step in mixed precision"
    d = Drawing(LEFT + 32 * BIT + 12, foot + 152, title=title, description=words)
    for k, format in enumerate(FORMATS.values()):
        y = 10 + k * row
        d.text(4, y + 17, format.name, size=12, bold=True, anchor="start")
        with d.shifted(LEFT, y):
            _draw_bits(d, format)
    for k, (part, color) in enumerate(PARTS.items()):
        d.rect(LEFT + 120 * k, foot - 24, 14, 14, fill=color)
        d.text(LEFT + 120 * k + 20, foot - 12, part, size=12, anchor="start")
    d.text(4, foot + 40, "A step in mixed precision", bold=True, anchor="start")
    gap, wide = 14, (d.width - 8 - 4 * 14) / 5
    for k, (name, how) in enumerate(STEP):
        x, sixteen = 4 + k * (wide + gap), "16" in how
        fill = "#FFFFFF" if sixteen else WHOLE
        d.rect(x, foot + 56, wide, 50, fill=fill, radius=4, dashed=sixteen)
        d.text(x + wide / 2, foot + 77, name, size=11, bold=True)
        d.text(x + wide / 2, foot + 95, how, size=11)
        if k:
            d.arrow((x - gap, foot + 81), (x, foot + 81))
    words = "Dashed: rounded to 16 bits. Grey: as precise as before."
    d.text(4, foot + 132, words, size=12, anchor="start", fill=MUTED)
    return d


def taken_apart(digits: float = 1.1, power: int = 0, format: str = "fp16") -> Drawing:
    """Draw the bits of the number digits x 2^power after rounding to a format.

    Raises ValueError for a name that is not in FORMATS.
    """
    check_choice("format", format, FORMATS)
    its, x = FORMATS[format], digits * 2.0**power
    exact = torch.tensor(x, dtype=torch.float64)
    kept, bits = float(its.round(exact)), bits_of(x, its)
    sign, exponent, fraction = bits.split()
    e, f = int(exponent, 2), int(fraction, 2)
    says = [f"asked for: {x:.6g}", f"kept: {kept:.6g}"]
    if math.isfinite(kept):
        whole, power_of = (1, e - its.bias) if e else (0, 1 - its.bias)
        says[1] += f" = ({whole} + {f} / {2**its.fraction}) x 2^{power_of}"
        near = f"the next number is {float(its.spacing(exact)):.3g} away"
        gone = f"lost: {abs(kept - x) / abs(x or 1):.2g} of it"
        says += [f"{gone}; {near}"]
    else:
        says += [f"the largest number is {its.max:.6g}"]
    title = f"{x:.6g} in {format}"
    d = Drawing(32 * BIT + 16, 122, title=title, description="; ".join(says))
    with d.shifted(8, 8):
        _draw_bits(d, its, sign + exponent + fraction)
    for k, words in enumerate(says):
        d.text(8, 58 + 22 * k, words, anchor="start", fill=MUTED if k == 2 else INK)
    return d


@plot
def exponents(values: Mapping[str, Tensor], format: str = "fp16") -> Drawn:
    """Draw histograms of numbers' exponents, and mark the range that a format loses.

    `values` maps at most three names to tensors of any shape; zeros do not count.
    Raises ValueError for a name that is not in FORMATS.
    """
    check_choice("format", format, FORMATS)
    its, words = FORMATS[format], []
    figure, axes = canvas((7, 3.6))
    low, high = math.log2(its.smallest), math.log2(its.max)
    least, most = low - 18, high + 5
    for (name, numbers), look in zip(values.items(), CURVES, strict=False):
        flat = numbers.detach().double().flatten()
        flat = flat[flat != 0].abs()
        powers = torch.floor(torch.log2(flat)).clamp(least, most)
        counts = torch.bincount((powers - least).long(), minlength=int(most - least))
        xs = [least + k for k in range(len(counts))]
        share = (100 * counts / len(flat)).tolist()
        axes.step(xs, share, where="post", label=name, **look)
        zero, coarse = lost_in(flat, its)
        words.append(f"{name}: {zero:.1%} become 0, {coarse:.1%} keep fewer bits")
    for begin, end, says in (
        (least, low - 1, "become 0"),
        (low - 1, math.log2(its.tiny), "fewer bits"),
        (high, most, "inf"),
    ):
        all_lost = {"facecolor": "#FFFFFF", "edgecolor": PANEL_EDGE, "hatch": "//"}
        look = {"color": PANEL} if says == "fewer bits" else all_lost
        axes.axvspan(begin, end, **look)
        axes.text((begin + end) / 2, axes.get_ylim()[1], says, ha="center", va="top",
                  backgroundcolor="white")  # fmt: skip
    axes.set(xlabel="exponent: the number is 1 to 2 times 2 to this power")
    axes.set(ylabel="share of the numbers [%]", ylim=(0, None), xlim=(least, most))
    axes.grid(axis="y", **GRID)
    axes.legend(loc="center", bbox_to_anchor=(0.75, 0.7))
    return figure, f"Exponents, and what {format} loses. {'; '.join(words)}."


def lost_in(values: Tensor, format: Format) -> tuple[float, float]:
    """Return which shares of the non-zero numbers become 0, and lose bits."""
    size = values.detach().double().abs().flatten()
    size = size[size != 0]
    zero = format.round(size) == 0
    coarse = (size < format.tiny) & ~zero
    return float(zero.double().mean()), float(coarse.double().mean())


@plot
def errors_of_sums(
    simulated: Mapping[str, Mapping[int, float]],
    measured: Mapping[str, Mapping[int, float]],
    expected: Mapping[str, Callable[[int], float]],
) -> Drawn:
    """Draw the relative error of a sum against the number of ranks N, for each order.

    `simulated` (in one process) and `measured` (on real ranks) map the name of an order
    of summation to {N: error}; there can be three orders. `expected` has formulas of N,
    drawn as thin lines.
    """
    figure, axes = canvas((7, 3.8))
    texts, ranks = [], sorted({n for its in simulated.values() for n in its})
    for (order, points), look in zip(simulated.items(), CURVES, strict=False):
        axes.plot(points.keys(), points.values(), label=order, **look)
        texts.append(f"{order}: {points[ranks[-1]]:.2%} at {ranks[-1]} ranks")
        points_measured = measured.get(order, {})
        axes.plot(
            points_measured.keys(),
            points_measured.values(),
            "o",
            color=INK,
            markersize=5,
        )
    for formula in expected.values():
        axes.plot(ranks, [formula(n) for n in ranks], color=INK, linewidth=0.8)
    axes.plot([], [], color=INK, linewidth=0.8, label="expected")
    axes.plot([], [], "o", color=INK, markersize=5, label="on real ranks")
    axes.set(xscale="log", yscale="log", xlabel="ranks N", ylabel="relative error")
    axes.set_xticks(ranks, [str(n) for n in ranks])
    marks = [0.002, 0.005, 0.01, 0.02, 0.05]
    axes.set_yticks(marks, [f"{share:.1g}%" for share in (0.2, 0.5, 1, 2, 5)])
    axes.minorticks_off()
    axes.grid(axis="y", **GRID)
    axes.legend()
    return figure, f"The error of a sum over ranks. {'; '.join(texts)}."


IMAGES = {"12_precision.svg": formats_and_a_step}
