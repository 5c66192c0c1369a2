"""What cannot be averaged is refused on every rank, and nothing hangs."""

import torch
import torch.distributed as dist
from ddp_cases import Ours, Small, UnusedIgnored, batch
from modules import Branches, Fails
from on_ranks import assert_refused, error_of, launched, tried
from torch import nn
from trained import same

from ddp_course.collectives import ring_all_reduce
from ddp_course.mechanisms.agreement import differences


def frozen(model: nn.Module, odd: bool) -> nn.Module:
    model[0].bias.requires_grad_(not odd)
    return model


def stepped_in_backward() -> nn.Module:
    model = nn.Linear(3, 3)
    # What `torch.distributed.optim._apply_optimizer_in_backward` leaves there.
    model.weight._in_backward_optimizers = [torch.optim.SGD([model.weight])]
    return model


def expanded() -> nn.Module:
    model = nn.Linear(3, 3)
    model.register_buffer("wide", torch.zeros(3).expand(4, 3))
    return model


def constructions(odd: bool) -> dict:
    """Return what cannot be constructed, by words of the error. Rank 1 is odd."""
    two = [nn.Linear(3, 4), nn.Linear(4, 2)]
    other = nn.Linear(3, 5) if odd else two[0]
    buffered = nn.BatchNorm1d(3, track_running_stats=not odd)
    in_turn = ring_all_reduce if odd else None
    once = Ours(nn.Linear(3, 3))

    def one(module=two[0], cls=Ours, **options):
        return lambda: cls(module, **options)

    return {
        "*ranks differ*0.weight is float32 [4, 3] on cpu, requires_grad=True on "
        "ranks 0, 2, float32 [5, 3]*on rank 1; 0.bias is*": one(nn.Sequential(other)),
        "*1.weight is float32*on ranks 0, 2, missing on rank 1*": one(
            nn.Sequential(*two[: 1 if odd else 2])
        ),
        "*weight is float32*on ranks 0, 2, float64*on rank 1*": one(
            nn.Linear(3, 4, dtype=torch.float64 if odd else None)
        ),
        "*0.bias is *=True on ranks 0, 2*requires_grad=False on rank 1*": one(
            frozen(nn.Sequential(nn.Linear(3, 4)), odd)
        ),
        "*buffer running_mean*missing on rank 1*": one(buffered),
        "*argument bucket_cap_mb is 25 on ranks 0, 2, 5 on rank 1*": one(
            bucket_cap_mb=5 if odd else 25
        ),
        "*argument all_reduce is*all_reduce*on ranks 0, 2*(*ring*rank 1*": one(
            all_reduce=in_turn
        ),
        "*rank 1: module is a list; it must be a torch.nn.Module*": one(
            [] if odd else nn.Linear(3, 3)
        ),
        "*ranks 0, 1, 2: the module has no parameter that requires a gradient*": one(
            nn.ReLU()
        ),
        "*bucket_cap_mb is 0; it must be a number of MiB above 0*": one(
            bucket_cap_mb=0
        ),
        "*all_reduce is 'ring'; it must be a function*": one(all_reduce="ring"),
        "*rank 1: weight has no shape yet*": one(
            nn.LazyLinear(3) if odd else nn.Linear(3, 3)
        ),
        "*meta device*": one(nn.Linear(3, 3, device="meta")),
        "*device_ids is [0], but the module is on the CPU*": one(device_ids=[0]),
        "*output_device is [1], but the module is on the CPU*": one(output_device=1),
        "*an optimizer steps weight in backward*": one(stepped_in_backward()),
        "*argument static_graph is False on ranks 0, 2, True on rank 1*": one(
            static_graph=odd
        ),
        "*contains, a DistributedDataParallel*wrap the plain module once*": one(
            nn.Sequential(once, nn.ReLU())
        ),
        "*ranks 0, 1, 2: the module is, or contains, a DistributedDataParallel*": one(
            nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
        ),
        "*0 is a SyncBatchNorm, which PyTorch has on GPUs only*": one(
            nn.Sequential(nn.SyncBatchNorm(3, affine=False), nn.Linear(3, 3))
        ),
        "*ranks 0, 1, 2: wide is expanded*Give the module its .clone()*": one(
            expanded()
        ),
        "*0 has sparse gradients*": one(nn.Sequential(nn.Embedding(3, 3, sparse=True))),
    }


def refused() -> dict[str, str]:
    return tried(constructions(dist.get_rank() == 1))


def test_wrong_constructions_are_refused_on_every_rank_and_nothing_is_sent(three_ranks):
    """And the ranks can go on: what the tests below look at comes after that."""
    assert_refused(three_ranks["refused"])


def test_differences_are_told_in_order_and_not_all_of_them():
    forms = [{f"p{k}": "a" for k in range(9)}, {f"p{k}": "b" for k in range(9)}]
    error = differences(forms, [4, 7])
    assert error.startswith("the ranks differ. p0 is a on rank 4, b on rank 7; p1 is")
    assert error.endswith("p4 is a on rank 4, b on rank 7; and 4 more")
    turned = [{"p": "a", "q": "a"}, {"q": "a", "p": "a"}]
    assert "another order: rank 0: p q; rank 1: q p" in differences(turned, [0, 1])


# ---- unused parameters -------------------------------------------------------------


TINY = {"bucket_cap_mb": 1e-5}


def loss_of(outputs):
    return sum(out.square().sum() for out in outputs)


def unused() -> dict[str, object]:
    """On every rank: what happens if some experts do not work."""
    me, x, results = dist.get_rank(), torch.ones(1, 3), {}

    def step(ddp, which):
        return lambda: loss_of(ddp(x, which)).backward()

    ddp = Ours(Branches(), **TINY)
    results["on rank 1 only"] = error_of(step(ddp, {0, 1} if me == 1 else {0, 1, 2}))
    results["then all is well"] = error_of(step(ddp, {0, 1, 2}))
    results["others elsewhere"] = error_of(step(ddp, {me}))
    for as_view in (True, False):
        ddp = Ours(Branches(), **TINY, gradient_as_bucket_view=as_view)
        results[f"nowhere, {as_view}"] = error_of(step(ddp, {0, 1}))
        results[f"grads, {as_view}"] = none_of(ddp)
        results[f"next, {as_view}"] = error_of(step(ddp, {0, 1, 2}))
    ddp = Ours(Branches(), **TINY)
    with ddp.no_sync():
        step(ddp, {0, 1, 2})()
    results["used in no_sync"] = error_of(step(ddp, {0, 1})) + error_of(
        lambda: ddp(x, {0})
    )
    ddp = Ours(Branches(), **TINY)
    results["nan"] = error_of(
        lambda: (loss_of(ddp(x, {0, 1, 2})) * torch.nan).backward()
    )
    results["after nan"] = error_of(step(ddp, {0, 1, 2}))
    results["ignored"] = error_of(step(UnusedIgnored(Branches()), {0, 1}))
    return results


def none_of(ddp: nn.Module) -> list[str]:
    return [name for name, p in ddp.module.named_parameters() if p.grad is None]


def test_unused_parameters_are_named_on_every_rank(three_ranks):
    results = three_ranks["unused"]
    for name in results[0]:
        assert len({str(rank[name]) for rank in results}) == 1, name
    got = results[0]
    assert "UnusedParametersError: some ranks had no gradient" in got["on rank 1 only"]
    assert "rank 1: branches.2.weight, branches.2.bias." in got["on rank 1 only"]
    assert "find_unused_parameters=True" in got["on rank 1 only"]
    assert got["then all is well"] == "no error"
    for part in ("rank 0: branches.1", "rank 1: branches.0", "rank 2: branches.0"):
        assert part in got["others elsewhere"]
    for as_view in (True, False):
        assert got[f"nowhere, {as_view}"] == "no error"
        assert got[f"grads, {as_view}"] == ["branches.2.weight", "branches.2.bias"]
        late = got[f"next, {as_view}"]
        assert "no rank had a gradient for branches.2.weight, branches.2.bias" in late
    assert got["used in no_sync"] == "no errorno error"
    assert got["nan"] == got["after nan"] == "no error"
    # The planted fake says nothing, now or later: it could not pass this test.
    assert got["ignored"] == "no error"


def found() -> list[dict]:
    """On every rank: gradients and bits of a training in which experts take turns."""
    collected = []
    for wrap in (
        lambda m: nn.parallel.DistributedDataParallel(m, find_unused_parameters=True),
        lambda m: Ours(m, find_unused_parameters=True, **TINY),
        lambda m: Ours(m, find_unused_parameters=True, gradient_as_bucket_view=False),
        lambda m: Ours(m, device_ids=None, output_device=None, static_graph=True),
    ):
        model = Branches()
        ddp = wrap(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        history = []
        me = dist.get_rank()
        for which, zero in (({0, 1, 2}, 1), ({me}, 1), ({0}, 0), ({0, 1}, 1), ({1}, 1)):
            if zero:
                optimizer.zero_grad()
            outputs = ddp(torch.full((1, 3), 1.0 + me), which)
            if which == {0, 1}:
                outputs = outputs[: 1 + (me == 0)]  # some outputs are in no loss
            loss_of(outputs).backward()
            history.append(
                {
                    k: None if p.grad is None else p.grad.clone()
                    for k, p in model.named_parameters()
                }
            )
            optimizer.step()
        collected.append(
            {"history": history, "end": [p.detach() for p in ddp.parameters()]}
        )
    return collected


def test_found_unused_parameters_are_handled_as_in_pytorch(three_ranks):
    results = three_ranks["found"]
    theirs, *mine = results[0]
    nones = [[k for k, g in step.items() if g is None] for step in theirs["history"]]
    assert any(nones) and not all(nones)  # the case is there at all
    for variant, got in enumerate(mine, start=1):
        assert same(got["history"], theirs["history"], rtol=1e-5), variant
        for rank in results:
            assert same(rank[variant]["end"], got["end"])


def after_an_error() -> bool:
    """On every rank: a backward that fails half-way does not spoil the next."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    torch.manual_seed(5)
    ddp = Ours(model, **TINY)
    fine = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fine.load_state_dict(model.state_dict())
    x = torch.full((1, 3), 1.0 + dist.get_rank())
    keep = model[0].forward
    model[0].forward = lambda x: Fails.apply(keep(x))
    failed = error_of(lambda: ddp(x).sum().backward()).startswith("ArithmeticError")
    model[0].forward = keep
    model.zero_grad()
    ddp(x).sum().backward()
    other = Ours(fine)
    other(x).sum().backward()
    return failed and all(
        torch.allclose(p.grad, q.grad)
        for p, q in zip(model.parameters(), fine.parameters(), strict=True)
    )


def test_a_backward_that_fails_does_not_spoil_the_next_one(three_ranks):
    assert all(three_ranks["after_an_error"])


def buffers_and_small_things() -> dict[str, bool]:
    """On every rank: whose buffers count, and when."""
    me, results = dist.get_rank(), {}
    for cls in (Ours, nn.parallel.DistributedDataParallel):
        model = Small()
        ddp = cls(model)
        seen = []
        for k in range(4):
            model.shift.fill_(me + 10.0 * k)  # each rank goes its own way
            if k == 1:
                with ddp.no_sync():
                    ddp(batch(0)[0])
            else:
                ddp(batch(0)[0])
            seen.append(model.shift[0].item())
        results[cls is Ours] = seen
    return results


def test_buffers_are_sent_when_pytorch_sends_them(three_ranks):
    results = three_ranks["buffers_and_small_things"]
    assert results[0][True] == results[0][False] == [0.0, 10.0, 20.0, 30.0]
    # After a forward in no_sync nothing is sent: rank 1 keeps its own in the third.
    assert results[1][True] == results[1][False] == [0.0, 10.0, 21.0, 30.0]


three_ranks = launched(
    3, refused, unused, found, after_an_error, buffers_and_small_things
)
