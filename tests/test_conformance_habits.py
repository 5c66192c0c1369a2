"""The second conformance matrix: optimizers and habits, under every strategy.

Every row is a loop that is right in one process: an optimizer, or something that people
do between `backward` and `step`. Each is run by one process with all rows, and under
each strategy by two ranks with half of the rows each. The end must be

* that of one process, on all ranks; or
* a refusal: an error of this course's, with a sentence, on all ranks within seconds; or
* an exception that `EXCEPTIONS` explains; it shall become shorter.

By default a third of the cells, which the seed chooses. All cells:

    DDP_COURSE_CONFORMANCE=all pytest tests/test_conformance_habits.py

A new row is a function below, with `@habit`; its docstring says what it does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import conformance_launch
import pytest
import torch
import torch.distributed as dist
from conformance_launch import EQUAL, FAILS, REFUSED, Case
from test_conformance import in_units
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as PyTorchDDP
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)
from torch.optim import LBFGS, SGD, Adafactor, AdamW, Muon, Optimizer
from torch.utils.checkpoint import checkpoint

from ddp_course import precision, zero
from ddp_course.communication_order import ScheduledDataParallel, priority
from ddp_course.data_parallel import DistributedDataParallel
from ddp_course.mechanisms.agreement import digest
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.parallelize import whole
from ddp_course.pipeline import PipelineParallel
from ddp_course.tensor_parallel import tensor_parallel

ALL = os.environ.get("DDP_COURSE_CONFORMANCE") == "all"
SEED = int(os.environ.get("DDP_COURSE_CONFORMANCE_SEED", "0"))
STEPS, ROWS = 4, 8
DDP, FSDP = DistributedDataParallel, zero.FullyShardedDataParallel
GPT = GPTConfig(12, 4, n_layer=2, n_head=2, d_model=12)

WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DDP,
    "zero1": lambda model: model,
    "zero2": lambda model: model,
    "zero3": in_units(FSDP),
    "tp": tensor_parallel,
    "pp": partial(PipelineParallel, loss_fn=mse_loss),
}
SHARDED = {
    "zero1": zero.ZeroRedundancyOptimizer,
    "zero2": zero.ShardedGradientOptimizer,
}
WAYS = ("ddp", "order", "zero1", "zero2", "zero3", "tp", "pp")
ALONE = "one"


class Script:
    """A training script, as a strategy's user has it; of one process if `way` is ALONE.

    Attributes:
        plain: the model before `start`; a habit may take another.
        model: what `start` has wrapped.
        optimizers: what `start` and `optimizer` have made.
    """

    def __init__(self, way: str, gpt: bool = False) -> None:
        self.way, self.gpt = way, gpt or way == "tp"  # which cuts no other model
        torch.manual_seed(0)
        self.plain = self.model = build_gpt(GPT, 0) if self.gpt else chain()
        self.optimizers: list[Any] = []
        alone = way == ALONE
        self.rank, self.ranks = (0, 1) if alone else (dist.get_rank(), 2)

    @property
    def last(self) -> bool:
        """Whether this is the last rank, or the only one: one may have a bad batch."""
        return self.rank == self.ranks - 1

    @property
    def parameters(self) -> list[Tensor]:
        """What the script sees as the model's parameters."""
        return list(self.model.parameters())

    def start(
        self,
        kind: type[Optimizer] = SGD,
        groups: Callable[[nn.Module], Any] = nn.Module.parameters,
        **options: Any,
    ) -> None:
        """Wrap the model, and make its optimizer."""
        options = options or {"lr": 0.1}
        if self.way == "order":  # the optimizer comes first
            optimizer = kind(groups(self.plain), **options)
            self.model = ScheduledDataParallel(self.plain, optimizer, priority(64))
            self.optimizers = [InSteps(self.model, optimizer)]
            return
        self.wrap()
        self.optimizer(kind, groups(self.model), **options)

    def wrap(self) -> None:
        """Wrap the model."""
        self.model = WRAPS.get(self.way, lambda model: model)(self.plain)

    def optimizer(self, kind: type[Optimizer], params: Any, **options: Any) -> None:
        """Make one more optimizer."""
        own = SHARDED.get(self.way)
        optimizer = own(params, kind, **options) if own else kind(params, **options)
        self.optimizers.append(optimizer)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's rows."""
        chance = torch.Generator().manual_seed(step + 1)
        x = torch.randn(ROWS, 6, generator=chance)
        y = torch.randn(ROWS, 4, generator=chance)
        x[: ROWS // 2, 0] = 1  # the first rank's rows, for those who route them
        if self.gpt:
            x, y = torch.randint(12, (2, ROWS, 4), generator=chance)
        if self.way in (ALONE, "tp", "pp"):
            return x, y
        return x.chunk(2)[self.rank], y.chunk(2)[self.rank]

    def loss(self, step: int, model: Callable[..., Any] | None = None) -> Tensor:
        """Go forward; a pipeline has no loss outside of its step."""
        (x, y), model = self.batch(step), model or self.model
        return model(x, y)[1] if self.gpt else mse_loss(model(x), y)

    def backward(self, step: int) -> Tensor:
        """Go forward and backward."""
        if self.way == "pp":
            return self.model.step(*self.batch(step))
        loss = self.loss(step)
        loss.backward()
        return loss

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        """Step all optimizers."""
        for optimizer in self.optimizers:
            optimizer.step()

    def train(
        self,
        before_step: Callable[[], Any] = lambda: None,
        backward: Callable[[int], Any] | None = None,
        steps: Iterable[int] = range(STEPS),
    ) -> None:
        """Make some steps."""
        for step in steps:
            self.zero_grad()
            (backward or self.backward)(step)
            before_step()
            self.step()

    def end(self) -> dict[str, Tensor]:
        """Return the whole model's numbers; a collective call."""
        first = getattr(self.optimizers[0], "own", self.optimizers[0])
        state = whole(self.model, first)[0].state_dict()
        return {k: t.detach() for k, t in state.items()}


class InSteps:
    """What stands for the optimizer of a model that is stepped layer by layer."""

    def __init__(self, model: ScheduledDataParallel, optimizer: Optimizer) -> None:
        self.step, self.own = model.step, optimizer
        self.param_groups, self.add_param_group = (
            optimizer.param_groups,
            optimizer.add_param_group,
        )

    def zero_grad(self) -> None:
        """Forget the gradients. (`step` does it, too.)"""
        self.own.zero_grad()


def chain() -> nn.Sequential:
    """Return the model: three Linear and two Tanh."""
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    )


# ---- rows ----------------------------------------------------------------------------

HABITS: dict[str, Callable[[Script], Any]] = {}
CELLS: list[Case] = []
LOOPS = ("ddp", "order", "zero1", "zero2", "zero3", "tp")  # the script has the loss
SIMPLE = ("ddp", "order", "zero1", "zero2", "zero3")  # and the model is any


def habit(ways: Sequence[str] = WAYS) -> Callable[..., Any]:
    """Add a row; `ways` are the strategies under which it can be written at all."""

    def add(function: Callable[[Script], Any]) -> Callable[[Script], Any]:
        name = function.__name__
        HABITS[name] = function
        CELLS.extend((name, way) for way in ways)
        return function

    return add


# ---- optimizers


@habit(("ddp", "zero1", "zero2", "zero3", "tp", "pp"))
def lbfgs(s: Script) -> None:
    """Search along one direction for all parameters."""
    s.start(LBFGS, lr=0.3, max_iter=2)

    def closure(step: int) -> Tensor:
        s.zero_grad()
        return s.backward(step)

    for step in range(STEPS):
        s.optimizers[0].step(partial(closure, step))


@habit()
def adafactor(s: Script) -> None:
    """Keep the second moments of rows and columns."""
    s.start(Adafactor, lr=0.1)
    s.train()


@habit(("ddp", "zero1", "zero2", "zero3", "tp", "pp"))
def muon(s: Script) -> None:
    """Step matrices by their singular vectors, and the rest by SGD."""
    s.wrap()
    s.optimizer(Muon, [p for p in s.parameters if p.dim() == 2], lr=0.1)
    s.optimizer(SGD, [p for p in s.parameters if p.dim() != 2], lr=0.1)
    s.train()


class ByHand(Optimizer):
    """An optimizer that somebody has written."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step each parameter by `update`."""
        self.count += 1
        some = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in some] or [torch.ones(())]).norm()
        for p in some:
            p.sub_(self.param_groups[0]["lr"] * self.update(p, norm))

    def update(self, p: Tensor, norm: Tensor) -> Tensor:
        """Return what to subtract, of learning rate 1."""
        raise NotImplementedError


class LARS(ByHand):
    """Scales each tensor's step by the norms of the tensor and its gradient."""

    def update(self, p: Tensor, norm: Tensor) -> Tensor:
        """As in the paper."""
        return p.grad * (p.norm() / (p.grad.norm() + 1e-6))


class ByNorm(ByHand):
    """Divides by the norm of all gradients, as LAMB with a maximal norm."""

    def update(self, p: Tensor, norm: Tensor) -> Tensor:
        """Clip by the norm of all."""
        return p.grad / (norm / 0.1).clamp(min=1)


class Noisy(ByHand):
    """Adds noise that is drawn for each tensor alone, from a seed."""

    def update(self, p: Tensor, norm: Tensor) -> Tensor:
        """Draw noise of the tensor's shape."""
        chance = torch.Generator().manual_seed(self.count)
        return p.grad + torch.randn(p.shape, generator=chance) / 10


@habit()
def lars(s: Script) -> None:
    """Step each tensor as far as its norm says."""
    s.start(LARS, lr=0.1)
    s.train()


@habit()
def norm_over_everything(s: Script) -> None:
    """Let the optimizer clip by the norm of all gradients together."""
    s.start(ByNorm, lr=0.5)
    s.train()


@habit()
def noise_per_tensor(s: Script) -> None:
    """Let the optimizer draw noise for each tensor."""
    s.start(Noisy, lr=0.1)
    s.train()


@habit()
def groups_by_dim(s: Script) -> None:
    """Decay matrices, and no vectors."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        several, parameters = ([], []), list(model.parameters())
        for p in parameters:
            several[p.dim() < 2].append(p)
        decays = ({"weight_decay": decay} for decay in (0.9, 0.0))
        return [g | {"params": p} for g, p in zip(decays, several, strict=True)]

    s.start(AdamW, groups, lr=0.05, eps=1e-2)
    s.train()


@habit(SIMPLE)
def group_added_later(s: Script) -> None:
    """Begin with the last layer, and add the first one after two steps."""
    later = [name for name, _ in s.plain[0].named_parameters("0")]

    def some(model: nn.Module, wanted: bool) -> list[Tensor]:
        named = model.named_parameters()
        return [p for n, p in named if (n.removeprefix("module.") in later) is wanted]

    s.start(SGD, partial(some, wanted=False), lr=0.1)
    s.train(steps=range(2))
    s.optimizers[0].add_param_group({"params": some(s.model, True), "lr": 0.05})
    s.train(steps=range(2, 4))


@habit(SIMPLE)
def head_outside_of_the_model(s: Script) -> dict[str, Tensor]:
    """Let the optimizer step a layer, too, that is not wrapped, and average it."""
    torch.manual_seed(3)
    head = nn.Linear(4, 4)
    s.start()
    s.optimizers[0].add_param_group({"params": list(head.parameters())})

    def backward(step: int) -> None:
        x, y = s.batch(step)
        mse_loss(head(s.model(x)), y).backward()
        if s.ranks > 1 and s.way not in SHARDED:  # which average all that they step
            for p in head.parameters():
                dist.all_reduce(p.grad)
                p.grad /= s.ranks

    s.train(backward=backward)
    return {f"head.{k}": t.detach().clone() for k, t in head.named_parameters()}


# ---- between backward and step


@habit()
def clips_norm_in_two_calls(s: Script) -> None:
    s.start()

    def clip() -> None:
        grads = [p.grad for p in s.parameters if p.grad is not None]
        clip_grads_with_norm_(s.parameters, 0.05, get_total_norm(grads))

    s.train(clip)


@habit()
def clips_by_hand(s: Script) -> None:
    """Take the norm from PyTorch, and scale the gradients in a loop of one's own."""
    s.start()

    def clip() -> None:
        grads = [p.grad for p in s.parameters if p.grad is not None]
        norm = get_total_norm(grads)
        for grad in grads:
            grad.mul_(0.05 / norm)

    s.train(clip)


@habit()
def clips_value(s: Script) -> None:
    s.start()
    s.train(lambda: clip_grad_value_(s.parameters, 0.01))


@habit()
def scales_gradients(s: Script) -> None:
    s.start()

    def scale() -> None:
        for p in s.parameters:
            if p.grad is not None:
                p.grad.mul_(3)

    s.train(scale)


@habit(SIMPLE)
def forgets_a_gradient(s: Script) -> None:
    """Let the first layer alone in the second step."""
    s.start(AdamW, lr=0.05, eps=1e-2, weight_decay=0.5)

    def forget() -> None:
        if next(count) == 1:
            for p in s.parameters[:2]:
                p.grad = None

    count = iter(range(STEPS))
    s.train(forget)


@habit(SIMPLE)
def changes_weights_between_steps(s: Script) -> None:
    """Clamp in place, and by `.data`."""
    s.start()

    def change() -> None:
        with torch.no_grad():
            s.parameters[0].clamp_(-0.2, 0.2)
        s.parameters[2].data.mul_(0.5)

    s.train(change)


@habit(("ddp", "order", "zero1", "zero2"))
def averages_weights(s: Script) -> None:
    """Follow the weights by an average, and train on with it at the end."""
    s.start()
    parameters = s.parameters
    average = [p.detach().clone() for p in parameters]
    for step in range(STEPS):
        s.train(steps=[step])
        for mean, p in zip(average, parameters, strict=True):
            mean.lerp_(p.detach(), 0.3)
    for mean, p in zip(average, parameters, strict=True):
        with torch.no_grad():
            p.copy_(mean)


@habit(SIMPLE)
def assigns_data(s: Script) -> None:
    """Replace the memory of a weight between two steps."""
    s.start()
    s.train(steps=range(2))
    p = s.parameters[0]
    p.data = p.detach() * 0.5
    s.train(steps=range(2, 4))


@habit(SIMPLE[:-1])
def averages_by_hand(s: Script) -> None:
    """Sum gradients over the ranks, and divide, before each step."""
    s.start()

    def average() -> None:
        for p in s.parameters:
            if s.ranks > 1 and p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= s.ranks

    s.train(average)


@habit(("ddp", "order", "zero1"))
def gradients_by_autograd_grad(s: Script) -> None:
    """Get gradients from autograd.grad, average them, and write them."""
    s.start()

    def backward(step: int) -> None:
        gradients = torch.autograd.grad(s.loss(step), s.parameters)
        for p, gradient in zip(s.parameters, gradients, strict=True):
            if s.ranks > 1:
                dist.all_reduce(gradient)
            p.grad = gradient / s.ranks

    s.train(backward=backward)


# ---- hooks


def _hooks(s: Script, kind: str) -> None:
    for p in s.parameters:
        if kind == "tensor":
            p.register_hook(lambda gradient: gradient * 2)
        elif kind == "in place":
            p.register_post_accumulate_grad_hook(_double)
        else:
            p.register_post_accumulate_grad_hook(
                lambda p: setattr(p, "grad", p.grad * 2)
            )


def _double(p: Tensor) -> None:
    p.grad.mul_(2)


def _hooked(s: Script, kind: str, before: bool) -> None:
    if before:
        _hooks(s, kind)
    s.start()
    if not before:
        _hooks(s, kind)
    s.train()


@habit()
def hook_before(s: Script) -> None:
    _hooked(s, "tensor", before=True)


@habit(("order",))  # test_guards.py has it for all others
def hook_after(s: Script) -> None:
    _hooked(s, "tensor", before=False)


@habit()
def hook_in_place_before(s: Script) -> None:
    _hooked(s, "in place", before=True)


@habit()
def hook_in_place_after(s: Script) -> None:
    _hooked(s, "in place", before=False)


@habit()
def hook_replaces_before(s: Script) -> None:
    _hooked(s, "replaces", before=True)


@habit()
def hook_replaces_after(s: Script) -> None:
    _hooked(s, "replaces", before=False)


@habit(SIMPLE)
def optimizer_in_backward(s: Script) -> None:
    """Step each parameter as soon as its gradient is there."""
    own = {p: SGD([p], lr=0.1) for p in s.parameters}

    def step(p: Tensor) -> None:
        own[p].step()
        own[p].zero_grad()

    for p in s.parameters:
        p.register_post_accumulate_grad_hook(step)
        p._in_backward_optimizers = [own[p]]  # as torch.distributed.optim marks it
    s.start(SGD, lr=0.0)
    s.train()


# ---- backward


@habit(("ddp", "zero1", "zero2", "zero3"))
def accumulates_in_no_sync(s: Script) -> None:
    """Average only the second of two backward passes."""
    s.start()

    def backward(step: int) -> None:
        holds = [m.no_sync for m in (s.model, *s.optimizers) if hasattr(m, "no_sync")]
        with (holds or [nullcontext])[0]():
            (s.loss(2 * step) / 2).backward()
        (s.loss(2 * step + 1) / 2).backward()

    s.train(backward=backward)


@habit(LOOPS)
def two_forwards_then_two_backwards(s: Script) -> None:
    s.start()

    def backward(step: int) -> None:
        losses = [s.loss(2 * step), s.loss(2 * step + 1)]
        for loss in losses:
            (loss / 2).backward()

    s.train(backward=backward)


@habit(LOOPS)
def two_backwards_of_one_graph(s: Script) -> None:
    s.start()

    def backward(step: int) -> None:
        loss = s.loss(step)
        loss.backward(retain_graph=True)
        (2 * loss).backward()

    s.train(backward=backward)


@habit(SIMPLE)
def checkpointed(s: Script) -> None:
    s.start()
    again = partial(checkpoint, s.model, use_reentrant=False)
    s.train(backward=lambda step: s.loss(step, again).backward())


@habit(SIMPLE)
def checkpointed_reentrant(s: Script) -> None:
    s.start()

    def again(x: Tensor) -> Tensor:
        return checkpoint(s.model, x.requires_grad_(), use_reentrant=True)

    s.train(backward=lambda step: s.loss(step, again).backward())


@habit(LOOPS)
def backward_to_inputs(s: Script) -> None:
    """Name all parameters as what backward is for."""
    s.start()
    s.train(backward=lambda step: s.loss(step).backward(inputs=s.parameters))


@habit(LOOPS)
def penalty(s: Script) -> None:
    """Add a penalty on all parameters to the loss."""
    s.start()

    def backward(step: int) -> None:
        decay = sum(p.square().sum() for p in s.parameters)
        (s.loss(step) + 0.05 * decay).backward()

    s.train(backward=backward)


class Returns(nn.Module):
    """Returns what `how` makes of its output and a parameter of one dimension."""

    def __init__(self, how: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.net, self.how = nn.Linear(6, 6), chain(), how
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x: Tensor) -> Any:
        """Compute, and pack."""
        return self.how(self, self.net(self.first(x)) * self.scale)


def _returning(
    s: Script, how: Callable[..., Any], unpack: Callable[[Any], tuple[Tensor, ...]]
) -> None:
    torch.manual_seed(0)
    s.plain = s.model = Returns(how)
    s.start()

    def backward(step: int) -> None:
        x, y = s.batch(step)
        output, *others = unpack(s.model(x))
        penalty = sum(t.square().sum() for t in others)
        (mse_loss(output, y) + 0.1 * penalty).backward()

    s.train(backward=backward)


@habit(SIMPLE)
def returns_a_parameter(s: Script) -> None:
    _returning(s, lambda m, y: (y, m.scale), tuple)


@habit(SIMPLE)
def returns_a_namespace(s: Script) -> None:
    _returning(s, lambda m, y: SimpleNamespace(y=y), lambda out: (out.y,))


@habit(SIMPLE)
def leaves_output_on_itself(s: Script) -> None:
    def how(model: nn.Module, y: Tensor) -> Tensor:
        model.hidden = y
        return y.detach()

    def unpack(out: Tensor) -> tuple[Tensor, ...]:
        return (s.plain.hidden,)

    _returning(s, how, unpack)


@habit(SIMPLE)
def functional(s: Script) -> None:
    """Call the wrapped model with parameters that are handed in."""
    s.start()
    named = dict(s.model.named_parameters())
    call = partial(functional_call, s.model, named)
    s.train(backward=lambda step: s.loss(step, call).backward())


@habit(SIMPLE)
def ties_after_wrapping(s: Script) -> None:
    s.plain[4] = nn.Linear(8, 8)
    s.plain.append(nn.Linear(8, 4))
    s.start()
    s.plain[4].weight = s.plain[2].weight
    s.train()


# ---- scalers, and one bad rank


def _scaled(s: Script, scaler: Any) -> dict[str, Tensor]:
    """Let one rank overflow in the second step."""
    s.start()
    for step in range(STEPS):
        s.zero_grad()
        factor = float("inf") if step == 1 and s.last else 1.0
        scaler.scale(s.loss(step) * factor).backward()
        scaler.step(s.optimizers[0])
        scaler.update()
    return {"scale": torch.tensor(scaler.get_scale())}


@habit(("ddp", "zero1", "zero2", "zero3", "tp"))
def scaler_of_ours(s: Script) -> dict[str, Tensor]:
    return _scaled(s, precision.GradScaler(init_scale=8.0))


@habit(("ddp", "zero1", "zero2", "zero3"))
def two_scalers(s: Script) -> dict[str, Tensor]:
    """Scale two losses, each with a scaler and an optimizer of its own."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**k) for k in (3, 5)]
    s.wrap()
    for some in (s.parameters[:4], s.parameters[4:]):
        s.optimizer(SGD, some, lr=0.1)
    for step in range(STEPS):
        for k, (scaler, own) in enumerate(zip(scalers, s.optimizers, strict=True)):
            s.zero_grad()
            factor = float("inf") if step == 1 and s.last and k else 1.0
            scaler.scale(s.loss(2 * step + k) * factor).backward()
            scaler.unscale_(own)
            scaler.step(own)
            scaler.update()
    return {f"scale {k}": torch.tensor(x.get_scale()) for k, x in enumerate(scalers)}


@habit(WAYS[:-1])
def nan_on_one_rank(s: Script) -> None:
    s.start()

    def backward(step: int) -> None:
        (s.loss(step) * (float("nan") if step == 2 and s.last else 1.0)).backward()

    s.train(backward=backward)


@habit(SIMPLE)
def layers_registered_in_another_order(s: Script) -> None:
    names = ["0", "2"][:: -1 if s.rank else 1]
    torch.manual_seed(0)
    layers = {"0": nn.Linear(6, 4), "2": nn.Linear(6, 4)}
    s.plain = s.model = Branches({name: layers[name] for name in names}, ["0", "2"])
    s.start()
    s.train()


@habit(SIMPLE)
def layers_called_in_another_order(s: Script) -> None:
    names = ["0", "2"][:: -1 if s.rank else 1]
    torch.manual_seed(0)
    layers = {"0": nn.Linear(6, 4), "2": nn.Linear(6, 4)}
    s.plain = s.model = Branches(layers, names)
    s.start()
    s.train()


@habit(SIMPLE)
def layer_unused_on_one_rank(s: Script) -> None:
    """Route the first half of the rows through a layer that the others do not use."""
    s.plain = s.model = Routed()
    s.start()
    s.train()


@habit(SIMPLE[:-1])  # ranks of a sharded model must go forward together
def evaluates_on_one_rank(s: Script) -> None:
    """Train for two steps; then let one rank evaluate alone, without gradients."""
    s.start()
    s.train(steps=range(2))
    if s.last:
        with torch.no_grad():
            s.loss(2)


class Routed(nn.Module):
    """Sends rows of even numbers through a second layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)])

    def forward(self, x: Tensor) -> Tensor:
        """Call the second layer if any row wants it."""
        first = self.layers[0](x).tanh()
        chosen = x[:, :1] == 1
        return first + self.layers[1](x) * chosen if chosen.any() else first


class Branches(nn.Module):
    """Adds up the outputs of some layers, in an order."""

    def __init__(self, layers: dict[str, nn.Module], names: Sequence[str]) -> None:
        super().__init__()
        self.layers, self.names = nn.ModuleList(), names
        self.where = {name: k for k, name in enumerate(layers)}
        self.layers.extend(layers.values())

    def forward(self, x: Tensor) -> Tensor:
        """Call the layers."""
        return sum(self.layers[self.where[name]](x).tanh() for name in self.names)


# ---- wrapped twice, and ordinary scripts


@habit(("zero1", "zero2", "zero3", "pp"))
def wrapped_in_ddp_before(s: Script) -> None:
    """Wrap the model in this course's DDP first."""
    if s.way != ALONE:
        s.plain = DDP(s.plain)
    s.start()
    s.train()


@habit(("zero1", "zero2", "zero3", "pp"))
def wrapped_in_pytorchs_ddp_before(s: Script) -> None:
    if s.way != ALONE:
        s.plain = PyTorchDDP(s.plain)
    s.start()
    s.train()


def _clipped(s: Script, norm_type: float) -> None:
    """Clip by the strategy's own function; by PyTorch's where gradients are whole."""
    s.start()
    owner = s.model if hasattr(s.model, "clip_grad_norm_") else s.optimizers[0]
    own = getattr(owner, "clip_grad_norm_", partial(clip_grad_norm_, s.parameters))
    s.train(lambda: own(0.05, norm_type=norm_type))


@habit(("ddp", "zero1", "zero2", "zero3", "tp", "pp"))
def clips_by_norm_1(s: Script) -> None:
    _clipped(s, 1.0)


@habit(("ddp", "zero1", "zero2", "zero3", "tp", "pp"))
def clips_by_largest(s: Script) -> None:
    _clipped(s, float("inf"))


# ---- cells ---------------------------------------------------------------------------

# What is neither equal nor refused by this course, and why it may be.
EXCEPTIONS: dict[Case, str] = {
    ("muon", "zero3"): "PyTorch says it: pieces are vectors, so its list is empty",
    ("functional", "zero3"): "PyTorch says it, with the words of `Freed`",
    ("scales_gradients", "zero2"): "documented: every `grad` is None after backward",
    ("forgets_a_gradient", "zero2"): "documented: every `grad` is None after backward",
    # A hook is called for each microbatch, as in torch.distributed.pipelining.
    ("hook_in_place_before", "pp"): "called on the sum of the microbatches so far",
    ("hook_in_place_after", "pp"): "called on the sum of the microbatches so far",
    ("hook_replaces_before", "pp"): "called on the sum of the microbatches so far",
    ("hook_replaces_after", "pp"): "called on the sum of the microbatches so far",
}


class Attempt:
    """A row under one strategy, on one rank."""

    def __init__(self, name: str, way: str) -> None:
        self.name, self.way = name, way

    def train(self) -> tuple[str, ...]:
        """Run it; return the bits of the parameters at the end."""
        self.state = _end_of(self.name, Script(self.way))
        return tuple(map(digest, self.state.values()))

    def judge(self, everyones: Sequence[tuple[str, ...]]) -> str:
        """Compare with one process."""
        if len(set(filter(None, everyones))) > 1:  # the state may be the first rank's
            return f"{FAILS}: the ranks have different parameters"
        if not self.state:
            return EQUAL  # the first rank compares
        found = unlike(self.state, _of_one_process(self.name, self.way == "tp"))
        return f"{FAILS}: {found}" if found else EQUAL


def _end_of(name: str, script: Script) -> dict[str, Tensor]:
    more = HABITS[name](script) or {}
    return script.end() | more


@cache
def _of_one_process(name: str, gpt: bool) -> dict[str, Tensor]:
    return _end_of(name, Script(ALONE, gpt))


def unlike(state: dict[str, Tensor], other: dict[str, Tensor]) -> str:
    """Return what differs first, or ""."""
    strip = {k.removeprefix("module."): t for k, t in state.items()}
    other = {k.removeprefix("module."): t for k, t in other.items()}
    if strip.keys() != other.keys():
        return f"the state has {', '.join(sorted(strip.keys() ^ other.keys()))}"
    for name, tensor in other.items():
        if not torch.allclose(strip[name], tensor, 1e-3, 1e-4, equal_nan=True):
            return f"{name} is off by {(strip[name] - tensor).abs().max():.2g}"
    return ""


@pytest.mark.timeout(1500)  # a hundred cells, perhaps beside busy programs
def test_every_habit_ends_like_one_process_or_is_refused():
    cells = CELLS if ALL else CELLS[SEED % 3 :: 3]
    found = conformance_launch.outcomes(
        [c for c in cells if c not in EXCEPTIONS], 2, Attempt
    )
    bad = {c: k for c, k in found.items() if not k.startswith((EQUAL, REFUSED))}
    assert bad == {}
    # A bed that refuses everything would prove nothing.
    assert sum(kind == EQUAL for kind in found.values()) > len(found) / 2


@habit(())
def clips_by_this_ranks_norm(s: Script) -> None:
    """The plant: what `clip_grad_norm_` would do without a guard."""
    s.start()

    def clip() -> None:
        norm = torch.stack([p.grad.norm() for p in s.parameters]).norm()
        for p in s.parameters:
            p.grad.mul_(0.05 / norm)

    s.train(clip)


def test_planted_habits_are_seen():
    name = clips_by_this_ranks_norm.__name__
    found = conformance_launch.outcomes(
        [(name, way) for way in ("ddp", "zero3")], 2, Attempt
    )
    assert found[name, "ddp"] == EQUAL
    assert found[name, "zero3"].startswith(f"{FAILS}: 0.weight is off by")
