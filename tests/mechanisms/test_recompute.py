"""Recomputation: the same gradients to the bit, less memory, and nothing lost."""

import contextlib
import copy
import sys
from collections.abc import Callable
from functools import partial

import cloudpickle
import pytest
import torch
from on_ranks import launched
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trained import same

from ddp_course.measure import MemoryLog
from ddp_course.mechanisms.recompute import (
    NaiveRecompute,
    recompute,
    recompute_blocks,
)
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.theory import gpt_activations

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TINY = GPTConfig(vocab_size=11, block_size=16, n_layer=3, n_head=2, d_model=12)


class Block(nn.Module):
    """Dropout, a frozen and an unused parameter, a count of forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 9), nn.Linear(9, 6)
        self.frozen = nn.Parameter(torch.full((6,), 0.5), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.calls = 0

    def forward(self, x: Tensor, scale: float = 1.0, *, flags: dict | None = None):
        self.calls += 1
        h = torch.dropout(torch.tanh(self.one(x)), 0.4, True)
        h = self.two(h) * scale + self.frozen
        if flags is None:
            return h
        return {"both": [h, h.detach().argmax(-1)], "told": flags["told"]}


def plainly(function: Callable, *args, **kwargs):
    return function(*args, **kwargs)


def by_torch(function: Callable, *args, **kwargs):
    return checkpoint(function, *args, use_reentrant=False, **kwargs)


def by_reentrant_torch(function: Callable, *args, **kwargs):
    return checkpoint(function, *args, use_reentrant=True, **kwargs)


def gradients(how: Callable, block: Block, x: Tensor) -> tuple[list, Tensor, Tensor]:
    """Return parameters' gradients, the input's, and the next random number."""
    block.zero_grad()
    x = x.detach().requires_grad_()
    torch.manual_seed(3)
    out = how(block, how(block, x))
    torch.rand(5)  # the generator goes on between forward and backward
    before = torch.get_rng_state()
    out.square().sum().backward()
    assert torch.equal(torch.get_rng_state(), before)  # and backward leaves it alone
    return [p.grad for p in block.parameters()], x.grad, torch.rand(1)


@pytest.mark.parametrize("theirs", [plainly, by_torch, by_reentrant_torch])
def test_gradients_are_the_same_to_the_bit(theirs):
    torch.manual_seed(0)
    block, x = Block(), torch.randn(4, 6)
    expected, at_x, drawn = gradients(theirs, block, x)
    before = block.calls
    found, here, next_drawn = gradients(recompute, block, x)
    assert block.calls - before == 4  # twice forward, twice again
    assert torch.equal(here, at_x) and torch.equal(drawn, next_drawn)
    assert same(found, expected)
    assert [g is None for g in found].count(True) == 2  # frozen and unused


def test_arguments_and_results_of_any_form():
    block, x = Block(), torch.randn(4, 6, requires_grad=True)
    results = recompute(block, x, 2.0, flags={"told": "so"})
    assert results["told"] == "so" and results["both"][1].dtype == torch.int64
    assert not results["both"][1].requires_grad
    results["both"][0].sum().backward()
    assert x.grad is not None and block.calls == 2

    def pair(tensors: list[Tensor], number: int) -> tuple:
        a, b = tensors
        return a * b, (b + number, a), None, number

    a, b = (torch.randn(3, requires_grad=True) for _ in range(2))
    first, (second, same), none, number = recompute(pair, [a, b], number=7)
    assert none is None and number == 7
    (first.sum() + 2 * second.sum() + 3 * same.sum()).backward()
    assert torch.equal(a.grad, b.detach() + 3) and torch.equal(b.grad, a.detach() + 2)


def test_only_some_results_are_used():
    block, x = Block(), torch.randn(4, 6, requires_grad=True)
    twice = nn.Module()
    twice.block = block
    twice.forward = lambda x: (block(x), x * 2)
    recompute(twice, x)[1].sum().backward()
    assert torch.equal(x.grad, torch.full((4, 6), 2.0))
    assert block.one.weight.grad is None


def test_an_input_without_a_gradient_does_not_stop_the_parameters():
    block, x = Block(), torch.randn(4, 6)
    recompute(block, x).sum().backward()
    assert block.one.weight.grad is not None
    block.zero_grad()
    recompute(block.forward, x).sum().backward()  # a method of a module, too
    assert block.one.weight.grad is not None


def test_no_gradients_are_wanted():
    block, x = Block(), torch.randn(4, 6)
    with torch.no_grad():
        assert not recompute(block, x).requires_grad
    frozen = Block().requires_grad_(False)
    assert not recompute(frozen, x).requires_grad and frozen.calls == 1
    # A function of a frozen input is simply called: closures have their gradients.
    recompute(lambda x: block(x), x).sum().backward()
    assert block.one.weight.grad is not None and block.calls == 2


def test_autocast_is_as_it_was():
    block, x = Block(), torch.randn(4, 6, requires_grad=True)
    block.one.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    seen: list[torch.dtype] = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = recompute(block, x)
    out.float().sum().backward()
    assert seen == [torch.bfloat16] * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        recompute(block, x).float().sum()
        with torch.autocast("cpu", enabled=False):
            out = recompute(block, x)
        out.sum().backward()
    assert seen[-2:] == [torch.float32] * 2


def test_nested():
    torch.manual_seed(0)
    blocks, x = nn.Sequential(Block(), Block()), torch.randn(4, 6)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.calls = blocks, 0

        def forward(self, x: Tensor) -> Tensor:
            return recompute(blocks[1], recompute(blocks[0], x))

    expected, at_x, _ = gradients(plainly, blocks, x)
    found, here, _ = gradients(recompute, Outer(), x)
    assert torch.equal(at_x, here)
    assert same(found, expected)


def test_hooks_are_called_once_and_tied_parameters_add_up():
    def counted(how) -> tuple[list[str], list[Tensor]]:
        torch.manual_seed(0)
        block, seen = Block(), []
        block.two.weight = nn.Parameter(block.one.weight.detach().t().clone())
        other = nn.Linear(6, 6, bias=False)
        other.weight = nn.Parameter(torch.eye(6))
        for name, p in (("one", block.one.weight), ("other", other.weight)):
            p.register_hook(lambda g, name=name: seen.append(name) or 2 * g)
            p.register_post_accumulate_grad_hook(
                lambda p, name=name: seen.append(f"{name} is there")
            )
        x = how(other, how(block, how(other, torch.ones(2, 6))))  # `other` is tied
        x.sum().backward()
        return seen, [block.one.weight.grad, other.weight.grad]

    seen, found = counted(recompute)
    expected_seen, expected = counted(plainly)
    assert sorted(seen) == sorted(expected_seen) and len(seen) == 4
    assert same(found, expected)


def test_part_of_the_graph_can_be_asked_for():
    """What a backward inside of backward cannot do: PyTorch refuses it there."""
    block, x = Block(), torch.randn(4, 6, requires_grad=True)
    (found,) = torch.autograd.grad(recompute(block, x).sum(), block.two.bias)
    assert found.shape == (6,) and block.two.bias.grad is None
    out = recompute(block, x).sum()
    out.backward(inputs=[x], retain_graph=True)
    assert block.one.weight.grad is None
    out.backward()  # and once more
    assert block.one.weight.grad is not None
    with pytest.raises(RuntimeError, match="no gradient of its gradient"):
        torch.autograd.grad(recompute(block, x).sum(), x, create_graph=True)


def test_what_would_be_lost_is_an_error():
    block, x = Block(), torch.randn(4, 6, requires_grad=True)
    with pytest.raises(RuntimeError, match="used 4 parameter.s. that are neither"):
        recompute(lambda x: block(x), x).sum().backward()
    weight = torch.ones(6, requires_grad=True)
    recompute(lambda x, w: x * w, x, weight).sum().backward()  # an argument is seen
    assert weight.grad is not None
    with pytest.raises(TypeError, match="function is 3"):
        recompute(3, x)
    # As without recomputation: what was changed in between is not forward's any more.
    out = recompute(block, x).sum()
    with torch.no_grad():
        block.one.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


# ---- the naive version, and what is wrong with it ----------------------------------


def test_the_naive_version_has_the_gradients_and_the_faults_that_it_names():
    torch.manual_seed(0)
    block, x = nn.Linear(6, 6), torch.randn(4, 6, requires_grad=True)
    block(x).square().sum().backward()
    expected = block.weight.grad.clone()
    block.zero_grad()
    NaiveRecompute.apply(block, x).square().sum().backward()
    assert torch.equal(block.weight.grad, expected)

    assert not NaiveRecompute.apply(block, x.detach()).requires_grad
    out = NaiveRecompute.apply(block, x).sum()
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(out, block.weight)
    seen = []
    block.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    NaiveRecompute.apply(block, NaiveRecompute.apply(block, x)).sum().backward()
    assert len(seen) == 2  # with `recompute`, or without: 1


class Tied(nn.Module):
    """Two blocks of the same parameters, each recomputed in the way that is told."""

    def __init__(self, how: Callable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.how = Block(), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.block, self.how(self.block, x))


def under_ddp() -> list:
    import torch.distributed as dist

    from ddp_course.data_parallel import DistributedDataParallel

    found = []
    for how in (plainly, recompute, by_torch, NaiveRecompute.apply):
        ddp = DistributedDataParallel(Tied(how), find_unused_parameters=False)
        ddp.module.block.unused.requires_grad_(False)
        torch.manual_seed(dist.get_rank())
        x = torch.randn(4, 6, requires_grad=True)
        try:
            ddp(x).sum().backward()
        except RuntimeError as error:
            found.append(str(error))
        else:
            found.append(ddp.module.block.one.weight.grad.clone())
    return found


def test_ddp_averages_recomputed_blocks_but_not_naive_ones(two_ranks):
    for result in two_ranks["under_ddp"]:
        assert torch.equal(result[0], result[1]) and torch.equal(result[0], result[2])
        assert "got its gradient twice in one backward pass" in result[3]


def under_fully_shard(how: str) -> tuple[list[float], int] | str:
    """Return three losses, and the peak of activations; or the error."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model = build_gpt(TINY)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    if how == "inside":
        recompute_blocks(model)
    if how == "outside":
        model.embed.register_forward_hook(
            lambda module, args, x: recompute(model.blocks[0], x)
        )
    stepper, losses = torch.optim.AdamW(model.parameters()), []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        idx = torch.randint(0, 11, (2, 16), generator=generator)
        with MemoryLog(model) as log:
            loss = model(idx, idx)[1]
            try:
                loss.backward()
            except RuntimeError as error:
                return str(error)
        stepper.step()
        stepper.zero_grad()
        losses.append(loss.item())
    return losses, log.peak_of("activations")


def recomputed_in_places() -> list:
    return [under_fully_shard(how) for how in ("plain", "inside", "outside")]


def test_inside_of_blocks_of_fully_shard_and_not_outside(two_ranks):
    for plain, inside, outside in two_ranks["recomputed_in_places"]:
        (expected, before), (losses, peak) = plain, inside
        assert losses == expected and peak < 0.8 * before
        assert "that are neither its own nor in its arguments" in outside


two_ranks = launched(2, under_ddp, recomputed_in_places)


# ---- a whole model -----------------------------------------------------------------


def trained(model: nn.Module) -> tuple[dict[str, Tensor], MemoryLog]:
    idx = torch.arange(32).view(2, 16) % 11
    model.zero_grad()
    with MemoryLog(model) as log:
        loss = model(idx, idx)[1]
        kept = log.moments[-1].ledger["activations"]
        loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    log.kept = kept
    return grads, log


def test_blocks_of_a_model_keep_their_inputs_alone():
    model = build_gpt(TINY)
    names = list(model.state_dict())
    expected, before = trained(model)
    recompute_blocks(model)
    found, with_it = trained(model)
    copied, _ = trained(copy.deepcopy(model))
    with pytest.raises(ValueError, match="this Block has a forward of its own"):
        recompute_blocks(model)
    with pytest.raises(ValueError, match=r"no nn.ModuleList, .* put the modules"):
        recompute_blocks(nn.Linear(1, 1))
    assert list(model.state_dict()) == names
    assert same(found, expected) and same(copied, expected)
    whole = sum(gpt_activations(TINY, 2).values())
    less = sum(gpt_activations(TINY, 2, recompute="full").values())
    assert before.kept - with_it.kept == whole - less
    assert with_it.peak_of("activations") < 0.7 * before.peak_of("activations")


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_as_much_is_kept_as_by_torch(use_reentrant):
    model, found = build_gpt(TINY), []
    torch_checkpoint = partial(checkpoint, use_reentrant=use_reentrant)
    for how in (recompute, torch_checkpoint):
        for block in model.blocks:
            plain = type(block).forward.__get__(block)
            block.forward = partial(how, plain)
        found.append(trained(model))
    (grads, ours), (their_grads, theirs) = found
    assert same(grads, their_grads)
    assert ours.kept == theirs.kept
    # Without use_reentrant, theirs does not compute again the block's last sum and what
    # is added there: nobody has saved them.
    last = 0 if use_reentrant else 2 * 4 * 2 * 16 * TINY.d_model
    assert ours.peak_of("activations") <= theirs.peak_of("activations") + last


# ---- planted wrong versions --------------------------------------------------------


def nothing_around(*_, **__):
    return contextlib.nullcontext()


ROOM = "ddp_course.mechanisms.recompute"
SAME_BITS = partial(test_gradients_are_the_same_to_the_bit, plainly)
HOOKS = test_hooks_are_called_once_and_tied_parameters_add_up


@pytest.mark.parametrize(
    ("replaced", "by", "seen_by"),
    [
        ("torch.set_rng_state", lambda state: None, SAME_BITS),  # forgets the numbers
        ("torch.random.fork_rng", nothing_around, SAME_BITS),  # moves the generator
        (f"{ROOM}._without_hooks", nothing_around, HOOKS),  # calls hooks twice
    ],
)
def test_wrong_versions_are_caught(replaced, by, seen_by, monkeypatch):
    monkeypatch.setattr(replaced, by)
    with pytest.raises(AssertionError):
        seen_by()
