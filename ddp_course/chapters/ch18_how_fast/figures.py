"""Where a step's seconds go, a roofline, and predictions beside published values."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_course.chapters.ch18_how_fast.beside import Machine, Part
from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.plots import GRID, Drawn, canvas, plot
from ddp_course.lab.palette import INK, MUTED, PANEL
from ddp_course.planning.accelerators import ACCELERATORS, GB, Cluster
from ddp_course.planning.anchors import ANCHORS
from ddp_course.planning.search import why_impossible
from ddp_course.planning.step_time import Candidate, Prediction, predict
from ddp_course.planning.workload import Workload

MODEL = Workload.of_size(70_000_000_000, 4096, 128_256, 1024)
LAYOUTS = (
    Candidate(512, zero=3, recompute="full", microbatch=2),
    Candidate(64, tp=8, zero=1, recompute="full"),
    Candidate(64, pp=8, zero=1, recompute="full"),
    Candidate(32, pp=4, tp=4, zero=1),
)
LEFT, WIDTH, BAR, STEP = 230, 460, 26, 44
GREYS = {"compute": "#C3C9D1", "bubble": "#FFFFFF", "optimizer": "#8A939E"}


def steps(network: float = 50, node: int = 8, gpu: str = "h100") -> Drawing:
    """Draw where a step's seconds go, in some layouts of a 70B model on 512 GPUs.

    `network`: GB/s from each GPU to other nodes; `node`: GPUs per node; `gpu`: a key of
    `ACCELERATORS`. Chapter 18.
    """
    cluster = Cluster(ACCELERATORS[gpu], 512, node, network * GB)
    rows = [
        predict(MODEL, cluster, layout)
        for layout in LAYOUTS
        if why_impossible(layout, MODEL, cluster) is None
    ]
    longest = max(row.seconds for row in rows)
    words = "; ".join(f"{row.candidate}: {row.seconds:.1f} s" for row in rows)
    d = Drawing(
        LEFT + WIDTH + 70,
        78 + STEP * len(rows),
        title=f"A step of a 70B model on 512 x {gpu}",
        description=f"Predicted seconds of a step, by part. {words}.",
    )
    d.text(12, 24, d.title, size=15, bold=True, anchor="start")
    d.text(
        12, 46, "grey: computes, white: bubble, hatched: sends and nothing computes",
        size=12, anchor="start", fill=MUTED,
    )  # fmt: skip
    for k, row in enumerate(rows):
        y = 66 + k * STEP
        mesh, _, more = str(row.candidate).partition(", ")
        d.text(LEFT - 10, y + 9, mesh, size=12, anchor="end")
        d.text(LEFT - 10, y + 25, more, size=11, anchor="end", fill=MUTED)
        _bar(d, y, row, WIDTH / longest)
    return d


def _bar(d: Drawing, y: float, row: Prediction, scale: float) -> None:
    x = float(LEFT)
    for name, seconds in row.parts.items():
        wide = seconds * scale
        if wide < 0.5:
            continue
        d.rect(x, y, wide, BAR, fill=GREYS.get(name, PANEL), stroke=INK)
        if name not in GREYS:
            d.hatch(x, y, wide, BAR, stroke=MUTED)
        if wide > 9 * len(name):
            d.text(x + wide / 2, y + 17, name, size=11)
        x += wide
    d.text(x + 8, y + 17, f"{row.seconds:.1f} s", size=12, anchor="start")


@plot
def roofline(machine: Machine, parts: Sequence[Part]) -> Drawn:
    """Draw each part's FLOP/s against its FLOPs per byte, below the machine's roof."""
    figure, axes = canvas((7, 4))
    low, high = 0.02, 2000.0
    xs = [low, machine.ridge, high]
    roof = [min(machine.flops, x * machine.bandwidth) / 1e9 for x in xs]
    axes.plot(xs, roof, color=INK, linewidth=1.5)
    for k, part in enumerate(sorted(parts, key=lambda each: each.intensity)):
        speed = part.flops / part.seconds / 1e9
        axes.plot([part.intensity], [speed], "o", color=INK, markersize=6)
        where = {"xytext": (6, -13), "ha": "left"} if k % 2 else {"xytext": (-6, 5)}
        where = {"ha": "right", "textcoords": "offset points"} | where
        label = axes.annotate(part.name, (part.intensity, speed), **where)
        label.set_bbox({"fc": "white", "ec": "none", "pad": 0.5, "alpha": 0.8})
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(None, 2 * roof[-1]))
    axes.set(xlabel="FLOPs per byte", ylabel="GFLOP/s of one core")
    axes.grid(**GRID)
    names = ", ".join(
        f"{p.name}: {p.intensity:.2g} FLOPs per byte, {p.flops / p.seconds / 1e9:.3g}"
        for p in parts
    )
    return figure, f"GFLOP/s against FLOPs per byte, and the machine's roof. {names}."


@plot
def published() -> Drawn:
    """Draw predicted against published MFU of all anchors."""
    figure, axes = canvas((6, 4.6))
    axes.plot([0, 70], [0, 70], color=MUTED, linewidth=1)
    for fitted, look in ((True, {"mfc": "white"}), (False, {})):
        pairs = [
            (100 * a.mfu, 100 * a.predicted()) for a in ANCHORS if a.fitted is fitted
        ]
        name = "fitted" if fitted else "predicted"
        axes.plot(*zip(*pairs, strict=True), "o", color=INK, label=name, **look)
    axes.set(xlabel="published MFU [%]", ylabel="predicted MFU [%]")
    axes.set(xlim=(0, 70), ylim=(0, 70))
    axes.grid(**GRID)
    axes.legend()
    words = ", ".join(f"{a.name} {a.mfu:.0%}, {a.predicted():.0%}" for a in ANCHORS)
    return figure, f"Published and predicted MFU: {words}."


IMAGES = {"18_how_fast.svg": steps}
