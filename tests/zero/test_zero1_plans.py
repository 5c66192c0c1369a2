"""Who owns what, which optimizers can be cut, states in parts: all without a rank."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer
from zero_cases import OPTIMIZERS, Odd

from ddp_course.model import build_gpt
from ddp_course.zero import NotElementwiseError, deal, shard_plan
from ddp_course.zero.elementwise import element_states
from ddp_course.zero.states import Owned, in_memory_order, joined, part_of, problem_with

CPU = torch.device("cpu")
sizes = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def parameters(numels: list[int]) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{k}", nn.Parameter(torch.zeros(n))) for k, n in enumerate(numels)]


@settings(deadline=None)
@given(sizes, st.integers(1, 9), st.floats(1e-6, 1e-3))
def test_every_element_has_one_owner_and_shards_are_equal(numels, n, cap):
    plan = shard_plan(parameters(numels), n, cap, cap)
    owners = {f"p{k}": [0] * numel for k, numel in enumerate(numels)}
    for bucket in plan:
        assert bucket.numel == n * bucket.shard_numel
        assert 0 <= bucket.padding < n
        for rank in range(n):
            end = 0
            for piece in bucket.pieces(rank):
                assert piece.offset >= end and piece.first < piece.last
                end = piece.offset + piece.last - piece.first
                assert end <= bucket.shard_numel
                for element in range(piece.first, piece.last):
                    owners[piece.parameter][element] += 1
                # Where the shard lies in the bucket is where the parameter lies.
                begin = bucket.bucket.offsets[
                    bucket.bucket.parameters.index(piece.parameter)
                ]
                assert rank * bucket.shard_numel + piece.offset == begin + piece.first
    assert all(count == 1 for counts in owners.values() for count in counts)


@settings(deadline=None)
@given(sizes, st.integers(1, 9))
def test_whole_parameters_are_dealt_out_as_evenly_as_their_sizes_allow(numels, n):
    owner = deal(numels, [0] * n)
    loads = [sum(s for s, o in zip(numels, owner, strict=True) if o == r)
             for r in range(n)]  # fmt: skip
    assert max(loads) <= sum(numels) / n + max(numels)
    assert max(loads) - min(loads) <= max(numels)


def test_the_largest_is_dealt_first_and_what_is_owned_counts():
    assert deal([5, 9, 3, 3], [0, 0]) == (1, 0, 1, 1)  # 9; 5, 3, 3
    assert deal([5, 9, 3, 3], [9, 0]) == (0, 1, 1, 1)
    assert deal([4], [1, 1, 0]) == (2,)


def test_a_plan_tells_itself():
    plan = shard_plan(parameters([6, 2]), 3)
    assert str(plan[0]).splitlines() == [
        "bucket 0: 0.00 MiB of float32, 2 parameters: p1 ... p0; 1 elements of padding",
        "  rank 0: p1[0:2] p0[0:1]",
        "  rank 1: p0[1:4]",
        "  rank 2: p0[4:6]",
    ]
    assert "nothing" in str(shard_plan(parameters([1]), 2)[0])
    with pytest.raises(ValueError, match="bucket_cap_mb is 0"):
        shard_plan(parameters([1]), 2, 0)


def test_half_of_a_model_can_be_one_parameter_and_then_only_shards_are_even():
    numels = [p.numel() for p in build_gpt("1m").parameters()]
    loads = [0, 0, 0, 0]
    for numel, owner in zip(numels, deal(numels, loads), strict=True):
        loads[owner] += numel
    assert max(loads) / (sum(numels) / 4) < 1.02
    numels = [1000, 10, 10, 10]
    assert deal(numels, [0, 0]) == (0, 1, 1, 1)
    (bucket,) = shard_plan(parameters(numels), 2)
    assert bucket.shard_numel == 515


# ---- which optimizers can be cut -----------------------------------------------------


class Trusts(Optimizer):
    """As LAMB: the step of a tensor is as long as the tensor."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * (p.norm() / p.grad.norm()), alpha=group["lr"])


class Clips(Trusts):
    """Clips each tensor's gradient, though at a norm that is rarely reached."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                scale = min(1.0, 20 / float(p.grad.norm()))
                p.data.sub_(p.grad, alpha=scale * group["lr"])


class Rows(Trusts):
    """Has a state for each row, though it does not use it."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["rows"] = p.detach().abs().amax(-1)
                p.data.sub_(p.grad, alpha=group["lr"])


class Noise(Trusts):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad + torch.randn_like(p), alpha=group["lr"])


ELEMENTWISE = {
    "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop",
    "Rprop", "SGD", "ASGD",
}  # fmt: skip


def test_pytorchs_optimizers_are_told_apart_by_trying():
    found = set()
    for name, cls in inspect.getmembers(torch.optim, inspect.isclass):
        if issubclass(cls, Optimizer) and cls is not Optimizer:
            try:
                element_states(cls, {"lr": 0.0}, {"lr": 0.0}, CPU)
                found.add(name)
            except NotElementwiseError as error:
                assert name in str(error) and "NaiveZeroRedundancy" in str(error)
    assert found == ELEMENTWISE


@pytest.mark.parametrize("cls", [Trusts, Clips, Rows, Noise])
def test_what_looks_at_whole_tensors_is_seen(cls):
    before = torch.get_rng_state()
    with pytest.raises(NotElementwiseError, match=f"optimizer_class is {cls.__name__}"):
        element_states(cls, {}, {"lr": 1e-9}, CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_states_that_have_a_number_for_each_element():
    def names(name):
        cls, defaults = OPTIMIZERS[name]
        return element_states(cls, defaults, defaults, CPU)

    assert names("adamw") == {"exp_avg", "exp_avg_sq"}
    assert names("amsgrad") == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert names("sgd") == set()
    assert names("momentum") == {"momentum_buffer"}
    assert names("lion") == {"m"}


# ---- states in parts -----------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 168), min_size=0, max_size=4))
def test_states_can_be_cut_anywhere_and_put_together(cuts):
    weight = Odd().first.weight  # (7, 6, 2, 2), channels_last
    assert not weight.is_contiguous() and weight.numel() == 168
    value = torch.arange(168.0).view(7, 6, 2, 2)  # laid out otherwise than the weight
    state = {"step": torch.tensor(3.0), "exp_avg": value, "kind": "any"}
    edges = [0, *sorted(cuts), 168]
    ranks = []
    for first, last in zip(edges, edges[1:], strict=False):
        owned = Owned(weight, first, last, nn.Parameter(torch.zeros(last - first)))
        part = part_of(state, owned, {"exp_avg"})
        assert part["exp_avg"].shape == (last - first,)
        for name in ("step", "exp_avg"):  # stepping it must not change what was given
            assert part[name].untyped_storage()._cdata != (
                state[name].untyped_storage()._cdata
            )
        flat = in_memory_order(weight.detach(), weight)[first:last]
        assert flat.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        if first < last:
            ranks.append({4: (first, last, part)})
    ranks.reverse()  # whoever comes first
    whole = joined(ranks, [weight] * 5, {"exp_avg"})
    assert whole.keys() == {4} and whole[4]["step"] == 3 and whole[4]["kind"] == "any"
    assert torch.equal(whole[4]["exp_avg"], value)
    assert whole[4]["exp_avg"].stride() == weight.stride()


def test_a_state_that_does_not_fit_is_named():
    ps = [torch.zeros(2, 3), torch.zeros(4)]
    group = {"params": [0, 1]}

    def told(state_dict):
        return problem_with(state_dict, ps, [2], {"m"})

    good = {"m": torch.zeros(4), "step": 1}
    assert told({"state": {1: good}, "param_groups": [group]}) is None
    assert "no state_dict" in told(None)
    assert "no state_dict" in told({"state": {}})
    assert "[1, 1] parameters; this optimizer has groups of [2]" in told(
        {"state": {}, "param_groups": [{"params": [0]}, {"params": [1]}]}
    )
    assert "m of parameter 0 has the shape [4]; it must be [2, 3]" in told(
        {"state": {0: good}, "param_groups": [group]}
    )
    assert "but no parameter 7" in told({"state": {7: good}, "param_groups": [group]})


def test_gradients_of_one_row_are_seen_in_place_however_autograd_lays_them():
    """Else clipping would scale a copy, and the step would not be clipped."""
    weight = nn.Parameter(torch.ones(1, 3))
    gradient = torch.ones(3, 1).t()  # strides (1, 1), not (3, 1): the same memory
    assert gradient.stride() != weight.stride()
    in_memory_order(gradient, weight).mul_(2)
    assert gradient.tolist() == [[2, 2, 2]]
