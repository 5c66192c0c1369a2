"""Pipelines in closed form: known numbers, messages, errors.

That they are what a schedule does is tested in tests/pipeline/test_schedules.py.
"""

from __future__ import annotations

from fractions import Fraction

from refusals import refused

from ddp_course.pipeline import SCHEDULES
from ddp_course.theory import (
    PIPELINES,
    pipeline_activations,
    pipeline_bubble,
    pipeline_time,
    pipeline_volume,
)


def test_the_names_are_those_of_the_schedules():
    assert {*PIPELINES} <= {*SCHEDULES}


def test_known_numbers():
    """p = 4, m = 8: what performance.md measured and the literature predicts."""
    shares = {name: pipeline_bubble(name, 4, 8) for name in PIPELINES}
    assert shares == {
        "naive": Fraction(3, 4),
        "gpipe": Fraction(3, 11),
        "1f1b": Fraction(3, 11),
        "interleaved": Fraction(3, 19),
        "zero_bubble": Fraction(1, 9),
    }
    peaks = [[pipeline_activations(name, 4, 8, r) for r in range(4)] for name in shares]
    assert peaks == [
        [1, 1, 1, 1],
        [8, 8, 8, 8],
        [4, 3, 2, 1],
        [Fraction(k, 2) for k in (11, 9, 7, 5)],
        [4, 4, 4, 4],
    ]
    assert pipeline_time("1f1b", 4, 8, F=1, I=1, W=1) == 33
    assert pipeline_time("zero_bubble", 4, 8) == 27


def test_time_with_recomputation_and_floats():
    """GPipe computes forward twice: (m+p-1)(2F+B)."""
    assert pipeline_time("gpipe", 4, 8, F=1, I=1 + 1, W=1) == 11 * 4
    assert pipeline_time("interleaved", 4, 8, F=0.5, I=0.5, W=0.5) == 9.5 * 1.5
    assert isinstance(pipeline_bubble("interleaved", 4, 8, F=0.5), float)


def test_messages_and_bytes():
    """One activation and one gradient of the whole batch at each boundary."""
    volume = pipeline_volume(4, 8, batch=16, sequence=64, hidden=144)
    assert volume.activations == volume.gradients == 3 * 16 * 64 * 144 * 4
    assert volume.messages == 2 * 3 * 8
    assert volume.total == 2 * volume.activations
    more = pipeline_volume(4, 16, batch=16, sequence=64, hidden=144)
    assert (more.total, more.messages) == (volume.total, 2 * volume.messages)
    assert pipeline_volume(1, 8, 16, 64, 144).total == 0
    half = pipeline_volume(4, 8, 16, 64, 144, itemsize=2)
    assert half.total * 2 == volume.total


test_bad_values_are_named = refused(
    (lambda: pipeline_time("GPipe", 2, 2), "schedule is 'GPipe'; it can be 'naive'"),
    (lambda: pipeline_time("gpipe", 2, 2, 2), "stages_per_rank is 2; with schedule"),
    (lambda: pipeline_time("zero_bubble", 3, 2, 2), "is 2; with 2 stages on"),
    (lambda: pipeline_bubble("gpipe", 2, 2, F=0, I=0, W=0), "are all 0"),
    (lambda: pipeline_activations("gpipe", 2, 2, 2), "rank is 2; it can be 0 to 1"),
    (lambda: pipeline_volume(2, 9, 8, 1, 1), "num_microbatches is 9 and batch 8; each"),
)
