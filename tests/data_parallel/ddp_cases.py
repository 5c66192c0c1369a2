"""What the tests of DistributedDataParallel share: models, training, planted fakes."""

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from sleeping import send_after_backward
from torch import Tensor, nn
from torch.autograd import Variable
from trained import Trained

from ddp_course.collectives import ring_all_reduce, shared_memory
from ddp_course.data_parallel.bucketed import (
    BucketedDistributedDataParallel as Bucketed,
)
from ddp_course.data_parallel.buffers import Buffers
from ddp_course.data_parallel.ddp import DistributedDataParallel as Ours
from ddp_course.data_parallel.flat import FlatDistributedDataParallel as Flat
from ddp_course.data_parallel.naive import NaiveDistributedDataParallel as Naive
from ddp_course.mechanisms.frozen import KeepFrozen
from ddp_course.pipeline.pipeline_parallel import defer_averaging

ROWS, CHANNELS = 12, 7  # rows that 1, 2, 3 and 4 ranks can share


class Small(nn.Module):
    """Odd sizes; tied, frozen, empty, scalar and double parameters; buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(CHANNELS, 13)
        self.frozen = nn.Linear(13, 13)
        self.frozen.requires_grad_(False)
        self.wide = nn.Linear(13, 5, dtype=torch.float64)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.last = nn.Linear(5, 13)
        self.out = nn.Linear(13, 5)
        self.out.weight = self.tied = nn.Parameter(torch.randn(5, 13) / 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.full((13,), 0.25 + seed))
        self.register_buffer("calls", torch.tensor(seed))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = torch.tanh(self.first(x) + self.shift)  # (B, 13)
        h = self.wide(self.frozen(h).double()).float()  # (B, 5)
        h = torch.tanh(self.last(h)) * self.scale + self.empty.sum()
        return self.out(h) + h @ self.tied.t()  # (B, 5): tied

    def step(self, x: Tensor, y: Tensor, micro: int) -> None:
        """Go forward and backward by itself, as a pipeline does."""
        with defer_averaging(self.parameters()):
            for some_x, some_y in zip(x.chunk(micro), y.chunk(micro), strict=True):
                (nn.functional.mse_loss(self(some_x), some_y) / micro).backward()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the whole batch of a step: (ROWS, CHANNELS) and (ROWS, 5)."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, CHANNELS, generator=generator)
    return x, torch.randn(ROWS, 5, generator=generator)


def train(
    wrap: Callable[[nn.Module], nn.Module] | None,
    steps: int = 3,
    micro: int = 1,
    in_step: bool = False,
) -> Trained:
    """Train `Small` on this rank's rows, which it takes in `micro` microbatches.

    Without `wrap`: one process on the whole batch. Ranks start from different seeds.
    `in_step`: the module goes backward by itself.
    """
    alone = wrap is None
    rank, n = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    model = Small(rank)
    ddp = model if alone else wrap(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = Trained()
    for step in range(steps):
        x, y = (t[rank * ROWS // n : (rank + 1) * ROWS // n] for t in batch(step))
        opt.zero_grad()
        parts = list(zip(x.chunk(micro), y.chunk(micro), strict=True))
        if in_step:
            step = getattr(ddp, "step", ddp.module.step)  # what `held` is told about
            step(x, y, micro)
            parts = []
        for k, (some_x, some_y) in enumerate(parts):
            last = k == len(parts) - 1
            with contextlib.nullcontext() if last or alone else ddp.no_sync():
                out = ddp(some_x)
                loss = nn.functional.mse_loss(out, some_y) / micro
                loss.backward()
        opt.step()
        run.note(model.named_parameters())
    run.buffers = {k: b.clone() for k, b in model.named_buffers()}
    return run


SMALL_BUCKETS = {"bucket_cap_mb": 0.0006, "first_bucket_mb": 0.0003}
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch": lambda m: nn.parallel.DistributedDataParallel(m, bucket_cap_mb=1),
    "naive": Naive,
    "flat": Flat,
    "bucketed": lambda m: Bucketed(m, parts=[Buffers()], **SMALL_BUCKETS),
    "ours": Ours,
    "small buckets": lambda m: Ours(m, **SMALL_BUCKETS),
    "ring": lambda m: Ours(m, all_reduce=ring_all_reduce, **SMALL_BUCKETS),
    "shared": lambda m: Ours(m, all_reduce=shared_memory.all_reduce, **SMALL_BUCKETS),
    "copied": lambda m: Ours(m, gradient_as_bucket_view=False, **SMALL_BUCKETS),
    "find": lambda m: Ours(m, find_unused_parameters=True, **SMALL_BUCKETS),
}

# ---- planted fakes: each is wrong in one way that is easy to overlook --------------


class NotTheSameAtFirst(Ours):
    """No broadcast at the start."""

    def __init__(self, module: nn.Module) -> None:
        mine = [t.clone() for t in module.state_dict().values()]
        super().__init__(module, **SMALL_BUCKETS)
        with torch.no_grad():
            for t, before in zip(module.state_dict().values(), mine, strict=True):
                t.copy_(before)


def sum_not_mean(module: nn.Module) -> Ours:
    """The sum in place of the mean."""
    ddp = Ours(module, **SMALL_BUCKETS)
    ddp.engine.reducer.scale = 1.0
    return ddp


def before_it_is_full(module: nn.Module) -> Ours:
    """A bucket is sent when its first gradient has come."""
    ddp = Ours(module, bucket_cap_mb=1)
    pack = ddp.engine.reducer.pack

    def hasty(bucket, slot):
        pack(bucket, slot)
        if bucket.work is None and bucket.missing > 1:
            bucket.sent = True
            bucket.work = dist.all_reduce(bucket.flat, async_op=True)

    ddp.engine.reducer.pack = hasty
    ddp.engine.launch = lambda bucket: None
    return ddp


def one_left_out(module: nn.Module) -> Ours:
    """One parameter is not averaged."""
    module.first.bias.requires_grad_(False)
    ddp = Ours(module, **SMALL_BUCKETS)
    module.first.bias.requires_grad_(True)
    ddp.parts[:] = [p for p in ddp.parts if not isinstance(p, KeepFrozen)]
    return ddp


class OneTooEarly(Ours):
    """`no_sync` off by one: it asks in backward, not in forward."""

    def forward(self, *inputs):
        wanted, self.require_backward_grad_sync = self.require_backward_grad_sync, True
        if hasattr(self, "before"):
            self.before, wanted = wanted, self.before
        else:
            self.before, wanted = wanted, True
        try:
            self.require_backward_grad_sync = wanted
            return super().forward(*inputs)
        finally:
            self.require_backward_grad_sync = True


class AfterBackward(Ours):
    """Everything is sent when backward has ended, in the same buckets."""

    def __init__(self, module: nn.Module, **options) -> None:
        super().__init__(module, **options)
        send_after_backward(self.engine)


class UnusedIgnored(nn.Module):
    """Averages what has a gradient, and nothing else."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.waiting = False
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self.hook)

    def forward(self, *inputs):
        return self.module(*inputs)

    def hook(self, _):
        if not self.waiting:
            self.waiting = True
            Variable._execution_engine.queue_callback(self.finish)

    def finish(self):
        self.waiting = False
        for p in self.module.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()


FAKES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "no broadcast": NotTheSameAtFirst,
    "sum": sum_not_mean,
    "before it is full": before_it_is_full,
    "one left out": one_left_out,
}
