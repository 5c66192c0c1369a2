"""What a pipeline decides and computes without other ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from pipeline_cases import batch, tied, untied
from refusals import refused
from torch import nn

from ddp_course.measure import Event
from ddp_course.pipeline import (
    add_messages,
    bubble,
    gpipe,
    one_f_one_b,
    spine,
    stage_plan,
)
from ddp_course.pipeline.backward import WeightGradStore, split_backward
from ddp_course.pipeline.batch_checks import MeanLoss
from ddp_course.pipeline.overlapped import horizons
from ddp_course.pipeline.stages import Stage
from ddp_course.pipeline.virtual_time import VirtualClock


def test_a_cut_can_be_printed_and_says_who_has_what():
    plan = stage_plan(tied(), [3, 5], [0, 1])
    assert str(plan).splitlines() == [
        "stage 0 on rank 0: embed, blocks.0, blocks.1 (5,222 parameters)",
        "stage 1 on rank 1: blocks.2, blocks.3, blocks.4, blocks.5, head "
        "(10,164 parameters)",
        "embed.tokens.weight on ranks 0, 1: gradients are summed",
    ]
    assert stage_plan(tied(), [3, 4, 1], [0, 1, 0]).shared == {}
    assert stage_plan(untied(), [3, 5], [0, 1]).shared == {}


test_a_cut_that_does_not_fit_is_refused = refused(
    *(
        (partial(stage_plan, tied(), sizes, [0, 1]), "sizes")
        for sizes in ([4, 5], [8, 0], [8], [])
    )
)


def test_receives_are_posted_ahead_and_never_behind():
    for schedule in (one_f_one_b(3, 4), gpipe(3, 4)):
        for groups in add_messages(schedule).ranks:
            found = horizons(groups, 2)
            assert all(horizon >= n for n, horizon in enumerate(found))
            assert found == sorted(found)
            actions = [n for n, g in enumerate(groups) if g[0].kind == "compute"]
            assert found[0] == actions[2]
            # A message may arrive two actions before it is needed, not later: then it
            # would travel while nobody computes.
            assert found[-1] == len(groups) - 1


def test_backward_in_two_halves_gives_the_same_bits():
    x, y = batch(0)
    gradients = []
    for split in (False, True):
        model = untied()
        model.blocks[2].requires_grad_(False)
        stage = Stage(spine(model).values(), lambda o, t: o.square().mean())
        store = WeightGradStore()
        if split:
            split_backward(stage, store)
            with store.collect() as tasks:
                stage(x, y).backward()
            put_off = [n for n, p in stage.named_parameters() if p.grad is None]
            assert "1.mlp.up.weight" in put_off
            assert "1.norm2.weight" not in put_off
            assert len(tasks) == 5 * 4 + 1  # a block is frozen, and head.out is linear
            stage(x, y).backward()  # not put off
            for task in tasks:
                task()
        else:
            for _ in range(2):
                stage(x, y).backward()
        gradients.append({n: p.grad for n, p in stage.named_parameters()})
    whole, halves = gradients
    for name, gradient in whole.items():
        assert (gradient is None) == (halves[name] is None), name
        if gradient is not None:
            assert torch.equal(gradient, halves[name]), name


def test_a_hook_on_a_weight_sees_its_gradient_in_two_halves_too():
    layer, store, seen = nn.Linear(2, 2), WeightGradStore(), []
    layer.weight.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
    split_backward(layer, store)
    with store.collect() as tasks:
        layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
    for task in tasks:
        task()
    assert [s.tolist() for s in seen] == [[[1, 1], [1, 1]]]
    assert layer.weight.grad.tolist() == [[2, 2], [2, 2]]
    assert layer.bias.grad.tolist() == [1, 1]


def rows_and(loss):
    random = torch.Generator().manual_seed(3)
    output, targets = torch.randn(4, 3, generator=random), torch.tensor([0, 1, 2, 2])
    tested = MeanLoss(loss)
    return lambda: [tested(output[k], targets[k]) for k in ([0, 1], [2, 3])][0]


def square(output, target):
    return (output - target[:, None]).square()


test_a_loss_that_is_no_mean_over_rows_is_refused = refused(
    (rows_and(lambda o, t: square(o, t).sum()), "it must be a mean over the rows"),
    (rows_and(lambda o, t: square(o, t).mean().sqrt()), "it must be a mean over"),
    (rows_and(lambda o, t: square(o, t)), "return a scalar"),
    (rows_and(lambda o, t: 1.0), "returned 1.0; return a scalar, not detached"),
    (lambda: MeanLoss(nn.MSELoss), "loss_fn is <class .*; pass a function or nn.MSEL"),
    (lambda: MeanLoss("mse"), "loss_fn is mse; pass a function or nn.MSELoss"),
    (
        lambda: MeanLoss(lambda o, t: o.detach().mean())(
            torch.ones(2, requires_grad=True), torch.ones(2)
        ),
        "loss_fn returned 1.0; return a scalar, not detached",
    ),
    (rows_and(nn.CrossEntropyLoss(torch.tensor([1.0, 5, 9]))), "it must be a mean"),
    (rows_and(lambda o, t: F.cross_entropy(o, t, ignore_index=0)), "must be a mean"),
)


def row_by_row(loss, targets):
    random = torch.Generator().manual_seed(3)
    output, tested = torch.randn(len(targets), 3, generator=random), MeanLoss(loss)
    for k in range(len(targets)):
        tested(output[k : k + 1], torch.tensor(targets[k : k + 1]))


test_rows_one_by_one_are_compared_with_those_before = refused(
    (
        lambda: row_by_row(
            lambda o, t: F.cross_entropy(o, t, ignore_index=0), [1, 2, 0, 1]
        ),
        "must be a mean",
    ),
    (
        lambda: row_by_row(nn.CrossEntropyLoss(torch.tensor([1.0, 5, 9])), [1, 2]),
        "must be a mean",
    ),
    (
        lambda: row_by_row(lambda o, t: (10 + square(o, t).mean()).sqrt(), [1, 2]),
        "must be a mean",
    ),
)


def test_a_loss_that_is_a_mean_over_rows_is_not():
    row_by_row(F.cross_entropy, [1, 2, 0, 1])
    row_by_row(F.cross_entropy, [1, -100, 0, 1])  # `SameBatch` counts these
    for loss in (F.cross_entropy, lambda o, t: square(o, t).mean()):
        assert rows_and(loss)().dim() == 0
    assert MeanLoss(partial(F.cross_entropy, ignore_index=3)).ignored == 3
    assert MeanLoss(nn.CrossEntropyLoss(ignore_index=4)).ignored == 4


def test_a_split_linear_layer_is_refused_under_autocast():
    with torch.autocast("cpu"), pytest.raises(RuntimeError, match="autocast"):
        layer = nn.Linear(2, 2)
        split_backward(layer, WeightGradStore())
        layer(torch.ones(1, 2))


def test_the_bubble_is_the_idle_share_of_all_ranks():
    def event(rank, start, end, step=0, lane="compute"):
        return Event(rank, "F", start, end, lane=lane, detail={"step": step})

    one = [event(0, 0, 2), event(1, 1, 4), event(1, 0, 1, lane="wait")]
    assert bubble(one) == 1 - 5 / 8
    assert bubble([*one, event(0, 10, 11, 1), event(1, 10, 11, 1)]) == 1 - 7 / 10
    with pytest.raises(ValueError, match="compute"):
        bubble([event(0, 0, 1, lane="wait")])


def test_a_virtual_clock_moves_with_computing_and_with_what_it_hears():
    clock = VirtualClock()
    clock.advance(2.0)
    clock.advance(1.0)
    assert clock.begin() == 2.0
    sum(range(100_000))
    assert 2.0 < clock.end() == clock.now() < 3.0
