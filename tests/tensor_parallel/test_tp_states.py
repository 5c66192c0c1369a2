"""Whole states, other layouts, recomputation, random numbers, and what is refused."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_cases import batch, model, refused
from trained import same

from ddp_course.experts.gpt import build_mixture_gpt
from ddp_course.gpt_config import MixtureConfig
from ddp_course.launch import spawn
from ddp_course.mechanisms.exchange import MessageExchange
from ddp_course.mechanisms.recompute import recompute, recompute_blocks
from ddp_course.mechanisms.whole_state import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from ddp_course.model import cross_entropy
from ddp_course.pipeline import PipelineParallel
from ddp_course.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    parallel_rng,
    tensor_parallel,
    vocab_parallel_cross_entropy,
)

MIXTURE = MixtureConfig(
    vocab_size=24, block_size=12, n_layer=1, n_head=2, d_model=8, experts=2
)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in module.parameters() if p.ndim > 1]
    others = [p for p in module.parameters() if p.ndim <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-4)


def run(module: nn.Module, optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        module(*batch(step))[1].backward()
        optimizer.step()


@functools.cache
def of_one_process(name: str, steps: int) -> tuple[dict, dict]:
    module = model(name)
    optimizer = adamw(module)
    run(module, optimizer, range(steps))
    return module.state_dict(), optimizer.state_dict()


def continued(before: dict[str, tuple[dict, dict]]) -> dict[str, tuple]:
    """On every rank: go on from one process after 2 steps; return states after 4."""
    results = {}
    for name, (state, optimizer_state) in before.items():
        module = tensor_parallel(model(name, seed=5), sequence_parallel=name != "tied")
        fresh, plain = full_state_dict(module), model(name, seed=5).state_dict()
        assert same(fresh, plain) and list(fresh) == list(plain)
        optimizer = adamw(module)
        load_full_state_dict(module, state)
        load_full_optimizer_state_dict(module, optimizer, optimizer_state)
        read = full_state_dict(module), full_optimizer_state_dict(module, optimizer)
        run(module, optimizer, range(2, 4))
        after = full_state_dict(module), full_optimizer_state_dict(module, optimizer)
        results[name] = read, after
    return results


def test_states_go_on_from_one_process_and_back():
    before = {name: of_one_process(name, 2) for name in ("plain", "tied", "frozen")}
    ranks = spawn(continued, before, world_size=3, output="none", device="cpu")
    for result in ranks:
        for name, (read, after) in result.items():
            assert same(read, before[name]), name  # bit for bit
            module, optimizer = model(name), None
            optimizer = adamw(module)
            module.load_state_dict(after[0])  # another layout: one process
            optimizer.load_state_dict(after[1])
            assert same(after, of_one_process(name, 4), rtol=1e-4, atol=1e-4), name


# ---- the same numbers again ----------------------------------------------------------


class Dropped(nn.Module):
    """A parallel MLP with dropout inside of the region and outside; it keeps masks."""

    def __init__(self, inside) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.masks = inside, []
        self.up = ColumnParallelLinear(nn.Linear(12, 48))
        self.down = RowParallelLinear(nn.Linear(48, 12))

    def forward(self, x):
        h = self.up(x)
        with self.inside():
            mask = F.dropout(torch.ones_like(h), 0.5)
        out = self.down(h * mask)
        outer = F.dropout(torch.ones_like(out), 0.5)
        self.masks += [mask.detach(), outer.detach()]
        return out * outer


def dropped() -> dict[bool, tuple]:
    """On every rank: masks of two forwards and of a recomputation; gradients."""
    results = {}
    for right, inside in ((True, parallel_rng), (False, nullcontext)):
        module = Dropped(inside)
        x = torch.randn(64, 12, generator=torch.Generator().manual_seed(1))
        x.requires_grad_()
        gradients = []
        for again in (False, True):
            torch.manual_seed(3)
            y = recompute(module, x) if again else module(x)
            gradients += torch.autograd.grad(y.square().sum(), x)
        results[right] = module.masks, torch.equal(*gradients), torch.rand(())
    return results


def recomputed() -> list[float]:
    found = []
    for options in ({}, {"sequence_parallel": True}):
        norms = []
        for again in (False, True):
            module = tensor_parallel(model(), **options)
            if again:
                recompute_blocks(module)
            module(*batch(0))[1].backward()
            norms.append(module.clip_grad_norm_(1e9).item())
        found.append(norms[0] - norms[1])
    return found


def bf16_and_logits() -> tuple:
    """On every rank: a loss under autocast, logits, the norm."""
    gpt = model()
    module = tensor_parallel(model())
    with torch.autocast("cpu", torch.bfloat16):
        _, a = gpt(*batch(0))
        _, b = module(*batch(0))
    a.backward()
    b.backward()
    head = gpt.head.out.weight.grad.chunk(2)[dist.get_rank()]
    error = (head - module.head.out.weight.grad).abs().max() / head.abs().max()
    logits = [m(batch(1)[0])[0] for m in (model(), module)]
    whole = nn.utils.get_total_norm([q.grad for q in gpt.parameters()])
    norm = float(module.clip_grad_norm_(1e9) / whole)
    return abs(a - b).item(), error.item(), torch.allclose(*logits, atol=1e-5), norm


def check_dropout(a: dict, b: dict) -> None:
    for right in (True, False):
        masks, equal, number = a[right]
        others, others_equal, others_number = b[right]
        assert equal and others_equal  # recomputed, with the same masks
        assert torch.equal(number, others_number)
        insides = list(zip(masks[::2], others[::2], strict=True))
        outsides = list(zip(masks[1::2], others[1::2], strict=True))
        assert all(torch.equal(x, y) for x, y in outsides)
        # With the same seed inside, the masks of different columns repeat.
        assert all(torch.equal(x, y) != right for x, y in insides)
        share = torch.stack([x == y for x, y in insides]).float().mean()
        assert abs(share - 0.5) < 0.1 or not right  # as if they were independent


# ---- what is refused, on every rank --------------------------------------------------


def refusals() -> list[str]:
    """On every rank: the texts of what is raised; the ranks differ where told."""
    rank, cut = dist.get_rank(), tensor_parallel(model())
    sequence, hooked = tensor_parallel(model(), sequence_parallel=True), model()
    hooked.head.norm.bias.register_hook(lambda gradient: 2 * gradient)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0)
    factored = torch.optim.Adafactor(cut.parameters(), lr=0.01)
    cut(*batch(0))[1].backward()
    factored_state = adamw(cut)
    factored_state.state[next(cut.parameters())]["row_var"] = torch.zeros(2)
    x, y = batch(0)
    state = model().state_dict()
    attempts = [
        lambda: tensor_parallel(model(seed=rank)),
        lambda: tensor_parallel(model(), sequence_parallel=rank == 1),
        lambda: tensor_parallel(nn.Linear(2, 2) if rank else model()),
        lambda: tensor_parallel(cut),
        lambda: tensor_parallel(hooked),
        lambda: tensor_parallel(build_mixture_gpt(MIXTURE), sequence_parallel=True),
        lambda: cut(*batch(rank)),
        lambda: cut(x if rank else x[:1], y if rank else y[:1]),
        lambda: cut(x, y[:, :-1] if rank else y),
        lambda: cut(x + 100 * rank, y),
        lambda: cut(x, None if rank else y),
        lambda: sequence(x[:, :5], y[:, :5]),
        lambda: load_full_state_dict(
            cut, {k: v for k, v in state.items() if "head" not in k}
        ),
        lambda: load_full_state_dict(cut, state | {"head.out.weight": torch.zeros(2)}),
        lambda: full_optimizer_state_dict(cut, optimizer),
        lambda: PipelineParallel(cut, "gpipe", 2, loss_fn=cross_entropy),
        factored.step,
        lambda: full_optimizer_state_dict(cut, factored_state),
        lambda: load_full_optimizer_state_dict(cut, adamw(cut), {"state": 3}),
    ]
    expected = [
        "numbers of embed.tokens.weight",
        "argument sequence_parallel is False on rank 0, True on rank 1",
        "rank 1: model is a Linear; it must be a plain GPT",
        "model is a TensorParallelGPT; it must be a plain GPT",
        "head.norm.bias has a hook, which this rank's part of it would not have",
        "blocks.0.mlp.experts is a StackedExperts; with sequence_parallel each rank",
        "idx differs between the ranks. rank 0: int64 [3, 12] with digest",
        "the ranks make different calls",
        "rank 1: targets has shape (3, 11); the logits are for (3, 12)",
        "rank 1: idx holds the token",
        "the ranks make different calls",
        "T is 5, which 2 ranks cannot share equally; with sequence_parallel it",
        "the state_dict has no head.norm.weight, head.norm.bias, head.out.weight",
        "the state_dict has head.out.weight as [2]; it must be [24, 24]",
        "a tensor of shape [3] is no part of this model; use the model's parameters()",
        "tensor parallelism has cut the model, so loss_fn would get a part",
        "Adafactor, which cannot step parts of a tensor",
        "only states of the parameter's own shape",
        "this is no state_dict of an optimizer",
    ]
    results = refused(attempts, expected)
    return [*results, f"{cut(x, y)[1].item():.4f}"]  # and it still works


# ---- all of it, on two ranks ---------------------------------------------------------


def everything() -> tuple:
    return dropped(), recomputed(), bf16_and_logits(), refusals()


def test_dropout_recomputation_autocast_logits_and_what_is_refused():
    """Dropout differs inside, is the same outside and when recomputed; and the rest."""
    ranks = spawn(everything, world_size=2, output="none", device="cpu", timeout=100)
    (masks, _, _, results), (others, _, _, others_told) = ranks
    check_dropout(masks, others)
    for _, recomputed, (loss, gradient, logits, norm), _ in ranks:
        assert recomputed == [0.0] * 2
        assert loss < 0.01 and gradient < 0.05
        assert logits
        assert norm == pytest.approx(1.0, rel=0.02)
    assert results == others_told


# ---- without processes ---------------------------------------------------------------


def exchange_of_one(rank: int = 0) -> MessageExchange:
    """Return an exchange that sends nothing, for code that needs a rank."""
    alone = MessageExchange.__new__(MessageExchange)
    alone.group, alone.rank, alone.size, alone.waiting = None, rank, 1, nullcontext
    return alone


def test_random_numbers_of_a_region_seed_no_gpu_that_is_not_restored(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    with parallel_rng(exchange_of_one(rank=1)):
        torch.rand(())
    assert seeded == []


def test_a_second_derivative_of_the_cut_loss_is_refused():
    logits = torch.randn(3, 4, requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.arange(3), exchange_of_one())
    with pytest.raises(RuntimeError, match="create_graph=True: the gradient of a"):
        torch.autograd.grad(loss, logits, create_graph=True)
