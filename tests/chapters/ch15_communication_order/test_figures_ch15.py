"""The figures of chapter 15."""

import pytest
from drawings import check_layout

from ddp_course.chapters.ch15_communication_order.figures import (
    LAYERS,
    POLICIES,
    step,
    steps,
    two_orders,
)
from ddp_course.communication_order import WAIT_FOR_ALL, priority, simulate


@pytest.mark.parametrize("policy", POLICIES)
def test_the_layout(policy):
    for send in (0, 1, 8):
        check_layout(lambda send=send: step(policy, send))
    check_layout(two_orders)


def test_what_the_steps_say():
    told = two_orders().description
    assert "sends: send 2 send 1 send 0. What" in told  # in the order of backward
    assert told.endswith("sends: send 2 send 1 send 0 send 1 send 2.")
    played = {
        "one": simulate(LAYERS, WAIT_FOR_ALL),
        "two": simulate(LAYERS, priority(1)),
    }
    drawn = steps(played, path=True)
    assert drawn.description.startswith("one: 18 in all. computes: backward 3")
    assert drawn.description.endswith(
        "longest: backward 3 backward 2 backward 1 backward 0 send 0 send 1 send 2 "
        "send 3 forward 3."
    )
    alone = steps({"events": played["two"].events}, unit=10)
    assert alone.description.startswith("events: 150 in all.")
    with pytest.raises(ValueError, match="no steps"):
        steps({})
