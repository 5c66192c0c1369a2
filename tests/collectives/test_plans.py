"""Plans as data: right for every number of ranks, and wrong ones are seen."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ddp_course.collectives import catalog, hierarchical
from ddp_course.collectives.catalog import PLANS, ring_plan
from ddp_course.collectives.plan import (
    Plan,
    Transfer,
    bounds,
    make_plan,
    mistakes,
    simulate,
)
from ddp_course.collectives.runtime import pieces_of

SIZES = range(1, 10)
ROOTED = [
    catalog.broadcast_naive_plan,
    catalog.broadcast_tree_plan,
    catalog.reduce_naive_plan,
    catalog.reduce_tree_plan,
    catalog.scatter_plan,
    catalog.gather_plan,
]


def all_plans() -> list[Plan]:
    plans = [make(n) for make in PLANS.values() for n in SIZES]
    plans += [make(n, root) for make in ROOTED for n in SIZES for root in range(n)]
    shapes = [(1, 1), (1, 4), (4, 1), (2, 2), (2, 3), (3, 2), (2, 4), (3, 3)]
    return plans + [p(*s) for p in hierarchical.PLANS.values() for s in shapes]


def clashes(plan: Plan) -> list[str]:
    """Return where a rank would change numbers that it is just sending, or just got."""
    wrong = []
    for t in plan.transfers:
        for other in plan.transfers:
            same_chunks = t.first < other.last and other.first < t.last
            if other is t or other.step != t.step or not same_chunks:
                continue
            if other.dst == t.src:
                wrong.append(f"{other}, which it sends in the same step")
            if other.dst == t.dst and not (t.reduce and other.reduce):
                wrong.append(f"{other}, and {t}")
    return wrong


def overtaken(plan: Plan) -> list[str]:
    """Return where a rank overwrites what it has sent with news that lack it.

    Receives are posted ahead: a message may be written over a chunk while an earlier
    one of that chunk is still being sent, unless its sender must have had that first.
    """
    states, wrong = simulate(plan), []
    for t in plan.transfers:
        for earlier in plan.sent_by(t.dst):
            for chunk in range(max(t.first, earlier.first), min(t.last, earlier.last)):
                if earlier.step < t.step and not t.reduce:
                    gave = states[earlier.step][t.dst][chunk]
                    if not set(gave) <= set(states[t.step][t.src][chunk]):
                        wrong.append(f"{t} over {earlier}")
    return wrong


def test_every_plan_is_right():
    for plan in all_plans():
        assert mistakes(plan) == [], plan
        assert clashes(plan) == [] or plan.idempotent, plan
        assert overtaken(plan) == [], plan
        assert all(t.src != t.dst and t.first < t.last for t in plan.transfers), plan


def test_planted_mistakes_are_seen():
    good = ring_plan(4)
    missing = replace(good, transfers=good.transfers[:-1])
    twice = replace(
        good, transfers=(*good.transfers, replace(good.transfers[0], step=good.steps))
    )
    copied = replace(
        good, transfers=tuple(replace(t, reduce=False) for t in good.transfers)
    )
    for wrong in (missing, twice, copied):
        assert mistakes(wrong)
    same_step = [Transfer(0, 0, 1, 0, 1, True), Transfer(0, 1, 0, 0, 1, True)]
    assert clashes(make_plan("swap", 2, 1, same_step))
    stale = [Transfer(0, 0, 1, 0, 1, True), Transfer(1, 2, 0, 0, 1, False)]
    assert overtaken(make_plan("stale", 3, 1, stale))


@given(st.integers(0, 10_000), st.integers(1, 20))
def test_chunks_cover_everything_and_are_nearly_equal(numel, chunks):
    edges = bounds(numel, chunks)
    sizes = [b - a for a, b in zip(edges, edges[1:], strict=False)]
    assert edges[0] == 0 and edges[-1] == numel and len(sizes) == chunks
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 200), st.integers(1, 30), st.sampled_from(list(PLANS)))
def test_pieces_cover_each_transfer_and_wait_for_what_they_contain(numel, piece, name):
    plan = PLANS[name](4)
    edges = tuple(bounds(numel, plan.chunks))
    for rank in range(4):
        todo = pieces_of(plan, rank, edges, piece)
        sent = sum(m.last - m.first for m in todo.sends)
        mine = plan.sent_by(rank)
        assert sent == sum(edges[t.last] - edges[t.first] for t in mine)
        assert all(0 < m.last - m.first <= piece for m in (*todo.sends, *todo.receives))
        for s in todo.sends:
            for r in todo.receives[s.after :]:
                assert r.step >= s.step or r.last <= s.first or s.last <= r.first
    # What one rank sends to another is what that one expects, in the same order.
    messages = [pieces_of(plan, rank, edges, piece) for rank in range(4)]
    for a, b in ((a, b) for a in range(4) for b in range(4)):
        sent = [m.last - m.first for m in messages[a].sends if m.peer == b]
        assert sent == [m.last - m.first for m in messages[b].receives if m.peer == a]
