"""Experts on several ranks: one process's outputs, gradients and bytes."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_course.experts import dispatch
from ddp_course.experts.balance import within_capacity
from ddp_course.experts.dispatch import (
    AllToAllRows,
    TokenDispatcher,
    all_to_all_rows,
    dispatched_mixture,
)
from ddp_course.experts.gathered import GatherRows, gathered_mixture, sum_for_owners
from ddp_course.experts.metered import metered_all_to_all_rows
from ddp_course.experts.naive import RoutedMixture, top_k_weights
from ddp_course.experts.segments import Segments, compute_segments
from ddp_course.launch import RankError, spawn
from ddp_course.measure import ByteMeter, TorchCollectives

C, E, K = 6, 12, 2
TOKENS = {  # of each rank
    "equal": lambda n: [8] * n,
    "unequal, one rank without any": lambda n: [0, 11, 5][:n],
}


def mlp():
    return nn.Sequential(nn.Linear(C, 8), nn.GELU(), nn.Linear(8, C))


def model_and_tokens(total, hot=False):
    """Return a mixture, all ranks' tokens and a gradient of the output, in float64."""
    torch.manual_seed(0)
    model = RoutedMixture(mlp, C, E, K).double()
    x, dy = torch.randn(2, total, C, dtype=torch.float64)
    if hot:  # all tokens choose experts 0 and 1
        x[:, 0] = 100
        with torch.no_grad():
            model.router.weight[:, 0] = -torch.arange(E)
    return model, x, dy


def on_one_process(model, x, dy, limit):
    whole = x.clone().requires_grad_()
    chosen, weights = top_k_weights(model.router(whole), K)
    kept = None if limit is None else within_capacity(chosen, E, limit)
    segments = Segments(chosen, E, kept)
    rows = compute_segments(
        model.experts, segments.sort(whole), segments.counts.tolist()
    )
    y = segments.sum(rows, weights)
    y.backward(dy)
    return y.detach(), whole.grad, {n: p.grad for n, p in model.named_parameters()}


def bytes_in(call):
    """Return what a call returns, and the bytes that it sends.

    PyTorch's record knows even splits only, and rows are counted by the meter.
    """
    with ByteMeter() as meter, TorchCollectives() as collectives:
        result = call()
    even = sum(c.bytes_sent for c in collectives.calls)
    return result, meter.total_sent or even


def divided(how, tokens, hot=False):
    """Return the errors of output and gradients, bytes sent both ways, and rows."""
    n, rank = dist.get_world_size(), dist.get_rank()
    tokens = TOKENS[tokens](n)
    model, x, dy = model_and_tokens(sum(tokens), hot)
    y, dx, grads = on_one_process(*model_and_tokens(sum(tokens), hot), None)
    first = sum(tokens[:rank])
    mine = slice(first, first + tokens[rank])
    part = x[mine].clone().requires_grad_()
    chosen, weights = top_k_weights(model.router(part), K)
    own = range(rank * E // n, (rank + 1) * E // n)
    experts = [model.experts[i] for i in own]
    compute = {
        "gathered": lambda i, rows: experts[i](rows),
        "dispatched": lambda rows, counts: compute_segments(experts, rows, counts),
    }
    mixtures = {
        "gathered": gathered_mixture,
        "dispatched": partial(dispatched_mixture, exchange=metered_all_to_all_rows),
    }
    found, forward = bytes_in(
        lambda: mixtures[how](part, chosen, weights, compute[how], E)
    )
    _, backward = bytes_in(lambda: found.backward(dy[mine]))
    errors = [(found - y[mine]).abs(), (part.grad - dx[mine]).abs()]
    for name, parameter in model.named_parameters():
        if name == "router.weight":
            dist.all_reduce(parameter.grad)
        elif int(name.split(".")[1]) not in own:
            continue
        errors.append((parameter.grad - grads[name]).abs())
    dispatcher = TokenDispatcher(chosen, E)
    away = [sum(a) - a[rank] for a in (dispatcher.sent, dispatcher.received)]
    largest = max(float(e.max()) for e in errors if e.numel())
    return largest, (forward, backward), away, sum(dispatcher.counts)


CASES = [("dispatched", tokens, hot) for tokens in TOKENS for hot in (False, True)]
CASES.append(("gathered", "equal", False))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_spawn_outputs_gradients_and_bytes(n):
    ranks = spawn(lambda: [divided(*case) for case in CASES], world_size=n)
    for case, results in zip(CASES, zip(*ranks, strict=True), strict=True):
        assert sum(rank[3] for rank in results) == K * sum(TOKENS[case[1]](n)), case
        for error, sent, (m, received), _ in results:
            assert error < 1e-11, case
            rows, count = (m + received) * C * 8, 8 * E * (n - 1) // n
            if case[0] == "gathered":
                others = 8 * (n - 1)  # tokens, whose rows go to all other ranks
                rows = others * (2 * C + K) * 8  # and the weights of their choices
                count = others * K * 8  # the numbers of the chosen experts
            assert sent == (rows + count, rows), case


def with_drops():
    """Return the largest error of one process that drops within each rank's tokens."""
    rank, n = dist.get_rank(), dist.get_world_size()
    model, x, dy = model_and_tokens(16 * n)
    mine = slice(16 * rank, 16 * (rank + 1))
    expected = on_one_process(model, x[mine], dy[mine], 2)[0]
    chosen, weights = top_k_weights(model.router(x[mine]), K)
    kept = within_capacity(chosen, E, 2)
    experts = model.experts[rank * E // n : (rank + 1) * E // n]
    y = dispatched_mixture(
        x[mine],
        chosen,
        weights,
        lambda rows, counts: compute_segments(experts, rows, counts),
        E,
        kept=kept,
    )
    return float((y - expected).abs().max()), int((~kept).sum())


def test_spawn_dropped_choices_are_not_sent():
    ranks = spawn(with_drops, world_size=3, output="none")
    assert all(error < 1e-11 for error, _ in ranks)
    assert all(dropped > 0 for _, dropped in ranks)


# ---- plants --------------------------------------------------------------------------


def dispatched_among_five():
    TokenDispatcher(torch.tensor([[0, 4]]), 5)


def test_spawn_experts_that_the_ranks_cannot_share_are_refused():
    must = "num_experts is 5, which 2 ranks cannot share equally; .* a multiple of 2"
    with pytest.raises(RankError, match=must):
        spawn(dispatched_among_five, world_size=2, output="none")


def transposed():
    rows = (torch.arange(8.0).view(2, 4) + 10 * dist.get_rank()).t()
    return torch.equal(sum_for_owners(rows), sum_for_owners(rows.contiguous()))


def test_spawn_rows_may_be_a_transposed_matrix():
    assert spawn(transposed, world_size=2, output="none") == [True] * 2


def second_derivatives():
    """Return for each exchange of rows whether x³ has its second derivative."""
    x = torch.tensor([[1.0], [2.0]], requires_grad=True)
    found = {}
    for name, count, exchanged in (
        ("sent", 1, AllToAllRows.apply(x, [1, 1], [1, 1], None, all_to_all_rows)),
        ("gathered", 2, GatherRows.apply(x, None)),  # each of two ranks has a copy
    ):
        (first,) = torch.autograd.grad(exchanged.pow(3).sum(), x, create_graph=True)
        second = first.requires_grad and torch.autograd.grad(first.sum(), x)[0]
        found[name] = torch.is_tensor(second) and torch.equal(second, count * 6 * x)
    return found


def test_spawn_an_exchange_of_rows_can_be_differentiated_twice():
    for found in spawn(second_derivatives, world_size=2, output="none"):
        assert found == {"sent": True, "gathered": True}


def by_expert():
    """Count the rows as if all of an expert lay together, from whichever rank."""
    init = TokenDispatcher.__init__

    def sorted_counts(self, *args, **options):
        init(self, *args, **options)
        each = torch.tensor(self.counts).view(len(self.sent), -1)
        self.counts = each.sum(0).tolist()

    TokenDispatcher.__init__ = sorted_counts


def cut_graph():
    """PyTorch's own call has no backward."""
    dispatch.AllToAllRows.apply = dispatch.all_to_all_rows


def splits_not_exchanged():
    """Backward of the gradients uses the splits of forward."""

    def backward(ctx, gradient):
        received, sent, group = ctx.back
        if sum(sent) != len(gradient):
            gradient = gradient.new_zeros(sum(sent), *gradient.shape[1:])
        back = dispatch.all_to_all_rows(gradient, sent, received, group)
        good = torch.zeros(sum(sent), *gradient.shape[1:], dtype=gradient.dtype)
        good[: min(len(good), len(back))] = back[: len(good)]
        return good, None, None, None

    dispatch.AllToAllRows.backward = staticmethod(backward)


def planted(plant):
    plant()
    try:
        return divided("dispatched", "equal")[0]
    except Exception as error:
        return repr(error)


@pytest.mark.parametrize("plant", [by_expert, cut_graph, splits_not_exchanged])
def test_spawn_a_wrong_dispatch_is_seen(plant):
    for error in spawn(planted, plant, world_size=2, output="none"):
        assert isinstance(error, str) or error > 1e-3
