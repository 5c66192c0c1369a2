"""Operations, products, layers and loss of tensor parallelism, on small tensors."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_cases import refused

from ddp_course.launch import spawn
from ddp_course.mechanisms.exchange import MessageExchange
from ddp_course.model import MLP, GPTConfig
from ddp_course.pipeline.backward import WeightGradStore
from ddp_course.tensor_parallel import (
    ColumnParallelLinear,
    NaiveColumnLinear,
    NaiveParallelMLP,
    NaiveRowLinear,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_group,
    gather_from_group,
    gather_sequence,
    reduce_from_group,
    scatter_sequence,
    split_to_group,
    vocab_parallel_cross_entropy,
)
from ddp_course.tensor_parallel.fused import (
    FusedColumnParallelLinear,
    FusedRowParallelLinear,
)

WIDE = 12  # can be cut for 1, 2 and 3 ranks


def integers(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float()


# ---- backward is the transpose of forward --------------------------------------------

# name -> (operation, the state of what it takes, of what it returns)
OPS = {
    "copy_to_group": (copy_to_group, "replicated", "different"),
    "reduce_from_group": (reduce_from_group, "different", "replicated"),
    "split_to_group": (lambda x, g: split_to_group(x, 1, g), "replicated", "cut"),
    "gather_from_group": (lambda x, g: gather_from_group(x, 1, g), "cut", "replicated"),
    "gather_sequence": (gather_sequence, "cut", "different"),
    "scatter_sequence": (scatter_sequence, "different", "cut"),
}


def of_state(state: str, seed: int, rank: int, size: int) -> torch.Tensor:
    """Return this rank's tensor of some state: (2, 12, 3), or its part."""
    if state == "different":
        return integers(seed + 100 * rank, 2, WIDE, 3)
    whole = integers(seed, 2, WIDE, 3)
    return whole.chunk(size, 1)[rank].contiguous() if state == "cut" else whole


def inner(a: torch.Tensor, b: torch.Tensor, state: str, rank: int) -> torch.Tensor:
    """Return this rank's share of <a, b>: what all ranks have counts once."""
    return (a * b).sum() * (1.0 if state != "replicated" or rank == 0 else 0.0)


def pairs() -> dict[str, tuple[float, float]]:
    """On every rank: <A x, y> and <x, Aᵀ y>, of all ranks together."""
    rank, size = dist.get_rank(), dist.get_world_size()
    results = {}
    for name, (op, before, after) in OPS.items():
        x = of_state(before, 1, rank, size).requires_grad_()
        y = of_state(after, 2, rank, size)
        out = op(x, None)
        out.backward(y)
        sides = torch.stack(
            [
                inner(out.detach(), y, after, rank),
                inner(x.detach(), x.grad, before, rank),
            ]
        )
        dist.all_reduce(sides)
        results[name] = tuple(sides.tolist())
    return results


# ---- products and layers -------------------------------------------------------------


def gradients_of(layer, way, x, gradient, store=None):
    """Return what a way through a layer makes of x, and all gradients."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    layer.weight_grads = store
    with store.collect() if store else nullcontext([]) as tasks:
        y = way(x)
        y.backward(gradient)
    for task in tasks:
        assert layer.weight.grad is None  # until somebody wants it
        task()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def slowly(layer, x):
    """Do what a fused layer says it does, in several operations."""
    column = isinstance(layer, ColumnParallelLinear)
    if not layer.sequence_parallel:
        return (ColumnParallelLinear if column else RowParallelLinear).forward(layer, x)
    if column:
        return F.linear(gather_sequence(x, layer.group), layer.weight, layer.bias)
    y = scatter_sequence(F.linear(x, layer.weight), layer.group)
    return y + copy_to_group(layer.bias, layer.group)


def products() -> list[str]:
    """On every rank: compare a product in one operation with that of several."""
    wrong = []
    rank, size = dist.get_rank(), dist.get_world_size()
    full = nn.Linear(WIDE, WIDE)
    full.weight.data, full.bias.data = integers(3, WIDE, WIDE), integers(4, WIDE)
    kinds = FusedColumnParallelLinear, FusedRowParallelLinear
    for kind, sequence in product(kinds, (False, True)):
        layer = kind(full, sequence_parallel=sequence)
        outside = (2, WIDE // size if sequence else WIDE, WIDE), sequence
        inside = (2, WIDE, WIDE // size), True  # other numbers on each rank
        ends = (outside, inside) if kind is kinds[0] else (inside, outside)
        x, gradient = (
            integers(5 + i + 10 * rank * differs, *shape)
            for i, (shape, differs) in enumerate(ends)
        )
        expected = gradients_of(layer, partial(slowly, layer), x, gradient)
        for store in (None, WeightGradStore()):
            got = gradients_of(layer, layer, x, gradient, store)
            if not all(map(torch.equal, got, expected)):
                wrong.append(f"{kind.__name__} {sequence} {store}")
    return wrong


class Gathered(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return gather_from_group(self.layer(x), -1)


class Split(Gathered):
    def forward(self, x):
        return self.layer(split_to_group(x, -1))


def cuts_of(layer):
    """Return along which dimension each parameter of a layer is cut."""
    naive = {"weight": 1, "bias": None}
    if isinstance(layer, NaiveColumnLinear):
        naive = {"weight": 0, "bias": 0}
    return getattr(layer, "CUTS", naive)


def layers() -> list[str]:
    """On every rank: compare layers with the full ones."""
    wrong = []
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    mlp = MLP(GPTConfig(d_model=WIDE))
    no_bias, embedding = nn.Linear(WIDE, WIDE, bias=False), nn.Embedding(WIDE, 3)
    x, idx = torch.randn(2, 5, WIDE), torch.randint(WIDE, (2, 5))
    operations = {
        "column without bias": (no_bias, Gathered(ColumnParallelLinear(no_bias)), x),
        "row without bias": (no_bias, Split(RowParallelLinear(no_bias)), x),
        "MLP of one row": (mlp, ParallelMLP(mlp), x[0, 0]),
        "embedding": (embedding, VocabParallelEmbedding(embedding), idx),
        "naive MLP": (mlp, NaiveParallelMLP(mlp), x),
        "MLP": (mlp, ParallelMLP(mlp), x),
        "naive column": (mlp.up, NaiveColumnLinear(mlp.up), x),
        "naive row": (mlp.up, NaiveRowLinear(mlp.up), x),
    }
    for name, (plain, parallel, inputs) in operations.items():
        plain.zero_grad()
        ends = []
        for layer in (plain, parallel):
            x = inputs.clone().requires_grad_(inputs is not idx)
            out = layer(x)
            out.square().sum().backward()
            ends.append([out.detach()] if inputs is idx else [out.detach(), x.grad])
        pairs = list(zip(*ends, strict=True))
        for key, own in parallel.named_parameters():
            module, _, last = key.rpartition(".")
            dim = cuts_of(parallel.get_submodule(module))[last]
            whole = plain.get_parameter(key.removeprefix("layer.")).grad
            part = whole if dim is None else whole.chunk(size, dim)[rank]
            pairs.append((part, own.grad))
        if not all(torch.allclose(a, b, atol=1e-5) for a, b in pairs):
            wrong.append(f"{name} on rank {rank} of {size}")
    return wrong


def losses() -> list[str]:
    """On every rank: compare the loss with PyTorch's, on logits that are hard."""
    wrong = []
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype, scale, atol in (
        (torch.float32, 1.0, 1e-6),
        (torch.float32, 200.0, 1e-4),  # exp overflows without the maximum
        (torch.float64, 1.0, 1e-12),
        (torch.bfloat16, 1.0, 1e-2),
    ):
        torch.manual_seed(1)
        logits = (scale * torch.randn(2, 7, WIDE)).to(dtype).requires_grad_()
        targets = torch.randint(WIDE, (2, 7))
        targets[0, :2], targets[1, 3] = -100, 0
        own = logits.detach().chunk(size, -1)[rank].clone().requires_grad_()
        for ignored in (-100, 0):
            chosen = targets.clamp(min=0) if ignored == 0 else targets
            whole = F.cross_entropy(
                logits.flatten(0, 1).to(dtype), chosen.flatten(), ignore_index=ignored
            )
            mine = vocab_parallel_cross_entropy(own, chosen, ignore_index=ignored)
            (a,) = torch.autograd.grad(whole, logits)
            (b,) = torch.autograd.grad(mine, own)
            part = a.chunk(size, -1)[rank]
            if not torch.allclose(
                whole.double(), mine.double(), atol=atol, rtol=1e-5 + atol
            ):
                wrong.append(f"loss {dtype} {scale} {ignored}: {whole} {mine}")
            if b.dtype != dtype or not torch.allclose(part, b, atol=atol):
                wrong.append(f"gradient {dtype} {scale} {ignored}")
    nothing = torch.full((2, 7), -100)
    if not vocab_parallel_cross_entropy(own, nothing).isnan():
        wrong.append("a mean of nothing")
    three, exact = torch.tensor(3), logits.detach()[0, 0].double()
    alone = vocab_parallel_cross_entropy(own.detach()[0, 0].double(), three)
    if not torch.allclose(alone, F.cross_entropy(exact, three)):
        wrong.append("one row alone")
    return wrong


@pytest.mark.parametrize("n", [1, 2, 3])
def test_operations_layers_and_loss_are_those_of_one_process(n):
    ranks = spawn(everything, world_size=n, output="none", device="cpu", timeout=100)
    for transposed, bad, result in ranks:
        for key, (forward, backward) in transposed.items():
            # Backward is the transpose of forward; whole numbers: no rounding.
            assert forward == backward != 0, key
        assert bad == []
        assert result == ranks[0][2]


def everything():
    bad = products() + layers() + losses()
    return pairs(), bad, wrong() if dist.get_world_size() == 2 else []


# ---- what cannot be ------------------------------------------------------------------


def wrong() -> list[str]:
    group = MessageExchange()
    attempts = [
        lambda: ColumnParallelLinear(nn.Linear(4, 7), group),
        lambda: RowParallelLinear(nn.Linear(7, 4), group),
        lambda: VocabParallelEmbedding(nn.Embedding(8, 2, padding_idx=0), group),
        lambda: VocabParallelEmbedding(
            nn.Embedding(8, 2, scale_grad_by_freq=True), group
        ),
        lambda: split_to_group(torch.zeros(2, 5), 1, group),
        lambda: scatter_sequence(torch.zeros(2, 5, 3), group),
        lambda: vocab_parallel_cross_entropy(
            torch.zeros(2, 3, 4), torch.zeros(2, 2).long()
        ),
        lambda: vocab_parallel_cross_entropy(torch.zeros(1, 4), torch.tensor([8])),
    ]
    expected = [
        "has 7 entries, which 2 ranks cannot share equally",
        "dimension 1 of a tensor of shape (4, 7) has 7 entries",
        "only a plain embedding can be cut",
        "only a plain embedding can be cut",
        "5 entries, which 2 ranks cannot share equally; it must be a multiple of 2",
        "has 5 entries, which 2 ranks",
        "targets has shape (2, 2); the logits are for (2, 3)",
        "targets are from 8 to 8; tokens are 0 to 7; -100 is ignored",
    ]
    return refused(attempts, expected)
