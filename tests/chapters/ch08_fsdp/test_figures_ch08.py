"""The figures of chapter 08 show what they are about, and nothing else."""

import itertools
from dataclasses import replace

import pytest
from drawings import fills, laid_out, words
from refusals import refused

from ddp_course.chapters.ch08_fsdp.figures import fully_sharded
from ddp_course.chapters.ch08_fsdp.fsdp_schedule import (
    BACKWARD,
    fsdp_schedule,
    fsdp_step,
    most_whole,
)
from ddp_course.lab import rank_color

SETTINGS = list(itertools.product((1, 2, 5, 8), (0, 1, 3), (True, False), (0.2, 2)))
test_the_layout = laid_out(fully_sharded, (fsdp_step, SETTINGS))


def faults(ops):
    """What is wrong with a schedule, in words."""
    whole = [op for op in ops if op.op == "whole"]
    for op in (op for op in ops if op.op in ("forward", "backward")):
        gathered = [w for w in whole if w.unit == op.unit]
        if not any(w.start <= op.start and op.end <= w.end for w in gathered):
            yield f"unit {op.unit} is not whole in its {op.op}"
        for w in gathered:
            if w.start <= op.start and op.end <= w.end:
                gathers = [g for g in ops if g.op == "all-gather" and g.unit == op.unit]
                if not any(w.start <= g.start and g.end <= op.start for g in gathers):
                    yield f"unit {op.unit} is not gathered before its {op.op}"
        if op.op == "backward":
            sums = [r for r in ops if r.op == "reduce-scatter" and r.unit == op.unit]
            if [r.start >= op.end for r in sums] != [True]:
                yield f"the gradients of {op.unit} are not reduced once, after backward"
    sent = sorted((op for op in ops if "-" in op.op), key=lambda op: op.start)
    if any(b.start < a.end - 1e-9 for a, b in itertools.pairwise(sent)):
        yield "two messages at once"
    if ops[-1].op != "update" or ops[-1].start < max(op.end for op in sent):
        yield "the update does not come last"


@pytest.mark.parametrize(("units", "prefetch", "reshard", "message"), SETTINGS)
def test_a_unit_is_whole_when_it_computes(units, prefetch, reshard, message):
    ops = fsdp_schedule(units, prefetch, reshard, message)
    assert list(faults(ops)) == []
    assert len([op for op in ops if op.op == "all-gather"]) == units * (1 + reshard)
    assert most_whole(ops) == (min(units, 1 + prefetch) if reshard else units)


@pytest.mark.parametrize(
    ("op", "change", "says"),
    [
        ("whole", lambda op: replace(op, end=op.start), "is not whole"),
        ("whole", lambda op: replace(op, end=op.end - 1), "is not whole"),
        ("all-gather", lambda op: None, "is not gathered"),
        ("all-gather", lambda op: replace(op, end=op.end + 9), "is not gathered"),
        ("reduce-scatter", lambda op: None, "not reduced once"),
        ("reduce-scatter", lambda op: replace(op, start=0), "not reduced once"),
        ("all-gather", lambda op: replace(op, start=op.start - 0.5), "at once"),
        ("update", lambda op: replace(op, start=0), "does not come last"),
    ],
)
def test_a_wrong_schedule_is_seen(op, change, says):
    ops = [change(o) if o.op == op else o for o in fsdp_schedule(4)]
    assert any(says in fault for fault in faults([o for o in ops if o]))


def test_prefetching_hides_gathers():
    ends = [max(op.end for op in fsdp_schedule(6, k)) for k in (0, 1)]
    assert ends[1] < ends[0]
    alone = fsdp_schedule(6, 0)
    computes = [op for op in alone if op.lane == "compute"]
    for gather in (op for op in alone if op.op == "all-gather"):
        assert not any(
            c.start < gather.end - 1e-9 and gather.start < c.end - 1e-9
            for c in computes
        )


def test_the_order_of_a_step():
    ops = fsdp_schedule(2, 0)
    order = [(op.op, op.unit) for op in sorted(ops, key=lambda op: op.end)
             if op.op != "whole"]  # fmt: skip
    assert order == [
        ("all-gather", 0), ("forward", 0), ("all-gather", 1), ("forward", 1),
        ("all-gather", 1), ("backward", 1), ("reduce-scatter", 1),
        ("all-gather", 0), ("backward", 0), ("reduce-scatter", 0), ("update", -1),
    ]  # fmt: skip
    times = [op.end - op.start for op in ops if op.op == "backward"]
    assert times == pytest.approx([BACKWARD] * 2)


def test_the_schedule_says_its_numbers():
    said = " ".join(words(fsdp_step(5, 1)))
    assert "10 all-gathers, 5 reduce-scatters; at most 2 of 5 units whole" in said
    said = " ".join(words(fsdp_step(5, 1, False)))
    assert "5 all-gathers, 5 reduce-scatters; at most 5 of 5 units whole" in said


def test_a_moment_in_the_middle_of_forward():
    drawing = fully_sharded()
    for rank in range(4):
        solid = [f for f in fills(drawing, f"{rank}") if f == rank_color(rank)]
        # Units 0, 2 and 3: one rank has it; unit 1: all four.
        assert len(solid) == 3 + 4


test_what_cannot_be_drawn = refused(
    (lambda: fsdp_schedule(0), "units is 0"),
    (lambda: fsdp_schedule(9), "units is 9; .* 1 to 8"),
    (lambda: fsdp_schedule(4, -1), "prefetch is -1"),
    (lambda: fsdp_schedule(4, message=0), "message is 0"),
)
