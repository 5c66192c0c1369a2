"""The figures of chapters 09 to 11: every part, every block, every number is true."""

import itertools
import re
from dataclasses import replace
from fractions import Fraction
from xml.etree import ElementTree

import matplotlib
import pytest
import torch
from torch.nn.functional import gelu

matplotlib.use("agg")

from drawings import elements, fills, no_texts_overlap, problems, texts, words  # noqa: E402  # noqa: E402
from matplotlib.colors import to_hex  # noqa: E402

from ddp_course.chapters.ch09_tensor_parallel.cut_product import (  # noqa: E402
    HOW,
    Matrix,
    Message,
    cut_product,
)
from ddp_course.chapters.ch09_tensor_parallel.figures import cut_products  # noqa: E402
from ddp_course.chapters.ch09_tensor_parallel.matrix_cut import (
    CutPicture,  # noqa: E402
    matrix_cut,  # noqa: E402
)
from ddp_course.chapters.ch10_pipeline_parallel.figures import staircase  # noqa: E402
from ddp_course.chapters.ch11_pipeline_schedules.figures import two_orders  # noqa: E402
from ddp_course.chapters.ch11_pipeline_schedules.plane import memory_against_bubble  # noqa: E402
from ddp_course.lab import (  # noqa: E402
    explore,
    gallery,
    rank_color,
)
from ddp_course.lab.draw.bubbles import activation_peaks, bubble_curve, bubbles  # noqa: E402
from ddp_course.lab.draw.drawing import Drawing  # noqa: E402
from ddp_course.lab.draw.lanes import (  # noqa: E402
    BLOCK,
    LOWER,
    PALER,
    SAMPLE,
)
from ddp_course.lab.draw.pipeline_timeline import pipeline_timeline, who_works  # noqa: E402
from ddp_course.lab.draw.schedule_view import (  # noqa: E402
    PLOT_W,
    TOP,
    equal_costs,
    named,
    schedule_view,  # noqa: E402
)
from ddp_course.lab.draw.work import (  # noqa: E402
    Work,
    chunks_of,
    gaps,
    idle_share,
    works_of,
)
from ddp_course.lab.palette import WHOLE, contrast, lighter  # noqa: E402
from ddp_course.measure import Event  # noqa: E402
from ddp_course.pipeline.clocks import bubble  # noqa: E402
from ddp_course.pipeline.schedule import ScheduleError, parse  # noqa: E402
from ddp_course.pipeline.schedules import SCHEDULES  # noqa: E402
from ddp_course.pipeline.simulate import Costs, simulate  # noqa: E402

SHAPES = [
    (128, 144, 576, 2), (128, 144, 576, 4), (8, 8, 8, 8), (1, 3, 300, 3),
    (4, 6, 8, 2), (4096, 24, 96, 8), (3, 5, 7, 1),
]  # fmt: skip
CUTS = [(*shape, how) for shape in SHAPES for how in HOW]
CUTS = [c for c in CUTS if c[1] % c[3] == 0 and c[2] % c[3] == 0]
VIEWS = [
    (name, *numbers)
    for name in SCHEDULES
    for numbers in ((1, 1, 2), (2, 3, 1), (4, 8, 2), (5, 1, 1))
] + [("interleaved", 3, 3, 4), ("interleaved", 8, 16, 2), ("zero_bubble", 8, 16, 1)]


def recorded(name, p, m, unit=0.03, rank0=5.0):
    """A simulated schedule as the ranks of a pipeline would record it."""
    schedule = named(name, p, m)
    for e in simulate(schedule, equal_costs(schedule)).events:
        a, start, end = e.action, float(e.start), float(e.end)
        yield Event(
            e.rank, a.op, rank0 + start * unit, rank0 + end * unit, lane="compute",
            detail={"stage": a.stage, "microbatch": a.microbatch, "step": 0},
        )  # fmt: skip
        yield Event(e.rank, "send", rank0, rank0 + 9, 8, lane="communication")
        yield Event(e.rank, "wait", rank0, rank0 + 9, lane="wait")


def one_after_the_other(ranks=3, forward=0.02, backward=0.04, at=7.0):
    """What naive model parallelism records."""
    for k in range(ranks):
        start = at + k * forward
        yield Event(k, "forward", start, start + forward, lane="compute")
        start = at + ranks * forward + (ranks - 1 - k) * backward
        yield Event(k, "backward", start, start + backward, lane="compute")


RUNS = {
    "simulated": simulate(named("1f1b", 4, 8)).events,
    "measured": list(recorded("1f1b", 4, 8)),
    "zero bubble": list(recorded("zero_bubble", 4, 8)),
    "interleaved": list(recorded("interleaved", 4, 8)),
}
DRAWINGS = {
    "09": cut_products,
    "10": staircase,
    "11": two_orders,
    **{f"cut {c}": lambda c=c: matrix_cut(*c) for c in CUTS},
    **{f"view {v}": lambda v=v: schedule_view(*v) for v in VIEWS},
    "view, costs": lambda: schedule_view("1f1b", costs=Costs(F=3, I=2, W=4, send=1)),
    "runs": lambda: pipeline_timeline(RUNS, 0.03),
    "one run": lambda: pipeline_timeline(RUNS["measured"], width=5000),
    "naive": lambda: who_works(one_after_the_other()),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_the_layout(name):
    drawing = DRAWINGS[name]()
    assert list(problems(drawing)) == []
    assert drawing.svg() == DRAWINGS[name]().svg()
    assert len(drawing.description) > 60
    assert drawing.width <= 1100


# The matrix cut: the plan, carried out with numbers, is the product.


def carried_out(cut, x, weights):
    """What every rank ends up with if it does what `cut` says; x: each rank's own."""
    weights, have, product = iter(weights), None, False
    for term in cut.terms:
        if isinstance(term, str):
            product = term == "@"
            have = [gelu(part) for part in have] if term == "GELU" else have
        elif isinstance(term, Message):
            whole = sum(have) if term.op == "all-reduce" else torch.cat(have, 1)
            have = [whole] * cut.ranks
        elif have is None:
            have = [own[term.part(rank, cut.ranks)] for rank, own in enumerate(x)]
        elif product:
            w = next(weights)
            parts = [w[term.part(rank, cut.ranks)] for rank in range(cut.ranks)]
            have = [h @ part for h, part in zip(have, parts, strict=True)]
    return have


def fault_of(cut):
    """What is wrong with a plan, "" if nothing: seen from its numbers."""
    drawn = torch.Generator().manual_seed(0)
    size = {"generator": drawn, "dtype": torch.float64}
    first, last = cut.matrices[0], cut.matrices[-1]
    x = torch.randn(first.rows, first.columns, **size).requires_grad_()
    weights = [torch.randn(m.rows, m.columns, **size) for m in cut.weights]
    full = x @ weights[0] if len(weights) == 1 else gelu(x @ weights[0]) @ weights[1]
    own = [x.detach().clone().requires_grad_() for _ in range(cut.ranks)]
    try:
        have = carried_out(cut, own, weights)
    except RuntimeError as error:
        return str(error)
    weight = torch.randn(full.shape, **size)  # of every number of Y in the loss
    for rank, part in enumerate(have):
        mine = last.part(rank, cut.ranks)
        if part.shape != full[mine].shape or not torch.allclose(part, full[mine]):
            return f"rank {rank} does not have its part of the product"
    parts = [(h * weight[last.part(r, cut.ranks)]).sum() for r, h in enumerate(have)]
    loss = parts[0] if last.cut == "whole" else sum(parts)
    wanted = torch.autograd.grad((full * weight).sum(), x)[0]
    got = torch.autograd.grad(loss, own)
    summed = any(m.name == "X's gradient" for m in cut.backward)
    for rank, gradient in enumerate(got):
        mine = first.part(rank, cut.ranks)
        gradient = sum(got) if summed else gradient
        if not torch.allclose(gradient[mine], wanted[mine]):
            return f"rank {rank} does not have its gradient of X"
    return ""


@pytest.mark.parametrize("how", HOW)
def test_a_cut_computes_the_product_and_its_gradient(how):
    for shape in ((8, 24, 48), (3, 12, 12), (1, 12, 24)):
        for ranks in (1, 2, 3, 4, 6):
            assert fault_of(cut_product(*shape, ranks, how)) == ""


def with_term(cut, at, change):
    terms = list(cut.terms)
    terms[at] = change(terms[at]) if change else None
    return replace(cut, terms=tuple(term for term in terms if term is not None))


WRONG = {
    "W by row, X whole": ("row", 0, lambda m: replace(m, cut="whole"), "shapes"),
    "parts not added": ("row", 5, None, "rank 0 does not have its part"),
    "gathered, not added": (
        "row", 5, lambda m: replace(m, op="all-gather"), "rank 0 does not have"
    ),
    "added, not gathered": (
        "column then column", 5, lambda m: replace(m, op="all-reduce"), "shapes"
    ),
    "B by column": (
        "column then row", 6, lambda m: replace(m, cut="column"), "shapes"
    ),
    "Y said to be whole": (
        "column", 4, lambda m: replace(m, cut="whole"), "rank 0 does not have its part"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_cut_is_seen(name):
    how, at, change, says = WRONG[name]
    cut = cut_product(8, 4, 12, 2, how)
    assert fault_of(cut) == ""
    assert says in fault_of(with_term(cut, at, change))


@pytest.mark.parametrize("how", ["column", "column then row", "column then column"])
def test_a_backward_that_sends_nothing_is_seen(how):
    cut = cut_product(8, 4, 12, 2, how)
    assert "its gradient of X" in fault_of(replace(cut, backward=()))
    assert cut_product(8, 4, 12, 2, "row").backward == ()


def test_the_bytes_are_those_of_the_formulas():
    s = 4 * 128 * 144  # of Y, X and their gradients
    for n in (1, 2, 3, 4):
        once = Fraction(n - 1, n)
        sent = {
            how: [m.sent(n) for c in [cut_product(ranks=n, how=how)]
                  for m in (*c.forward, *c.backward)]
            for how in HOW
        }  # fmt: skip
        assert sent["column"] == [2 * once * s]
        assert sent["row"] == [2 * once * 4 * s]
        assert sent["column then row"] == [2 * once * s] * 2
        gathered = [once * 4 * s, once * s, 2 * once * 4 * s, 2 * once * s]
        assert sent["column then column"] == gathered
    said = " ".join(words(matrix_cut(ranks=4, how="column then row")))
    assert "all-reduce of Y, 110,592 bytes from each rank" in said
    assert "all-reduce of X's gradient, 110,592 bytes from each rank" in said
    assert "1/4 of A and B: 41,472 of 165,888 numbers" in said
    assert "Backward: nothing is sent" in " ".join(words(matrix_cut(how="row")))


def areas(drawing, color):
    """The areas of rectangles of a colour, without the blocks with a rank's name."""
    root = ElementTree.fromstring(drawing.svg())
    return [
        float(e.get("width")) * float(e.get("height"))
        for e, _, _ in elements(root)
        if e.tag.endswith("rect") and e.get("fill") == color and not e.get("rx")
    ]


def drawn_faults(draw, cut):
    """What a picture of `cut` shows too much or too little, rank by rank."""
    d = Drawing(1200, 1200, title="t")
    picture = CutPicture(cut)
    draw(picture, d)
    sides = [(picture.side(m.rows), picture.side(m.columns), m) for m in cut.matrices]
    for rank in range(cut.ranks):
        has = [a * b / (cut.ranks if m.cut != "sum" else 1)
               for a, b, m in sides if m.cut != "whole"]  # fmt: skip
        if areas(d, rank_color(rank)) != pytest.approx(has, rel=0.01):
            yield f"rank {rank} has other parts"
    whole = [a * b for a, b, m in sides if m.cut == "whole" for _ in range(cut.ranks)]
    if areas(d, WHOLE) != pytest.approx(whole, rel=0.01):
        yield "other matrices are on all ranks"
    if words(d).count("+") != sum(m.cut == "sum" for m in cut.matrices) * (
        cut.ranks - 1
    ):
        yield "other matrices are added"


class WholeWeights(CutPicture):
    """A planted mistake: every rank has all of W."""

    def _matrix(self, d, m, rank, x, y):
        super()._matrix(d, replace(m, cut="whole") if m.name == "W" else m, rank, x, y)


class SameColumns(CutPicture):
    """A planted mistake: a part is drawn twice as wide."""

    def _matrix(self, d, m, rank, x, y):
        if m.cut == "column":
            m = Matrix(m.name, m.rows, m.columns, "sum")
        super()._matrix(d, m, rank, x, y)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("shape", [(128, 144, 576, 4), (4, 6, 8, 2)], ids=str)
def test_every_rank_is_drawn_with_its_own_part(how, shape):
    cut = cut_product(*shape, how=how)
    assert list(drawn_faults(CutPicture.draw, cut)) == []
    assert fills(matrix_cut(*shape, how), "rank 1") == [rank_color(1)]


@pytest.mark.parametrize("wrong", [WholeWeights, SameColumns])
def test_a_wrong_picture_is_seen(wrong):
    def draw(picture, d):
        wrong(picture.cut).draw(d)

    assert list(drawn_faults(draw, cut_product(how="column")))


def test_sides_of_equal_length_are_equal():
    for shape in ((128, 144, 576, 2), (4, 6, 8, 2)):
        picture = CutPicture(cut_product(*shape, "column then row"))
        sides = [picture.side(n) for n in sorted(set(shape[:3]))]
        assert sides == sorted(sides)
        assert len(set(sides)) == 3
        assert max(sides) == picture.longest


# Lanes: what is drawn is what happened.


LEGEND = [lighter(SAMPLE, p) if p else SAMPLE for p in PALER.values()]


def drawn_works(drawing, scale, left, top):
    """The blocks of a picture as (rank, fill, start, end, lower), by rank and start."""
    found = []
    root = ElementTree.fromstring(drawing.svg())
    for e, x, y in elements(root):
        if not e.tag.endswith("rect") or float(e.get("height")) != BLOCK:
            continue
        x, y = x + float(e.get("x")), y + float(e.get("y"))
        if e.get("rx") or e.get("stroke-dasharray") or y < top or x < left - 0.1:
            continue
        start, wide = (x - left) / scale, float(e.get("width")) / scale
        found.append((y, e.get("fill"), start, start + wide))
    return found


def shown_faults(drawing, schedule, simulated):
    """Where the blocks of a schedule's picture are not those of the simulation."""
    works = works_of(simulated.events)
    chunks = chunks_of(works)
    high = BLOCK + LOWER * max(chunks.values())
    scale, left = PLOT_W / float(simulated.makespan), 16 + 66
    bottom = TOP + schedule.num_ranks * (high + 6)
    drawn = [b for b in drawn_works(drawing, scale, left, TOP) if b[0] < bottom]
    wanted = [
        (
            TOP + w.rank * (high + 6) + LOWER * chunks[w.rank, w.stage],
            lighter(rank_color(w.rank), PALER[w.op])
            if w.op != "F"
            else rank_color(w.rank),
            w.start,
            w.end,
        )
        for w in works
    ]
    if len(drawn) != len(wanted):
        yield f"{len(drawn)} blocks instead of {len(wanted)}"
    for block, want in zip(sorted(drawn), sorted(wanted), strict=False):
        if block[1] != want[1] or block[::2] != pytest.approx(want[::2], abs=0.05):
            yield f"{block} instead of {want}"


@pytest.mark.parametrize("view", [v for v in VIEWS if v[1] > 1 and v[2] < 16], ids=str)
def test_every_action_is_drawn_when_it_happens(view):
    schedule = named(*view)
    simulated = simulate(schedule, equal_costs(schedule))
    drawing = schedule_view(*view)
    assert list(shown_faults(drawing, schedule, simulated)) == []
    said = " ".join(words(drawing))
    assert f"bubble {float(simulated.bubble):.1%}" in said


def test_a_wrong_picture_of_a_schedule_is_seen():
    right = named("1f1b", 4, 8)
    simulated = simulate(right)
    others = [named("gpipe", 4, 8), named("1f1b", 4, 7), named("zero_bubble", 4, 8)]
    for other in others:
        assert list(shown_faults(schedule_view(other), right, simulated))


def test_numbers_in_blocks_are_microbatches():
    said = words(schedule_view("zero_bubble", 3, 5))
    for op, k in itertools.product("FIW", range(5)):
        assert said.count(f"{op}{k}") == 3  # ranks
    said = words(schedule_view("interleaved", 4, 8, 2))  # no room for letters
    plain = [said.count(f"{k}") for k in (1, 2, 3, 4, 6, 7)]  # 0, 5: of the axis, too
    assert plain == [4 * 2 * 2] * 6  # ranks, stages, F and B


def test_ops_can_be_told_apart_without_colours():
    for rank in range(8):
        color = rank_color(rank)
        shades = [lighter(color, p) if p else color for p in sorted(PALER.values())]
        assert len(set(shades)) == 4
        for a, b in itertools.pairwise(shades[:2] + shades[3:]):
            assert rank == 7 or contrast(a, b) > 1.2, (rank, a, b)  # yellow is light
    assert "dasharray" in schedule_view("zero_bubble").svg()  # dots


BUBBLES = {  # of 4 ranks and 8 microbatches, F = I = W
    "naive": Fraction(3, 4),
    "gpipe": Fraction(3, 11),
    "1f1b": Fraction(3, 11),
    "interleaved": Fraction(3, 2) / (8 + Fraction(3, 2)),
    "zero_bubble": Fraction(1, 9),
}
PEAKS = {
    "naive": [1, 1, 1, 1],
    "gpipe": [8, 8, 8, 8],
    "1f1b": [4, 3, 2, 1],
    "interleaved": [5.5, 4.5, 3.5, 2.5],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_lane_says_how_long_its_rank_waits_and_what_it_keeps(name):
    drawing = schedule_view(name)
    notes = [w for w in words(drawing) if "keeps" in w and w.startswith("waits ")]
    assert len(notes) == 4
    for rank, note in enumerate(notes):
        share, keeps = re.fullmatch(r"waits ([\d.]+)%, keeps ([\d.]+)", note).groups()
        assert float(share) == pytest.approx(100 * BUBBLES[name], abs=0.06)
        if name in PEAKS:
            assert float(keeps) == PEAKS[name][rank]
        else:
            assert float(keeps) <= 4


def test_the_opening_of_chapter_11_does_not_tell_what_is_to_be_predicted():
    drawing = two_orders()
    told = " ".join([*words(drawing), drawing.description])
    assert not re.search(r"%|keeps|bubble \d|1F1B|27\.3", told)
    assert "GPipe" in words(drawing) and "Zero bubble (ZB-H1)" in words(drawing)


def test_the_staircase_and_the_microbatches():
    drawing = staircase()
    said = [w for w in words(drawing) if w.startswith("waiting")]
    assert said == ["waiting: 75%", "waiting: 43%"]  # 3/4 and 3/(4 + 3)
    assert "in 21 instead of 48 units" in drawing.description


def test_the_reader_may_draw_a_schedule_of_their_own():
    mine = parse("mine", ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])
    drawing = schedule_view(mine)
    assert drawing.title == "mine: 2 ranks, 2 microbatches"
    assert "bubble 33.3%" in " ".join(words(drawing))
    assert "rank 1: 1F0 1B0 1F1 1B1" in drawing.description
    stuck = parse("stuck", ["0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1"])
    assert "bubble" in schedule_view(stuck).description  # odd, but it comes to an end
    with pytest.raises(ScheduleError, match="rank"):
        schedule_view(parse("stuck", ["0B0 0F0", "1F0 1B0"]))


# Recorded runs.


def test_recorded_and_simulated_lie_on_one_axis():
    runs = {name: RUNS[name] for name in ("simulated", "measured")}
    drawing = pipeline_timeline(runs, unit=0.03)
    blocks = [b for b in drawn_works(drawing, 1, 82, 44) if b[1] not in LEGEND]
    assert len(blocks) == 2 * 4 * (8 + 8)
    half = len(blocks) // 2
    for one, other in zip(blocks[:half], blocks[half:], strict=True):
        assert one[1:] == pytest.approx(other[1:], abs=0.05)
    said = [w for w in words(drawing) if "ms, " in w]
    assert said == [f"{name}: 990 ms, 27.3% of it waiting" for name in runs]


def test_a_share_of_waiting_is_that_of_the_runtime():
    for name in ("gpipe", "zero_bubble"):
        events = list(recorded(name, 4, 8))
        works = works_of(events)
        wanted = float(BUBBLES[name])
        assert (
            idle_share(works) == pytest.approx(wanted) == pytest.approx(bubble(events))
        )
    late = [replace(w, start=w.start + 0.01, end=w.end + 0.01) if w.rank == 3 else w
            for w in works]  # fmt: skip
    assert idle_share(late) != pytest.approx(wanted)  # all others wait for it


def test_gaps_are_what_no_work_covers():
    works = [
        Work(0, "F", 0, 0, 1.0, 2.0),
        Work(0, "B", 0, 0, 1.5, 1.8),  # within the other
        Work(0, "F", 0, 1, 4.0, 5.0),
        Work(1, "F", 1, 0, 0.0, 6.0),
    ]
    assert gaps(works, 0) == [(0.0, 1.0), (2.0, 4.0), (5.0, 6.0)]
    assert gaps(works, 1) == []
    assert idle_share(works) == pytest.approx((4 / 6) / 2)
    assert idle_share(works, 0) == pytest.approx(4 / 6)


def test_who_works_tells_forward_from_backward_and_who_waits():
    drawing = who_works(one_after_the_other(4))
    said = words(drawing)
    assert said.count("forward") == said.count("backward") == 4
    assert said.count("waits 75.0%") == 4
    for rank in range(4):
        color = rank_color(rank)
        fill = {"forward": color, "backward": lighter(color, PALER["B"])}
        for word, want in fill.items():
            assert fills(drawing, word)[rank] == want
    assert "rank 3 computes 2 times and waits 75.0% of the time" in drawing.description


# Measured.

ROWS = [
    ("GPipe", 0.284, BUBBLES["gpipe"], 0.285),
    ("1F1B", 0.276, BUBBLES["1f1b"], 0.284),
    ("interleaved, v = 2", 0.17, BUBBLES["interleaved"], 0.193),
    ("ZB-H1", 0.118, BUBBLES["zero_bubble"], None),
]


def test_bubbles_are_as_high_as_they_were_measured():
    (axes,) = bubbles(ROWS).axes
    bars = [bar.get_height() for bar in axes.patches if bar.get_height()]
    wanted = [100 * s for _, ours, _, theirs in ROWS for s in (ours, theirs) if s]
    assert bars == pytest.approx(wanted)
    marks = [line.get_ydata()[0] for line in axes.lines if len(line.get_ydata())]
    assert marks[::2] == pytest.approx([100 * float(row[2]) for row in ROWS])
    assert axes.get_ylabel() == "bubble [% of the ranks' time]"
    assert "PyTorch's" not in str(texts(bubbles([row[:3] for row in ROWS])))


def test_the_curves_are_the_formula():
    (axes,) = bubble_curve({2: {1: 0.51, 4: 0.21}, 4: {4: 0.44}, 8: {}}, most=12).axes
    curves = [line for line in axes.lines if len(line.get_xdata()) == 12]
    for line, p in zip(curves, (2, 4, 8), strict=True):
        m = line.get_xdata()
        assert list(line.get_ydata()) == pytest.approx(100 * (p - 1) / (m + p - 1))
    points = [line.get_xydata().tolist() for line in axes.lines
              if line.get_marker() == "o" and len(line.get_xdata())]  # fmt: skip
    assert points == [[[1, 51], [4, 21]], [[4, 44]]]


def test_who_is_beaten_in_both_is_hollow():
    rows = [("gpipe", 8, 0.27), ("1f1b", 4, 0.27), ("interleaved", 5.5, 0.16)]
    (axes,) = memory_against_bubble(rows).axes
    drawn = [line for line in axes.lines if len(line.get_xdata())]
    assert [line.get_xydata().tolist() for line in drawn] == [
        [[peak, pytest.approx(100 * share)]] for _, peak, share in rows
    ]
    hollow = [line.get_markerfacecolor() == "white" for line in drawn]
    assert hollow == [True, False, False]  # 1F1B keeps less, and waits no longer


def test_peaks_have_the_colours_of_their_ranks():
    (axes,) = activation_peaks(PEAKS, PEAKS).axes
    bars = [bar for bar in axes.patches if bar.get_height()]
    assert [bar.get_height() for bar in bars] == list(itertools.chain(*PEAKS.values()))
    assert to_hex(bars[5].get_facecolor()).upper() == rank_color(1)
    assert axes.get_ylabel() == "kept activations [microbatches]"


PLOTS = {
    "bubbles": lambda: bubbles(ROWS),
    "bubbles alone": lambda: bubbles([row[:3] for row in ROWS[:2]]),
    "peaks": lambda: activation_peaks(PEAKS, PEAKS),
    "curve": lambda: bubble_curve({2: {1: 0.5}, 4: {4: 0.43}, 8: {}}),
}


@pytest.mark.parametrize("name", PLOTS)
def test_texts_do_not_overlap(name):
    no_texts_overlap(PLOTS[name])


def test_sliders_and_galleries():
    controls = {"ranks": [1, 2, 3, 4], "inner": (12, 288, 12), "columns": (12, 576, 12)}
    view = explore(matrix_cut, how=list(HOW), **controls)
    assert view.children[-1].value.startswith("<svg")
    drawing = gallery(matrix_cut, [{"how": how} for how in ("column", "row")])
    assert list(problems(drawing)) == []
    controls = {"ranks": (1, 8), "microbatches": (1, 16), "stages_per_rank": (1, 4)}
    view = explore(schedule_view, schedule=list(SCHEDULES), **controls)
    assert view.children[-1].value.startswith("<svg")
    drawing = gallery(schedule_view, [{"schedule": s} for s in ("gpipe", "1f1b")])
    assert list(problems(drawing)) == []


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (lambda: matrix_cut(how="diagonal"), "how is 'diagonal'; it can be 'column'"),
        (lambda: matrix_cut(0), "rows is 0"),
        (lambda: matrix_cut(ranks=9), "ranks is 9; .* 1 to 8"),
        (lambda: matrix_cut(8, 8, 9, 2), "columns is 9; 2 ranks need a multiple of 2"),
        (lambda: matrix_cut(8, 9, 8, 2, "row"), "inner is 9; 2 ranks need"),
        (lambda: schedule_view("gpip"), "schedule is 'gpip'; it can be 'naive'"),
        (lambda: schedule_view(ranks=0), "ranks is 0"),
        (lambda: schedule_view(ranks=9), "ranks is 9"),
        (lambda: schedule_view(microbatches=17), "microbatches is 17"),
        (lambda: schedule_view("interleaved", stages_per_rank=5), "stages_per_rank is"),
        (lambda: pipeline_timeline({}), "no runs"),
        (lambda: pipeline_timeline([]), "nothing was computed"),
        (lambda: pipeline_timeline(RUNS, unit=0), "unit is 0"),
        (lambda: pipeline_timeline(RUNS["measured"], width=-1), "width is -1"),
        (lambda: pipeline_timeline(RUNS["measured"], width=10), "a run lasts 990 ms"),
        (lambda: who_works([Event(0, "wait", 0, 1, lane="wait")]), "nothing was"),
        (lambda: bubbles([]), "no rows"),
        (lambda: bubbles(ROWS * 2), "may be there once"),
        (lambda: bubbles([("a", 1.2, 0.5)]), "the bubble of 'a' is 1.2"),
        (lambda: bubbles([("a", 0.2, 0.5, 50)]), "the bubble of 'a' is 50"),
        (lambda: activation_peaks(PEAKS, {}), "theory is of"),
        (lambda: memory_against_bubble([]), "no rows"),
        (lambda: memory_against_bubble([("a", 0, 0.5)]), "'a' keeps 0 microbatches"),
        (lambda: memory_against_bubble([("a", 1, 5)]), "the bubble of 'a' is 5"),
        (lambda: bubble_curve({}), "no number of ranks"),
        (lambda: bubble_curve({0: {}}), "p is 0"),
        (lambda: bubble_curve({2: {0: 0.5}}), "m is 0"),
        (lambda: bubble_curve({2: {1: 50}}), "p = 2, m = 1 is 50"),
        (lambda: bubble_curve({2: {}}, most=1), "most is 1"),
    ],
)
def test_what_cannot_be_drawn(bad, says):
    with pytest.raises(ValueError, match=says):
        bad()
