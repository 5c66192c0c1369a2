"""Habits that would be wrong in silence: each is refused, or right, on two ranks.

The same once more with PyTorch's tools as they are: there the harm is done.
"""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

from ddp_course.data_parallel import (
    BucketedDistributedDataParallel,
    DistributedDataParallel,
    FlatDistributedDataParallel,
    NaiveDistributedDataParallel,
)
from ddp_course.launch import spawn
from ddp_course.mechanisms import habits
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.pipeline import PipelineParallel
from ddp_course.tensor_parallel import tensor_parallel
from ddp_course.zero import (
    FullyShardedDataParallel,
    NaiveFullyShardedDataParallel,
    NaiveZeroRedundancyOptimizer,
    ShardedGradientOptimizer,
    SimpleFullyShardedDataParallel,
    Zero1,
    Zero2,
    ZeroRedundancyOptimizer,
)

GPT = GPTConfig(block_size=16, n_layer=2, n_head=2, d_model=24)
SGD, INF = torch.optim.SGD, float("inf")
AVERAGING = (
    NaiveDistributedDataParallel,
    FlatDistributedDataParallel,
    BucketedDistributedDataParallel,
    DistributedDataParallel,
)
SHARDED = (
    NaiveFullyShardedDataParallel,
    SimpleFullyShardedDataParallel,
    FullyShardedDataParallel,
)
OPTIMIZERS = (Zero1, Zero2, ZeroRedundancyOptimizer, ShardedGradientOptimizer)
DIVIDING = {c.__name__: c for c in SHARDED}
DIVIDING |= {"tp": tensor_parallel, "pp": PipelineParallel}
DIVIDING |= {c.__name__: c for c in (*OPTIMIZERS, NaiveZeroRedundancyOptimizer)}
RANKS = 2


def error_of(call) -> str:
    try:
        call()
    except (RuntimeError, TypeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def made(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    gpt, make = build_gpt(GPT, 0), DIVIDING[name]
    if isinstance(make, type) and issubclass(make, torch.optim.Optimizer):
        return gpt, make(gpt.parameters(), SGD, lr=0.1)
    model = make(gpt)
    return model, SGD(model.parameters(), lr=0.1)


def backward(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    x = torch.arange(64).view(4, 16)
    if isinstance(model, PipelineParallel):  # goes backward by itself
        model.step(x, x)
        scaler.scale(torch.ones(()))
    else:
        scaler.scale(model(x, x)[1]).backward()


def clipped(name: str) -> str:
    model, _optimizer = made(name)
    backward(model, torch.amp.GradScaler("cpu", enabled=False))
    return error_of(lambda: clip_grad_norm_(model.parameters(), 1.0))


def numbers(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def scaled(name: str) -> list:
    """Return scales, and which steps were made: rank 1 has an inf in the first one."""
    model, optimizer = made(name)
    scaler, told = torch.amp.GradScaler("cpu", init_scale=8.0), []
    for step in range(2):
        optimizer.zero_grad()
        backward(model, scaler)
        before, own = numbers(model), optimizer
        if isinstance(optimizer, OPTIMIZERS):
            optimizer.give_gradients()
            own = optimizer.optim
        if dist.get_rank() == 1 and step == 0:
            parts = (p for group in own.param_groups for p in group["params"])
            some = next(p.grad for p in parts if p.grad is not None and p.numel())
            some.view(-1)[0] = INF
        scaler.step(optimizer)
        scaler.update()
        told += [scaler.get_scale(), not torch.equal(before, numbers(model))]
    return told


def before(make, **options) -> str:
    gpt = build_gpt(GPT, 0)
    optimizer = SGD(gpt.parameters(), lr=0.1)
    model = make(gpt, **options)
    backward(model, torch.amp.GradScaler("cpu", enabled=False))
    return error_of(optimizer.step)


def unfrozen(wrap) -> tuple[str, str]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    wrapped = wrap(model)
    first = error_of(lambda: wrapped(torch.ones(2, 3)).sum().backward())
    for parameter in wrapped.parameters():
        parameter.requires_grad_(True)
    return first, error_of(lambda: wrapped(torch.ones(2, 3)).sum().backward())


def everything(watched: bool) -> dict:
    """Return for each habit and strategy what came of it."""
    if not watched:
        habits._put_around = lambda owner, name, make: None
        habits._check_step = lambda optimizer, args, kwargs: None
    told = {("clip", name): clipped(name) for name in DIVIDING}
    for name in DIVIDING if watched else ():  # ranks that disagree may wait for ever
        told["scaler", name] = scaled(name)
    for name in ("tp", "pp", "FullyShardedDataParallel"):
        told["scaler", name] = scaled(name)
    for make in (*SHARDED, tensor_parallel):
        told["before", make.__name__] = before(make)
    for wrap in (*AVERAGING, *SHARDED):
        told["unfrozen", wrap.__name__] = unfrozen(wrap)
        wrapped = wrap(nn.Linear(3, 3))
        for copied in (copy.deepcopy, pickle.dumps):
            told[copied.__name__, wrap.__name__] = error_of(partial(copied, wrapped))
    plain = build_gpt(GPT, 0)  # and it may be trained on
    optimizer = SGD(plain.parameters(), lr=0.1)
    tensor_parallel(plain)
    backward(plain, torch.amp.GradScaler("cpu", enabled=False))
    clip_grad_norm_(plain.parameters(), 1.0)
    told["plain", ""] = error_of(optimizer.step)
    return told


WORDS = {
    "clip": "of what has divided them",
    "before": "make it afterwards",
    "unfrozen": "Wrap the model again",
    "deepcopy": "cannot be copied or pickled",
    "dumps": "cannot be copied or pickled",
    "plain": "no error",
}


@pytest.fixture(scope="module")
def told() -> list[dict]:
    return spawn(everything, True, world_size=RANKS, output="none", timeout=120)


def test_habits_are_right_or_refused_on_every_rank(told):
    for rank in told:
        for (habit, name), text in rank.items():
            if habit == "scaler":
                assert text == [4.0, False, 4.0, True], name
            elif habit == "unfrozen":
                assert text[0] == "no error", name
                assert WORDS[habit] in text[1], (name, text)
            else:
                assert WORDS[habit] in text, (habit, name, text)


def test_they_are_wrong_in_silence_with_tools_that_know_of_one_process():
    wrong = spawn(everything, False, world_size=RANKS, output="none", timeout=120)
    for habit, name in wrong[0]:
        texts = [rank[habit, name] for rank in wrong]
        if habit in ("clip", "before"):
            assert texts == ["no error"] * RANKS, (habit, name)
        elif habit == "scaler":
            assert texts[0] != texts[1], name  # replicas, or parts, that disagree
