"""Mixtures in one process: equal sums, balance, and sorted segments."""

import pytest
import torch
from torch import nn

from ddp_course.experts import naive
from ddp_course.experts.balance import (
    auxiliary_loss,
    capacity,
    loads,
    moved_bias,
    within_capacity,
)
from ddp_course.experts.naive import NaiveMixture, RoutedMixture, top_k_weights
from ddp_course.experts.segments import Segments, compute_segments

N, C, E = 30, 6, 5


def mlp():
    return nn.Sequential(nn.Linear(C, 8), nn.GELU(), nn.Linear(8, C))


def mixture(kind, k, num_experts=E):
    torch.manual_seed(0)
    return kind(mlp, C, num_experts, k).double()


class SortedMixture(NaiveMixture):
    """The mixture by sorted segments."""

    def forward(self, x):
        chosen, weights = top_k_weights(self.router(x), self.k)
        segments = Segments(chosen, len(self.experts))
        counts = segments.counts.tolist()
        rows = compute_segments(self.experts, segments.sort(x), counts)
        return segments.sum(rows, weights)


def output_and_gradients(model):
    x = torch.randn(N, C, generator=torch.Generator().manual_seed(1)).double()
    x.requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **grads}


@pytest.mark.parametrize("k", [1, 2, E])
@pytest.mark.parametrize("kind", [RoutedMixture, SortedMixture])
def test_a_routed_mixture_is_the_dense_one(kind, k):
    expected = output_and_gradients(mixture(NaiveMixture, k))
    found = output_and_gradients(mixture(kind, k))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert expected["router.weight"].abs().max() > 1e-6


def test_all_experts_of_equal_weights_are_one_mlp():
    model = mixture(RoutedMixture, 2)
    for expert in model.experts:
        expert.load_state_dict(model.experts[0].state_dict())
    x = torch.randn(N, C, dtype=torch.float64)
    torch.testing.assert_close(model(x), model.experts[0](x))


def scaled_for_one(scores, k):
    """A router of k = 1 whose weights are scaled: it never learns."""
    best, chosen = scores.softmax(-1).topk(k, dim=-1)
    return chosen, best / best.sum(-1, keepdim=True)


def test_a_scaled_weight_of_one_expert_gives_the_router_no_gradient(monkeypatch):
    monkeypatch.setattr(naive, "top_k_weights", scaled_for_one)
    found = output_and_gradients(mixture(RoutedMixture, 1))
    assert found["router.weight"].abs().max() < 1e-15


def test_experts_without_tokens_get_gradients_of_zero():
    model = mixture(SortedMixture, 1)
    with torch.no_grad():
        model.router.weight.zero_()  # all tokens choose the same expert
    grads = output_and_gradients(model)
    zero = [i for i in range(E) if not grads[f"experts.{i}.0.weight"].any()]
    assert len(zero) == E - 1


# ---- balance -------------------------------------------------------------------------

CHOSEN = torch.tensor([[0, 1], [0, 2], [0, 1], [1, 0]])


def test_first_choices_are_kept_before_second_ones():
    assert loads(CHOSEN, 4).tolist() == [4, 3, 1, 0]
    kept = within_capacity(CHOSEN, 4, 2)
    # Expert 0: tokens 0 and 1. Expert 1: token 3's first choice, then token 0's second.
    expected = [[True, True], [True, True], [False, False], [True, False]]
    assert kept.tolist() == expected
    queued_by_token = within_capacity(CHOSEN.flatten()[:, None], 4, 2).view(4, 2)
    assert queued_by_token.tolist() != expected  # the plant: token by token


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
def test_dropped_choices_are_those_beyond_the_capacity(factor, k):
    scores = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    chosen, _ = top_k_weights(scores, k)
    limit = capacity(64, 8, k, factor)
    kept = within_capacity(chosen, 8, limit)
    load = loads(chosen, 8)
    assert int((~kept).sum()) == int((load - limit).clamp(min=0).sum())
    assert torch.equal(loads(chosen[kept], 8), load.clamp(max=limit))
    segments = Segments(chosen, 8, kept)
    assert torch.equal(segments.counts, load.clamp(max=limit))
    assert (
        sorted(segments.order.tolist()) == kept.flatten().nonzero().flatten().tolist()
    )


def test_a_token_that_is_dropped_gets_zeros():
    chosen = torch.tensor([[0], [0], [0]])
    kept = within_capacity(chosen, 2, 1)
    segments = Segments(chosen, 2, kept)
    x = torch.arange(6.0).view(3, 2) + 1
    y = segments.sum(segments.sort(x), torch.full((3, 1), 0.5))
    assert y.tolist() == [[0.5, 1.0], [0, 0], [0, 0]]


def test_the_auxiliary_loss_is_one_if_balanced_and_pushes_away_from_the_busy():
    uniform = torch.zeros(E, E, requires_grad=True)
    chosen = torch.arange(E)[:, None]
    assert auxiliary_loss(uniform, chosen).item() == pytest.approx(1.0)
    busy = torch.zeros(E, dtype=torch.int64)[:, None]
    auxiliary_loss(uniform, busy).backward()
    assert (uniform.grad[:, 0] > 0).all()  # descent lowers the busy expert's score
    assert (uniform.grad[:, 1:] < 0).all()


def test_the_bias_moves_against_the_load():
    bias = moved_bias(torch.zeros(3), torch.tensor([5, 2, 2]), rate=0.1)
    torch.testing.assert_close(bias, torch.tensor([-0.1, 0.1, 0.1]))
    torch.testing.assert_close(moved_bias(bias, torch.tensor([3, 3, 3])), bias)


def test_scores_in_place_of_choices_are_refused():
    scores = torch.zeros(3, 4)
    chosen = scores.topk(2).indices
    assert auxiliary_loss(scores, chosen) == 1
    with pytest.raises(
        ValueError, match=r"chosen is torch.float32 \[3, 4\]; it must be"
    ):
        auxiliary_loss(chosen, scores)
