"""The checker: what is wrong is found, what is right is proved."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules_brute import can_be_run, meets

from ddp_course import theory
from ddp_course.pipeline import (
    SCHEDULES,
    Action,
    Schedule,
    ScheduleError,
    add_messages,
    check,
    gpipe,
    naive,
    one_f_one_b,
    parse,
    zero_bubble,
)
from ddp_course.pipeline.player import play
from ddp_course.pipeline.program import Instruction, Program

MAKERS = list(SCHEDULES.values())

# ---- planted schedules --------------------------------------------------------------

PLANTED = {
    "deadlock": (
        ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
        "ranks wait for each other: rank 0 is at 0B0, which needs 1B0 of rank 1; "
        "rank 1 is at 1F1, which needs 0F1 of rank 0",
    ),
    "three in a circle": (
        ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F1 2B1 2F0 2B0"],
        "rank 1 is at 1B0, which needs 2B0 of rank 2; "
        "rank 2 is at 2F1, which needs 1F1 of rank 1",
    ),
    "missing backward": (
        ["0F0 0B0 0F1", "1F0 1B0 1F1 1B1"],
        "0B1 is missing, or 0I1 and 0W1 in its place",
    ),
    "missing forward": (["0F0 0B0 0B1", "1F0 1B0 1F1 1B1"], "0F1 is missing"),
    "missing weights": (["0F0 0I0"], "0W0 is missing: 0I0 is only half of 0B0"),
    "missing inputs": (["0F0 0W0"], "0I0 is missing: 0W0 is only half of 0B0"),
    "twice": (
        ["0F0 0F1 0B0 0B1 0B0", "1F0 1B0 1F1 1B1"],
        "0B0 is run twice, by ranks 0 and 0",
    ),
    "backward and a half": (
        ["0F0 0B0 0W0"],
        "0B0 is run, and 0W0, which is a part of it",
    ),
    "backward before forward": (
        ["0B0 0F0", "1F0 1B0"],
        "rank 0 runs 0B0 before 0F0, which it needs",
    ),
    "W before I": (["0F0 0W0 0I0"], "rank 0 runs 0W0 before 0I0, which it needs"),
    "stage on two ranks": (
        ["0F0 0B0 1B0", "1F0"],
        "stage 1 is on rank 0 and rank 1; it must be on one",
    ),
    "stage on no rank": (["0F0 0B0", "2F0 2B0"], "stage 1 is on no rank"),
    "later stage first on one rank": (
        ["1F0 0F0 1B0 0B0"],
        "rank 0 runs 1F0 before 0F0, which it needs",
    ),
    "earlier stage's backward first": (
        ["0F0 1F0 0B0 1B0"],
        "rank 0 runs 0B0 before 1B0, which it needs",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_first_thing_that_is_wrong_is_named(name):
    rows, message = PLANTED[name]
    planted = parse("planted", rows)
    assert not can_be_run(planted)
    with pytest.raises(ScheduleError) as caught:
        check(planted)
    assert str(caught.value).startswith("planted: ")
    assert message in str(caught.value)


def test_what_there_is_not():
    short = gpipe(2, 2)
    with pytest.raises(ScheduleError, match="rank 1 runs 1F0; the last stage is 0"):
        check(replace(short, num_stages=1))
    with pytest.raises(
        ScheduleError, match="rank 0 runs 0F1; the last microbatch is 0"
    ):
        check(replace(short, num_microbatches=1))
    with pytest.raises(ScheduleError, match="0F2 is missing"):
        check(replace(short, num_microbatches=3))
    with pytest.raises(ScheduleError, match="stage 2 is on no rank"):
        check(replace(short, num_stages=3))


def test_memory_beyond_a_limit():
    with pytest.raises(ScheduleError, match="after 0F2; its limit is 2"):
        check(gpipe(2, 3), max_activations=2)
    check(gpipe(2, 3), max_activations=3)
    check(one_f_one_b(2, 8), max_activations=[2, 1])
    with pytest.raises(ScheduleError, match="rank 1 .* 2 microbatches after 1F1"):
        check(gpipe(2, 8), max_activations=[8, 1])
    with pytest.raises(ValueError, match="max_activations has 3 limits; there are 2"):
        check(gpipe(2, 2), max_activations=[1, 2, 3])


def test_what_w_needs_is_kept_until_w():
    hoarding = parse("mine", ["0F0 0I0 0F1 0I1 0F2 0I2 0W0 0W1 0W2"])
    assert check(hoarding).peak_activations == (3,)
    assert check(zero_bubble(2, 3)).peak_activations == (2, 2)


# ---- mutations ----------------------------------------------------------------------


@st.composite
def mutated(draw) -> Schedule:
    """A legal schedule, and one to three changes."""
    make = draw(st.sampled_from(MAKERS))
    schedule = make(draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    rows = [list(row) for row in schedule.ranks]
    for _ in range(draw(st.integers(1, 3))):
        row = draw(st.sampled_from(rows))
        if not row:
            continue
        one, two = (draw(st.integers(0, len(row) - 1)) for _ in "12")
        kind = draw(
            st.sampled_from(["swap", "move", "drop", "twice", "change", "rank"])
        )
        if kind == "swap":
            row[one], row[two] = row[two], row[one]
        elif kind == "move":
            row.insert(two, row.pop(one))
        elif kind == "drop":
            row.pop(one)
        elif kind == "twice":
            row.insert(two, row[one])
        elif kind == "change":
            row[one] = replace(row[one], op=draw(st.sampled_from("FBIW")))
        else:
            draw(st.sampled_from(rows)).append(row.pop(one))
    return replace(schedule, ranks=rows)


@settings(max_examples=300, deadline=None)
@given(schedule=mutated(), seed=st.integers(0, 1000))
def test_mutated_schedules_are_judged_as_if_they_were_run(schedule, seed):
    legal = can_be_run(schedule, seed)
    try:
        proof = check(schedule)
    except ScheduleError as error:
        assert not legal, f"{error}\n{schedule}"
    else:
        assert legal, schedule
        check_witness(proof)


def check_witness(proof) -> None:
    """The proof's order is the schedule's, one by one, on one rank."""
    schedule = proof.program.schedule
    for rank, row in enumerate(schedule.ranks):
        assert tuple(a for r, a in proof.order if r == rank) == row
    done = set()
    for _, action in proof.order:
        assert done.issuperset(schedule.needs(action))
        done.add(action)


# ---- programs -----------------------------------------------------------------------


def test_a_program_as_it_is_printed():
    """The module's own example, to its end."""
    assert str(add_messages(one_f_one_b(2, 3))).splitlines() == [
        "rank 0 | 0F0  >0F0  0F1  >0F1+<1B0  0B0  0F2  >0F2+<1B1  0B1  <1B2  0B2",
        "rank 1 | <0F0  1F0  <0F1  1B0  >1B0  1F1  1B1  <0F2+>1B1  1F2  1B2  >1B2",
    ]
    assert str(add_messages(one_f_one_b(2, 3), fused=False)).splitlines() == [
        "rank 0 | 0F0  >0F0  0F1  >0F1  <1B0  0B0  0F2  >0F2  <1B1  0B1  <1B2  0B2",
        "rank 1 | <0F0  1F0  1B0  >1B0  <0F1  1F1  1B1  >1B1  <0F2  1F2  1B2  >1B2",
    ]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_every_message_is_sent_once_and_received_once(make, fused):
    for p, m in [(1, 2), (2, 1), (2, 5), (3, 4), (4, 4)]:
        schedule = make(p, m)
        steps = add_messages(schedule, fused=fused)
        sent, received = set(), set()
        for rank, groups in enumerate(steps.ranks):
            flat = [step for group in groups for step in group]
            computed = [s.action for s in flat if s.kind == "compute"]
            assert tuple(computed) == schedule.ranks[rank]
            for group in groups:
                assert len(group) == 1 or "compute" not in {s.kind for s in group}
                assert fused or len(group) == 1
            for step in flat:
                if step.kind == "send":
                    assert (rank, step.peer, step.action) not in sent
                    sent.add((rank, step.peer, step.action))
                elif step.kind == "recv":
                    assert (step.peer, rank, step.action) not in received
                    received.add((step.peer, rank, step.action))
                    forward = step.action.op == "F"
                    needed = step.action.stage + (1 if forward else -1)
                    assert schedule.rank_of(needed) == rank
                else:
                    assert step.peer is None
        assert sent == received
        crossed = sum(a != b for a, b in pairwise(schedule.ranks_of_stages))
        assert len(sent) == 2 * m * crossed
        if p > 1 and schedule.name in theory.PIPELINES:
            volume = theory.pipeline_volume(schedule.num_stages, m, m, 1, 1)
            assert len(sent) == volume.messages
        for src in range(p):
            for dst in range(p):
                order = schedule.messages(src, dst)
                assert {(src, dst, a) for a in order} == {
                    key for key in sent if key[:2] == (src, dst)
                }


ALONE = {"naive": True, "gpipe": True}  # the others need messages posted together


@pytest.mark.parametrize("name", theory.PIPELINES)
def test_one_message_at_a_time_is_not_enough_for_1f1b(name):
    """With blocking sends; naive and GPipe have never two messages that cross."""
    for p, m in [(2, 2), (2, 5), (3, 4), (4, 8)]:
        schedule = SCHEDULES[name](p, m)
        assert meets(add_messages(schedule, fused=False)) == ALONE.get(name, False)
        if name in ALONE:
            check(schedule, fused=False)
            continue
        with pytest.raises(
            ScheduleError, match=r"ranks wait for each other: rank \d s"
        ):
            check(schedule, fused=False)
    with pytest.raises(ScheduleError) as caught:
        check(one_f_one_b(2, 2), fused=False)
    assert str(caught.value) == (
        "1f1b: ranks wait for each other: "
        "rank 0 sends 0F1 to rank 1; rank 1 sends 1B0 to rank 0"
    )


@st.composite
def mutated_program(draw) -> Program:
    """A legal program of few ranks, and a change in the order of one rank's groups."""
    schedule = draw(st.sampled_from(MAKERS))(
        draw(st.integers(2, 3)), draw(st.integers(1, 3))
    )
    steps = add_messages(schedule, fused=draw(st.booleans()))
    rows = [list(row) for row in steps.ranks]
    for _ in range(draw(st.integers(0, 2))):
        row = draw(st.sampled_from(rows))
        one, two = (draw(st.integers(0, len(row) - 1)) for _ in "12")
        kind = draw(st.sampled_from(["move", "drop", "turn"]))
        if kind == "move":
            row.insert(two, row.pop(one))
        elif kind == "turn":
            row[one] = row[one][::-1]
        elif len(row) > 1:
            row.pop(one)
    return Program(schedule, tuple(map(tuple, rows)))


@settings(max_examples=300, deadline=None)
@given(steps=mutated_program(), seed=st.integers(0, 1000))
def test_mutated_programs_are_judged_as_if_they_were_run(steps, seed):
    try:
        play(steps)
    except ScheduleError as error:
        assert not meets(steps, seed), f"{error}\n{steps}"
    else:
        assert meets(steps, seed), steps


def hand_made(*rows: str) -> Program:
    """1F1B or GPipe of two ranks and two microbatches, messages as written."""
    kinds = {">": "send", "<": "recv"}
    ranks = tuple(
        tuple(
            tuple(
                Instruction(kinds[word[0]], Action.parse(word[1:]), 1 - rank)
                if word[0] in kinds
                else Instruction("compute", Action.parse(word))
                for word in group.split("+")
            )
            for group in row.split()
        )
        for rank, row in enumerate(rows)
    )
    return Program(gpipe(2, 2), ranks)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            ["0F0 0F1 >0F1 >0F0 <1B0 0B0 <1B1 0B1", "<0F0 1F0 <0F1 1F1"],
            "rank 1 receives 0F0 from rank 0, which sends 0F1",
        ),
        (["0F0 >0F1", "<0F1"], "rank 0 sends 0F1, which it has not computed"),
        (["0F0 >0F0", "1F0"], "rank 1 runs 1F0 without 0F0, which it needs"),
        (["0F0 >0F0", ""], "rank 0 sends 0F0 to rank 1, but rank 1 is at its end"),
        (["0F0", "<0F0"], "rank 1 receives 0F0 from rank 0, but rank 0 is at its end"),
    ],
)
def test_programs_made_by_hand(rows, message):
    assert not meets(hand_made(*rows))
    with pytest.raises(ScheduleError, match=message):
        play(hand_made(*rows))


def test_a_proof_as_it_is_printed():
    assert str(check(naive(2, 1))) == (
        "naive is legal, even if sends block; activations of 1, 1 microbatches at most "
        "on ranks 0 to 1; one by one: 0F0 1F0 1B0 0B0"
    )
