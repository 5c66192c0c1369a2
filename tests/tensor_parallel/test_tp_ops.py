"""Operations, products, layers and loss of tensor parallelism, on small tensors."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_course.launch import spawn
from ddp_course.mechanisms.exchange import MessageExchange
from ddp_course.mechanisms.memory_exchange import MemoryExchange
from ddp_course.mechanisms.weight_gradients import WeightGradStore
from ddp_course.model import MLP, GPTConfig
from ddp_course.tensor_parallel import (
    ColumnParallelLinear,
    NaiveParallelMLP,
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
from ddp_course.tensor_parallel.layers import part_of

EXCHANGES = {"messages": MessageExchange, "memory": MemoryExchange}
WIDE = 12  # can be cut for 1, 2, 3 and 4 ranks


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


def pairs() -> dict[tuple[str, str], tuple[float, float]]:
    """On every rank: <A x, y> and <x, Aᵀ y>, of all ranks together."""
    rank, size = dist.get_rank(), dist.get_world_size()
    told = {}
    for way, make in EXCHANGES.items():
        group = make()
        for name, (op, before, after) in OPS.items():
            x = of_state(before, 1, rank, size).requires_grad_()
            y = of_state(after, 2, rank, size)
            out = op(x, group)
            out.backward(y)
            sides = torch.stack(
                [
                    inner(out.detach(), y, after, rank),
                    inner(x.detach(), x.grad, before, rank),
                ]
            )
            dist.all_reduce(sides)
            told[way, name] = tuple(sides.tolist())
    return told


# ---- products and layers -------------------------------------------------------------


def gradients_of(layer, x, gradient, store=None):
    """Return what a layer makes of x, and the gradients of x and its parameters."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    if store is not None:
        layer.weight_grads = store
    with store.collect() if store else nullcontext([]) as tasks:
        y = layer(x)
        y.backward(gradient)
    if store is not None:
        assert layer.weight.grad is None  # until somebody wants it
        for task in tasks:
            task()
        layer.weight_grads = None
    own = [p.grad for p in layer.parameters()]
    return [y.detach(), x.grad, *own]


def sequence_of(layer, group):
    """Return the readable layer as it is to be where the sequence is cut."""
    if isinstance(layer, ColumnParallelLinear):
        layer.forward = lambda x: F.linear(
            gather_sequence(x, group), layer.weight, layer.bias
        )
    else:
        layer.forward = lambda x: (
            scatter_sequence(F.linear(x, layer.weight), group)
            + copy_to_group(layer.bias, group)
        )
    return layer


def products() -> list[str]:
    """On every rank: compare a product in one operation with that of two."""
    wrong = []
    rank, size = dist.get_rank(), dist.get_world_size()
    full = nn.Linear(WIDE, WIDE)
    full.weight.data, full.bias.data = integers(3, WIDE, WIDE), integers(4, WIDE)
    kinds = [
        (ColumnParallelLinear, FusedColumnParallelLinear),
        (RowParallelLinear, FusedRowParallelLinear),
    ]
    for way, make in EXCHANGES.items():
        group = make()
        for (readable, fused), sequence in product(kinds, (False, True)):
            slow, fast = (
                readable(full, group),
                fused(full, group, sequence_parallel=sequence),
            )
            column = readable is ColumnParallelLinear
            whole, cut = (2, WIDE, WIDE), (2, WIDE // size, WIDE)
            own = (2, WIDE, WIDE // size)
            entered = cut if sequence else whole
            shapes = (entered, own) if column else (own, entered)
            common = not (column or sequence)  # all have the same gradient
            x = integers(5 + rank * (sequence or not column), *shapes[0])
            gradient = integers(6 + (0 if common else rank), *shapes[1])
            if sequence:
                slow = sequence_of(slow, group)
            expected = gradients_of(slow, x, gradient)
            for store in (None, WeightGradStore()):
                got = gradients_of(fast, x, gradient, store)
                if not all(
                    torch.equal(a, b) for a, b in zip(got, expected, strict=True)
                ):
                    wrong.append(f"{fused.__name__} {way} {sequence} {store}")
    return wrong + layers() + losses()


class Gathered(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return gather_from_group(self.layer(x), -1)


class Split(Gathered):
    def forward(self, x):
        return self.layer(split_to_group(x, -1))


def layers() -> list[str]:
    """On every rank: compare layers with the full ones."""
    wrong = []
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    mlp = MLP(GPTConfig(d_model=WIDE))
    no_bias, embedding = nn.Linear(WIDE, WIDE, bias=False), nn.Embedding(WIDE, 3)
    x = torch.randn(2, 5, WIDE, requires_grad=True)
    idx = torch.randint(WIDE, (2, 5))
    made = {
        "column without bias": (no_bias, Gathered(ColumnParallelLinear(no_bias)), x),
        "row without bias": (no_bias, Split(RowParallelLinear(no_bias)), x),
        "MLP of one row": (mlp, ParallelMLP(mlp), x[0, 0]),
        "embedding": (embedding, VocabParallelEmbedding(embedding), idx),
        "naive MLP": (mlp, NaiveParallelMLP(mlp), x),
        "MLP": (mlp, ParallelMLP(mlp), x),
        "MLP in memory": (mlp, ParallelMLP(mlp, MemoryExchange()), x),
    }
    for name, (plain, parallel, given) in made.items():
        for each in (x, *plain.parameters()):
            each.grad = None
        outs = []
        for layer in (plain, parallel):
            x.grad = None
            out = layer(given)
            out.square().sum().backward()
            outs.append((out.detach(), None if given is idx else x.grad.clone()))
        for a, b in zip(*outs, strict=True):
            if a is not None and not torch.allclose(a, b, atol=1e-5):
                wrong.append(f"{name} on rank {rank} of {size}")
        full_layers = dict(plain.named_modules())
        for name_of, layer in parallel.named_modules():
            for key, dim in getattr(layer, "CUTS", {}).items():
                own = getattr(layer, key)
                if own is not None:
                    whole = getattr(
                        full_layers[name_of.removeprefix("layer")], key
                    ).grad
                    part = part_of(whole, dim, layer.group)
                    if not torch.allclose(part, own.grad, atol=1e-5):
                        wrong.append(f"{name}: {name_of}.{key} on rank {rank}")
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


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_operations_layers_and_loss_are_those_of_one_process(n):
    ranks = spawn(everything, world_size=n, output="none", device="cpu", timeout=100)
    for transposed, wrong, told in ranks:
        for key, (forward, backward) in transposed.items():
            # Backward is the transpose of forward; whole numbers: no rounding.
            assert forward == backward != 0, key
        assert wrong == []
        if n == 2:
            check_refused(told)


def everything():
    return pairs(), products(), refused() if dist.get_world_size() == 2 else []


# ---- what cannot be ------------------------------------------------------------------


def refused() -> list[str]:
    told = []
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
        lambda: MemoryExchange().all_reduce(torch.zeros(3)),
    ]
    for attempt in attempts:
        try:
            attempt()
            told.append("nothing was raised")
        except (ValueError, RuntimeError) as error:
            told.append(str(error))
    return told


def check_refused(messages: list[str]) -> None:
    expected = [
        "7 rows of a weight cannot be cut into 2 equal parts; it can be 1, 7",
        "7 columns of a weight cannot be cut into 2",
        "only a plain embedding can be cut",
        "only a plain embedding can be cut",
        "has 5 entries, which 2 ranks cannot share equally; it must be a multiple of 2",
        "has 5 entries, which 2 ranks",
        "targets has shape (2, 2); the logits are for (2, 3)",
        "targets are from 8 to 8; tokens are 0 to 7, or -100 for none",
        "written into `buffer`",
    ]
    for told, part in zip(messages, expected, strict=True):
        assert part in told
