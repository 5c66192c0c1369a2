"""What the benches of training steps compare does the same work, and shards."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from ddp_course.bench import async_, ddp, pp, steps, tp, zero
from ddp_course.bench.turns import rows_of
from ddp_course.launch import spawn
from ddp_course.measure import resident
from ddp_course.mechanisms.divided import DividedModule
from ddp_course.mechanisms.whole_state import full_state_dict
from ddp_course.model import GPTConfig
from ddp_course.parameter_server import simulate_run
from ddp_course.theory import gradients_per_second

pytestmark = pytest.mark.timeout(900)  # the launch for all has 840 s
TINY = GPTConfig(block_size=16, n_layer=1, d_model=24)
CASE = steps.Case(2, TINY, 32, 2)
CONTESTS = {
    "ddp": ddp.VARIANTS,
    "ZRO": zero.STAGES_1_AND_2,
    "fully_shard": zero.STAGE_3,
    "tp": tp.VARIANTS,
}


def after_three_steps() -> dict[str, list[tuple]]:
    """On every rank: contest -> name, a weight, parameters and states of each variant.

    And the times of two turns of DDP's.
    """
    results = {}
    for contest, variants in CONTESTS.items():
        results[contest] = []
        for name, make in variants.items():
            models = []

            def noted(model, make=make, models=models):
                models.append(model)
                models.extend(make(model))
                return models[1], models[2]

            step = steps.step_of(noted, CASE)
            for _ in range(3):
                step()
            model, parallel, optimizer = models
            if contest == "tp":  # what else its `OneBatch` hides
                model = parallel = getattr(parallel, "module", parallel)
            states = resident(getattr(optimizer, "optim", optimizer))
            kept = states["optimizer states"], own_numel(parallel)
            head = head_of(model, parallel)
            results[contest].append(
                (name, None if head is None else head.clone(), *kept)
            )
    mine = torch.full((2, 3), dist.get_rank())
    one = steps.OneBatch(lambda x, y: x)
    results["batches"] = torch.stack([one(mine, mine), one(mine + 5, mine)])
    results["times"] = steps.measure(ddp.VARIANTS, CASE, 60.0)[0]
    return results


def head_of(model, parallel) -> torch.Tensor | None:
    """Return the head's weight, whole; None on a rank that has none of it."""
    if isinstance(parallel, DividedModule):
        return full_state_dict(parallel)["head.out.weight"]
    weight = model.state_dict().get("head.out.weight")
    return getattr(weight, "full_tensor", lambda: weight)()


def own_numel(module) -> int:
    local = (getattr(p, "to_local", lambda p=p: p)() for p in module.parameters())
    return sum(p.numel() for p in local)


@pytest.fixture(scope="module")
def ranks():
    how = {"world_size": 2, "output": "none", "device": "cpu", "timeout": 840}
    return spawn(after_three_steps, **how)


@pytest.mark.parametrize("contest", CONTESTS)
def test_all_variants_do_the_same_work(contest, ranks):
    for result in ranks:
        reference = result[contest][0][1]
        for name, weight, *_ in result[contest]:
            if weight is not None:
                error = (weight - reference).abs().max().item()
                same = error < (1e-5 if contest == "tp" else 1e-6)  # of 3e-4
                assert same == (name != "bound"), (name, error)


def test_they_shard_what_they_say(ranks):
    whole = TINY.num_parameters
    for rank, result in enumerate(ranks):
        for name, _, states, _ in (*result["ZRO"], *result["fully_shard"]):
            assert states < 0.7 * 2 * 4 * whole, name
        for name, _, _, numel in result["tp"]:
            alone = 1 if rank else whole
            right = numel == alone if name == "one rank alone" else numel < 0.6 * whole
            assert right, name
        assert not result["batches"].any()  # all work on rank 0's


def test_every_variant_is_timed_on_every_rank(ranks):
    for result in ranks:
        assert set(result["times"]) == set(ddp.VARIANTS)
        for turns in result["times"].values():
            assert len(turns) == 2 and min(turns) > 0


@pytest.mark.parametrize("bench", [ddp, zero, tp, pp])
def test_ours_are_compared_with_theirs_at_their_best(bench):
    both = {} if bench is not zero else zero.STAGES_1_AND_2 | zero.STAGE_3
    known = {*getattr(bench, "VARIANTS", both)}
    compared = [p for p in bench.PAIRS if not p.variant.startswith(("peak", "bubble"))]
    assert {name for p in compared for name in (p.variant, p.denominator)} == known
    assert any(p.control for p in bench.PAIRS)
    ours = {p.variant for p in compared if p.at_most is not None}
    best = {ddp: "best", zero: " best", tp: "DTensor best", pp: "Schedule1F1B"}[bench]
    for name in ours:
        assert any(p.variant == name and p.denominator.endswith(best) for p in compared)


def test_a_pipeline_is_measured_where_there_is_a_layer_for_each_stage():
    for ranks in (2, 4):
        case = steps.Case(ranks, "1m", 128, 1)
        kept = {name for name in pp.VARIANTS if pp.fits(case, name)}
        left = {"ScheduleInterleaved1F1B", "interleaved gloo"} if ranks == 4 else set()
        assert set(pp.VARIANTS) - kept == left  # of 6 layers


def test_rows_compare_the_slowest_ranks_and_pair_the_turns():
    base = {name: [4.0, 2.0, 2.0] for name in ddp.VARIANTS}
    slow = base | {"gloo": [8.0, 3.0, 1.0]}
    calm = [(1.0, 2.0, 1.0)] * 3  # own, busy, wall: the machine is ours
    case = steps.Case(2, "1m", 128, 3)
    found = partial(rows_of, str(case), ddp.PAIRS)
    rows = list(found([(base, calm), (slow, calm)], **case.fields))
    assert len(rows) == len(ddp.PAIRS)
    ours = next(
        r for r in rows if (r["variant"], r["denominator"]) == ("gloo", "default")
    )
    # The slowest rank of each turn: 8, 3 and 2 s beside 4, 2 and 2.
    assert (ours["ours"], ours["theirs"], ours["paired"]) == (3.0, 2.0, 1.5)
    assert (ours["ranks"], ours["tokens"], ours["turns"]) == (2, 128, 3)
    assert ours["case"] == "2 ranks, 1m, 128 tokens"


def test_peaks_are_those_of_the_rank_that_needs_most():
    names = ["zero3 gloo", "zero3 gloo kept", "fully_shard best", "fully_shard kept"]
    results = [dict.fromkeys(names, 100) for _ in range(2)]
    results[1]["zero3 gloo"] = 120
    first, second = zero.peak_rows(steps.Case(2, "1m", 128, 1), results)
    assert (first["ours"], first["theirs"], first["ratio"]) == (120, 100, 1.2)
    assert second["ratio"] == 1


def test_bubbles_are_the_share_that_is_not_work():
    busy = 3 * pp.MICROBATCHES * 0.03
    times = {
        f"{s} {side}": [busy / 0.75] for s in pp.THEIRS for side in ("ours", "theirs")
    }
    times["1f1b ours"] = [busy / 0.8]
    results = [(times, [(1.0, 1.0, 1.0)])] * 4
    rows = {
        (r["variant"], r["denominator"]): r for r in pp.bubble_rows(4, results, 0.03)
    }
    assert rows["bubble of gpipe", "ScheduleGPipe"]["ratio"] == pytest.approx(1)
    assert rows["bubble of 1f1b", "Schedule1F1B"]["ours"] == pytest.approx(0.2)
    assert rows["bubble of 1f1b", pp.SIMULATED]["theirs"] == pytest.approx(3 / 11)


# ---- a parameter server --------------------------------------------------------------


@pytest.mark.parametrize("way", async_.WAYS)
def test_seconds_per_gradient_are_those_of_the_formula_if_nothing_else_takes_time(way):
    rule = async_.WAYS[way]
    for slower in (1.0, 2.0, 4.0, 8.0):
        times = [1.0] * (async_.WORKERS - 1) + [slower]
        record = simulate_run(rule, times, 240)
        took = async_.per_gradient(record, rule.bound)
        results = gradients_per_second(way, times, rule.spare)
        assert took == pytest.approx(1 / results, rel=0.05)
    every = record.seconds / record.steps  # steps are not what is counted
    assert (took == pytest.approx(every)) == (way == "asynchronous")


def test_what_is_pulled_and_pushed_is_told_by_all_contenders():
    results = spawn(
        async_.pull_and_push, 3, 64, world_size=2, output="none", timeout=240
    )
    rows = {row["variant"]: row for row in rows_of("", async_.PAIRS, results)}
    assert "server" in rows
    assert ("rpc" in rows) == torch.distributed.rpc.is_available()
