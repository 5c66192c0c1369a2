"""The figures of chapter 04 show what they are about, and nothing else."""

import re
from dataclasses import dataclass, field

import pytest
from drawings import no_texts_overlap, problems

from ddp_course.chapters.ch04_dp_vs_ddp.dp_and_ddp import dp_and_ddp
from ddp_course.chapters.ch04_dp_vs_ddp.figures import DP_STEPS, dp_step
from ddp_course.chapters.ch04_dp_vs_ddp.gil import Timing
from ddp_course.chapters.ch04_dp_vs_ddp.measured import plot_gil, plot_moves
from ddp_course.data_parallel import Move
from ddp_course.lab import explore, gallery

DRAWINGS = {
    **{f"step {k}": lambda k=k: dp_step(k) for k in range(len(DP_STEPS))},
    "the star and the ring": dp_and_ddp,
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_the_layout(name):
    drawing = DRAWINGS[name]()
    assert list(problems(drawing)) == []
    assert drawing.svg() == DRAWINGS[name]().svg()
    assert len(drawing.description) > 60
    assert drawing.width <= 1100


def test_an_iteration_has_its_moves_and_their_bytes():
    names = [step.name for step in DP_STEPS]
    assert names[1:5] == ["scatter", "replicate", "parallel_apply", "gather"]
    assert names[5:] == ["loss", "backward", "update"]
    # (N - 1) S out with the copies, (N - 1) S back with their gradients.
    assert [step.through for step in DP_STEPS] == [0, 0, 3, 3, 3, 3, 6, 6]
    for step in DP_STEPS:
        assert (
            (step.sent in step.at_0) == (step.sent in step.at_others) == bool(step.way)
        )
        assert not {"optimizer", "loss"} & set(step.at_others)
        assert {"model", "optimizer"} <= set(step.at_0)


@pytest.mark.parametrize("step", range(8))
def test_arrows_go_where_the_bytes_go(step):
    heads = re.findall(r'<polygon points="([\d.]+),', dp_step(step).svg())
    left = [float(x) for x in heads if float(x) < 250]
    right = [float(x) for x in heads if float(x) > 250]
    way = DP_STEPS[step].way
    assert len(right) == 3 * (way in ("out", "both"))
    assert len(left) == 3 * (way in ("back", "both"))


def test_moves_are_added_up_by_replica():
    moves = [Move("parameters", 0, k, 2**20) for k in (1, 2)]
    moves += [Move("gradients of parameters", k, 0, 3 * 2**20) for k in (1, 2)]
    (axes,) = plot_moves(moves).axes
    heights = [bar.get_height() for bar in axes.patches if bar.get_height()]
    assert heights == [2, 3, 3, 6, 1, 1]  # sent by 0, 1, 2; received
    assert "MiB" in axes.get_ylabel()


def timings(model):
    ways = ("one after another", "threads", "DataParallel", "processes")
    return [
        Timing(model, way, 2, 2 / k, 2.0, k, (2 / k, 2.2 / k))
        for way, k in zip(ways, (1, 0.8, 0.7, 1.9), strict=True)
    ]


def test_the_lock_is_shown_for_both_models():
    panels = plot_gil(timings("tiny") + timings("large")).axes
    assert [axes.get_title() for axes in panels] == ["tiny", "large"]
    for axes in panels:
        assert [bar.get_height() for bar in axes.patches] == [1, 0.8, 0.7, 1.9]
        dots = [line for line in axes.lines if line.get_marker() == "o"]
        assert [list(dot.get_ydata()) for dot in dots] == [
            pytest.approx([k, k]) for k in (0.8, 0.7, 1.9)
        ]
        flat = [line.get_ydata()[0] for line in axes.lines if line not in dots]
        assert flat == [1, 2]  # one thread does everything, and the ideal
        assert axes.get_ylim()[1] > 2
        assert [text.get_text() for text in axes.texts].count("ideal: 2") == 1


def test_the_slider_and_the_gallery():
    view = explore(dp_step, step=(0, 7))
    assert view.children[-1].value.startswith("<svg")
    assert view.children[0].value == 0
    drawing = gallery(dp_step, [{"step": k} for k in range(8)])
    assert list(problems(drawing)) == []
    assert drawing.width <= 1000


@dataclass(frozen=True)
class Other:
    """A move of something else than Moves' own class."""

    src: int = 0
    dst: int = 3
    nbytes: int = 2**21
    detail: dict = field(default_factory=dict, hash=False)


FIGURES = {
    "moves": lambda: plot_moves([Other(), Other(3, 0)]),
    "the lock": lambda: plot_gil(timings("many tiny ones") + timings("few large ones")),
}


@pytest.mark.parametrize("name", FIGURES)
def test_texts_do_not_overlap(name):
    no_texts_overlap(FIGURES[name])


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (lambda: dp_step(8), "step is 8; .* 0 to 7"),
        (lambda: plot_moves([]), "no moves; .*record=True"),
        (lambda: plot_gil([]), "no timings"),
    ],
)
def test_what_cannot_be_drawn(bad, says):
    with pytest.raises(ValueError, match=says):
        bad()
