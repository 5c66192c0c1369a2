"""The opening picture of chapter 19: half a day, with failures, saves and restarts."""

from itertools import pairwise, product

import pytest
from drawings import check_sliders, laid_out

from ddp_course.chapters.ch19_failures.half_day import failures, half_day, pieces

test_the_layout = laid_out(
    half_day, (half_day, product((1024, 16_384), (0.5, 4.0), [(10, 40, 160)], (0, 8)))
)


def test_work_behind_the_last_save_is_lost():
    found = list(pieces(every=100, save=20, failed=[300, 305]))
    assert found == [
        ("kept", 0, 100), ("save", 100, 120), ("kept", 120, 220), ("save", 220, 240),
        ("lost", 240, 300), ("restart", 300, 310),
        ("restart", 305, 315),  # it failed again before work went on
        ("kept", 315, 415), ("save", 415, 435), ("kept", 435, 535), ("save", 535, 555),
        ("kept", 555, 655), ("save", 655, 675), ("kept", 675, 720),
        ("restart", 720, 720),
    ]  # fmt: skip


@pytest.mark.parametrize(("gpus", "seed"), [*product((1024, 16_384), range(5))])
def test_a_row_has_no_hole(gpus, seed):
    found = list(pieces(10, 0.5, failures(gpus, seed)))
    assert found[0][1] == 0 and found[-1][2] == 720
    for (_, _, end), (kind, start, _) in pairwise(found):
        assert start == end or (kind == "restart" and start < end)


def test_failures_come_at_the_rate_of_all_gpus():
    counts = [len(failures(16_384, seed)) for seed in range(400)]
    assert sum(counts) / 400 == pytest.approx(12 * 16_384 / 50_700, rel=0.1)
    titles = {half_day(gpus=gpus, seed=0).title for gpus in (1024, 8192, 16_384)}
    assert "12 hours of 8,192 GPUs, 1 failure" in titles
    assert all(title.endswith((" 1 failure", "failures")) for title in titles)


def test_the_sliders_begin_with_a_picture():
    settings = [{"gpus": 1024}, {"gpus": 16_384, "save": 0.5}]
    check_sliders(half_day, settings, gpus=[1024, 16_384], save=[0.5, 4], seed=range(9))
