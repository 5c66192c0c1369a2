"""The bench of a training step: fair, and what it returns is what was measured."""

from __future__ import annotations

import pytest

from ddp_course.bench import ddp, steps
from ddp_course.launch import spawn


def test_rows_compare_the_slowest_ranks_and_pair_the_turns():
    base = {name: [4.0, 2.0, 2.0] for name in ddp.VARIANTS}
    slow = base | {"gloo": [8.0, 3.0, 1.0]}
    calm = [(1.0, 2.0, 1.0)] * 3  # own, busy, wall: the machine is ours
    rows = list(
        steps.rows_of("ddp", ddp.COMPARED, 2, "1m", 128, [(base, calm), (slow, calm)])
    )
    assert len(rows) == sum(map(len, ddp.COMPARED.values()))
    ours = next(r for r in rows if (r["variant"], r["beside"]) == ("gloo", "default"))
    # The slowest rank of each turn: 8, 3 and 2 s beside 4, 2 and 2.
    assert (ours["ours"], ours["theirs"], ours["paired"]) == (3.0, 2.0, 1.5)
    assert (ours["ranks"], ours["tokens"], ours["turns"]) == (2, 128, 3)


def measured() -> steps.Times:
    return ddp.measure(steps.TINY, 32, 2)[0]


def test_all_variants_are_measured_on_every_rank():
    for times in spawn(measured, world_size=2, output="none", device="cpu"):
        assert set(times) == set(ddp.VARIANTS)
        assert all(len(turns) == 2 and min(turns) > 0 for turns in times.values())


def losses() -> list[bytes]:
    """On every rank: the parameters of each variant after three steps."""
    ends = []
    for name, wrap in ddp.VARIANTS.items():
        models = []
        step = steps.step_of(
            lambda m, w=wrap, ms=models: ms.append(m) or w(m), steps.TINY, 32
        )
        for _ in range(3):
            step()
        ends.append((name, models[0].head.out.weight.detach().clone()))
    return ends


def test_all_variants_do_the_same_work():
    told = spawn(losses, world_size=2, output="none", device="cpu")
    for ends in told:
        reference = ends[0][1]
        for name, weight in ends:
            same = pytest.approx(0, abs=1e-6) == (weight - reference).abs().max().item()
            assert same == (name != "bound"), name
