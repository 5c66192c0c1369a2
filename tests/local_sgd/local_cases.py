"""What runs on the ranks, in one launch; and local training that is wrong."""

from __future__ import annotations

import math
import os
import signal
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from refusals import said
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as PyTorchs
from torch.optim import SGD, AdamW

from ddp_course.collectives import naive_all_reduce, ring_all_reduce
from ddp_course.data_parallel import (
    DistributedDataParallel,
    FlatDistributedDataParallel,
)
from ddp_course.launch import deadlock
from ddp_course.local_sgd import (
    DiLoCo,
    LocalSGD,
    NotAveragedError,
    simulate_training,
    train_locally,
)
from ddp_course.local_sgd.local import means
from ddp_course.local_sgd.simulation import distance
from ddp_course.measure import ByteMeter, SystemBytes
from ddp_course.mechanisms.agreement import ReplicaError
from ddp_course.train import largest_difference as apart

RANKS, STEPS, H = 4, 8, 3  # two averages, and two steps more
WIDE = 8192  # outputs of what is metered: 5 * 4 bytes of parameters for each
IN_ORDER = {"all_reduce": naive_all_reduce}  # which a simulation adds in, too


class Model(nn.Module):
    """Has all that models have: tied, frozen, unused, of two types; BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last.weight = self.first.weight
        self.last.bias.requires_grad_(False)
        self.short = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.seldom = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, seldom: bool) -> Tensor:
        y = self.last(self.norm(self.first(x).tanh())).square().mean()
        y = y + (self.short.float() * x[0, 0]).square().mean()
        return y + self.seldom.sum() * x.mean() if seldom else y


def rows(step: int, rank: int) -> Tensor:
    seed = torch.Generator().manual_seed(97 * step + rank)
    return torch.randn(6, 4, generator=seed) + rank


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    if (step, rank) == (0, 1):
        model(rows(step, rank), False)  # once more: BatchNorm counts it
    return model(rows(step, rank), (step + rank) % 2 == 0)


def plain() -> nn.Module:
    """One type, all trained and used: as PyTorch's averager wants it."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def plain_loss(model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    return model(rows(step, dist.get_rank() if rank is None else rank)).square().mean()


INNER = {
    "sgd": partial(SGD, lr=0.05),
    "momentum": partial(SGD, lr=0.05, momentum=0.9),
    "adam": partial(AdamW, lr=0.02),
}
OUTER = {
    "local": LocalSGD,
    "diloco": DiLoCo,
    "as local": partial(DiLoCo, lr=1.0, momentum=0.0),
}
PAIRS = [
    ("local", "sgd"),
    ("local", "adam"),
    ("diloco", "momentum"),
    ("diloco", "adam"),
    ("as local", "adam"),
]


def wrapped(model: nn.Module, outer: Any, inner: str = "adam", **how: Any) -> LocalSGD:
    how = {"every": H, **IN_ORDER, **how}
    return OUTER.get(outer, outer)(INNER[inner](model.parameters()), model, **how)


def trained(optimizer: LocalSGD, last: int = STEPS, of=loss) -> dict[str, Any]:
    """Go on to step `last`; return this rank's state, its optimizer's, and drifts."""
    model, rank, apart = optimizer.module, dist.get_rank(), []
    for step in range(optimizer.steps, last):
        optimizer.zero_grad()
        of(model, step, rank).backward()
        due = optimizer.step_alone()
        apart.append(drift(model))
        if due:
            optimizer.average()
    own = optimizer.optimizer.state_dict()["state"]
    return {"model": copied(model), "drift": apart, "optimizer": own}


def drift(model: nn.Module) -> list[float]:
    """Return how far each rank's trained parameters are from the mean of all ranks."""
    trained = [p for p in model.parameters() if p.requires_grad]
    drifts = [0.0] * dist.get_world_size()
    own = distance(trained, means(trained, **IN_ORDER))
    dist.all_gather_object(drifts, own)
    return drifts


def copied(model: nn.Module) -> dict[str, Tensor]:
    state = getattr(model, "module", model).state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}


def by_hand(outer: Any, inner: str, build=Model, loss=loss, **how: Any) -> Any:
    """The same in one process."""

    def wrap(model: nn.Module) -> LocalSGD:
        return wrapped(model, outer, inner, **how)

    return simulate_training(build, wrap, loss, RANKS, STEPS)


# ---- planted -------------------------------------------------------------------------


class AveragesStates(LocalSGD):
    def average(self):
        super().average()
        for value in self.optimizer.state[self.trained[0]].values():
            dist.all_reduce(value.div_(dist.get_world_size()))


class Sums(LocalSGD):
    def apply_mean(self, mean):
        super().apply_mean([value * RANKS for value in mean])


class AStepLate(LocalSGD):
    def step_alone(self):
        super().step_alone()
        return self.steps > 1 and self.steps % self.every == 1


class AveragesCounters(LocalSGD):
    def average(self):
        super().average()
        for buffer in self.module.buffers():
            if not buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer //= dist.get_world_size()


class LeavesBuffers(LocalSGD):
    def averaged_tensors(self):
        return self.trained


class WrongSign(DiLoCo):
    def apply_mean(self, mean):
        for common, value in zip(self.common, mean, strict=False):
            value.copy_(2 * common - value)
        super().apply_mean(mean)


class ForgetsMomentum(DiLoCo):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "outer": self.outer.state_dict()})


class ForgetsCommon(DiLoCo):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "common": self.trained})


class ForgetsSteps(LocalSGD):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "steps": H})


PLANTED = {  # and what each is to be
    AveragesStates: "local",
    Sums: "local",
    AStepLate: "local",
    AveragesCounters: "local",
    LeavesBuffers: "local",
    WrongSign: "diloco",
}
FORGETFUL = {ForgetsMomentum: "diloco", ForgetsCommon: "diloco", ForgetsSteps: "local"}


# ---- on the ranks --------------------------------------------------------------------


def everything() -> dict[str, Any]:
    """All that one launch can tell."""
    results = {pair: trained(wrapped(Model(), *pair)) for pair in PAIRS}
    results |= {kind.__name__: trained(wrapped(Model(), kind)) for kind in PLANTED}
    for kind in ("local", "diloco", *FORGETFUL):
        like = FORGETFUL.get(kind, kind)
        results["resumed", getattr(kind, "__name__", kind)] = resumed(like, kind)
    results |= {f"H 1, {inner}": every_step(inner) for inner in INNER}
    return results | as_pytorch() | {"bytes": metered(), "refused": refused()}


def resumed(like: str, kind: Any) -> dict[str, Any]:
    """Save after step 4 or 5, between two averages, and go on with new objects."""
    before = wrapped(Model(), like)
    trained(before, last=5)
    again = wrapped(Model(), kind)
    again.module.load_state_dict(copied(before.module))
    again.load_state_dict(before.state_dict())
    return trained(again)


def every_step(inner: str) -> float:
    """Return how far averaging parameters in each step is from averaging gradients."""
    local = wrapped(plain(), "local", inner, every=1)
    trained(local, of=plain_loss)
    model = FlatDistributedDataParallel(plain(), **IN_ORDER)
    optimizer = INNER[inner](model.parameters())
    train_locally(model, optimizer, plain_loss, STEPS, every=10**6)
    return apart(copied(local.module), copied(model))


def as_pytorch() -> dict[str, Any]:
    """Local SGD and post-local SGD: ours, the ten lines, and PyTorch's."""
    # Not above: the import takes a quarter of a second, in every rank of these tests.
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
    from torch.distributed.algorithms.model_averaging.averagers import (
        PeriodicModelAverager,
    )
    from torch.distributed.optim import PostLocalSGDOptimizer

    results = {}
    model = plain()
    train_locally(model, INNER["adam"](model.parameters()), plain_loss, STEPS, H)
    results["ten lines"] = copied(model)
    of_gloo = {"of": plain_loss, "last": STEPS}
    ours = wrapped(plain(), "local", all_reduce=dist.all_reduce)
    results["local"] = trained(ours, **of_gloo)["model"]
    model = plain()
    optimizer = INNER["adam"](model.parameters())
    averager = PeriodicModelAverager(H, warmup_steps=H - 1)
    for step in range(STEPS):
        optimizer.zero_grad()
        plain_loss(model, step).backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
    results["PyTorch's"] = copied(model)

    for kind in (DistributedDataParallel, PyTorchs):
        post = wrapped(kind(plain()), "local", warmup=2, all_reduce=dist.all_reduce)
        name = f"post-local, {kind.__module__.partition('.')[0]}"
        results[name] = trained(post, **of_gloo)["model"]
    model = PyTorchs(plain())
    alone, _ = dist.new_subgroups(1)
    state = hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)
    model.register_comm_hook(state, hook.post_localSGD_hook)
    averager = PeriodicModelAverager(H, warmup_steps=2 + H - 1)
    optimizer = PostLocalSGDOptimizer(INNER["adam"](model.parameters()), averager)
    train_locally(model, optimizer, plain_loss, STEPS, every=10**6)
    return results | {"post-local, PyTorch's": copied(model)}


def metered() -> dict[tuple[str, int], tuple[int, int]]:
    """Return the bytes that this rank sends in 6 steps: by meter, by the system.

    No rank writes into the store, a file, for whom it waits: the system would count it.
    """
    results = {}
    for outer in ("local", "diloco"):
        for every in (1, 3, 4):
            how = {"every": every, "all_reduce": ring_all_reduce}
            local = wrapped(nn.Linear(4, WIDE), outer, "sgd", **how)
            silent = mock.patch.object(deadlock, "PATIENCE", math.inf)
            with silent, SystemBytes() as system, ByteMeter() as meter:
                for step in range(6):
                    plain_loss(local.module, step).backward()
                    local.step()
            results[outer, every] = meter.total_sent, system.written
    return results


def refused() -> list[str]:
    """Return what is said of calls that all ranks refuse."""
    of_another, last = INNER["sgd"](plain().parameters()), dist.get_rank() // 3
    return [
        said(ReplicaError, wrapped, plain(), "local", warmup=3),
        said(ReplicaError, LocalSGD, of_another, plain()),
        said(ReplicaError, wrapped, plain(), "local", every=2 + last),
        said(ReplicaError, wrapped, plain(), "diloco", lr=0.5 + last),
    ]


class AloneWithInf(LocalSGD):
    """Plant: a rank skips a step for itself."""

    @property
    def groups(self) -> tuple:
        return ()

    @groups.setter
    def groups(self, groups: tuple) -> None:
        pass


def scaled(kind: type[LocalSGD]) -> tuple[int, float]:
    """Train with PyTorch's loss scaler and an inf on rank 1; return steps and drift."""
    local = wrapped(plain(), kind, "sgd", every=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(5):
        local.zero_grad()
        factor = float("inf") if (step, dist.get_rank()) == (2, 1) else 1.0
        scaler.scale(plain_loss(local.module, step) * factor).backward()
        scaler.step(local)
        scaler.update()
    return local.steps, max(drift(local.module))


def both_scaled() -> list[tuple[int, float]]:
    return [scaled(LocalSGD), scaled(AloneWithInf)]


def one_dies() -> tuple[str, bool, int]:
    """Rank 2 is killed between two averages; return what another is told, and has."""
    of_gloo = {"all_reduce": dist.all_reduce}  # which sees at once who is gone
    local, rank = wrapped(plain(), "diloco", every=4, **of_gloo), dist.get_rank()
    before = None
    try:
        for step in range(STEPS):
            local.zero_grad()
            plain_loss(local.module, step).backward()
            if (step, rank) == (5, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            if local.step_alone():
                before = copied(local.module)
                local.average()
    except NotAveragedError as error:
        return str(error), apart(before, copied(local.module)) == 0, local.steps
    return "", False, local.steps
