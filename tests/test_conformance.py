"""The conformance matrix: every strategy with small models that users have.

Each model is trained for three steps by one process with all rows, and by ranks that
share the rows. Then three promises are held to:

* losses, parameters and buffers are those of one process;
* a fresh replica that loads the saved states has them, and goes on in the same way;
* what cannot be so is refused: by an error of this course's, with a sentence, on all
  ranks together: none waits for another that goes on.

The naive and the simple rung of stage 3 are left out: they show the idea, and neither
check models nor save states. The first three rungs of DDP check nothing either: of
sparse gradients they let PyTorch complain. All else is a failure
(`conformance_launch`).

By default: the hardest models and some that a seed draws, on two ranks. The whole
matrix, on two and three ranks:

    DDP_COURSE_CONFORMANCE=all pytest tests/test_conformance.py
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import conformance_launch
import pytest
import torch
import torch.distributed as dist
from conformance_launch import EQUAL, FAILS, HANGS_AFTER, REFUSED, Case
from conformance_models import HARD, MODELS, ROWS, _drawn
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._pytree import tree_map_only

from ddp_course import data_parallel, zero
from ddp_course.communication_order import ScheduledDataParallel, priority
from ddp_course.context_parallel.gpt import context_parallel
from ddp_course.experts.axis import expert_parallel
from ddp_course.mechanisms.agreement import digest, kind_of
from ddp_course.mechanisms.buckets import bucket_plan
from ddp_course.mechanisms.graph import tensors_in
from ddp_course.parallelize import whole
from ddp_course.pipeline import PipelineParallel
from ddp_course.tensor_parallel import tensor_parallel

ALL = os.environ.get("DDP_COURSE_CONFORMANCE") == "all"
SEED = int(os.environ.get("DDP_COURSE_CONFORMANCE_SEED", "0"))
STEPS, DRAWN = 3, 4
_BF16, _F64 = torch.bfloat16, torch.float64

# ---- the strategies ------------------------------------------------------------------

Optim = partial[Optimizer]  # a class, and its options
Strategy = Callable[[nn.Module, Optim], tuple[nn.Module, Optimizer]]


def wrapped(wrap: Callable[..., nn.Module], **options: Any) -> Strategy:
    """Return a strategy that wraps the model."""

    def strategy(model: nn.Module, optim: Optim) -> tuple[nn.Module, Optimizer]:
        replica = wrap(model, **options)
        return replica, optim(replica.parameters())

    return strategy


def sharding(kind: type[Optimizer]) -> Strategy:
    """Return a strategy that is an optimizer, and leaves the model as it is."""
    return lambda model, optim: (
        model,
        kind(model.parameters(), optim.func, **optim.keywords),
    )


def in_order(model: nn.Module, optim: Optim) -> tuple[nn.Module, Any]:
    """Return a replica that steps layer by layer, and what stands for its optimizer."""
    optimizer = optim(model.parameters())
    replica = ScheduledDataParallel(model, optimizer, priority(64))  # small pieces
    return replica, SimpleNamespace(
        step=replica.step,
        zero_grad=lambda: None,
        state_dict=optimizer.state_dict,
        load_state_dict=optimizer.load_state_dict,
    )


def members(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules in lists and sequences: what is called one by one."""
    rows = [m for m in model.modules() if isinstance(m, (nn.Sequential, nn.ModuleList))]
    inside = {m for row in rows for m in row if any(True for _ in m.parameters())}
    return {name: m for name, m in model.named_modules() if m in inside}


def in_units(kind: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return a stage 3 that gathers each member alone."""
    return lambda model: kind(model, units=members(model))


def over_positions(model: nn.Module) -> nn.Module:
    """Return a model whose ranks share each sequence, and average their gradients."""
    return DDP(context_parallel(model))


def over_experts(model: nn.Module) -> nn.Module:
    """Return a model whose experts are all different; the rest is averaged."""
    alone, _ = dist.new_subgroups(group_size=1)
    return DDP(expert_parallel(model, dist.group.WORLD, alone))


def in_stages(model: nn.Module) -> nn.Module:
    """Return a pipeline; the course's GPT has a loss of its own."""
    return PipelineParallel(model, loss_fn=None if hasattr(model, "config") else score)


DDP = data_parallel.DistributedDataParallel
OURS: dict[str, Strategy] = {
    "naive": wrapped(data_parallel.NaiveDistributedDataParallel),
    "flat": wrapped(data_parallel.FlatDistributedDataParallel),
    "bucket": wrapped(data_parallel.BucketedDistributedDataParallel),
    "ddp": wrapped(DDP),
    "ddp unused": wrapped(DDP, find_unused_parameters=True),
    "order": in_order,
    "zero1": sharding(zero.ZeroRedundancyOptimizer),
    "zero2": sharding(zero.ShardedGradientOptimizer),
    "zero3": wrapped(in_units(zero.FullyShardedDataParallel)),
    "tp": wrapped(tensor_parallel),
    "cp": wrapped(over_positions),
    "ep": wrapped(over_experts),
    "pp": wrapped(in_stages),
}
WHOLE_BATCH = ("tp", "cp", "pp")  # ranks that share a model work on the same rows
CHECK_NOTHING = ("naive", "flat", "bucket")  # nor refuse sparse gradients
SENDS_BUFFERS = ("ddp", "ddp unused")  # the first rank's, before each forward
# With this epsilon AdamW, too, sees how large gradients are, and rests where they are
# noise.
OPTIMS: tuple[Optim, ...] = (
    partial(AdamW, lr=0.03, eps=1e-2, weight_decay=0.1),
    partial(SGD, lr=0.1, momentum=0.9),
)

# ---- one process ---------------------------------------------------------------------

Outcome = tuple[Sequence[float], Mapping[str, Any]]  # losses, the state at the end
WORDS = {  # to what else than one process with the whole batch a strategy may be equal
    "first": "each rank's rows alone, every forward with the first rank's buffers",
    "own": "each rank's rows alone, with buffers of its own",
    "on": "one microbatch after the other, buffers too",
    "zeros": "where no gradient comes it counts as zero, so momentum and decay go on",
}


def model_and_optimizer(name: str) -> tuple[nn.Module, Optim]:
    """Return a model, always with the same numbers, and what trains it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name].build(), OPTIMS[list(MODELS).index(name) % len(OPTIMS)]


def batch(name: str, step: int, part: int = 0, parts: int = 1) -> tuple[Any, Tensor]:
    """Return a part of a step's rows: the arguments of a call, and the targets."""
    inputs = MODELS[name].inputs or _drawn(6)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1 + step)
        both = inputs(), torch.randn(ROWS, dtype=_F64)
    rows = slice(part * ROWS // parts, (part + 1) * ROWS // parts)
    return tree_map_only(
        Tensor, lambda t: t.detach()[rows].requires_grad_(t.requires_grad), both
    )


def score(output: Any, y: Tensor) -> Tensor:
    """Return a loss of whatever a model returns: a mean over rows."""
    results: Any = 0
    for t in tensors_in(output):
        flat = (torch.view_as_real(t) if t.is_complex() else t).flatten(1).double()
        results = results + flat @ torch.arange(1.0, 1 + flat.shape[1]).cos().double()
    return (results - y).square().mean()


def loss_of(model: nn.Module, inputs: Any, y: Tensor) -> Tensor:
    """Go forward and backward; return the loss."""
    has_targets = isinstance(inputs, tuple) and len(inputs) > 1  # the course's GPT
    if isinstance(model, PipelineParallel):
        return model.step(inputs[0], inputs[1] if has_targets else y)
    output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    loss = output[1] if has_targets else score(output, y)
    loss.backward()
    return loss.detach()


@cache
def alone(
    name: str, parts: int = 1, buffers: str = "first", zeros: bool = False
) -> Outcome:
    """Train in one process; return the losses, and the state at the end.

    The rows come in so many parts, whose gradients are averaged. What becomes of the
    buffers, and of missing gradients (`zeros`), is said in WORDS.
    """
    model, optim = model_and_optimizer(name)
    parameters, losses = list(model.parameters()), []
    trained = [p for p in parameters if p.requires_grad]
    optimizer, ends = optim(parameters), [[b.clone() for b in model.buffers()]] * parts
    for step in range(STEPS):
        optimizer.zero_grad()
        starts, ends = (ends if buffers == "own" else ends[:1] * parts), []
        for part in range(parts):
            if buffers != "on" or not part:
                torch.manual_seed(step)
                _put(starts[part], model.buffers())
            losses.append(loss_of(model, *batch(name, step, part, parts)).item())
            ends.append([b.clone() for b in model.buffers()])
        for p in trained:
            if p.grad is not None:
                p.grad /= parts
            elif zeros:
                p.grad = torch.zeros_like(p)
        ends = ends[-1:] if buffers == "on" else ends
        optimizer.step()
    _put(ends[0], model.buffers())
    means = torch.tensor(losses, dtype=_F64).view(STEPS, parts).mean(1)
    return means.tolist(), model.state_dict()


def _put(numbers: Iterable[Tensor], tensors: Iterable[Tensor]) -> None:
    for tensor, values in zip(tensors, numbers, strict=True):
        tensor.copy_(values)


def difference(one: Outcome, other: Outcome) -> str:
    """Return what is not equal first, in words, or "".

    As near as the least precise type of the model allows: 1e-4 for float32. A loss of a
    pipeline is float32 in any case. A buffer of which one is None is not compared.
    """
    (losses, state), (wanted, plain) = one, other
    if state.keys() != plain.keys():
        return f"the state has {', '.join(sorted(state.keys() ^ plain.keys()))}"
    tolerances = {_F64: 1e-9, _BF16: 3e-2}
    near = max(tolerances.get(tensor.dtype, 1e-4) for tensor in plain.values())
    for step, pair in enumerate(zip(losses, wanted, strict=True)):
        if not abs(pair[0] - pair[1]) <= max(near, 1e-6) * (1 + abs(pair[1])):
            return f"the loss of step {step} is {pair[0]:.6g}, not {pair[1]:.6g}"
    for name, tensor in plain.items():
        if (found := state[name]) is None:
            continue
        if kind_of(found) != kind_of(tensor):
            return f"{name} is {kind_of(found)}, not {kind_of(tensor)}"
        if not torch.allclose(found, tensor, near, near):
            return f"{name} is off by {(found - tensor).abs().max():.2g}"
    return ""


@contextmanager
def pytorch_may_refuse(name: str, strategy: str) -> Iterator[None]:
    """Mark an error of PyTorch's that counts as a refusal.

    It raises the same for this model in one process, or the strategy checks nothing.
    """
    words = MODELS[name].itself
    anyone = strategy in CHECK_NOTHING and name.startswith("sparse")
    try:
        yield
    except Exception as error:
        error.counts = anyone or bool(words and words in str(error))
        raise


# ---- on the ranks --------------------------------------------------------------------


class Run:
    """A model that one strategy trains on this rank."""

    def __init__(
        self, strategies: Mapping[str, Strategy], name: str, strategy: str
    ) -> None:
        self.strategies, self.name, self.strategy = strategies, name, strategy
        ranks = dist.get_rank(), dist.get_world_size()
        self.part = (0, 1) if strategy in WHOLE_BATCH else ranks
        model, optim = model_and_optimizer(name)
        self.names = [name for name, _ in model.named_parameters()]
        # Buffers are compared with the first rank's.
        self.others = dict(model.named_buffers()) if ranks[0] else {}
        with pytorch_may_refuse(name, strategy):
            self.replica, self.optimizer = strategies[strategy](model, optim)

    def step(self, step: int) -> float:
        """Make one step on this rank's rows; return its loss."""
        self.optimizer.zero_grad()
        torch.manual_seed(step)
        loss = loss_of(self.replica, *batch(self.name, step, *self.part)).item()
        self.optimizer.step()
        return loss

    def train(self) -> tuple[Sequence[float], tuple[str, ...]]:
        """Return this rank's losses, and the parameters' bits."""
        with pytorch_may_refuse(self.name, self.strategy):
            losses = [self.step(step) for step in range(STEPS)]
        state = self.state()
        bits = tuple(digest(state[name]) for name in self.names)
        self.end = state | dict.fromkeys(self.others.keys() & state.keys())
        return losses, bits

    def judge(self, everyones: Sequence[tuple[Sequence[float], tuple]]) -> str:
        """Compare with one process, and go on from a saved state."""
        losses, all_bits = zip(*everyones, strict=True)
        means = torch.tensor(losses, dtype=_F64).mean(0).tolist()
        kind = compared(self.name, self.strategy, (means, self.end))
        if len(set(all_bits)) > 1:
            return f"{FAILS}: the ranks have different parameters"
        return self.resume() or kind if kind.startswith(EQUAL) else kind

    def state(self) -> dict[str, Tensor]:
        """Return the whole model's state."""
        state = whole(self.replica, self.optimizer)[0].state_dict()
        return {k: t.detach() for k, t in state.items()}

    def saved(self) -> list[dict[str, Any]]:
        """Return the whole states of the model and its optimizer, on the first rank."""
        return [part.state_dict() for part in whole(self.replica, self.optimizer)]

    def resume(self) -> str:
        """Load the states into a fresh replica; return what it lacks, or ""."""
        # Copied, as an optimizer keeps the very tensors that it loads.
        states = [deepcopy(self.saved())]
        dist.broadcast_object_list(states, 0)
        fresh = Run(self.strategies, self.name, self.strategy)
        parts = whole(fresh.replica, fresh.optimizer)
        for part, state in zip(parts, deepcopy(states[0]), strict=True):
            part.load_state_dict(state)
        again = fresh.saved()
        found = [unequal(again, states[0]) if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(found, 0)
        if found[0]:
            return f"{FAILS}: loaded, {found[0]}"
        model = MODELS[self.name]
        if model.per_rank or model.unsaved:
            return ""
        ends = [([run.step(STEPS)], run.state()) for run in (fresh, self)]
        other = dict.fromkeys(self.others)
        lost = difference((ends[0][0], ends[0][1] | other), ends[1])
        return f"{FAILS}: resumed, {lost}" if lost else ""


def unequal(one: Any, other: Any, where: str = "the state") -> str:
    """Return where two states of any depth differ first, or ""."""
    if isinstance(other, (Mapping, list, tuple)):
        pairs = other.items() if isinstance(other, Mapping) else enumerate(other)
        if type(one) is not type(other) or len(one) != len(other):
            return f"{where} has other entries"
        try:
            found = (unequal(one[k], v, f"{where}[{k!r}]") for k, v in pairs)
            return next(filter(None, found), "")
        except KeyError as missing:
            return f"{where} has no {missing}"
    if isinstance(other, Tensor):
        same = kind_of(one) == kind_of(other) and torch.equal(one, other)
    else:
        same = one == other
    return "" if same else f"{where} is another one"


def compared(name: str, strategy: str, results: Outcome) -> str:
    """Say to what the outcome is equal, of what this strategy promises."""
    model, size = MODELS[name], dist.get_world_size()
    ways: list[tuple[Any, ...]] = [(1, "first")]
    if strategy == "pp":
        ways.append((size, "on"))
    elif model.per_rank and strategy not in WHOLE_BATCH:
        ways = [(size, "first" if strategy in SENDS_BUFFERS else "own")]
    ways += [(*way, True) for way in ways if model.unused]
    found = [difference(results, alone(name, *way)) for way in ways]
    if "" not in found:
        return f"{FAILS}: {found[0]}"
    parts, buffers, *zeros = ways[found.index("")]
    words = [WORDS[buffers]] * (parts > 1) + [WORDS["zeros"]] * len(zeros)
    return ": ".join([EQUAL, *words])


def outcomes(
    cases: Sequence[Case],
    ranks: int,
    strategies: Mapping[str, Strategy] = OURS,
    seconds: float = HANGS_AFTER,
) -> dict[Case, str]:
    """Return what becomes of each model under each strategy."""
    return conformance_launch.outcomes(cases, ranks, partial(Run, strategies), seconds)


# ---- planted: strategies that are wrong ----------------------------------------------


def averages(model, optim, parameters, size):
    """Add up the gradients of some parameters, and divide them."""

    def average(parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= size

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(average)
    return model, optim(model.parameters())


def forgets(model, optim):
    """Average no parameter without dimensions."""
    some = [p for p in model.parameters() if p.dim()]
    return averages(model, optim, some, dist.get_world_size())


def sums(model, optim):
    """Forget to divide by the number of ranks: all ranks agree, and are wrong."""
    return averages(model, optim, model.parameters(), 1)


def forgets_states(model, optim):
    """Train as it should be, and load no state of the optimizer."""
    whole = model.parameters(), dist.get_world_size()
    model, optimizer = averages(model, optim, *whole)
    optimizer.load_state_dict = lambda state: None
    return model, optimizer


def raises(model, optim):
    """Let PyTorch complain."""
    torch.zeros(2).view(3)


def hangs(model, optim):
    """Wait on one rank for what nobody sends."""
    if dist.get_rank() == 1:
        time.sleep(1000)
    return model, optim(model.parameters())


def refuses_alone(model, optim):
    """Refuse with the course's own words, on one rank; the other one waits for it."""
    if dist.get_rank() == 0:
        bucket_plan((), bucket_cap_mb=-1)
    time.sleep(1000)


WRONG = {
    forgets: "FAILS: the ranks have different parameters",
    sums: "FAILS: the loss of step . is .*, not ",
    forgets_states: r"FAILS: loaded, the state.* has other entries",
    raises: r"FAILS: raises RuntimeError: shape '\[3\]' is invalid for input of size 2",
}
ENDLESS = {  # each ends its launch, when its time is over
    hangs: "FAILS: rank 0: done; rank 1: hangs",
    refuses_alone: "FAILS: rank 0: refused: ValueError: bucket_cap_mb .* rank 1: hangs",
}


@pytest.mark.timeout(1500)  # hundreds of cases, perhaps beside busy programs
def test_every_strategy_conforms_or_refuses():
    others = [name for name in MODELS if name not in HARD]
    names = [*HARD, *random.Random(SEED).sample(others, len(others) if ALL else DRAWN)]
    cases = [(name, strategy) for name in names for strategy in OURS]
    for ranks in (2, 3) if ALL else (2,):
        found = outcomes(cases, ranks)
        assert {case: kind for case, kind in found.items() if FAILS in kind} == {}
        # A bed that refuses everything would prove nothing.
        assert sum(kind.startswith(EQUAL) for kind in found.values()) > 100
        assert found["GPT, tied", "tp"] == found["GPT, tied", "cp"] == EQUAL
        of_experts = [found["GPT of experts", how] for how in ("ep", "tp", "zero1")]
        assert of_experts == 3 * [EQUAL]
        assert found["GPT of experts", "cp"].startswith(REFUSED)
        assert found["buffer that counts", "pp"].startswith(REFUSED)
        assert [WORDS["first"], WORDS["own"]] == [
            found["moving mean", strategy].removeprefix(f"{EQUAL}: ")
            for strategy in ("ddp", "zero3")
        ]


@pytest.mark.timeout(900)
def test_what_is_wrong_is_called_by_its_name():
    plants = WRONG | ENDLESS
    strategies = OURS | {plant.__name__: plant for plant in plants}
    cases = [("0-dim parameter", plant.__name__) for plant in plants]
    ended, endless = cases[: len(WRONG)], cases[len(WRONG) :]
    found = outcomes([*ended, ("GPT", "ddp")], 2, strategies)
    assert found.pop(("GPT", "ddp")) == EQUAL  # after all that was wrong
    found |= outcomes(endless, 2, strategies, seconds=10)  # in two launches
    for kind, words in zip(found.values(), plants.values(), strict=True):
        assert re.match(words, kind), kind
