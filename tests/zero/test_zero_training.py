"""Stages 1 and 2 train as one process does, and as PyTorch's class does."""

from contextlib import ExitStack, nullcontext

import torch
import torch.distributed as dist
import trained
from modules import InAnyOrder
from on_ranks import launched
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import SGD
from trained import Trained, bits, far_apart
from zero_cases import (
    FAKES,
    OPTIMIZERS,
    SMALL,
    TINY,
    DecaysWhatIsUnused,
    LastPass,
    Make,
    Naive,
    Stage1,
    Stage2,
    adds_to_anything,
    of_reducer,
    options,
    pytorchs,
    same,
    train,
    with_ddp,
)

from ddp_course import collectives
from ddp_course.pipeline.pipeline_parallel import defer_averaging
from ddp_course.zero import Zero1, Zero2

WAYS: dict[str, dict] = {
    "naive": {"make": Naive},
    "naive, averaged": with_ddp(options(Naive, gradients="averaged")),
    "readable 1": {"make": options(Zero1, **SMALL)},
    "readable 1, ours": {"make": options(Zero1, **SMALL, collectives=collectives)},
    "readable 2": {"make": options(Zero2, **SMALL)},
    "one bucket": {"make": Stage1},
    "small": {"make": options(Stage1, **SMALL)},
    "2, one bucket": {"make": Stage2},
    "2, small": {"make": options(Stage2, **SMALL)},
    "2, one in flight": {"make": options(Stage2, **TINY, buckets_in_flight=1)},
    "2, many": {"make": options(Stage2, **TINY, buckets_in_flight=99)},
}
IN_GROUPS = ("small", "2, small", "2, one in flight")
ONE_TYPE = ("small", "2, small")
PYTORCHS = {**with_ddp(pytorchs), "one_type": True}
WITH_GROUPS = {"optimizer": "momentum", "groups": True, "clip": 0.05}


def everything() -> dict:
    """On every rank: train in all ways."""
    results = {way: train(**how) for way, how in WAYS.items()}
    results |= {(way, "groups"): train(**WAYS[way], **WITH_GROUPS) for way in IN_GROUPS}
    results |= {(way, "pytorch"): train(**WAYS[way], one_type=True) for way in ONE_TYPE}
    results["naive", "momentum"] = train(Naive, "momentum")
    results["pytorch"] = train(**PYTORCHS)
    results["pytorch", "groups"] = train(**PYTORCHS, **WITH_GROUPS)
    results |= {("fake", name): train(**fake) for name, fake in FAKES.items()}
    make = WAYS["small"]["make"]
    results |= {("of", name): train(make, name) for name in OPTIMIZERS}
    return results


def test_the_same_training_as_one_process_and_as_pytorch(three_ranks):
    results = three_ranks["everything"]
    alone, in_groups = train(None), train(None, **WITH_GROUPS)
    assert min(in_groups.norms) > 2 * WITH_GROUPS["clip"]  # it does clip

    def wrong(name, oracle: Trained):
        mine = [rank[name] for rank in results]
        return far_apart(mine[0], oracle) or len({bits(rank) for rank in mine}) > 1

    for way in WAYS:
        assert not wrong(way, alone), way
    assert not wrong(("naive", "momentum"), train(None, "momentum"))
    for way in IN_GROUPS:
        assert not wrong((way, "groups"), in_groups), way
    for way in ONE_TYPE:
        assert not wrong((way, "pytorch"), results[0]["pytorch"]), way
    assert not wrong(("pytorch", "groups"), train(None, **WITH_GROUPS, one_type=True))
    for name, fake in FAKES.items():
        arguments = {**fake, "make": None}
        assert wrong(("fake", name), train(**arguments)), f"{name} not seen"
    for name in OPTIMIZERS:  # any that treats each element alone
        assert not wrong(("of", name), train(None, name)), name


# ---- how gradients add up ------------------------------------------------------------


class Branches(nn.Module):
    """Layers of which a rank may use any."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x, used):
        return sum(self.layers[k](x * (k + 1)) for k in used).square().sum()


def rows(rank: int, pass_: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * rank + pass_))


# What happens in a step: (the layers that each rank uses, averaged?), pass by pass.
STEPS = {
    "all": [([0, 1, 2, 3], True)],
    "one is used by nobody": [([0, 1, 3], True)],
    "two passes": [([0, 1, 2], True), ([0, 1], True)],
    "no_sync before": [([0, 1, 3], False), ([0, 2], False), ([1, 2], True)],
    "no_sync between": [([0, 1], True), ([1, 2], False), ([0, 2], True)],
    "by rank": [("by rank", True), ([1, 2], True)],
    "by rank, no_sync": [("by rank", False), ("by rank", True)],
    "held": [([0, 1], "held"), ([1, 3], "held"), ("by rank", "held")],
    "held after a pass": [([0, 1], True), ([1, 2], "held"), ("by rank", "held")],
}


def layers_of(used, rank: int) -> list[int]:
    return [0, 1 + rank % 2] if used == "by rank" else used


def steps_of(make: Make | None, name: str, set_to_none: bool = True) -> list:
    """Return the parameters after each of two steps; momentum and decay tell.

    Without `make`: of one process that does what three ranks do.
    """
    model, n = Branches(), 3
    kwargs = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}
    make = make or (lambda params, cls, **defaults: cls(params, **defaults))
    opt = make(model.parameters(), SGD, **kwargs)
    alone, found = isinstance(opt, SGD), []
    for step in range(2):
        opt.zero_grad(set_to_none=set_to_none)
        with ExitStack() as stack:
            for k, (used, sync) in enumerate(STEPS["all" if step == 0 else name]):
                if sync == "held":
                    stack.enter_context(defer_averaging(model.parameters()))
                for rank in range(n) if alone else [dist.get_rank()]:
                    loss = model(rows(rank, k), layers_of(used, rank))
                    with opt.no_sync() if not sync and not alone else nullcontext():
                        (loss / n if alone else loss).backward()
        opt.step()
        found.append([p.detach().clone() for p in model.parameters()])
    return found


SEEN_IN = {  # the planted mistakes, and the steps that tell
    DecaysWhatIsUnused: ["one is used by nobody"],
    adds_to_anything: ["two passes", "no_sync between", "held after a pass"],
}


def adding_up() -> dict:
    results = {}
    for name, passes in STEPS.items():
        for to_none in (True, False):
            ways = {"one bucket": Stage1, "small": options(Stage1, **SMALL)}
            for fake, cases in SEEN_IN.items():
                if to_none and name in cases:
                    ways[fake.__name__] = fake
            if all(sync for _, sync in passes):
                for limit in (1, 2):
                    two = options(Stage2, **SMALL, buckets_in_flight=limit)
                    ways[f"stage 2, {limit}"] = two
            results[name, to_none] = {
                way: steps_of(make, name, to_none) for way, make in ways.items()
            }
    return results


def test_passes_add_up_and_what_is_unused_is_not_touched(three_ranks):
    results, fakes = three_ranks["adding_up"], {fake.__name__ for fake in SEEN_IN}
    for case in results[0]:
        oracle = steps_of(None, *case)
        for way, mine in results[0][case].items():
            if way in fakes:
                assert not same(mine, oracle), (case, way)
                continue
            assert same(mine, oracle), (case, way)
            for rank in results:
                assert trained.same(mine, rank[case][way]), (case, way)
    assert sum(way in fakes for case in results[0].values() for way in case) == 4


# ---- gradients in any order, in several passes ---------------------------------------


ORDERS = [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [1, 0, 4, 3, 2]]


def in_another_order(make) -> list:
    """The gradients of every rank come in an order of their own; two passes, twice."""
    model = InAnyOrder(5)
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
    ways["last pass"] = of_reducer(LastPass, **EACH)
    return {way: in_another_order(make) for way, make in ways.items()}


def test_gradients_may_come_in_any_order_and_passes_add_up(three_ranks):
    for rank in three_ranks["in_another_order_every_way"]:
        fake = rank.pop("last pass")
        assert torch.allclose(fake[0], torch.full((2, 2), 2.0))  # of 4
        for way, moved in rank.items():
            for k, difference in enumerate(moved):
                right = torch.full((2, 2), 4.0 * (k + 1))
                assert torch.allclose(difference, right), (way, k)


def windows() -> dict[str, list]:
    """On every rank: how many buckets have memory at each gradient, at most."""
    results = {}
    for limit in (1, 2, 3):
        model = InAnyOrder(5)
        opt = Stage2(model.parameters(), SGD, lr=1.0, **EACH, buckets_in_flight=limit)
        reducer, seen = opt.reducer, []
        for p in model.parameters():
            # As late as the engine's own hook, and after it.
            get_gradient_edge(p).node.register_hook(
                lambda *_, p=p, seen=seen, reducer=reducer: seen.append(
                    (len(reducer.opened), p.grad is None)
                )
            )
        for _ in range(2):
            opt.zero_grad()
            model(torch.ones(1, 2), ORDERS[dist.get_rank()]).sum().backward()
            opt.step()
        memory = [b.flat.untyped_storage().nbytes() for b in opt.engine.buckets]
        results[limit] = seen, memory
    return results


def test_no_more_buckets_than_allowed_have_memory_and_none_afterwards(three_ranks):
    for rank, result in enumerate(three_ranks["windows"]):
        for limit, (seen, memory) in result.items():
            assert len(seen) == 10
            assert max(opened for opened, _ in seen) <= limit
            assert memory == [0] * 5
            parked = sum(not moved for _, moved in seen)
            # Once rank 0's order is known, its own gradients never come too early.
            if rank == 0:
                assert all(moved for _, moved in seen[5:]), (limit, seen)
            elif limit == 1:
                assert parked > 0


three_ranks = launched(3, everything, adding_up, in_another_order_every_way, windows)
