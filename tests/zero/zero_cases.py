"""What the tests of ZeRO share: a model, training in many ways, planted fakes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import trained
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from trained import Trained, own_norm_only

from ddp_course.mechanisms.engine import BucketReducer
from ddp_course.zero import (
    NaiveZeroRedundancyOptimizer,
    ShardedGradientOptimizer,
    ZeroRedundancyOptimizer,
    metered,
)
from ddp_course.zero.optimizer_parts import AddsUp
from ddp_course.zero.shards import shard_of
from ddp_course.zero.stage1 import ReduceScatterBuckets
from ddp_course.zero.stage2 import ReduceScatterAndFree

Naive = NaiveZeroRedundancyOptimizer


class Stage1(ZeroRedundancyOptimizer):
    """Stage 1 with what meters need."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **metered.optimizer() | more)


class Stage2(ShardedGradientOptimizer):
    """Stage 2 with what meters need."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **metered.optimizer() | more)


ROWS, CHANNELS = 12, 6  # rows that 1, 2, 3 and 4 ranks can share


class Odd(nn.Module):
    """Odd sizes; tied, frozen, empty, double, scalar and channels_last parameters."""

    def __init__(self, seed: int = 0, one_type: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        convolution = nn.Conv2d(CHANNELS, 7, 2)
        self.first = convolution.to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(7, 13)
        self.frozen.requires_grad_(False)
        self.wide = nn.Linear(13, 5, dtype=None if one_type else torch.float64)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.last = nn.Linear(5, 13)
        self.out = nn.Linear(13, 5)
        self.out.weight = self.tied = nn.Parameter(torch.randn(5, 13) / 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x).flatten(1))  # (B, 7)
        h = self.wide(self.frozen(h).to(self.wide.weight.dtype)).float()  # (B, 5)
        h = torch.tanh(self.last(h)) * self.scale + self.empty.sum()
        return self.out(h) + h @ self.tied.t()  # (B, 5): tied


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the whole batch of a step: (ROWS, CHANNELS, 2, 2) and (ROWS, 5)."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, CHANNELS, 2, 2, generator=generator)
    return x, torch.randn(ROWS, 5, generator=generator)


def share(tensor: Tensor) -> Tensor:
    """Return this rank's rows."""
    rank, n = dist.get_rank(), dist.get_world_size()
    return tensor[rank * ROWS // n : (rank + 1) * ROWS // n]


class Lion(Optimizer):
    """An optimizer that PyTorch does not have (Chen et al. 2023), and its counter."""

    def __init__(self, params, lr: float, betas: tuple[float, float] = (0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1  # some optimizers write into their groups
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    p.sub_(torch.sign(torch.lerp(p.grad, m, b1)), alpha=group["lr"])
                    m.lerp_(p.grad, 1 - b2)


of = torch.optim
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (of.AdamW, {"lr": 0.01}),
    "fused": (of.AdamW, {"lr": 0.01, "fused": True}),
    "amsgrad": (of.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "foreach": (of.Adam, {"lr": 0.01, "foreach": True}),
    "sgd": (of.SGD, {"lr": 0.1}),
    "momentum": (of.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (of.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": (of.Adagrad, {"lr": 0.01}),
    "adadelta": (of.Adadelta, {"lr": 0.1}),
    "rmsprop": (of.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "adamax": (of.Adamax, {"lr": 0.01}),
    "nadam": (of.NAdam, {"lr": 0.01}),
    "radam": (of.RAdam, {"lr": 0.01}),
    "asgd": (of.ASGD, {"lr": 0.01}),
    "rprop": (of.Rprop, {"lr": 0.01}),
    "lion": (Lion, {"lr": 0.01}),
}

# A way to train: (parameter groups, optimizer class, its arguments) -> optimizer.
Make = Callable[..., Optimizer]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return three groups: the biases, the matrices, and an odd one."""
    named = dict(model.named_parameters())
    biases = [p for name, p in named.items() if "bias" in name]
    odd = [model.scale, model.empty]
    rest = [p for p in named.values() if not any(p is q for q in biases + odd)]
    return [
        {"params": biases, "weight_decay": 0.0},
        {"params": rest, "lr": 0.02},
        {"params": odd, "weight_decay": 0.1},
    ]


def train(
    make: Make | None,
    optimizer: str = "adamw",
    steps: int = 2,
    groups: bool = False,
    clip: float | None = None,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    one_type: bool = False,
) -> Trained:
    """Train `Odd` on this rank's rows. Without `make`: one process, the whole batch.

    Ranks start from different seeds; only rank 0's numbers may count. `groups` trains
    three parameter groups, whose rates a scheduler changes. `one_type`: all parameters
    are float32, which is all that PyTorch's ZeroRedundancyOptimizer takes.
    """
    alone = make is None
    model = Odd(0 if alone else dist.get_rank(), one_type)
    replica = wrap(model) if wrap else model
    cls, defaults = OPTIMIZERS[optimizer]
    params = groups_of(model) if groups else model.parameters()
    opt = cls(params, **defaults) if alone else make(params, cls, **defaults)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.3) if groups else None
    run = Trained()
    for step in range(steps):
        x, y = batch(step) if alone else map(share, batch(step))
        opt.zero_grad()
        nn.functional.mse_loss(replica(x), y).backward()
        if clip is not None:
            own = getattr(opt, "clip_grad_norm_", None)
            norm = own(clip) if own else clip_grad_norm_(model.parameters(), clip)
            run.norms.append(float(norm))
        opt.step()
        if schedule:
            schedule.step()
        named = model.named_parameters()
        run.states.append({k: p.detach().clone() for k, p in named})
    run.rates = [group["lr"] for group in opt.param_groups]
    return run


same = partial(trained.same, rtol=1e-4, atol=1e-6)  # but for rounding
SMALL = {"bucket_cap_mb": 0.0005}  # several buckets
TINY = {"bucket_cap_mb": 0.0001}  # a bucket for almost every parameter


def with_ddp(make: Make) -> dict[str, Any]:
    """Return the arguments of `train` for an optimizer that expects DDP."""
    return {"make": make, "wrap": DDP}


def pytorchs(params, cls, **defaults):
    """Make PyTorch's. With parameters_as_bucket_view=True, torch 2.13 trains parameters
    in channels_last wrongly, without a word."""
    from torch.distributed.optim import ZeroRedundancyOptimizer as PyTorchs  # 0.25 s

    return PyTorchs(params, cls, **defaults)


def options(cls: type, **extra: Any) -> Make:
    """Return how to make an optimizer of `cls` with more arguments."""
    return lambda params, of, **defaults: cls(params, of, **extra, **defaults)


# ---- planted fakes: each is wrong in one way that is easy to overlook --------------


class NotTheSameAtFirst(Stage1):
    """No broadcast at the start."""

    def broadcast(self, tensor, group):
        pass


class NoGather(Stage1):
    """Every rank keeps its own result."""

    def share_parameters(self):
        pass


class OneShardLate(Stage1):
    """A rank sees its own shard, and the others' of the step before."""

    def share_parameters(self):
        owns = [
            shard_of(r, self.rank, b) for b, r in zip(self.plan, self.rows, strict=True)
        ]
        now = [own.clone() for own in owns]
        for own, sent in zip(owns, getattr(self, "sent", now), strict=True):
            own.copy_(sent)
        super().share_parameters()
        self.sent = now
        for own, mine in zip(owns, now, strict=True):
            own.copy_(mine)


class ClippedPerShard(Stage1):
    """Each rank clips its own gradients by their own norm."""

    def clip_grad_norm_(self, max_norm):
        self.give_gradients()
        return own_norm_only(self.owned.values(), max_norm)


class OptionsOfTheFirstDay(Stage1):
    """What a scheduler changes does not reach the optimizer that steps."""

    def step(self, closure=None):
        before = [{**group} for group in self.param_groups]
        if not hasattr(self, "rates"):
            self.rates = [group["lr"] for group in before]
        for group, rate in zip(self.param_groups, self.rates, strict=True):
            group["lr"] = rate
        super().step(closure)
        for group, then in zip(self.param_groups, before, strict=True):
            group["lr"] = then["lr"]


class DecaysWhatIsUnused(Stage1):
    """A parameter without a gradient is stepped with one of zero."""

    def give_gradients(self):
        super().give_gradients()
        for mine in self.owned.values():
            if mine.grad is None:
                mine.grad = torch.zeros_like(mine)


class OwnStateOnly(Stage1):
    """`state_dict` holds what this rank has."""

    def consolidate_state_dict(self, to=0):
        super().consolidate_state_dict(to)
        every = [p for group in self.param_groups for p in group["params"]]
        numbers = {p: k for k, p in enumerate(every)}
        mine = {numbers[p]: dict(self.state[own]) for p, own in self.owned.items()}
        whole = self._consolidated.whole
        self._consolidated.whole = whole and {**whole, "state": mine}


class Sums(ReduceScatterBuckets):
    """The sum in place of the mean."""

    def __init__(self, *args):
        super().__init__(*args)
        self.scale = 1.0


class AddsToAnything(AddsUp):
    """Gradients are added to what a pass has left, in all shards."""

    def put_aside(self):
        pass


class Replicated(Optimizer):
    """Plain data parallelism that calls itself sharded: the numbers are right."""

    def __init__(self, params, cls, **defaults):
        self.optim = cls(params, **defaults)
        super().__init__(self.optim.param_groups, self.optim.defaults)
        self.param_groups, self.state = self.optim.param_groups, self.optim.state
        for p in self._params():
            dist.broadcast(p.data, 0)

    def _params(self):
        return [p for g in self.param_groups for p in g["params"] if p.requires_grad]

    @torch.no_grad()
    def step(self, closure=None):
        for p in self._params():
            if p.grad is not None:
                grad = p.grad.contiguous()
                dist.all_reduce(grad)
                p.grad.copy_(grad / dist.get_world_size())
        self.optim.step()


class TooEarly(ReduceScatterAndFree):
    """A bucket gives its memory back when it is launched, not when it has arrived."""

    def launch(self, bucket):
        work = super().launch(bucket)
        bucket.flat.zero_()
        return work


class LastPass(ReduceScatterAndFree):
    """The mean of a pass takes the place of that of the pass before."""

    def arrived(self, bucket):
        self.shards.pop(bucket, None)
        super().arrived(bucket)


def of_reducer(reducer: type[BucketReducer], **more: Any) -> Make:
    """Return how to make a stage that reduces its buckets in another way."""
    second = issubclass(reducer, ReduceScatterAndFree)

    def make_reducer(self):
        limit = {"limit": self.buckets_in_flight} if second else {}
        return reducer(self.process_group, self.collectives, self.parts, **limit)

    stage = Stage2 if second else Stage1
    return options(type("Fake", (stage,), {"make_reducer": make_reducer}), **more)


def adds_to_anything(*args: Any, **more: Any) -> Optimizer:
    """Make stage 1 with a part that adds to what a pass has left."""
    parts = {"make_parts": lambda self: [AddsToAnything()]}
    return type("Fake", (Stage1,), parts)(*args, **more)


FAKES: dict[str, dict[str, Any]] = {
    "no broadcast": {"make": NotTheSameAtFirst},
    "sum": {"make": of_reducer(Sums), "optimizer": "momentum"},
    "no gather": {"make": NoGather},
    "one shard late": {"make": OneShardLate},
    "clipped per shard": {"make": ClippedPerShard, "clip": 0.05},
    "options of the first day": {"make": OptionsOfTheFirstDay, "groups": True},
    "stage 2, too early": {"make": of_reducer(TooEarly, bucket_cap_mb=4)},
}
