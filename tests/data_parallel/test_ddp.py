"""DistributedDataParallel trains as one process does, and as PyTorch's class does."""

import weakref
from fractions import Fraction
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ddp_cases import (
    FAKES,
    ROWS,
    SMALL_BUCKETS,
    WRAPPERS,
    Bucketed,
    Flat,
    Naive,
    OneTooEarly,
    Ours,
    Small,
    batch,
    train,
)
from modules import InAnyOrder
from on_ranks import launched
from torch import nn
from torch.utils.checkpoint import checkpoint
from trained import bits, far_apart, same

from ddp_course.collectives import ring_all_reduce
from ddp_course.launch import spawn
from ddp_course.measure import ByteMeter, TorchCollectives
from ddp_course.mechanisms.buckets import bucket_plan
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.theory import bytes_sent


def everything() -> dict[str, object]:
    """On every rank: train under every wrapper, right and planted."""
    return {name: train(wrap) for name, wrap in (WRAPPERS | FAKES).items()}


def test_the_same_training_as_one_process_and_as_pytorch():
    """On three ranks; one and two accumulate below."""
    results = spawn(everything, world_size=3, output="none")
    alone = train(None)
    for name in WRAPPERS:
        mine = [rank[name] for rank in results]
        assert not far_apart(mine[0], alone), name
        assert not far_apart(mine[0], results[0]["torch"]), name
        assert len({bits(rank) for rank in mine}) == 1, name
        assert "frozen.weight" not in mine[0].gradients[0]
        assert mine[0].gradients[0]["empty"].shape == (0, 3)
        assert all(rank.buffers["shift"][0] == 0.25 for rank in mine)  # rank 0's
    for name in FAKES:
        mine = [rank[name] for rank in results]
        seen = far_apart(mine[0], alone), len({bits(rank) for rank in mine}) > 1
        assert any(seen), f"{name} was not seen"


def accumulated() -> dict[str, object]:
    """On every rank: four microbatches in all, by ranks, by no_sync, or both."""
    n = dist.get_world_size()
    results = {"ranks": train(WRAPPERS["ours"])}
    for name in ("ours", "small buckets", "shared", "copied", "find", "torch"):
        micro = {1: 4, 2: 2}[n]
        results[name] = train(WRAPPERS[name], micro=micro)
    for name in ("bucketed", "small buckets", "copied", "find"):
        how = {"micro": 12 // n, "in_step": True}
        results[f"{name}, held"] = train(WRAPPERS[name], **how)
    if n == 2:
        fake = partial(OneTooEarly, **SMALL_BUCKETS)
        results["fake"] = train(fake, micro=2)
    return results


def half_in_no_sync() -> tuple[int, dict[str, torch.Tensor | None]]:
    """On every rank: two `step`s, the first of them in no_sync.

    Returns the number of all-reduces in the first, and the gradients after the second.
    """
    rank, n, model = dist.get_rank(), dist.get_world_size(), Small()
    ddp = Ours(model, **SMALL_BUCKETS)
    (x, y), rows = batch(0), ROWS // n
    x, y = (t[rank * rows : (rank + 1) * rows] for t in (x, y))
    with ddp.no_sync(), TorchCollectives() as calls:
        ddp.step(x[::2], y[::2], 1)
    ddp.step(x[1::2], y[1::2], 1)
    return calls.count("all_reduce"), gradients(model)


def test_a_step_in_no_sync_only_adds_up(three_ranks):
    (whole,) = train(None, steps=1).gradients
    for sent, got in three_ranks["half_in_no_sync"]:
        assert sent == 0  # buffers are sent, gradients are not
        for name, gradient in whole.items():
            if gradient is not None:
                torch.testing.assert_close(
                    got[name], 2 * gradient, rtol=1e-4, atol=1e-5
                )


def test_more_ranks_a_larger_batch_and_accumulation_are_the_same():
    alone = train(None)
    for n in (1, 2):
        results = spawn(accumulated, world_size=n, output="none")
        for name in results[0]:
            wrong = far_apart(results[0][name], alone) or (
                len({bits(rank[name]) for rank in results}) > 1
            )
            assert bool(wrong) == (name == "fake"), name


# ---- how many collectives, how many bytes ------------------------------------------

GPT = GPTConfig(block_size=8, n_layer=2, n_head=2, d_model=24)  # 16,000 parameters
CAPS = {"bucket_cap_mb": 0.02, "first_bucket_mb": 0.01}


def step(ddp: nn.Module) -> None:
    """Run forward and backward on this rank's own tokens."""
    x = torch.arange(16).view(2, 8) + dist.get_rank()
    ddp(x, x)[1].backward()


def counted() -> dict[str, tuple[int, int, int]]:
    """On every rank: collectives, their tensors' bytes, and bytes sent in a step."""
    got = {}

    def count(name, ddp, run=step):
        run(ddp)  # the first is to warm up
        with TorchCollectives() as calls, ByteMeter() as meter:
            run(ddp)
        got[name] = (calls.count("all_reduce"), calls.nbytes, meter.total_sent)

    count("ours", Ours(build_gpt(GPT), **CAPS))
    count("bucketed", Bucketed(build_gpt(GPT), **CAPS))
    count("find", Ours(build_gpt(GPT), find_unused_parameters=True, **CAPS))
    count("naive", Naive(build_gpt(GPT)))
    count("flat", Flat(build_gpt(GPT)))
    torch_ddp = nn.parallel.DistributedDataParallel(build_gpt(GPT), bucket_cap_mb=0.02)
    for _ in range(3):
        step(torch_ddp)
    count("torch", torch_ddp)
    count("ring", Ours(build_gpt(GPT), all_reduce=ring_all_reduce, **CAPS))
    silent = Ours(build_gpt(GPT), **CAPS)
    rings = Ours(build_gpt(GPT), all_reduce=ring_all_reduce, **CAPS)

    def without(ddp):
        with ddp.no_sync():
            step(ddp)

    count("no_sync", silent, without)
    count("no_sync, ring", rings, without)
    return got


def test_as_many_collectives_as_buckets_and_the_bytes_of_the_formula(three_ranks):
    n, model = 3, build_gpt(GPT)
    plan = bucket_plan(model.named_parameters(), **CAPS)
    nbytes = sum(p.nbytes for p in model.parameters())
    assert len(plan) > 2 and sum(bucket.nbytes for bucket in plan) == nbytes
    parameters = len(list(model.parameters()))
    for rank, got in enumerate(three_ranks["counted"]):
        assert got["ours"] == (len(plan), nbytes, 0)
        assert got["bucketed"] == got["find"] == (len(plan), nbytes, 0)
        assert got["naive"] == (parameters, nbytes, 0)
        assert got["flat"] == (1, nbytes, 0)
        assert got["torch"][1] == nbytes
        times = bytes_sent("all_reduce_ring", n)[rank]
        # A ring of n chunks is exact where n divides; here within a chunk's rounding.
        assert got["ring"][:2] == (0, 0)
        assert abs(got["ring"][2] - times * nbytes) <= 2 * (n - 1) * 4 * len(plan)
        assert Fraction(got["ring"][2], nbytes) == pytest.approx(times, rel=1e-2)
        assert got["no_sync"] == got["no_sync, ring"] == (0, 0, 0)


# ---- what else one may do ----------------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Linear(3, 4)
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x, which="ab"):
        h = torch.tanh(self.trunk(x))
        return {"a": self.a(h) if "a" in which else None, "b": [self.b(h), h]}


def two_heads(ddp: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = ddp(x)
    return out["a"], out["b"][0]


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        k: None if p.grad is None else p.grad.clone()
        for k, p in model.named_parameters()
    }


def rows(rank: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def ways_to_go_backward() -> dict[str, dict]:
    """On every rank: gradients after several forwards and backwards."""
    x, results = rows(dist.get_rank()), {}

    def fresh(**options):
        return Ours(TwoHeads(), **{**CAPS, "bucket_cap_mb": 1e-5, **options})

    def loss_a(out):
        return out["a"].square().sum()

    def loss_b(out):
        return out["b"][0].exp().sum()

    ddp = fresh()
    out = ddp(x)
    (loss_a(out) + loss_b(out)).backward()
    results["sum"] = gradients(ddp.module)
    ddp = fresh()
    out = ddp(x)
    loss_a(out).backward(retain_graph=True)
    loss_b(out).backward()
    results["two backwards"] = gradients(ddp.module)
    ddp(x)  # nothing is owed: the next forward is fine
    for find in (False, True):
        ddp = fresh(find_unused_parameters=find)
        out = ddp(x)
        loss = loss_a(out) + loss_b(out)
        loss.backward(retain_graph=True)
        loss.backward()
        results[f"twice, {find}"] = gradients(ddp.module)
        ddp = fresh(find_unused_parameters=find)
        one, two = ddp(x), ddp(2 * x)
        (loss_a(one) + loss_b(one) + loss_a(two) + loss_b(two)).backward()
        results[f"two forwards, {find}"] = gradients(ddp.module)
    ddp = fresh(find_unused_parameters=True)
    one, two = ddp(x), ddp(2 * x, "b")  # only the first reaches head a
    (loss_a(one) + loss_b(two)).backward()
    results["a of one, b of the other"] = gradients(ddp.module)
    ddp = fresh()
    with ddp.no_sync():
        out = ddp(x)
    (loss_a(out) + loss_b(out)).backward()  # the forward decides
    results["forward in no_sync"] = gradients(ddp.module)
    ddp = fresh()
    out = ddp(x)
    with ddp.no_sync():
        (loss_a(out) + loss_b(out)).backward()
    results["backward in no_sync"] = gradients(ddp.module)
    for reentrant in (True, False):
        ddp = fresh()
        heads = partial(two_heads, ddp)
        out = checkpoint(heads, x.clone().requires_grad_(), use_reentrant=reentrant)
        (out[0].square().sum() + out[1].exp().sum()).backward()
        results[f"recomputed, {reentrant}"] = gradients(ddp.module)
    ddp = fresh()
    with torch.no_grad():
        ddp(x)
    out = ddp.module(x)
    (loss_a(out) + loss_b(out)).backward()
    results["module"] = gradients(ddp.module)
    ddp = fresh()
    out = ddp(x)
    loss = loss_a(out) + loss_b(out)
    loss.backward(create_graph=True)
    results["create_graph"] = {k: g.detach() for k, g in gradients(ddp.module).items()}
    model = TwoHeads()
    ddp = Ours(model)
    ddp = Ours(model)  # wrapped again, as one does in a notebook
    with TorchCollectives() as calls:
        out = ddp(x)
        (loss_a(out) + loss_b(out)).backward()
    results["again"] = gradients(model)
    results["calls"] = [calls.count()]
    bucket = weakref.ref(ddp.engine.buckets[0])
    del ddp, out
    results["calls"].append(bucket() is None)  # no hook keeps the memory
    return results


def test_several_forwards_and_backwards(three_ranks):
    n = 3
    results = three_ranks["ways_to_go_backward"]

    def alone(rank, a=1.0, b=1.0):
        model = TwoHeads()
        loss_a = model(a * rows(rank))["a"].square().sum()
        (loss_a + model(b * rows(rank))["b"][0].exp().sum()).backward()
        return gradients(model)

    def mean(a=1.0, b=1.0):
        each = [alone(rank, a, b) for rank in range(n)]
        return {k: sum(g[k] for g in each) / n for k in each[0]}

    close = partial(same, rtol=1e-5)
    once, both = mean(), mean(2.0, 2.0)
    both = {k: once[k] + both[k] for k in once}
    twice = {k: 2 * g for k, g in once.items()}
    for rank, got in enumerate(results):
        mine = alone(rank)
        for way in ("sum", "two backwards", "backward in no_sync", "create_graph"):
            assert close(got[way], once), way
            assert not close(got[way], mine), way
        assert close(got["a of one, b of the other"], mean(1.0, 2.0))
        assert close(got["again"], once) and got["calls"] == [1, True]
        for find in (False, True):
            assert close(got[f"recomputed, {find}"], once)
            assert close(got[f"twice, {find}"], twice)
            assert close(got[f"two forwards, {find}"], both)
        for way in ("forward in no_sync", "module"):
            assert close(got[way], mine), way
        for way, gradient in got.items():
            if way != "calls" and way not in ("forward in no_sync", "module"):
                assert same(gradient, results[0][way]), way


def in_another_order() -> list[torch.Tensor]:
    """On every rank: gradients that come in another order than on the other ranks."""
    rank = dist.get_rank()
    ddp = Ours(InAnyOrder(3), bucket_cap_mb=1e-5)
    came = []
    for k, p in enumerate(ddp.module.parameters()):
        p.register_post_accumulate_grad_hook(lambda _, k=k: came.append(k))
    ddp(torch.ones(1, 2), [[0, 1, 2], [2, 0, 1], [1, 2, 0]][rank]).sum().backward()
    return [came, *(p.grad for p in ddp.parameters())]


def test_buckets_are_sent_in_one_order_whatever_the_order_of_the_gradients(three_ranks):
    results = three_ranks["in_another_order"]
    assert len({tuple(came) for came, *_ in results}) == 3
    for _, *gradients in results:
        for k, gradient in enumerate(gradients):
            assert torch.allclose(gradient, torch.full((2, 2), k + 1.0))


def like_pytorch() -> dict[str, object]:
    """On every rank: attributes, names, memory, and a module in channels_last."""
    theirs = nn.parallel.DistributedDataParallel(Small())
    ours = Ours(Small(), **SMALL_BUCKETS)
    results = {"names": list(ours.state_dict()) == list(theirs.state_dict())}
    results["prefix"] = all(name.startswith("module.") for name in ours.state_dict())
    try:
        ours.first  # noqa: B018
    except AttributeError as error:
        results["attribute"] = str(error)
    ours(batch(0)[0]).sum().backward()
    flats = [bucket.flat for bucket in ours.engine.buckets]
    results["views"] = all(
        any(p.grad.untyped_storage().data_ptr() == f.untyped_storage().data_ptr()
            for f in flats)
        for p in ours.parameters() if p.requires_grad and p.numel()
    )  # fmt: skip
    convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    ddp = Ours(convolution)
    ddp(torch.ones(1, 3, 5, 5)).sum().backward()
    results["strides"] = convolution.weight.grad.stride() == convolution.weight.stride()
    results["equal"] = torch.allclose(convolution.bias.grad, torch.full((4,), 9.0))
    return results


def test_names_attributes_and_memory_are_as_in_pytorch(three_ranks):
    for got in three_ranks["like_pytorch"]:
        assert "has no attribute 'first'" in got.pop("attribute")
        assert all(got.values()), got


three_ranks = launched(
    3, half_in_no_sync, counted, ways_to_go_backward, in_another_order, like_pytorch
)
