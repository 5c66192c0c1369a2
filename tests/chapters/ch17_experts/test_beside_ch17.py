"""What chapter 17 measures: numbers, bytes, waits; and its planted step hangs."""

import pytest
import torch

from ddp_course.chapters.ch17_experts.beside import (
    ROW,
    N,
    against_one_process,
    busy_segments,
    expert_gradients,
    in_words,
    train_step,
    waited_forward,
)
from ddp_course.chapters.ch17_experts.trained import BALANCES, train_mixtures
from ddp_course.experts.segments import compute_segments
from ddp_course.launch import RankError, spawn

HOT = (0.0, 20.0)


@pytest.mark.parametrize("hot", HOT)
def test_spawn_dispatch_is_one_process_and_its_bytes_the_formulas(hot):
    ranks = spawn(against_one_process, "dispatched", hot, output="none")
    for rank in ranks:
        assert rank.error < 1e-4
        assert rank.forward == rank.backward == (rank.away + rank.arriving) * ROW
    assert sum(rank.computed for rank in ranks) == 4 * 2 * N
    assert sum(rank.away for rank in ranks) == sum(rank.arriving for rank in ranks)


def test_spawn_a_gather_sends_all_tokens_to_all():
    for rank in spawn(against_one_process, "gathered", output="none"):
        assert rank.error < 1e-4
        assert "as the formula: True" in in_words("gathered", rank)


def test_spawn_the_busiest_rank_is_waited_for():
    ranks = spawn(waited_forward, 20.0, 2e-4, output="none")
    rows = [count for count, _ in ranks]
    assert max(rows) == rows[0] > 2 * sum(rows) / 4
    spans = [{event.op: event for event in log} for _, log in ranks]
    for count, its in zip(rows, spans, strict=True):  # all ranks have one clock
        assert its["experts"].seconds >= 2e-4 * count
        assert its["combine"].end > spans[0]["experts"].end


def test_spawn_an_experts_gradient_is_a_sum():
    for summed, right in spawn(expert_gradients, output="none"):
        torch.testing.assert_close(summed / 4, right)


def test_spawn_a_rank_without_rows_must_go_backward():
    assert spawn(train_step, compute_segments, 0, output="none") == [True] * 4
    assert spawn(train_step, busy_segments, output="none") == [True] * 4
    with pytest.raises(RankError, match="rank 0 still wanted to communicate"):
        spawn(train_step, busy_segments, 0, output="none", device="cpu")


@pytest.mark.parametrize("balance", BALANCES)
def test_a_training_returns_loads_of_both_layers(balance):
    loads, losses = train_mixtures(balance, 3)
    assert loads.shape == (3, 2, 8) and len(losses) == 3
    assert (loads.sum(-1) == 2 * 8 * 64).all()
