"""The bench of ZeRO: all variants do the same work, and are told apart."""

from __future__ import annotations

import pytest
import torch

from ddp_course.bench import steps, zero
from ddp_course.launch import spawn
from ddp_course.measure import resident


def weights() -> list[tuple[str, torch.Tensor, int]]:
    """On every rank, of each variant after three steps: a weight, and its states."""
    told = []
    for name, make in {**zero.STAGES_1_AND_2, **zero.STAGE_3}.items():
        made = []

        def noted(model, make=make, made=made):
            made.append(model)
            made.extend(make(model))
            return made[1], made[2]

        step = steps.step_of(noted, steps.TINY, 32)
        for _ in range(3):
            step()
        told.append((name, head_of(*made), states_of(made[2])))
    return told


def head_of(model, parallel, optimizer) -> torch.Tensor:
    if hasattr(parallel, "full_state_dict"):
        return parallel.full_state_dict()["head.out.weight"]
    weight = model.state_dict()["head.out.weight"]
    return getattr(weight, "full_tensor", lambda: weight)().clone()


def states_of(optimizer) -> int:
    return resident(getattr(optimizer, "optim", optimizer))["optimizer states"]


def test_all_variants_do_the_same_work_and_shard_their_states():
    of_ranks = spawn(weights, world_size=2, output="none", device="cpu", timeout=120)
    whole = 2 * 4 * steps.TINY.num_parameters
    for told in of_ranks:
        assert len(told) == len(zero.STAGES_1_AND_2) + len(zero.STAGE_3) - 1  # bound
        reference = told[0][1]
        for name, weight, states in told:
            same = pytest.approx(0, abs=1e-6) == (weight - reference).abs().max().item()
            assert same == (name != "bound"), name
            assert states < 0.7 * whole, name


def test_ours_are_compared_with_theirs_at_their_best():
    for theirs, variants in zero.CONTESTS.items():
        pairs = zero.compared(theirs)
        assert {name for name in variants if name.startswith("zero")} < pairs.keys()
        for name, others in pairs.items():
            assert {name, *others} <= variants.keys()
    assert zero.compared("ZRO")["zero1 gloo"] == ("ZRO default", "ZRO best")
    assert zero.compared("fully_shard")["zero3 gloo kept"] == ("fully_shard kept",)


def test_peaks_are_those_of_the_rank_that_needs_most():
    told = [dict.fromkeys([*zero.PEAKS, *zero.PEAKS.values()], 100) for _ in range(2)]
    told[1]["zero3 gloo"] = 120
    first, second = zero.peak_rows(2, "1m", 128, told)
    assert (first["ours"], first["theirs"], first["ratio"]) == (120, 100, 1.2)
    assert second["ratio"] == 1
