"""Loss scaling against PyTorch's, and with parts on several ranks: all or none step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_course.launch import spawn
from ddp_course.mesh import make_groups
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.parallelize import (
    autocast,
    clip_gradients,
    optimizer_for,
    parallelize,
    whole,
)
from ddp_course.precision import (
    GradScaler,
    MasterWeights,
    NaiveGradScaler,
    scaler,
)
from ddp_course.spec import layout_for

GPT = GPTConfig(block_size=16, n_layer=2, n_head=2, d_model=24)
OPTIONS = {"init_scale": 8.0, "growth_interval": 3}
# What one gradient is in each step.
GRADIENTS = (1.0, torch.inf, 2.0, 3.0, torch.nan, 1.0, 2.0, 1e-3, -torch.inf, 5.0)
GRADIENTS += (1.0,) * 7  # it grows twice


def scales_and_weights(scaler) -> list[tuple[float, float]]:
    weight = nn.Parameter(torch.ones(2))
    optimizer, found = torch.optim.SGD([weight], lr=0.1), []
    for gradient in GRADIENTS:
        optimizer.zero_grad()
        scaler.scale((weight * torch.tensor([gradient, 1.0])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        theirs = isinstance(scaler, torch.amp.GradScaler)
        scale = scaler.get_scale() if theirs else scaler.factor
        found.append((scale, weight.tolist()))
    return found


class Naive(NaiveGradScaler):
    def update(self):
        """Its step chooses the next scale."""


class NeverResets(GradScaler):
    """A count of clean steps that an inf does not interrupt."""

    def update(self):
        clean = self.clean_steps
        super().update()
        if self.factor < 8.0:
            self.clean_steps = clean


class StepsAnyway(GradScaler):
    def step(self, optimizer):
        super().step(optimizer)
        if self.skipped[optimizer]:
            optimizer.step()


def test_scales_and_skipped_steps_are_pytorchs():
    theirs = scales_and_weights(torch.amp.GradScaler("cpu", **OPTIONS))
    assert scales_and_weights(GradScaler(**OPTIONS)) == theirs
    assert scales_and_weights(Naive(*OPTIONS.values())) == theirs
    assert {scale for scale, _ in theirs} >= {4.0, 2.0}  # some were skipped
    for wrong in (NeverResets, StepsAnyway):
        assert str(scales_and_weights(wrong(**OPTIONS))) != str(theirs)


def test_an_inf_is_seen_in_the_last_number_and_of_any_optimizer():
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.5) for weight in weights]
    scaler, last = GradScaler(init_scale=8.0), torch.tensor([1.0, 1.0, torch.inf])
    scaler.scale((weights[0] + weights[1] * last).sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [weight.tolist() for weight in weights] == [[0.5] * 3, [1.0] * 3]
    assert scaler.factor == 4.0


def test_it_can_be_off():
    off = GradScaler(enabled=False)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    off.scale(weight.sum()).backward()
    off.unscale_(optimizer)
    off.step(optimizer)
    off.update()
    assert (off.factor, weight.item()) == (1.0, 0.5)
    assert (off.state_dict(), off.get_scale()) == ({}, 1.0)
    with pytest.raises(RuntimeError, match="the state is empty"):
        GradScaler().load_state_dict(off.state_dict())


def test_calls_in_another_order_and_numbers_that_cannot_be_are_refused():
    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), GradScaler()
    with pytest.raises(RuntimeError, match="before step"):
        scaler.update()
    scaler.scale(weight.sum())
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="divided twice"):
        scaler.unscale_(optimizer)
    weight.data, weight.grad = weight.data.half(), None
    weight.sum().backward()
    with pytest.raises(ValueError, match=r"torch\.float16; when it is divided"):
        scaler_of(weight).unscale_(optimizer)
    for name, value in (
        ("init_scale", 0.0),
        ("growth_factor", 1.0),
        ("backoff_factor", 1.0),
        ("growth_interval", 0),
    ):
        with pytest.raises(ValueError, match=f"{name} is {value!r}"):
            GradScaler(**{name: value})


def scaler_of(weight: nn.Parameter) -> GradScaler:
    """Return a scaler that has scaled a loss."""
    scaler = GradScaler()
    scaler.scale(weight.sum())
    return scaler


@pytest.mark.parametrize("method", ["unscale_", "step"])
def test_gradients_of_a_loss_that_was_not_scaled_are_refused(method):
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    weight.sum().backward()
    with pytest.raises(RuntimeError, match=r"divided by 65536: call scaler\.scale"):
        getattr(GradScaler(), method)(optimizer)
    assert (weight.item(), weight.grad.item()) == (1.0, 1.0)
    off = GradScaler(enabled=False)
    getattr(off, method)(optimizer)  # it divides nothing
    by_hand = GradScaler(init_scale=4.0)
    (weight.sum() * by_hand.get_scale()).backward()
    getattr(by_hand, method)(optimizer)


def test_float16_parameters_are_unscaled_in_their_copies():
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = MasterWeights([weight], torch.optim.SGD, lr=0.5)
    scaler = GradScaler(init_scale=2.0**15)
    for gradient, after in ((1e-7, 1.0), (torch.inf, 1.0), (0.5, 0.75)):
        optimizer.zero_grad()
        scaler.scale(weight.float() * gradient).sum().backward()
        scaler.step(optimizer)
        scaler.update()
        assert weight.item() == after
    master = optimizer.state[weight]["master"].item()
    assert master == pytest.approx(1 - 0.5e-7 - 0.25, abs=1e-7)


def clipped(clip) -> float:
    """Return how far a weight moves whose gradient of 30 is clipped to a norm of 1."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = MasterWeights([weight], torch.optim.SGD, lr=0.5)
    scaler = GradScaler(init_scale=1024.0)
    scaler.scale(weight.float() * 30).sum().backward()
    scaler.unscale_(optimizer)
    clip(optimizer, weight)
    scaler.step(optimizer)
    return 1 - weight.item()


def test_copies_are_clipped_after_unscaling():
    assert clipped(lambda own, _: own.clip_grad_norm_(1.0)) == pytest.approx(0.5)
    assert clipped(lambda own, _: None) == 15.0
    clip = nn.utils.clip_grad_norm_  # it would change nothing: the copies are stepped
    with pytest.raises(
        RuntimeError, match=r"Clip the copies, with optimizer\.clip_grad"
    ):
        clipped(lambda _, weight: clip([weight], 1.0))


def test_a_step_left_out_leaves_no_gradient_behind():
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = MasterWeights([weight], torch.optim.SGD, lr=0.5)
    scaler = GradScaler(init_scale=1024.0)
    scaler.scale(weight.float() * torch.inf).sum().backward()
    scaler.step(optimizer)
    weight.grad = None  # as the model's zero_grad
    (weight.float() * 0.5).sum().backward()
    optimizer.step()  # without the scaler
    assert weight.item() == 0.75


def test_states_go_to_pytorchs_and_back():
    settings = {"growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7}
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, **settings)
    theirs.load_state_dict(theirs.state_dict() | {"_growth_tracker": 5})
    ours = GradScaler()
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == theirs.state_dict()
    assert ours.get_scale() == theirs.get_scale() == 8.0
    assert ours.clean_steps == 5
    both = [torch.ones(2), torch.ones(1)]
    for got, expected in zip(ours.scale(both), theirs.scale(both), strict=True):
        assert torch.equal(got, expected)


# ---- parts on several ranks ----------------------------------------------------------

LAYOUTS = {"ddp": {}, "tp": {"tp": 2}, "pp": {"pp": 2, "microbatches": 2}}
LAYOUTS |= {f"zero{stage}": {"zero": stage} for stage in (1, 2, 3)}


def one_step(strategy: str, poison: int | None) -> dict:
    """One step in float16, in which rank `poison` finds an inf in one number."""
    layout = layout_for(2, precision="fp16", **LAYOUTS[strategy])
    axes = make_groups(layout.mesh)
    model = parallelize(build_gpt(GPT), layout, axes)
    optimizer = optimizer_for(model, layout, axes, lr=0.1)
    full, _ = whole(model, optimizer)
    before = {n: t.clone() for n, t in full.state_dict().items()}
    x = torch.arange(64).view(4, 16)
    scaler = GradScaler(init_scale=1024.0)
    with autocast(layout):
        if strategy == "pp":
            model.step(x, x, scaler.get_scale())
        else:
            _, loss = model(x, x)
    if strategy != "pp":
        scaler.scale(loss).backward()
    stepped = getattr(optimizer, "unscaled", optimizer)
    if poison in (dist.get_rank(), "all"):
        grads = (p.grad for g in stepped.param_groups for p in g["params"])
        next(g for g in grads if g is not None and g.numel()).view(-1)[0] = torch.inf
    scaler.unscale_(optimizer)
    norm = clip_gradients(model, optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    after = full.state_dict()
    return {
        "moved": any(not torch.equal(before[n], after[n]) for n in before),
        "factor": scaler.factor,
        "norm": float(norm),
    }


def all_steps() -> dict[str, list[dict]]:
    found = {}
    for strategy in LAYOUTS:
        poison = "all" if strategy == "ddp" else 1  # after a mean, all ranks have it
        found[strategy] = [one_step(strategy, None), one_step(strategy, poison)]
    return found


def without_agreement() -> list[float]:
    scaler.seen_by_all = lambda optimizer, own: own if own is not None else 0.0
    return [one_step(strategy, 1)["factor"] for strategy in ("zero3", "tp", "pp")]


def test_all_ranks_step_or_none():
    ranks = spawn(all_steps, world_size=2, output="none", timeout=250)
    for strategy in LAYOUTS:
        for clean, poisoned in (result[strategy] for result in ranks):
            assert (clean["moved"], clean["factor"]) == (True, 1024.0), strategy
            assert (poisoned["moved"], poisoned["factor"]) == (False, 512.0), strategy
            # The norm is that of gradients that were divided before.
            expected = ranks[0]["ddp"][0]["norm"]
            assert clean["norm"] == pytest.approx(expected, rel=2e-2), strategy
    alone = spawn(without_agreement, world_size=2, output="none")
    assert all(a != b for a, b in zip(*alone, strict=True)), alone  # planted
