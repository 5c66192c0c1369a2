"""Who owns what, which optimizers can be cut, states in parts: all without a rank."""

import inspect
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import error_of
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddp_course.mechanisms import trial
from ddp_course.mechanisms.elementwise import check_elementwise
from ddp_course.model import build_gpt
from ddp_course.zero import NotElementwiseError, deal, optimizer_guards, shard_plan
from ddp_course.zero.shards import names_of

CPU = torch.device("cpu")
sizes = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def parameters(numels: list[int]) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{k}", nn.Parameter(torch.zeros(n))) for k, n in enumerate(numels)]


@settings(deadline=None)
@given(sizes, st.integers(1, 9), st.floats(1e-6, 1e-3))
def test_every_element_has_one_owner_and_shards_are_equal(numels, n, cap):
    plan = shard_plan(parameters(numels), n, cap)
    owners = {f"p{k}": [0] * numel for k, numel in enumerate(numels)}
    for bucket in plan:
        assert bucket.numel == n * bucket.shard_numel
        assert 0 <= bucket.padding < n
        for rank in range(n):
            every = bucket.pieces(rank, empty=True)
            assert tuple(piece.parameter for piece in every) == bucket.parameters
            assert all(0 <= piece.offset <= bucket.shard_numel for piece in every)
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


def test_all_names_differ_also_if_two_models_have_equal_ones():
    named = [(name, nn.Parameter(torch.zeros(1))) for name in ("a2", "a", "a", "a23")]
    groups = torch.optim.SGD(named).param_groups
    assert list(names_of(groups).values()) == ["a2", "a", "a22", "a23"]
    unnamed = torch.optim.SGD([parameter for _, parameter in named]).param_groups
    assert list(names_of(unnamed).values()) == ["0", "1", "2", "3"]


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


class OneNorm(Trusts):
    """As Prodigy, or LAMB with a largest norm: one number over all parameters."""

    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"]]
        norm = sum(p.grad.square().sum() for p in every).sqrt()
        for p in every:
            p.data.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"])


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
            rate = {"lr": 0.1 if name == "SparseAdam" else 0.0}  # it refuses 0
            try:
                check_elementwise(cls, rate, rate, CPU)
                found.add(name)
            except NotElementwiseError as error:
                assert name in str(error) and "NaiveZeroRedundancy" in str(error)
    assert found == ELEMENTWISE


@pytest.mark.parametrize("cls", [Trusts, OneNorm, Clips, Rows, Noise])
def test_what_looks_at_whole_tensors_is_seen(cls):
    before = torch.get_rng_state()
    with pytest.raises(NotElementwiseError, match=f"optimizer_class is {cls.__name__}"):
        check_elementwise(cls, {}, {"lr": 1e-9}, CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stage_may_have_what_looks_at_a_whole_tensor_but_not_at_several():
    for cls in (Trusts, Clips, Rows, torch.optim.Adafactor, torch.optim.Muon):
        check_elementwise(cls, {}, {"lr": 0.1}, CPU, whole_tensors=True)
    with pytest.raises(NotElementwiseError, match="step parameters one by one"):
        check_elementwise(OneNorm, {}, {"lr": 0.1}, CPU, whole_tensors=True)


class NeedsMore(torch.optim.SGD):
    """Cannot be constructed from its options alone."""

    def __init__(self, params, how):
        super().__init__(params, lr=0.1)


def test_who_cannot_be_tried_out_is_warned_of():
    optimizer = NeedsMore([torch.nn.Parameter(torch.ones(2))], "somehow")
    with pytest.warns(UserWarning, match="NeedsMore could not be tried out"):
        trial._try_out(optimizer, optimizer.param_groups[0], whole_tensors=False)


# ---- guards --------------------------------------------------------------------------


class LargestResult(TorchDispatchMode):
    """The bytes of the largest tensor that an operation returns."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.nbytes = max([self.nbytes, *(t.nbytes for t in tensors)])
        return result


@pytest.mark.parametrize("averaged", [True, False])
def test_equal_gradients_are_found_without_a_copy_of_all(averaged, monkeypatch):
    def exchange(group):
        return lambda note: [note, note if averaged else f"1{'0' * 16}"]

    monkeypatch.setattr(optimizer_guards, "quick_exchange", exchange)
    slots = [SimpleNamespace(parameter=p) for _, p in parameters([1000] * 8 + [5])]
    for slot in slots[1:]:
        slot.parameter.grad = torch.ones_like(slot.parameter)
    engine = SimpleNamespace(slots=slots)
    optimizer = SimpleNamespace(engine=engine, world_size=2, process_group=None)
    guard = optimizer_guards.AveragedOnce()
    with LargestResult() as largest:
        refused = error_of(lambda: guard.gradients_complete(optimizer))
    assert ("all ranks have the same gradients" in refused) == averaged
    assert guard.known and largest.nbytes <= 4000  # of one gradient, in float32


def test_stage_1_finds_pytorchs_collectives_under_their_old_names():
    program = (
        "import torch.distributed as dist\n"
        "for name in ('all_gather_single', 'reduce_scatter_single'):\n"
        "    vars(dist).pop(name, None)\n"
        "from ddp_course.zero.stage1 import NATIVE\n"
        "assert NATIVE.all_gather_single is dist.all_gather_into_tensor\n"
        "assert NATIVE.reduce_scatter_single is dist.reduce_scatter_tensor\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
