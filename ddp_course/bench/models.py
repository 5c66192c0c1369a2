"""Fifty small models under every strategy: the same as in one process, or refused.

What a strategy takes for granted about a model is seldom written down: that outputs are
tensors, parameters real and not empty, that forward does the same in every step. Here
are models for which one such thing does not hold, one each. Each is trained for three
steps by one process with all rows, and by ranks that share the rows. Then losses,
parameters and buffers must be equal. What cannot be so must be refused: by an error of
this course's, with a sentence, on all ranks within two seconds. All else is a failure:
other numbers, an error out of PyTorch, ranks that wait for each other. PyTorch's own
are told in the same way in the last two columns, and judged by nobody.

One launch goes through all cases. A case that hangs, or leaves ranks that do not
understand each other any more, ends it; the next launch goes on with the next case.
Chapters 04, 05, 07 to 10, and 15.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import re
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import make_dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn, tanh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as PyTorchDDP
from torch.nn.utils import parametrizations
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import ddp_course
from ddp_course import data_parallel, zero
from ddp_course.bench.table import WIDTH, beside, column
from ddp_course.bench.turns import Row
from ddp_course.communication_order import ScheduledDataParallel, priority
from ddp_course.launch import RankReport, spawn
from ddp_course.mechanisms.hooks import tensors_in
from ddp_course.mechanisms.tensor_words import digest, kind_of
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.parallelize import whole
from ddp_course.pipeline import PipelineParallel
from ddp_course.tensor_parallel import tensor_parallel

ABOUT = "Fifty small models under every strategy: equal to one process, or refused."
PAIRS = ()  # nothing is timed
ROWS, STEPS = 12, 3
REFUSED_WITHIN, HANGS_AFTER = 2.0, 20.0  # seconds
DONE, EQUAL, REFUSED, RAISES, FAILS = "done", "equal", "refused", "raises", "FAILS"

# ---- the models ----------------------------------------------------------------------


class Model(NamedTuple):
    """How one is built, what it is given, and what may differ from one process.

    Attributes:
        build: makes it, with numbers of the global generator.
        given: draws the arguments of a call: 12 rows of 6 numbers, unless told.
        per_rank: its forward looks at all rows that it is given, or draws numbers.
        unused: parameters get no gradient in some steps.
        itself: what PyTorch says of this model on the CPU, under any strategy.
    """

    build: Callable[[], nn.Module]
    given: Callable[[], Any] | None = None
    per_rank: bool = False
    unused: bool = False
    itself: str = ""


class Net(nn.Module):
    """Some parts, and a function that is its forward; a tensor becomes a buffer.

    If its name ends in "_" it is one that is not saved.
    """

    def __init__(self, how: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.how = how
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part, persistent=not name.endswith("_"))
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.how(self, *args, **kwargs)


Output = make_dataclass("Output", ("logits", "hidden"))


def _linear(n: int = 6, k: int = 4, dtype: torch.dtype | None = None) -> nn.Linear:
    return nn.Linear(n, k, dtype=dtype)


def _chain(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(_linear(6, 8), *between, nn.Tanh(), _linear(8))


def _two(how: Callable[..., Any], **parts: Any) -> Net:
    return Net(how, first=_linear(6, 6), head=_linear(), **parts)


def _blocks(call: Callable[[nn.Module, Tensor], Tensor]) -> Net:
    def residual(m: Net, x: Tensor) -> Tensor:
        for block in m.blocks:
            x = x + tanh(call(block, x))
        return m.head(x)

    return Net(residual, blocks=nn.ModuleList([_linear(6, 6), _linear(6, 6)]),
               head=_linear())  # fmt: skip


def _recurrent(kind: type[nn.RNNBase], **options: Any) -> Net:
    rnn = kind(6, 3, batch_first=True, **options)
    head = _linear(6 if rnn.bidirectional else 3)
    return Net(lambda m, x: m.head(m.rnn(x)[0][:, -1]), rnn=rnn, head=head)


def _parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=dtype) / 2)


def _drawn(*shape: int, dtype: torch.dtype | None = None) -> Callable[[], Any]:
    return lambda: (torch.randn(ROWS, *shape).to(dtype),)


def _tokens(times: int = 1) -> Callable[[], Any]:
    return lambda: tuple(torch.randint(12, (ROWS, 4)) for _ in range(times))


def _gpt(**options: Any) -> Model:  # can be cut in two, and in three
    config = GPTConfig(12, 4, n_layer=2, n_head=6, d_model=12, **options)
    return Model(lambda: build_gpt(config), _tokens(times=2))


def _by_turns(m: Net, x: Tensor) -> Tensor:
    m.count += 1
    return m.head(tanh(m.first(x) if m.count % 2 else x))


def _freezing(m: Net, x: Tensor) -> Tensor:
    m.count += 1
    m.first.requires_grad_(bool(m.count < 2))
    return m.head(tanh(m.first(x)))


def _routed(m: Net, x: Tensor) -> Tensor:
    """Send each row to one of three experts; a rank may have none for one of them."""
    y, chosen = x.new_zeros(len(x), 4), (4 * x[:, 0].abs()).long().clamp(max=2)
    for k, expert in enumerate(m.experts):
        if len(rows := chosen.eq(k).nonzero()[:, 0]):
            y = y.index_add(0, rows, expert(x[rows]))
    return y


def _forces(m: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return an energy, and its gradient; the loss is of both."""
    x = x.detach().requires_grad_()
    energy = m.net(x)
    return energy, torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


def _counting(m: Net, x: Tensor) -> Tensor:
    for counter in m.buffers():
        counter += 1
        x = x * (1 + counter / 4)
    return m.net(x)


def _moving(m: Net, x: Tensor) -> Tensor:
    m.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
    return m.net(x - m.mean)


def _clamped(m: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.first.weight.clamp_(-0.2, 0.2)
    return m.head(tanh(m.first(x)))


def _hooked() -> nn.Module:
    model = _chain()
    model[0].register_forward_hook(lambda m, given, out: out * 2)
    model[1].register_full_backward_hook(lambda m, into, out: (into[0] / 2,))
    model[2].bias.register_hook(lambda gradient: gradient * 3)
    return model


_COUNT = partial(torch.tensor, 0)
_BF16, _F64, _C64 = torch.bfloat16, torch.float64, torch.complex64
_SEQUENCES, _SIGNALS, _IMAGES = _drawn(5, 6), _drawn(2, 8), _drawn(2, 6, 6)
MODELS: dict[str, Model] = {
    "GPT": _gpt(),
    "GPT, tied": _gpt(tied=True),
    "RNN": Model(lambda: _recurrent(nn.RNN), _SEQUENCES),
    "GRU": Model(lambda: _recurrent(nn.GRU), _SEQUENCES),
    "LSTM": Model(
        lambda: _recurrent(nn.LSTM, num_layers=2, bidirectional=True), _SEQUENCES),
    "Conv1d": Model(
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Conv1d(4, 2, 3)),
        _SIGNALS),
    "Conv2d, NHWC": Model(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), _linear(48))
        .to(memory_format=torch.channels_last), _IMAGES),
    "ConvTranspose2d": Model(
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, 2), nn.Tanh(), nn.ConvTranspose2d(3, 2, 3)), _IMAGES),
    "tied": Model(
        lambda: nn.Sequential(tied := _linear(6, 6), nn.Tanh(), tied, _linear())),
    "sparse Embedding": Model(
        lambda: Net(lambda m, x: m.head(m.embed(x).mean(1)), head=_linear(),
                    embed=nn.Embedding(12, 6, sparse=True)), _tokens()),
    "used twice": Model(lambda: _two(lambda m, x: m.head(m.first(tanh(m.first(x)))))),
    "EmbeddingBag": Model(
        lambda: nn.Sequential(nn.EmbeddingBag(12, 6), nn.Tanh(), _linear()), _tokens()),
    "frozen": Model(
        lambda: nn.Sequential(_linear(6, 6).requires_grad_(False), *_chain())),
    "frozen later": Model(lambda: _two(_freezing, count=_COUNT()), unused=True),
    "BatchNorm": Model(lambda: _chain(nn.BatchNorm1d(8)), per_rank=True),
    "SyncBatchNorm": Model(
        lambda: _chain(nn.SyncBatchNorm(8)), itself="SyncBatchNorm expected input"),
    "Layer-, GroupNorm": Model(lambda: _chain(nn.LayerNorm(8), nn.GroupNorm(2, 8))),
    "dict in": Model(
        lambda: Net(lambda m, given: m.net(given["a"] * given["b"][0]), net=_chain()),
        lambda: ({"a": torch.randn(ROWS, 6), "b": [torch.randn(ROWS, 6)]},)),
    "keywords in": Model(
        lambda: Net(lambda m, *, x, scale: m.net(x) * scale, net=_chain()),
        lambda: {"x": torch.randn(ROWS, 6), "scale": torch.randn(ROWS, 1)}),
    "several out": Model(
        lambda: _two(lambda m, x: (y := m.first(x), [m.head(y), m.head(-x) ** 2]))),
    "dict out": Model(
        lambda: _two(lambda m, x: {"y": (y := m.first(x)), "more": {"z": m.head(y)}})),
    "dataclass out": Model(
        lambda: _two(lambda m, x: Output(m.head(y := m.first(x)), y))),
    "None out": Model(
        lambda: _two(lambda m, x: (None, m.head(tanh(m.first(x))), "words", None))),
    "residual ModuleList": Model(lambda: _blocks(lambda block, x: block(x))),
    "ModuleDict, nested": Model(
        lambda: Net(
            lambda m, x: m.by["b"](x) + m.by["a"](x), by=nn.ModuleDict(
                {"a": _linear(), "b": nn.Sequential(_chain(), _linear(4))}))),
    "ParameterList, Dict": Model(
        lambda: Net(
            lambda m, x: tanh(x @ m.a[0] + m.b["bias"]) @ m.a[1],
            a=nn.ParameterList([_parameter(6, 5), _parameter(5, 4)]),
            b=nn.ParameterDict({"bias": _parameter(5)}))),
    "checkpointed": Model(lambda: _blocks(partial(checkpoint, use_reentrant=False))),
    "reentrant": Model(
        lambda: _blocks(partial(checkpoint, use_reentrant=True)),
        lambda: (torch.randn(ROWS, 6, requires_grad=True),)),
    "complex": Model(
        lambda: Net(
            lambda m, x: torch.fft.rfft(x) * m.filter @ m.mix,
            filter=_parameter(4, dtype=_C64), mix=_parameter(4, 3, dtype=_C64))),
    "bfloat16": Model(lambda: _chain().to(_BF16), _drawn(6, dtype=_BF16)),
    "float64": Model(lambda: _chain().to(_F64), _drawn(6, dtype=_F64)),
    "mixed types": Model(
        lambda: Net(
            lambda m, x: m.b(tanh(m.a(x.double()).float())) + m.c(x.bfloat16()),
            a=_linear(dtype=_F64), b=_linear(4), c=_linear(dtype=_BF16))),
    "weight_norm": Model(lambda: _chain(parametrizations.weight_norm(_linear(8, 8)))),
    "spectral_norm": Model(
        lambda: _chain(parametrizations.spectral_norm(_linear(8, 8)))),
    "orthogonal": Model(lambda: _chain(parametrizations.orthogonal(_linear(8, 8)))),
    "buffer that counts": Model(
        lambda: nn.Sequential(
            Net(_counting, net=_linear(), count=_COUNT()), _linear(4), _linear(4))),
    "buffer not saved": Model(lambda: Net(_counting, net=_chain(), count_=_COUNT())),
    "moving mean": Model(
        lambda: Net(_moving, net=_chain(), mean=torch.zeros(6)), per_rank=True),
    "Dropout": Model(lambda: _chain(nn.Dropout(0.4)), per_rank=True),
    "by turns": Model(lambda: _two(_by_turns, count=_COUNT()), unused=True),
    "unused": Model(lambda: _two(lambda m, x: m.head(x)), unused=True),
    "experts": Model(
        lambda: Net(_routed, experts=nn.ModuleList(_linear() for _ in range(3))),
        unused=True),
    "0-dim parameter": Model(
        lambda: Net(lambda m, x: m.net(x) * m.scale, net=_chain(), scale=_parameter())),
    "empty, strided": Model(
        lambda: Net(lambda m, x: x @ m.w + m.none.sum(), none=_parameter(0, 3),
                    w=nn.Parameter(torch.randn(4, 6).t()))),
    "MultiheadAttention": Model(
        lambda: Net(
            lambda m, x: m.head(m.attn(x, x, x, need_weights=False)[0].mean(1)),
            attn=nn.MultiheadAttention(6, 2, batch_first=True), head=_linear()),
        _SEQUENCES),
    "TransformerEncoder": Model(
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), nn.Tanh(),
            nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True)), _SEQUENCES),
    "no parameters": Model(
        lambda: nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Tanh()),
        itself="optimizer got an empty parameter list"),
    "owner's hooks": Model(_hooked),
    "weights clamped": Model(lambda: _two(_clamped)),
    "gradient in forward": Model(lambda: Net(_forces, net=_chain())),
}  # fmt: skip
HARD = (
    "GPT, tied", "experts", "BatchNorm", "several out", "complex", "mixed types",
    "buffer that counts", "moving mean", "0-dim parameter", "empty, strided",
    "weights clamped", "gradient in forward",
)  # fmt: skip

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
    return replica, SimpleNamespace(step=replica.step, zero_grad=lambda: None)


def members(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules in lists and sequences: what is called one by one."""
    rows = [m for m in model.modules() if isinstance(m, (nn.Sequential, nn.ModuleList))]
    inside = {m for row in rows for m in row if any(True for _ in m.parameters())}
    return {name: m for name, m in model.named_modules() if m in inside}


def in_units(kind: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return a stage 3 that gathers each member alone."""
    return lambda model: kind(model, units=members(model))


def in_stages(model: nn.Module) -> nn.Module:
    """Return a pipeline; the course's GPT has a loss of its own."""
    return PipelineParallel(model, loss_fn=None if hasattr(model, "config") else score)


def by_fsdp(model: nn.Module) -> nn.Module:
    """Return what PyTorch's `fully_shard` makes of each member, and of the model."""
    for child in members(model).values():
        fully_shard(child)
    return fully_shard(model)


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
    "zero3 naive": wrapped(zero.NaiveFullyShardedDataParallel),
    "zero3 simple": wrapped(in_units(zero.SimpleFullyShardedDataParallel)),
    "zero3": wrapped(in_units(zero.FullyShardedDataParallel)),
    "tp": wrapped(tensor_parallel),
    "pp": wrapped(in_stages),
}
STRATEGIES = OURS | {"DDP": wrapped(PyTorchDDP), "FSDP": wrapped(by_fsdp)}
WHOLE_BATCH = ("tp", "pp")  # ranks that share a model work on the same rows
SENDS_BUFFERS = ("ddp", "ddp unused", "DDP")  # the first rank's, before each forward
# With this epsilon AdamW, too, sees how large gradients are, and rests where they are
# noise.
OPTIMS: tuple[Optim, ...] = (
    partial(AdamW, lr=0.03, eps=1e-2, weight_decay=0.1),
    partial(SGD, lr=0.1, momentum=0.9),
)

# ---- one process ---------------------------------------------------------------------

Case = tuple[str, str]  # a model, a strategy
Told = tuple[Sequence[float], Mapping[str, Any]]  # losses, the state at the end
WORDS = {  # to what else than one process with the whole batch a strategy may be equal
    "first": "each rank's rows alone, every forward with the first rank's buffers",
    "own": "each rank's rows alone, with buffers of its own",
    "on": "one microbatch after the other, buffers too",
    "zeros": "where no gradient comes it counts as zero, so momentum and decay go on",
}


def made(name: str) -> tuple[nn.Module, Optim]:
    """Return a model, always with the same numbers, and what trains it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name].build(), OPTIMS[list(MODELS).index(name) % len(OPTIMS)]


def batch(name: str, step: int, part: int = 0, parts: int = 1) -> tuple[Any, Tensor]:
    """Return a part of a step's rows: the arguments of a call, and the targets."""
    given = MODELS[name].given or _drawn(6)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1 + step)
        both = given(), torch.randn(ROWS, dtype=_F64)
    rows = slice(part * ROWS // parts, (part + 1) * ROWS // parts)
    return tree_map_only(
        Tensor, lambda t: t.detach()[rows].requires_grad_(t.requires_grad), both
    )


def score(output: Any, y: Tensor) -> Tensor:
    """Return a loss of whatever a model returns: a mean over rows."""
    told: Any = 0
    for t in tensors_in(output):
        flat = (torch.view_as_real(t) if t.is_complex() else t).flatten(1).double()
        told = told + flat @ torch.arange(1.0, 1 + flat.shape[1]).cos().double()
    return (told - y).square().mean()


def loss_of(model: nn.Module, given: Any, y: Tensor) -> Tensor:
    """Go forward and backward; return the loss."""
    has_targets = isinstance(given, tuple) and len(given) > 1  # the course's GPT
    if isinstance(model, PipelineParallel):
        return model.step(given[0], given[1] if has_targets else y)
    output = model(**given) if isinstance(given, dict) else model(*given)
    loss = output[1] if has_targets else score(output, y)
    loss.backward()
    return loss.detach()


@cache
def alone(
    name: str, parts: int = 1, buffers: str = "first", zeros: bool = False
) -> Told:
    """Train in one process; return the losses, and the state at the end.

    The rows come in so many parts, whose gradients are averaged. What becomes of the
    buffers, and of missing gradients (`zeros`), is said in WORDS.
    """
    model, optim = made(name)
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


def difference(one: Told, other: Told) -> str:
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


# ---- on the ranks --------------------------------------------------------------------


def on_rank(
    cases: Sequence[Case], strategies: Mapping[str, Strategy], seconds: float
) -> None:
    """Try all cases; print a line when one is over on this rank, and when on all."""
    warnings.simplefilter("ignore")
    for number, (name, strategy) in enumerate(cases):
        faulthandler.dump_traceback_later(seconds, exit=True)
        kind, told, bits = DONE, ([], {}), ()
        try:
            told, bits = trained(name, strategies[strategy], strategy in WHOLE_BATCH)
        except Exception as error:
            kind = refusal(error, MODELS[name].itself) or f"{RAISES} {_in_words(error)}"
            faulthandler.dump_traceback_later(REFUSED_WITHIN, exit=True)
        print(json.dumps([number, "here", kind]), flush=True)
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, (kind, told[0], bits))
        faulthandler.cancel_dump_traceback_later()
        kinds, losses, all_bits = zip(*said, strict=True)
        if set(kinds) == {DONE}:
            means = torch.tensor(losses, dtype=_F64).mean(0).tolist()
            kind = compared(name, strategy, (means, told[1]))
            if len(set(all_bits)) > 1:
                kind = f"{FAILS}: the ranks have different parameters"
        elif not all(kind.startswith(REFUSED) for kind in kinds):
            kind = by_rank(kinds)
        print(json.dumps([number, "all", kind]), flush=True)


def trained(
    name: str, strategy: Strategy, whole_batch: bool
) -> tuple[Told, tuple[str, ...]]:
    """Train a model; return this rank's losses and the whole state, and its bits."""
    rank, parts = (0, 1) if whole_batch else (dist.get_rank(), dist.get_world_size())
    model, optim = made(name)
    names = [name for name, _ in model.named_parameters()]
    others = dict(model.named_buffers()) if rank else {}  # the first rank's count
    replica, optimizer = strategy(model, optim)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.manual_seed(step)
        losses.append(loss_of(replica, *batch(name, step, rank, parts)).item())
        optimizer.step()
    state = whole(replica, optimizer)[0].state_dict()
    state = {k: getattr(t, "full_tensor", t.detach)() for k, t in state.items()}
    bits = tuple(digest(state[name]) for name in names)
    return (losses, state | dict.fromkeys(others.keys() & state.keys())), bits


def refusal(error: Exception, itself: str = "") -> str | None:
    """Return what this course says when it refuses, or None: somebody else did."""
    end, package = traceback.extract_tb(error.__traceback__)[-1], ddp_course.__path__[0]
    ours = end.filename.startswith(package) and end.line.startswith("raise")
    if not (ours and " " in str(error) or itself and itself in str(error)):
        return None
    return f"{REFUSED}: {_in_words(error)}"


def _in_words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def compared(name: str, strategy: str, told: Told) -> str:
    """Say to what the outcome is equal, of what this strategy promises."""
    model, size = MODELS[name], dist.get_world_size()
    ways: list[tuple[Any, ...]] = [(1, "first")]
    if strategy == "pp":
        ways.append((size, "on"))
    elif model.per_rank and strategy not in WHOLE_BATCH:
        ways = [(size, "first" if strategy in SENDS_BUFFERS else "own")]
    ways += [(*way, True) for way in ways if model.unused]
    found = [difference(told, alone(name, *way)) for way in ways]
    if "" not in found:
        return f"{FAILS}: {found[0]}"
    parts, buffers, *zeros = ways[found.index("")]
    words = [WORDS[buffers]] * (parts > 1) + [WORDS["zeros"]] * len(zeros)
    return ": ".join([EQUAL, *words])


def by_rank(kinds: Sequence[str]) -> str:
    """Say how the ranks ended, of which one failed, or not all did the same."""
    told = [f"rank {kinds.index(kind)}: {kind}" for kind in dict.fromkeys(kinds)]
    return f"{FAILS}: {'; '.join(told) if told[1:] else kinds[0]}"


# ---- launches ------------------------------------------------------------------------


def bench(quick: bool) -> Iterator[Row]:
    """Yield a row for each model: what becomes of it under each strategy."""
    names = HARD if quick else tuple(MODELS)
    cases = [(name, strategy) for name in names for strategy in STRATEGIES]
    told = {n: outcomes(cases, n) for n in ((2,) if quick else (2, 3))}
    for name in names:
        date = datetime.date.today().isoformat()
        row = {"case": name, "date": date, "ranks": [*told]}
        for strategy in STRATEGIES:
            kinds = [in_short(found[name, strategy]) for found in told.values()]
            each = (f"{n} ranks: {kind}" for n, kind in zip(told, kinds, strict=True))
            row[strategy] = "; ".join(each) if len(set(kinds)) > 1 else kinds[0]
            if strategy not in OURS:
                row[strategy] = row[strategy].replace(f"{FAILS}: ", "")
        yield row


def outcomes(
    cases: Sequence[Case],
    ranks: int,
    strategies: Mapping[str, Strategy] = STRATEGIES,
    seconds: float = HANGS_AFTER,
) -> dict[Case, str]:
    """Return what becomes of each case, in as few launches as there can be."""
    found: dict[Case, str] = {}
    while left := cases[len(found) :]:
        reports = spawn(
            on_rank, left, strategies, seconds, world_size=ranks, check=False,
            output="none", device="cpu", timeout=60 + seconds * len(left),
        )  # fmt: skip
        told = [_lines(report) for report in reports]
        for number, case in enumerate(left):
            kinds = [lines.get((number, "all")) for lines in told]
            if None in kinds:  # this case has ended the launch
                both = zip(told, reports, strict=True)
                kinds = [lines.get((number, "here")) or _end(r) for lines, r in both]
                found[case] = by_rank(kinds)
                break
            found[case] = kinds[0] if len(set(kinds)) == 1 else by_rank(kinds)
    return found


def _lines(report: RankReport) -> dict[tuple[int, str], str]:
    lines = [json.loads(line) for line in report.output.splitlines()]
    return {(number, where): kind for number, where, kind in lines}


def _end(report: RankReport) -> str:
    """Say how a rank ended in the middle of a case."""
    waits = report.status == "unfinished" or "Timeout (" in report.stderr
    return "hangs" if waits else report.error or report.status


# ---- what is printed -----------------------------------------------------------------


def in_short(kind: str) -> str:
    """Return what happened, without who said it, and what else was said."""
    if kind.startswith(REFUSED):
        kind = re.sub(r"^refused: \w+: |\branks? \d[\d, ]*: ", "", kind)
        kind = f"{REFUSED}: {kind.partition('. ')[0]}"
    return textwrap.shorten(kind, 140, placeholder=" ...")


def failed(row: Mapping[str, Any]) -> bool:
    """Tell whether a strategy of this course does neither what it says nor refuses."""
    return any(FAILS in row[name] for name in OURS)


def shown(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is printed: a line for each model, a column for each strategy."""
    notes, counted = {EQUAL: "="}, dict.fromkeys((EQUAL, REFUSED, FAILS), 0)
    for row in rows:
        for name in STRATEGIES:
            fails = "!" * (FAILS in row[name])
            notes.setdefault(row[name], f"{len(notes)}{fails}")
            if name in OURS:
                counted[[kind for kind in counted if kind in row[name]][-1]] += 1
    columns = [column([], [row["case"] for row in rows], str.ljust)]
    columns += [column(n.split(), [notes[r[n]] for r in rows]) for n in STRATEGIES]
    text = textwrap.wrap(
        f"{ABOUT} On {' and '.join(map(str, rows[0]['ranks']))} ranks, "
        f"{rows[0]['date']}. = is equal, ! fails, a number is told below; the last two "
        "are PyTorch's.",
        WIDTH,
    )
    text += ["", *beside(columns, " "), ""]
    for words, number in list(notes.items())[1:]:
        text += textwrap.wrap(f"{number:>4} {words}", WIDTH, subsequent_indent=" " * 5)
    told = ", ".join(f"{count} {kind}" for kind, count in counted.items())
    return [*text, "", f"{len(rows)} models under {len(OURS)} strategies: {told}"]
