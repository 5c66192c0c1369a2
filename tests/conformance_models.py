"""Fifty small models, each with one thing that a strategy may take for granted.

Outputs are tensors; parameters are real and not empty; forward does the same in every
step: here is a model for which one of these does not hold, one each. What strategies
make of them is in test_conformance.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import make_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, tanh
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from ddp_course.experts.gpt import build_mixture_gpt
from ddp_course.gpt_config import MixtureConfig
from ddp_course.model import GPTConfig, build_gpt

ROWS = 12


class Model(NamedTuple):
    """How one is built, what it is given, and what may differ from one process.

    Attributes:
        build: makes it, with numbers of the global generator.
        given: draws the arguments of a call: 12 rows of 6 numbers, unless told.
        per_rank: its forward looks at all rows that it is given, or draws numbers.
        unused: parameters get no gradient in some steps.
        itself: what PyTorch says of this model on the CPU, under any strategy.
        unsaved: a state has not all of it, so training goes on otherwise.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], Any] | None = None
    per_rank: bool = False
    unused: bool = False
    itself: str = ""
    unsaved: bool = False


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


def _gpt_of_experts() -> Model:
    config = MixtureConfig(12, 4, n_layer=2, n_head=6, d_model=12, experts=6)
    return Model(lambda: build_mixture_gpt(config), _tokens(times=2))


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
    model[0].register_forward_hook(lambda m, inputs, out: out * 2)
    model[1].register_full_backward_hook(lambda m, into, out: (into[0] / 2,))
    model[2].bias.register_hook(lambda gradient: gradient * 3)
    return model


_COUNT = partial(torch.tensor, 0)
_BF16, _F64, _C64 = torch.bfloat16, torch.float64, torch.complex64
_SEQUENCES, _SIGNALS, _IMAGES = _drawn(5, 6), _drawn(2, 8), _drawn(2, 6, 6)
MODELS: dict[str, Model] = {
    "GPT": _gpt(),
    "GPT, tied": _gpt(tied=True),
    "GPT of experts": _gpt_of_experts(),
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
        lambda: Net(lambda m, x: m.net(x["a"] * x["b"][0]), net=_chain()),
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
    "buffer not saved": Model(
        lambda: Net(_counting, net=_chain(), count_=_COUNT()), unsaved=True),
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
    "GPT, tied", "GPT of experts", "experts", "BatchNorm", "several out", "complex",
    "mixed types",
    "buffer that counts", "moving mean", "0-dim parameter", "empty, strided",
    "weights clamped", "gradient in forward",
)  # fmt: skip
