"""Local SGD is what one process computes, and what PyTorch does; mistakes are seen."""

from __future__ import annotations

import local_cases as cases
import pytest
import torch
from local_cases import FORGETFUL, PAIRS, PLANTED, RANKS, STEPS, apart
from refusals import refused

from ddp_course.launch import spawn
from ddp_course.local_sgd import DiLoCo, LocalSGD
from ddp_course.theory import local_sgd_bytes

ROUNDING = 1e-6  # who divides first, or adds in another order, rounds otherwise


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return spawn(cases.everything, world_size=RANKS, output="none", timeout=240)


@pytest.fixture(scope="module")
def runs() -> dict:
    return {pair: cases.by_hand(*pair) for pair in PAIRS}


def same(results: dict, run, rank: int) -> bool:
    """Tell whether a rank has every bit that the same rank of a simulation has."""
    return apart(results["model"], cases.copied(run.models[rank])) == 0


@pytest.mark.parametrize("pair", PAIRS)
def test_one_process_that_plays_all_ranks_has_every_bit(pair, ranks, runs):
    for rank, result in enumerate(ranks):
        assert same(result[pair], runs[pair], rank)
        assert result[pair]["drift"] == runs[pair].drift


def test_what_is_averaged_and_what_stays_each_ranks_own(ranks):
    fresh = cases.Model().state_dict()
    own = [result["local", "adam"] for result in ranks]
    assert own[0]["model"]["norm.num_batches_tracked"] == STEPS
    assert own[1]["model"]["norm.num_batches_tracked"] == STEPS + 1
    assert torch.equal(own[0]["model"]["last.bias"], fresh["last.bias"])
    first = own[0]["optimizer"][0]["exp_avg"]
    assert not torch.equal(first, own[1]["optimizer"][0]["exp_avg"])
    assert max(own[0]["drift"][cases.H]) < max(own[0]["drift"][cases.H - 1])


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_averages_are_seen(kind, ranks, runs):
    run = runs[PLANTED[kind], "adam"]
    right = [
        same(result[kind.__name__], run, rank) for rank, result in enumerate(ranks)
    ]
    assert not all(right)


def test_resumed_between_two_averages_every_bit_is_there(ranks, runs):
    for rank, result in enumerate(ranks):
        for outer in ("local", "diloco"):
            assert same(result["resumed", outer], runs[outer, "adam"], rank)
        for kind, outer in FORGETFUL.items():
            resumed = result["resumed", kind.__name__]
            assert not same(resumed, runs[outer, "adam"], rank)


def test_with_lr_1_and_no_momentum_diloco_is_local_sgd(runs):
    ours, theirs = (
        cases.copied(runs[outer, "adam"].models[0]) for outer in ("as local", "local")
    )
    short = ours.pop("short") - theirs.pop("short")  # bfloat16
    assert apart(ours, theirs) < ROUNDING and short.abs().max() < 2**-7
    diloco = cases.copied(runs["diloco", "adam"].models[0])
    assert apart(diloco, ours | {"short": diloco["short"]}) > 1e-2


def test_averaging_each_steps_parameters_is_averaging_gradients_if_steps_are_linear(
    ranks,
):
    for result in ranks:
        assert result["H 1, sgd"] < ROUNDING
        assert result["H 1, momentum"] < ROUNDING
        assert result["H 1, adam"] > 1e-3


def test_it_is_what_pytorch_does(ranks):
    for result in ranks:
        assert apart(result["local"], result["PyTorch's"]) == 0
        assert apart(result["local"], result["ten lines"]) == 0
        theirs = result["post-local, PyTorch's"]
        assert apart(result["post-local, torch"], theirs) < ROUNDING
        assert apart(result["post-local, ddp_course"], theirs) < ROUNDING
        assert apart(result["local"], theirs) > 1e-3


def test_a_warm_up_without_end_is_data_parallelism():
    how = {"build": cases.plain, "loss": cases.plain_loss}
    run = cases.by_hand("local", "adam", warmup=STEPS, **how)
    assert max(map(max, run.drift)) == 0
    assert max(cases.by_hand("local", "adam", **how).drift[1]) > 1e-2


def test_bytes_are_those_of_the_formula_by_meter_and_by_the_systems_count(ranks):
    for result in ranks:
        for (outer, every), (sent, written) in result["bytes"].items():
            wanted = local_sgd_bytes(RANKS, 20 * cases.WIDE, every, steps=6)
            assert sent == wanted, (outer, every)
            assert sent < written < 1.01 * sent
    assert local_sgd_bytes(4, 100, 8, 80) * 8 == local_sgd_bytes(4, 100, 1, 80)
    assert local_sgd_bytes(4, 100, 8, 17, warmup=2) == 3 * 150


def test_what_cannot_be_is_refused_in_words(ranks):
    for result in ranks:
        warmup, foreign, every, lr = result["refused"]
        assert "so the module must be a DistributedDataParallel" in warmup
        assert "it is a Sequential: wrap it, or leave warmup out" in warmup
        assert "has a parameter that is not in the module" in foreign
        assert "every is 2 on ranks 0, 1, 2, 3 on rank 3" in every
        assert "lr is 0.5 on ranks 0, 1, 2, 1.5 on rank 3" in lr
    model = cases.plain()
    for wrong in ({"every": 0}, {"every": 2.0}, {"warmup": -1}):
        with pytest.raises(ValueError, match="must be a whole number, [01] or more"):
            LocalSGD(cases.INNER["sgd"](model.parameters()), model, **wrong)


def constructed(outer, swapped=False, **options):
    model = cases.plain()
    both = cases.INNER["sgd"](model.parameters()), model
    return outer(*(reversed(both) if swapped else both), 8, **options)


test_arguments_that_cannot_be_are_refused = refused(
    (
        lambda: constructed(LocalSGD, True),
        r"of type SGD; .* LocalSGD\(optimizer, module",
    ),
    (lambda: constructed(DiLoCo, True), r"of type SGD; .* DiLoCo\(optimizer, module"),
    (lambda: constructed(DiLoCo, momentum=1.5), "momentum is 1.5; it must be below 1"),
    (lambda: constructed(DiLoCo, momentum=1), "momentum is 1; it must be below 1"),
    (lambda: constructed(DiLoCo, momentum=-1), "momentum is -1; it must be a finite"),
    (lambda: constructed(DiLoCo, lr="0.7"), "lr is '0.7'; it must be a finite number"),
)


def test_with_a_loss_scaler_all_ranks_skip_the_same_step():
    """As every rank has made 4 steps of 5, the last one has averaged."""
    right, planted = zip(*spawn(cases.both_scaled, world_size=2), strict=True)
    assert [steps for steps, _ in right] == [4, 4]
    assert max(drift for _, drift in right) < ROUNDING
    assert [steps for steps, _ in planted] == [5, 4]


def test_a_rank_that_dies_leaves_the_others_what_they_have_learnt():
    results = spawn(cases.one_dies, world_size=3, may_fail=[2])
    for rank in (0, 1):
        words, unchanged, steps = results[rank]
        assert "could not be averaged after step 8: a rank has ended" in words
        assert unchanged and steps == 8
