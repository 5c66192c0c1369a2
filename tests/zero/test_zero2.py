"""ShardedGradientOptimizer: the same training, and no whole gradients anywhere."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from zero_cases import (
    SMALL,
    TINY,
    Stage2,
    bits,
    far_apart,
    options,
    pytorchs,
    train,
    with_ddp,
)

from ddp_course.launch import spawn
from ddp_course.zero.window import WindowReducer

WAYS = {
    "one bucket": options(Stage2),
    "small": options(Stage2, **SMALL),
    "one in flight": options(Stage2, **TINY, buckets_in_flight=1),
    "three": options(Stage2, **TINY, buckets_in_flight=3),
    "many": options(Stage2, **TINY, buckets_in_flight=99),
    "shared": options(Stage2, **TINY, buckets_in_shared_memory=True),
    "one shared": options(Stage2, **SMALL, buckets_in_flight=1,
                          buckets_in_shared_memory=True),
}  # fmt: skip
IN_GROUPS = ("one bucket", "one in flight", "shared")
WITH_GROUPS = {"optimizer": "momentum", "groups": True, "clip": 0.05}


# ---- planted fakes -------------------------------------------------------------------


class NoMean(Stage2):
    def make_reducer(self):
        reducer = super().make_reducer()
        reducer.scale = 1.0
        return reducer


class NotOwn(WindowReducer):
    """Everyone takes its part of what it has sent, not of what has been reduced."""

    def finish(self, bucket):
        if bucket in self.opened:
            own = bucket.own.clone()
            super().finish(bucket)
            self.shards[bucket].copy_(own)


class TooEarly(WindowReducer):
    """A bucket gives its memory back when it is launched, not when it has arrived."""

    def launch(self, bucket, output):
        super().launch(bucket, output)
        bucket.flat.zero_()


class LastPass(WindowReducer):
    """The mean of a pass takes the place of that of the pass before."""

    def launch(self, bucket, output):
        self.shards.pop(bucket, None)
        super().launch(bucket, output)


def faked(reducer: type[WindowReducer], **more) -> type[Stage2]:
    class Fake(Stage2):
        def make_reducer(self):
            return reducer(self.process_group, self.reduce_scatter, 2)

    return options(Fake, **more)


FAKES = {
    "no mean": (options(NoMean, **SMALL), {"optimizer": "momentum"}),
    "not own": (faked(NotOwn, **SMALL), {}),
    "too early": (faked(TooEarly, bucket_cap_mb=4), {}),
}


def everything() -> dict:
    told = {way: train(make) for way, make in WAYS.items()}
    told |= {(way, "groups"): train(WAYS[way], **WITH_GROUPS) for way in IN_GROUPS}
    told["one type"] = train(WAYS["small"], one_type=True)
    told["pytorch"] = train(**with_ddp(pytorchs), one_type=True)
    if dist.get_world_size() > 2:
        told |= {("fake", name): train(m, **kw) for name, (m, kw) in FAKES.items()}
    return told


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_same_training_as_one_process_and_as_pytorch(n):
    told = spawn(everything, world_size=n, output="none")
    alone, in_groups = train(None), train(None, **WITH_GROUPS)

    def wrong(name, oracle):
        mine = [rank[name] for rank in told]
        return far_apart(mine[0], oracle) or len({bits(rank) for rank in mine}) > 1

    for way in WAYS:
        assert not wrong(way, alone), way
        assert way not in IN_GROUPS or not wrong((way, "groups"), in_groups), way
    assert not wrong("one type", told[0]["pytorch"])
    for name, (_, kwargs) in FAKES.items():
        if n > 2:
            assert wrong(("fake", name), train(None, **kwargs)), name


# ---- gradients in any order, in several passes ---------------------------------------


class Branches(nn.Module):
    """Equal branches; the order of forward decides that of the gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(5))

    def forward(self, x, order):
        outputs = {k: (k + 1) * self.branches[k](x) for k in order}
        return sum(outputs[k] for k in range(5))


ORDERS = [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [1, 0, 4, 3, 2]]


def in_another_order(make) -> list:
    """The gradients of every rank come in an order of their own; two passes, twice."""
    model = Branches()
    opt = make(model.parameters(), SGD, lr=1.0)
    start = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        opt.zero_grad()
        for _ in range(2):
            model(torch.ones(1, 2), ORDERS[dist.get_rank()]).sum().backward()
            assert all(p.grad is None for p in model.parameters())
        opt.step()
    end = [p.detach() for p in model.parameters()]
    return [s - e for s, e in zip(start, end, strict=True)]


EACH = {"bucket_cap_mb": 1e-5}  # a bucket for each parameter


def in_another_order_every_way() -> dict[str, list]:
    ways = {str(k): options(Stage2, **EACH, buckets_in_flight=k) for k in (1, 2, 4, 9)}
    ways["shared"] = options(Stage2, **EACH, buckets_in_shared_memory=True)
    ways["last pass"] = faked(LastPass, **EACH)
    return {way: in_another_order(make) for way, make in ways.items()}


def test_gradients_may_come_in_any_order_and_passes_add_up():
    told = spawn(in_another_order_every_way, world_size=3, output="none")
    for rank in told:
        fake = rank.pop("last pass")
        assert torch.allclose(fake[0], torch.full((2, 2), 2.0))  # of 4
        for way, moved in rank.items():
            for k, difference in enumerate(moved):
                right = torch.full((2, 2), 4.0 * (k + 1))
                assert torch.allclose(difference, right), (way, k)


def windows() -> dict[str, list]:
    """On every rank: how many buckets have memory at each gradient, at most."""
    told = {}
    for limit in (1, 2, 3):
        model = Branches()
        opt = Stage2(model.parameters(), SGD, lr=1.0, **EACH, buckets_in_flight=limit)
        reducer, seen = opt.reducer, []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(
                lambda p, seen=seen, reducer=reducer: seen.append(
                    (len(reducer.opened), p.grad is None)
                )
            )
        for _ in range(2):
            opt.zero_grad()
            model(torch.ones(1, 2), ORDERS[dist.get_rank()]).sum().backward()
            opt.step()
        memory = [b.flat.untyped_storage().nbytes() for b in reducer.buckets]
        told[limit] = seen, memory
    return told


def test_no_more_buckets_than_allowed_have_memory_and_none_afterwards():
    for rank, told in enumerate(spawn(windows, world_size=3, output="none")):
        for limit, (seen, memory) in told.items():
            assert len(seen) == 10
            assert max(opened for opened, _ in seen) <= limit
            assert memory == [0] * 5
            parked = sum(not moved for _, moved in seen)
            # Once rank 0's order is known, its own gradients never come too early.
            if rank == 0:
                assert all(moved for _, moved in seen[5:]), (limit, seen)
            elif limit == 1:
                assert parked > 0
