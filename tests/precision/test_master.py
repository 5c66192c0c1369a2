"""Master weights: by hand in one process, in shards on two ranks, and saved."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from trained import same

from ddp_course.launch import spawn
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.precision import MasterWeights, NaiveMasterWeights
from ddp_course.zero import ShardedGradientOptimizer, ZeroRedundancyOptimizer

GPT = GPTConfig(block_size=16, n_layer=2, n_head=2, d_model=24, tied=True)
X = torch.arange(128).view(8, 16) % 96
BF16 = torch.bfloat16


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in model.state_dict().items()}


def by_hand(steps: int) -> dict[str, torch.Tensor]:
    """The same in eight lines, without a class."""
    model = build_gpt(GPT).to(BF16)
    full = {n: nn.Parameter(p.detach().float()) for n, p in model.named_parameters()}
    optimizer = AdamW(full.values(), lr=1e-3)
    for _ in range(steps):
        model.zero_grad()
        model(X, X)[1].backward()
        for name, parameter in model.named_parameters():
            full[name].grad = parameter.grad.float()
        optimizer.step()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(full[name])
    return state(model)


class Naive(NaiveMasterWeights):
    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


class NeverCopiedBack(MasterWeights):
    def step(self, closure=None):
        before = [p.detach().clone() for p in self.param_groups[0]["params"]]
        super().step(closure)
        for parameter, was in zip(self.param_groups[0]["params"], before, strict=True):
            parameter.data.copy_(was)


class StepsTheParameters(MasterWeights):
    """No copies after all: the optimizer inside has 16 bits."""

    def step(self, closure=None):
        for copies, group in zip(
            self.optim.param_groups, self.param_groups, strict=True
        ):
            for own, parameter in zip(copies["params"], group["params"], strict=True):
                own.data.copy_(parameter)
        super().step(closure)


def trained(make, steps: int = 5) -> tuple[dict, Optimizer, nn.Module]:
    model = build_gpt(GPT).to(BF16)
    optimizer = make(model.parameters(), AdamW, lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(X, X)[1].backward()
        optimizer.step()
    return state(model), optimizer, model


def test_it_is_the_loop_by_hand_and_wrong_ones_are_not():
    right = by_hand(5)
    found, optimizer, model = trained(MasterWeights)
    assert same(found, right)
    assert same(trained(Naive)[0], right)
    for wrong in (NeverCopiedBack, StepsTheParameters):
        assert not same(trained(wrong)[0], right)
    kept = optimizer.state[next(model.parameters())]
    assert {n: t.dtype for n, t in kept.items()} == dict.fromkeys(
        ("master", "step", "exp_avg", "exp_avg_sq"), torch.float32
    )


def test_small_updates_add_up_and_a_scheduler_is_obeyed():
    weights = [nn.Parameter(torch.ones(1, dtype=BF16)) for _ in range(2)]
    plain = SGD(weights[:1], lr=1e-3)
    master = MasterWeights(weights[1:], SGD, lr=1e-3)
    assert master.param_groups[0]["momentum"] == 0
    for _ in range(100):
        for optimizer in (plain, master):
            optimizer.zero_grad()
        (weights[0] + weights[1]).sum().backward()
        plain.step()
        master.step()
    assert [w.item() for w in weights] == [1.0, 0.8984375]
    torch.optim.lr_scheduler.LambdaLR(master, lambda step: 0.0)  # sets it at once
    for _ in range(20):
        (weights[1] * 1).sum().backward()
        master.step()
    assert weights[1].item() == 0.8984375
    loss = master.step(lambda: weights[1].sum())
    assert (loss.item(), loss.requires_grad) == (0.8984375, True)


def test_copies_are_copies_and_gradients_are_those_of_this_step():
    weight = nn.Parameter(torch.ones(1))  # in 32 bits already
    master = MasterWeights([weight], SGD, lr=0.5)
    with torch.no_grad():
        weight.fill_(7.0)
    assert master.state[weight]["master"].item() == 1.0
    master.step()
    assert weight.item() == 7.0  # without a gradient it is left alone
    weight.grad = torch.ones(1)
    assert master.unscaled is master.optim  # as a scaler asks, before it leaves out
    master.zero_grad()
    assert master.optim.param_groups[0]["params"][0].grad is None
    weight.grad = torch.full((1,), 2.0)
    master.step()
    assert weight.item() == 6.0  # it was changed from outside
    assert master.optim.param_groups[0]["params"][0].grad is None  # 4 bytes fewer


def test_parameters_changed_from_outside_and_added_later_are_stepped():
    layer = nn.Linear(2, 1, bias=False).to(BF16)
    master = MasterWeights([layer.weight], SGD, lr=2**-12)
    layer.load_state_dict({"weight": torch.tensor([[1.0, 3.0]])})
    later = nn.Parameter(torch.ones(1, dtype=BF16))
    for step in range(3):
        for p in (layer.weight, later):
            p.grad = torch.ones_like(p)
        if step == 1:
            master.add_param_group({"params": [later], "lr": 2**-10})
            with torch.no_grad():
                layer.weight[0, 1] = 5.0
        master.step()
    copies = [master.state[p]["master"] for p in (layer.weight, later)]
    assert copies[0].tolist() == [[1 - 3 * 2**-12, 5 - 2 * 2**-12]]
    assert copies[1].tolist() == [1 - 2 * 2**-10]


def test_saved_and_loaded_the_copies_keep_their_bits():
    _, optimizer, model = trained(MasterWeights, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    for load in (MasterWeights.load_state_dict, Optimizer.load_state_dict):
        other = build_gpt(GPT).to(BF16)
        if load is Optimizer.load_state_dict:  # ours has the weights, too
            other.load_state_dict(model.state_dict())
        again = MasterWeights(other.parameters(), AdamW, lr=1e-3)
        load(again, copy.deepcopy(saved))
        for _ in range(2):
            again.zero_grad()
            other(X, X)[1].backward()
            again.step()
        right = by_hand(5)
        # PyTorch's way rounds all states to the type of the parameters.
        assert same(state(other), right) == (load is MasterWeights.load_state_dict)


def test_loading_drops_states_that_the_loaded_state_does_not_have():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = MasterWeights([weight], SGD, lr=1.0, momentum=0.5)
    new = copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        optimizer.load_state_dict(new)
        assert optimizer.state[weight].keys() == {"master"}
        weight.grad = torch.ones(1)
        optimizer.step()
        assert weight.item() == -1.0  # -1.5 with the momentum of an earlier step


def sharded() -> list:
    found = [by_hand(3)]  # here: another number of threads rounds otherwise
    inner = partial(MasterWeights, optimizer_class=AdamW)
    for zero in (ZeroRedundancyOptimizer, ShardedGradientOptimizer):
        model = build_gpt(GPT).to(BF16)
        optimizer = zero(model.parameters(), inner, lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            model(X, X)[1].backward()  # the same rows on both ranks: the mean is equal
            optimizer.step()
        states = [s for s in optimizer.optim.state.values() if "master" in s]
        found.append((state(model), sum(s["master"].numel() for s in states)))
    return found


def test_in_shards_each_rank_has_copies_of_its_own_part():
    ranks = spawn(sharded, world_size=2, output="none")
    for stage in (1, 2):
        for result in ranks:
            assert same(result[stage][0], result[0])
        total = sum(result[stage][1] for result in ranks)
        assert total == GPT.num_parameters
        assert max(result[stage][1] for result in ranks) < 0.6 * total


def test_what_cannot_be_has_its_optimizers_words():
    with pytest.raises(ValueError, match="Invalid learning rate"):
        MasterWeights([nn.Parameter(torch.ones(1))], SGD, lr=-1.0)
