"""What the tests of tensor parallelism share: models, training, planted fakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
import trained
from refusals import said
from torch import Tensor, nn
from trained import Trained, own_norm_only, scale_gradients

from ddp_course import collectives
from ddp_course.bench.tp import styles
from ddp_course.mechanisms.exchange import MessageExchange
from ddp_course.mechanisms.placements import Shard, placed
from ddp_course.mechanisms.whole_state import (
    full_state_dict,
)
from ddp_course.mesh import Mesh, make_groups
from ddp_course.model import GPT, GPTConfig, build_gpt
from ddp_course.pipeline.backward import WeightGradStore
from ddp_course.tensor_parallel import TensorParallelGPT, tensor_parallel
from ddp_course.tensor_parallel.fused import ColumnProduct, RowProduct

CONFIG = GPTConfig(vocab_size=24, block_size=12, n_layer=2, n_head=12, d_model=24)
ROWS = 3


def model(name: str = "plain", seed: int = 0) -> GPT:
    """Return a GPT: "plain", "tied", or "frozen" in many ways."""
    gpt = build_gpt(replace(CONFIG, tied=name == "tied"), seed)
    with torch.no_grad():  # biases and norms begin as 0 and 1: an error there is unseen
        noise = torch.Generator().manual_seed(7)
        for parameter in gpt.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=noise)
    if name == "frozen":
        gpt.blocks[0].requires_grad_(False)
        gpt.embed.positions.requires_grad_(False)
        gpt.blocks[1].norm1.bias.requires_grad_(False)
        gpt.blocks[1].mlp.up.weight.requires_grad_(False)
        gpt.blocks[1].mlp.down.bias.requires_grad_(False)
    return gpt


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the batch of a step, the same on all ranks: (ROWS, T) int64, twice."""
    generator = torch.Generator().manual_seed(step)
    shape = ROWS, CONFIG.block_size + 1
    drawn = torch.randint(CONFIG.vocab_size, shape, generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def refused(attempts: list[Callable], expected: list[str]) -> list[str]:
    """Return what each attempt raises, in which the expected text has to be."""
    results = [said((ValueError, RuntimeError), attempt) for attempt in attempts]
    for text, words in zip(expected, results, strict=True):
        assert text in words, (text, words)
    return results


def gradients(gpt: nn.Module) -> dict[str, Tensor]:
    """Return the whole gradient of every trained parameter."""
    named = {n: p.grad for n, p in gpt.named_parameters() if p.grad is not None}
    if isinstance(gpt, TensorParallelGPT):
        messages = MessageExchange(gpt.exchange.group)
        for name, parameter in gpt.named_parameters():
            if name in named and (dim := dim_of(parameter)) is not None:
                named[name] = messages.all_gather(named[name], dim)
    return {name: _full(g).clone() for name, g in named.items()}


def dim_of(parameter: Tensor) -> int | None:
    """Return along which dimension a parameter is cut; None: all ranks have it."""
    (step,) = placed(parameter).steps
    return step.placement.dim if isinstance(step.placement, Shard) else None


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def whole_state(gpt: nn.Module) -> dict[str, Tensor]:
    if isinstance(gpt, TensorParallelGPT):
        return full_state_dict(gpt)
    return {name: _full(t).clone() for name, t in gpt.state_dict().items()}


def norm_of(gpt: nn.Module, clip: float) -> float:
    """Clip the gradients' norm; return it."""
    if isinstance(gpt, TensorParallelGPT):
        return float(gpt.clip_grad_norm_(clip))
    # PyTorch's clip_grad_norm_ refuses DTensors among plain tensors.
    norm = nn.utils.get_total_norm(list(gradients(gpt).values()))
    for parameter in gpt.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_((clip / (norm + 1e-6)).clamp(max=1.0))
    return float(norm)


def train(wrap: Callable[[GPT], nn.Module] | None, name: str = "plain") -> Trained:
    """Train for two steps of AdamW, clipped; without `wrap`, in one process."""
    gpt = model(name)
    gpt = gpt if wrap is None else wrap(gpt)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=0.01, eps=1e-4)
    run = Trained()
    for step in range(2):
        optimizer.zero_grad()
        _, loss = gpt(*batch(step))
        loss.backward()
        run.gradients.append(gradients(gpt))
        run.norms.append(norm_of(gpt, 0.5))
        optimizer.step()
        run.losses.append(loss.item())
        run.states.append({k: v.clone() for k, v in whole_state(gpt).items()})
    if isinstance(gpt, TensorParallelGPT):
        common = [p for p in gpt.parameters() if dim_of(p) is None]
        run.common = b"".join(p.detach().numpy().tobytes() for p in common)
    return run


# Sums over ranks add in another order: some 1e-6 of a gradient.
far_apart = partial(trained.far_apart, atol=1e-4, of_gradients=2e-5, losses=True)


def dtensor(gpt: GPT, sequence: bool = False) -> nn.Module:
    """Cut a GPT with PyTorch's own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(gpt, mesh, styles(gpt, True, sequence))


WRAPPERS: dict[str, Callable[[GPT], nn.Module]] = {
    "gloo": tensor_parallel,
    "sequence": partial(tensor_parallel, sequence_parallel=True),
    "ring": partial(tensor_parallel, all_reduce=collectives.ring_all_reduce),
}


class PutOff:
    """A loss whose backward computes the weights' gradients at the end."""

    def __init__(self, loss: Tensor, store: WeightGradStore) -> None:
        self.loss, self.store, self.item = loss, store, loss.item

    def backward(self) -> None:
        with self.store.collect() as tasks:
            self.loss.backward()
        assert len(tasks) == 4 * CONFIG.n_layer + 1  # all linear layers
        for task in tasks:
            task()


def piece_by_piece(gpt: GPT) -> TensorParallelGPT:
    """Cut it for ranks 0 and 2, and for 1 and 3; call it as a pipeline does."""
    group = make_groups(Mesh({"tp": 2, "dp": 2})).group("tp")
    parallel = tensor_parallel(gpt, group, sequence_parallel=True)
    store = WeightGradStore()
    for layer in parallel.modules():
        if hasattr(layer, "weight_grads"):
            layer.weight_grads = store

    def forward(x: Tensor, y: Tensor) -> tuple[None, PutOff]:
        for layer in [parallel.embed, *parallel.blocks, parallel.head]:
            x = layer(x)
        return None, PutOff(parallel.loss_fn(x, y), store)

    parallel.forward = forward
    return parallel


# ---- planted fakes: each is wrong in one way that is easy to overlook ----------------


class ForgetfulColumn(ColumnProduct):
    """Its backward misses the all-reduce."""

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        flat = gradient.flatten(0, -2)
        bias = flat.sum(0) if ctx.needs_input_grad[2] else None
        of_weight = flat.t() @ x.flatten(0, -2)
        return (flat @ weight).view_as(x), of_weight, bias, None


def norm_per_rank(parallel: TensorParallelGPT, max_norm: float) -> Tensor:
    """Clips what a rank has by the norm of what it has."""
    return own_norm_only(parallel.parameters(), max_norm)


def norm_counts_twice(parallel: TensorParallelGPT, max_norm: float) -> Tensor:
    """Adds up all ranks' squares, though some gradients are on all ranks."""
    square = sum(p.grad.square().sum() for p in parallel.parameters())
    dist.all_reduce(square)
    scale_gradients(parallel.parameters(), max_norm, square.sqrt())
    return square.sqrt()


def spoiled(at: str, wrong: Callable, **options: bool) -> Callable[[GPT], nn.Module]:
    """Return a way to make a parallel GPT with one layer's forward, or clipping, wrong.

    `wrong` is called with the layer, or with the model if `at` is none.
    """

    def wrap(gpt: GPT) -> TensorParallelGPT:
        parallel = tensor_parallel(gpt, **options)
        spoilt, name = (
            parallel.get_submodule(at),
            "forward" if at else "clip_grad_norm_",
        )
        setattr(spoilt, name, partial(wrong, spoilt))
        return parallel

    return wrap


def same_shard(gpt: GPT) -> TensorParallelGPT:
    """A row layer gets the same columns on all ranks."""
    parallel = tensor_parallel(gpt)
    dist.broadcast(parallel.blocks[0].mlp.down.weight.detach(), 0)
    return parallel


FAKES: dict[str, Callable[[GPT], nn.Module]] = {
    "column without all-reduce": spoiled(
        "blocks.1.mlp.up",
        lambda layer, x: layer.product(ForgetfulColumn, x, layer.bias),
    ),
    "bias by every rank": spoiled(
        "blocks.0.attn.proj",
        lambda own, x: RowProduct.apply(x, own.weight, own.bias * own.group.size, own),
    ),
    "logits of another scale": spoiled(
        "head.out", lambda own, x: type(own).forward(own, x) + own.group.rank
    ),
    "norm's own gradients": spoiled(
        "blocks.1.norm2",
        lambda own, x: F.layer_norm(x, own.shape, own.weight, own.bias, own.eps),
        sequence_parallel=True,
    ),
    "bias' own gradient": spoiled(
        "blocks.1.mlp.down",
        lambda own, x: RowProduct.apply(x, own.weight, None, own) + own.bias,
        sequence_parallel=True,
    ),
    "norm per rank": spoiled("", norm_per_rank),
    "norm counts twice": spoiled("", norm_counts_twice),
    "same shard on all ranks": same_shard,
}
