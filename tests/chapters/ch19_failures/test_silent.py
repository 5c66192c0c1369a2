"""Silent faults: what digests and losses show, and what has spread by then."""

import pytest
from drawings import laid_out

from ddp_course.chapters.ch19_failures.figures import digest_table, lost_time
from ddp_course.chapters.ch19_failures.silent import (
    EVERY,
    STEPS,
    WRONG_STEP,
    costs,
    silent_run,
)
from ddp_course.failures.digests import first_spike, suspects
from ddp_course.launch import spawn

SEEN = WRONG_STEP // EVERY * EVERY + EVERY  # the next comparison


def run(fault, *batches_and_state):
    return spawn(silent_run, fault, *batches_and_state, world_size=3, output="none")


@pytest.fixture(scope="module")
def whole():
    return run("none")[0]


def differing(found):
    return {step: suspects(row) for step, row in found.digests.items() if suspects(row)}


def test_without_a_fault_nothing_is_seen(whole):
    assert differing(whole) == {} and first_spike(whole.losses) is None
    assert [*whole.digests] == [*range(0, STEPS + 1, EVERY)]


@pytest.mark.parametrize(("fault", "rank"), [("flipped bit", 1), ("drift", 2)])
def test_a_rank_that_differs_is_named_and_no_loss_shows_it(whole, fault, rank):
    found = run(fault)
    assert differing(found[0]) == {
        step: [rank] for step in range(SEEN, STEPS + 1, EVERY)
    }
    assert found[0].digests == found[1].digests == found[2].digests
    losses = zip(found[0].losses, whole.losses, strict=True)
    assert max(abs(a - b) for a, b in losses) < 0.01
    # the wrong rank's gradients were averaged into all replicas before the comparison
    assert found[0].digests[SEEN][0] != whole.digests[SEEN][0]
    assert found[0].digests[SEEN - EVERY] == whole.digests[SEEN - EVERY]


def test_a_wrong_gradient_is_seen_by_the_loss_alone(whole):
    found = run("wrong gradient")[0]
    assert differing(found) == {}
    assert first_spike(found.losses) == WRONG_STEP + 1
    assert found.losses[: WRONG_STEP + 1] == whole.losses[: WRONG_STEP + 1]
    # from the checkpoint before the fault: without a fault, the same as if nothing was
    state = found.states[SEEN - EVERY]
    again = run("none", range(SEEN - EVERY, SEEN), state)[0]
    assert again.losses == whole.losses[SEEN - EVERY : SEEN]
    assert again.digests[EVERY] == whole.digests[SEEN]
    # the checkpoint behind the fault is as wrong on all ranks
    late = run("none", range(SEEN, STEPS), found.states[SEEN])[0]
    assert sum(late.losses) > 1.5 * sum(whole.losses[SEEN:])


ROWS = {0: [1, 1, 1], 4: [1, 2, 1], 8: [1, 2, 3]}
test_the_layout = laid_out((digest_table, [({"a fault": ROWS, "another": ROWS},)]))


def test_a_table_of_digests_shows_who_differs_and_no_guess():
    words = digest_table({"a fault": ROWS}).description
    assert "a fault: rank 1 from step 4 on" in words
    assert digest_table({"a fault": ROWS}).svg().count("≠") == 1
    assert digest_table({"a fault": ROWS}).svg().count(">?<") == 3


def test_lost_time_is_drawn_where_it_was_measured():
    axes = lost_time({0.1: 1.5, 0.2: 1.25}, 0.015, 0.3).axes[0]
    assert [*axes.lines[1].get_ydata()] == pytest.approx([50, 25])
    assert min(axes.lines[0].get_ydata()) == pytest.approx(39.6, abs=0.1)


def test_a_digest_costs_a_small_part_of_a_step():
    [(of_digest, of_step)] = spawn(costs, world_size=1, output="none")
    assert 0 < of_digest < 0.3 * of_step
