"""The figures of chapter 12 show what they are about, and nothing else."""

import pytest
import torch
from drawings import check_layout, fills, words

from ddp_course.chapters.ch12_precision import figures
from ddp_course.precision import FORMATS

SETTINGS = [(1.1, 0, name) for name in FORMATS] + [
    (1.9, 15, "fp16"),
    (1.0, -30, "fp16"),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_number_taken_apart(setting):
    check_layout(lambda: figures.taken_apart(*setting))
    drawing, its = figures.taken_apart(*setting), FORMATS[setting[2]]
    digits = [word for word in words(drawing) if word in ("0", "1")]
    assert len(digits) == its.bits
    exponent = fills(drawing, "0") + fills(drawing, "1")
    assert exponent.count(figures.PARTS["exponent"]) == its.exponent


def test_what_is_kept_is_told():
    assert any("kept: 1.09961 = (1 + 102 / 1024) x 2^0" in w
               for w in words(figures.taken_apart(1.1, 0, "fp16")))  # fmt: skip
    assert "kept: inf" in words(figures.taken_apart(1.0, 16, "fp16"))
    assert "lost: 1 of it; the next number is 5.96e-08 away" in words(
        figures.taken_apart(1.0, -26, "fp16")
    )
    with pytest.raises(ValueError, match="format is 'int8'"):
        figures.taken_apart(format="int8")


def test_the_picture_has_every_format_and_no_answer():
    check_layout(figures.formats_and_a_step)
    said = words(figures.formats_and_a_step())
    assert set(FORMATS) <= set(said)
    assert not {"256", "1.5"} & set(said)  # what is to be predicted


def test_what_a_format_loses_is_counted():
    values = torch.tensor([0.0, 1.0, 2e-5, 1e-8, 7e-8, 3.0, 1e-30, 1e-6])
    assert figures.lost_in(values, FORMATS["fp16"]) == (2 / 7, 3 / 7)
    assert figures.lost_in(values, FORMATS["bf16"]) == (0, 0)
    drawn = figures.exponents({"some": values})
    shown = [len(line.get_xdata()) for line in drawn.axes[0].lines]
    assert shown and drawn.axes[0].get_xlabel().startswith("exponent")


def test_errors_are_drawn_where_they_are():
    simulated = {"tree": {2: 0.001, 8: 0.002}, "ring": {2: 0.001, 8: 0.004}}
    expected = {"ring": lambda n: n / 1000}
    drawn = figures.errors_of_sums(simulated, {"ring": {2: 0.003}}, expected)
    lines = [list(line.get_ydata()) for line in drawn.axes[0].lines]
    for drawn_line in ([0.001, 0.002], [0.001, 0.004], [0.003], [0.002, 0.008]):
        assert drawn_line in lines
