"""Autocast by its table, against torch.autocast: types, bits, and where it is on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_course.data_parallel import DataParallel
from ddp_course.mechanisms.recompute import recompute_blocks
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.precision import Autocast, NaiveAutocast, autocast
from ddp_course.precision.autocast import FULL, LOWER

GPT = GPTConfig(block_size=16, n_layer=2, n_head=2, d_model=24)
TYPES = (torch.bfloat16, torch.float16)
W, X = torch.randn(4, 4), torch.rand(4, 4) / 2 + 0.2
Z, C1, C2, C3 = X[None], X[None], X[None, None], X[None, None, None]
CALLS = {  # one of each function of the table, and others that it leaves alone
    "linear": lambda x: F.linear(x, W),
    "linear, by keyword": lambda x: F.linear(input=x, weight=W),
    "matmul": lambda x: x @ W,
    "rmatmul": lambda x: torch.Tensor.__rmatmul__(W, x),
    "mm": lambda x: torch.mm(x, W),
    "bmm": lambda x: torch.bmm(x[None], W[None]),
    "addmm": lambda x: torch.addmm(x, W, W),
    "addbmm": lambda x: torch.addbmm(x, W[None], W[None]),
    "baddbmm": lambda x: torch.baddbmm(x[None], W[None], W[None]),
    "conv1d": lambda x: F.conv1d(x[None], W[:, :, None]),
    "conv2d": lambda x: F.conv2d(x[None, None], W[None, None]),
    "conv3d": lambda x: F.conv3d(x[None, None, None], W[None, None, None]),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x[None], W[:, :, None]),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x[None, None], W[None, None]),
    "conv_transpose3d": lambda x: F.conv_transpose3d(
        x[None, None, None], W[None, None, None]
    ),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(
        *[x[None, None]] * 3
    ),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, W),
    "inner": lambda x: torch.inner(x, W.to(x.dtype)),
    "tensordot": lambda x: torch.tensordot(x, W.to(x.dtype), 1),
    "linalg_multi_dot": lambda x: torch.linalg.multi_dot([x, x, x]),
    "conv_tbc": lambda x: torch.conv_tbc(x[None], W[None], W[0]),
    "lstm": lambda x: of_type(nn.LSTM, x)(x[None])[0],
    "rnn_tanh": lambda x: of_type(nn.RNN, x)(x[None])[0],
    "rnn_relu": lambda x: of_type(nn.RNN, x, nonlinearity="relu")(x[None])[0],
    "multi_head_attention_forward": lambda x: of_type(
        nn.MultiheadAttention, x, num_heads=2
    )(x[None], x[None], x[None])[0],
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(4)),
    "nll_loss": lambda x: F.nll_loss(x, torch.arange(4)),
    "mse_loss": lambda x: F.mse_loss(x, x + 1),
    "l1_loss": lambda x: F.l1_loss(x, x + 1),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x + 1),
    "huber_loss": lambda x: F.huber_loss(x, x + 1),
    "kl_div": lambda x: F.kl_div(x, x, reduction="batchmean"),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x, x),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(
        x, x
    ),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x, x, torch.ones(4)),
    "prod": lambda x: x.prod(),
    "cat": lambda x: torch.cat([x, X]),
    "stack": lambda x: torch.stack(tensors=[x, X]),
    "stack of one type": lambda x: torch.stack([x, x]),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "softmax": lambda x: x.softmax(-1),
    "gelu": F.gelu,
    "add": lambda x: x + X,
    "sum": lambda x: x.sum(),
}


def of_type(kind: type[nn.Module], x: torch.Tensor, **how) -> nn.Module:
    """Return the same module in every call, of the type of its input."""
    torch.manual_seed(0)
    sizes = () if kind is nn.MultiheadAttention else (4,)
    return kind(4, *sizes, **how).to(x.dtype)


def in_both(call, dtype: torch.dtype, dtype_in: torch.dtype) -> tuple:
    found = []
    for context in (Autocast(dtype), torch.autocast("cpu", dtype=dtype)):
        with context:
            found.append(call(X.to(dtype_in)))
    return tuple(found)


@pytest.mark.parametrize("name", CALLS)
def test_every_function_computes_in_pytorchs_type(name):
    recurrent = name in ("lstm", "rnn_tanh", "rnn_relu")
    for dtype in TYPES[:1] if recurrent else TYPES:  # no kernel of the CPU for float16
        for dtype_in in (torch.float32, dtype):
            try:
                ours, theirs = in_both(CALLS[name], dtype, dtype_in)
            except RuntimeError as error:  # torch.autocast has no LSTM without AVX-512
                assert name == "lstm" and "primitive descriptor" in str(error)
                with Autocast(dtype):
                    ours = CALLS[name](X.to(dtype_in))
                theirs = CALLS[name](X.to(dtype))  # the layer itself in the lower type
            assert ours.dtype == theirs.dtype, (dtype, dtype_in)
            assert torch.equal(ours, theirs)


def test_the_table_is_tried_whole_and_a_wrong_one_is_seen(monkeypatch):
    assert CALLS.keys() >= LOWER | FULL
    for table, name in (("LOWER", "linear"), ("FULL", "cross_entropy")):
        with monkeypatch.context() as patch:
            patch.setattr(autocast, table, getattr(autocast, table) - {name})
            dtype_in = torch.float32 if table == "LOWER" else torch.bfloat16
            ours, theirs = in_both(CALLS[name], torch.bfloat16, dtype_in)
            assert ours.dtype != theirs.dtype


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_pytorchs_checkpoint_is_refused_in_a_block_and_allowed_outside(use_reentrant):
    layer, x = nn.Linear(4, 4), X.clone().requires_grad_()
    again = partial(checkpoint, layer, x, use_reentrant=use_reentrant)
    with Autocast(), pytest.raises(RuntimeError, match="knows only torch.autocast"):
        again()
    with Autocast(enabled=False):
        again().sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        assert again().dtype is torch.bfloat16


def gradients(context, model: nn.Module) -> dict[str, torch.Tensor]:
    x = torch.arange(64).view(4, 16)
    model.zero_grad()
    with context:
        _, loss = model(x, x)
    loss.mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", TYPES)
def test_the_gpt_has_pytorchs_bits_and_float32_parameters(dtype):
    model = build_gpt(GPT)
    ours = gradients(Autocast(dtype), model)
    theirs = gradients(torch.autocast("cpu", dtype=dtype), model)
    plain = gradients(nullcontext(), model)
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert {p.dtype for p in (*model.parameters(), *ours.values())} == {torch.float32}
    assert not all(torch.equal(ours[n], plain[n]) for n in ours)
    recompute_blocks(model.blocks)  # computes again in backward, outside of the block
    again = gradients(Autocast(dtype), model)
    assert all(torch.equal(ours[n], again[n]) for n in ours)


def test_the_naive_one_has_the_same_bits():
    model = build_gpt(GPT)
    naive, full = gradients(NaiveAutocast(), model), gradients(Autocast(), model)
    assert all(torch.equal(naive[n], full[n]) for n in full)


def test_threads_of_data_parallel_cast_too():
    model = DataParallel(build_gpt(GPT), ["cpu"] * 2)
    ours = gradients(Autocast(), model)
    theirs = gradients(torch.autocast("cpu", dtype=torch.bfloat16), model)
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_a_parameter_is_cast_once_and_not_kept(monkeypatch):
    layer, casts = nn.Linear(4, 4), []
    real = Autocast._cast

    def counted(self, value, dtype):
        cast = real(self, value, dtype)
        casts.extend([cast] if isinstance(cast, torch.Tensor) else [])
        return cast

    monkeypatch.setattr(Autocast, "_cast", counted)
    block = Autocast()
    with block:
        layer(layer(X))
        of_weight = [c for c in casts if c.shape == (4, 4) and c.requires_grad]
        of_weight = [c for c in of_weight if c.grad_fn.name() == "ToCopyBackward0"]
        assert len(of_weight) == 2 and len({id(c) for c in of_weight}) == 1
        assert len(block.casts) == 2  # weight and bias, used twice
    assert not block.casts
    with torch.no_grad(), Autocast() as block:  # a cast without graph is not for later
        layer(X)
        assert not block.casts


def test_casts_are_of_one_parameter_one_type_and_one_thread():
    half = nn.Parameter(X.half())
    with Autocast():
        for number in range(9):  # each may get the address of the one before
            own = nn.Parameter(W + number)
            assert torch.equal(X @ own, (X.bfloat16() @ (W + number).bfloat16()))
        types = (half @ W).dtype, F.mse_loss(half, half).dtype
        with ThreadPoolExecutor(1) as other:
            assert other.submit(lambda: (X @ W).dtype).result() is torch.float32
    assert types == (torch.bfloat16, torch.float32)


def test_blocks_inside_of_blocks_and_other_types():
    with Autocast() as outer:
        with Autocast(enabled=False):
            assert (X @ W).dtype == torch.float32
        with Autocast(torch.float16):
            assert (X @ W).dtype == torch.float16
        assert (X.double() @ W.double()).dtype == torch.float64
        assert torch.mm(X, W, out=torch.empty(4, 4)).dtype == torch.float32
        assert outer.enabled
    assert (X @ W).dtype == torch.float32
    with pytest.raises(ValueError, match=r"dtype is torch\.float32"):
        Autocast(torch.float32)
