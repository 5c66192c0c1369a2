"""The figures of chapter 04 show what they are about, and nothing else."""

import re

import pytest
from drawings import check_sliders, laid_out
from refusals import refused

from ddp_course.chapters.ch04_dp_vs_ddp.figures import DP_STEPS, dp_and_ddp, dp_step

test_the_layout = laid_out(dp_and_ddp, (dp_step, range(len(DP_STEPS))))


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


def test_the_slider_and_the_gallery():
    view = check_sliders(dp_step, [{"step": k} for k in range(8)], step=(0, 7))
    assert view.children[0].value == 0


test_what_cannot_be_drawn = refused((lambda: dp_step(8), "step is 8; .* 0 to 7"))
