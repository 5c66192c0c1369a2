"""The state of a pipeline is that of one process, and goes there and back."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pipeline_cases import CLOSE, PipelineParallel, adamw, batch, mse, tied
from refusals import said
from torch import nn
from trained import same

from ddp_course.collectives import CollectiveError
from ddp_course.launch import RankError, spawn
from ddp_course.mechanisms.agreement import ReplicaError
from ddp_course.mechanisms.whole_state import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from ddp_course.pipeline import PipelineError, interleaved, parse


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW of two groups: matrices, and the rest."""
    params = list(model.parameters())
    rest = [p for p in params if p.dim() <= 1]
    matrices = [p for p in params if p.dim() > 1]
    decayed = {"params": matrices, "weight_decay": 0.1}
    return adamw([decayed, {"params": rest, "weight_decay": 0.0}])


def steps(model: nn.Module, optimizer, numbers) -> None:
    for step in numbers:
        optimizer.zero_grad()
        if isinstance(model, PipelineParallel):
            model.step(*batch(step))
        else:
            model(*batch(step))[1].backward()
        optimizer.step()


def there_and_back(state, optimizer_state):
    """On every rank: go on from a state for two steps, and return the whole state."""
    pipeline = PipelineParallel(tied(5), "interleaved", 3)
    optimizer = in_groups(pipeline)
    load_full_state_dict(pipeline, state)
    load_full_optimizer_state_dict(pipeline, optimizer, optimizer_state)
    steps(pipeline, optimizer, (2, 3))
    full = full_optimizer_state_dict(pipeline, optimizer)
    return full_state_dict(pipeline), full


def test_a_run_goes_on_in_a_pipeline_and_back_in_one_process():
    plain = tied()
    optimizer = in_groups(plain)
    steps(plain, optimizer, (0, 1))
    state = {k: v.clone() for k, v in plain.state_dict().items()}
    results = spawn(
        there_and_back,
        state,
        optimizer.state_dict(),
        world_size=2,
        output="none",
    )
    steps(plain, optimizer, (2, 3))
    for found, found_optimizer in results:
        assert list(found) == list(plain.state_dict())
        assert same(found, plain.state_dict(), **CLOSE)
        assert same(found_optimizer, optimizer.state_dict(), **CLOSE)
        optimizer.load_state_dict(found_optimizer)  # and back


# ---- what cannot be ------------------------------------------------------------------


refused = partial(said, (ReplicaError, CollectiveError))


class RunningMean(nn.Module):
    """A layer with a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


def spectral() -> nn.Module:
    return torch.nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))


STATEFUL = {"running mean": RunningMean, "spectral norm": spectral}


def refusals() -> dict[str, str]:
    rank = dist.get_rank()
    results = {
        "name": refused(PipelineParallel, tied(), "2f2b"),
        "microbatches": refused(PipelineParallel, tied(), "1f1b", 0),
        "layers": refused(PipelineParallel, tied(), interleaved(2, 4, 9)),
        "sizes": refused(PipelineParallel, tied(), sizes=[5, 4]),
        "spine": refused(PipelineParallel, nn.Linear(2, 2)),
        "differ": refused(PipelineParallel, tied(), "1f1b", 2 + rank),
        "ranks": refused(PipelineParallel, tied(), parse("one", ["0F0 0B0"])),
        "illegal": refused(
            PipelineParallel, tied(), parse("mine", ["0F0 0B0", "1B0 1F0"])
        ),
    }
    pipeline = PipelineParallel(tied(), "1f1b", 4)
    x, y = batch(0)
    results["few rows"] = refused(pipeline.step, x[:3], y[:3])
    results["targets"] = refused(pipeline.step, x, y[:3])
    results["none"] = refused(pipeline.step, x, None)
    results["shapes"] = refused(pipeline.step, x[: 8 - rank], y[: 8 - rank])
    results["numbers"] = refused(pipeline.step, *batch(rank))
    results["long"] = refused(pipeline.step, x.repeat(1, 9), y.repeat(1, 9))
    results["called"] = refused(pipeline, x, y)
    results["columns"] = refused(pipeline.step, x, y[:, :2])
    with torch.no_grad():
        results["no gradients"] = refused(pipeline.step, x, y)
        results["token"] = refused(pipeline, x, y - 99)
    norm = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    norms, ones = PipelineParallel(norm, "gpipe", 2, loss_fn=mse), torch.ones(4, 2)
    results["norm"] = refused(norms.step, ones, ones)
    norms.eval().step(ones, ones)
    PipelineParallel(norm, "gpipe", 1, loss_fn=mse).step(ones, ones)
    for name, layer in STATEFUL.items():
        model = nn.Sequential(nn.Linear(2, 2), layer(), nn.Linear(2, 2))
        results[name] = refused(
            PipelineParallel(model, "gpipe", 2, loss_fn=mse).step, ones, ones
        )
        PipelineParallel(model, "gpipe", 1, loss_fn=mse).step(ones, ones)
        PipelineParallel(model.eval(), "gpipe", 2, loss_fn=mse).step(ones, ones)
    late = nn.Sequential(nn.Linear(2, 2), RunningMean(), nn.Linear(2, 2))
    late = PipelineParallel(late, "gpipe", 2, loss_fn=mse)
    late.eval()(ones, ones)  # an evaluation before the first step
    results["evaluated"] = refused(late.train().step, ones, ones)
    results["modes"] = refused(pipeline.train(rank == 0).step, x, y)
    pipeline.train()
    alone = [dist.new_group([r]) for r in range(2)][rank]
    flat = nn.Sequential(nn.Linear(2, 2), nn.Flatten(0, 1), nn.Linear(2, 2))
    flat = PipelineParallel(
        flat, interleaved(1, 2, 2), group=alone, sizes=[2, 1], loss_fn=mse
    )
    results["rows"] = said(
        PipelineError, flat.step, ones[:, None].expand(4, 3, 2), ones
    )
    tokens = torch.tensor([0, 1, -100, 0])
    words = PipelineParallel(norm.eval(), "gpipe", 2)  # the loss is cross-entropy
    results["ignored"] = refused(words.step, ones, tokens)
    halves = tokens[[0, 2, 1, 2]]  # a half of each microbatch counts
    expected = F.cross_entropy(norm(ones), halves).detach()
    torch.testing.assert_close(words.step(ones, halves), expected)
    lbfgs = torch.optim.LBFGS(pipeline.parameters())
    results["lbfgs"] = said(ValueError, lbfgs.step, lambda: None)
    results["state"] = refused(partial(load_full_state_dict, pipeline), {"a": x})
    pipeline.step(x, y)  # and it can still be used
    return results


def test_what_cannot_be_is_refused_on_all_ranks_in_the_same_words():
    results = spawn(refusals, world_size=2, output="none")
    assert results[0] == results[1]
    for case, words in {
        "name": "schedule is '2f2b'; it can be naive, gpipe, 1f1b",
        "microbatches": "num_microbatches is 0; it must be",
        "layers": "num_stages is 18; there are 8 layers",
        "sizes": "sizes is [5, 4]; it must be a number of layers for each stage",
        "spine": "a Linear has no spine: it must be an nn.Sequential",
        "differ": "argument num_microbatches is 2 on rank 0, 3 on rank 1",
        "ranks": "the number of ranks of the group is 2; the schedule one is for 1",
        "illegal": "1B0",
        "few rows": "x is int64 [3, 5]; it must be a tensor with a row or more",
        "targets": "y is int64 [3, 5]; it must be a tensor of 8 rows, as x is",
        "none": "y is None; step needs targets",
        "shapes": "the ranks differ. x is int64 [8, 5] with digest",
        "numbers": "the ranks differ. x is int64 [8, 5] with digest",
        "long": "x has shape (8, 45); it must be (B, T) with B >= 1 and T from 1 to",
        "token": "y holds the token -9",
        "called": "the loss of a call has no gradients: to train, call step(x, y); to",
        "columns": "y is int64 [8, 2]; it must be [8, 5], as x is",
        "no gradients": "gradients are switched off; call step outside",
        "norm": "1 is a BatchNorm1d in training: its mean would be a microbatch's, not",
        "running mean": "the buffer mean of a RunningMean changes in each forward",
        "spectral norm": "of a _SpectralNorm changes in each forward",
        "evaluated": "the buffer mean of a RunningMean changes in each forward",
        "modes": "training is True on rank 0, False on rank 1",
        "rows": "returned [3, 2]; the first dimension must be the rows of the batch",
        "ignored": "the loss leaves out targets of -100 (ignore_index)",
        "lbfgs": "LBFGS, which cannot step parameters one by one",
        "state": "the state_dict has no embed.tokens.weight",
    }.items():
        assert words in results[0][case], results[0][case]


class ToComplex(nn.Module):
    def forward(self, x):
        return torch.complex(x, x * x)


class FromComplex(nn.Module):
    def forward(self, x):
        return x.real + x.imag


def of_complex_activations():
    """Return the first weight's gradient in a pipeline with a complex activation."""
    torch.manual_seed(0)
    layers = nn.Linear(2, 2), ToComplex(), FromComplex(), nn.Linear(2, 2)
    model, x = nn.Sequential(*layers), torch.randn(4, 2)
    mse(model(x), x).backward()
    expected = model[0].weight.grad.clone()
    model.zero_grad()
    PipelineParallel(model, "gpipe", 2, sizes=[2, 2], loss_fn=mse).step(x, x)
    return dist.get_rank() > 0 or same(model[0].weight.grad, expected, **CLOSE)


def test_complex_activations_have_gradients():
    assert all(spawn(of_complex_activations, world_size=2, output="none"))


class Breaks(nn.Module):
    """A layer that fails at its third microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.calls = 0

    def forward(self, x):
        self.calls += torch.is_grad_enabled()
        if self.calls == 3:
            raise ZeroDivisionError("what is it?")
        return x * self.scale


def sum_of_squares(output, target):
    return (output - target).square().sum()


def one_step(columns: int, loss_fn) -> None:
    breaks = nn.Identity() if loss_fn is sum_of_squares else Breaks()
    model = nn.Sequential(nn.Linear(2, 2), breaks, nn.Linear(2, 2))
    pipeline = PipelineParallel(model, "1f1b", 4, loss_fn=loss_fn)
    pipeline.step(torch.ones(4, columns), torch.ones(4, 2))


@pytest.mark.parametrize(
    ("columns", "loss_fn", "rank", "message", "cause"),
    [
        (
            2,
            sum_of_squares,
            2,
            "PipelineError: 2F0 failed (forward of stage 2, microbatch 0)",
            "it must be a mean over the rows, so that microbatches",
        ),
        (
            2,
            mse,
            1,
            "PipelineError: 1F2 failed (forward of stage 1, microbatch 2)",
            "ZeroDivisionError: what is it?",
        ),
        (
            3,
            mse,
            0,
            "PipelineError: one row of x, float32 [1, 3], was sent through the stages",
            "RuntimeError: mat1 and mat2",
        ),
    ],
)
def test_what_fails_ends_all_ranks_and_is_named(columns, loss_fn, rank, message, cause):
    with pytest.raises(RankError) as failed:
        spawn(one_step, columns, loss_fn, world_size=3, output="none")
    text = str(failed.value)
    assert text.startswith(f"rank {rank}: ")
    assert message in text and cause in text


# ---- a stage without parameters ------------------------------------------------------


def bare_stages(empty: int, world_size: int) -> nn.Sequential:
    """Return a layer for each rank, of which one has no parameters."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3) for _ in range(world_size)]
    layers[empty] = nn.Tanh()
    return nn.Sequential(*layers)


def without_parameters() -> list[tuple]:
    found, p = [], dist.get_world_size()
    for empty in range(p):
        pipeline = PipelineParallel(bare_stages(empty, p), "1f1b", 2, loss_fn=mse)
        optimizer = adamw(pipeline.parameters())
        for step in (1, 2, 3):
            optimizer.zero_grad()
            loss = pipeline.step(torch.eye(3), torch.eye(3) * step)
            norm = pipeline.clip_grad_norm_(0.5)
            optimizer.step()
        own = {n: p.detach() for n, p in pipeline.named_parameters()}
        states = full_optimizer_state_dict(pipeline, optimizer)["state"]
        found.append((loss, norm, full_state_dict(pipeline), own, len(states)))
    return found


def test_a_stage_may_have_no_parameters():
    p = 3
    ranks = spawn(without_parameters, world_size=p, output="none")
    for empty in range(p):
        plain = bare_stages(empty, p)
        optimizer = adamw(plain.parameters())
        for step in (1, 2, 3):
            optimizer.zero_grad()
            loss = mse(plain(torch.eye(3)), torch.eye(3) * step)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
        for result in ranks:
            found, its, whole, own, states = result[empty]
            right = loss.detach(), norm, plain.state_dict()
            assert same((found, its, whole), right, **CLOSE), empty
            assert own and same(own, {name: whole[name] for name in own}, **CLOSE)
            assert states == len(whole)
