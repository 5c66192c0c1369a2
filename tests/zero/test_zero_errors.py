"""What cannot be sharded is refused on every rank, and nothing hangs; and oddities."""

import fnmatch
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from modules import Fails
from on_ranks import assert_refused, error_of, launched, tried
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Adafactor, AdamW
from torch.utils.checkpoint import checkpoint
from trained import same
from zero_cases import Naive, Odd, Stage1, Stage2, pytorchs

from ddp_course.data_parallel import DistributedDataParallel as OurDDP
from ddp_course.zero import deal, sharded_checkpoint


def linear(*shape) -> list[nn.Parameter]:
    return list(nn.Linear(*shape).parameters())


def constructions(odd: bool) -> dict:
    """Return what cannot be constructed, by words of the error. Rank 1 is odd."""
    frozen, shared = linear(3, 4), torch.zeros(5)
    frozen[1].requires_grad_(not odd)
    twice = [{"params": frozen}, {"params": frozen[:1]}]
    views = [nn.Parameter(shared[:3]), nn.Parameter(shared[2:])]
    meta = [nn.Parameter(torch.zeros(3, device="meta"))]
    named = [
        (name, nn.Parameter(torch.zeros(2))) for name in ("a", "c" if odd else "b")
    ]

    def one(params=None, cls=Stage1, of=SGD, **more):
        of_sgd = {"lr": 0.1} if of is SGD else {}
        params_ = linear(3, 3) if params is None else params
        return lambda: cls(params_, of, **{**of_sgd, **more})

    return {
        "*ranks differ*0 is float32 [4, 3] on cpu, requires_grad=True on ranks "
        "0, 2, float32 [5, 3]*on rank 1; 1 is*": one(linear(3, 5 if odd else 4)),
        "*1 is*=True on ranks 0, 2*=False on rank 1*": one(frozen),
        "*group 0 is *'lr': 0.1*'lr': 0.2*rank 1*": one(lr=0.2 if odd else 0.1),
        "*b is float32 [2]*on ranks 0, 2, missing on rank 1; c is*": one(named),
        "*bucket_cap_mb is 25 on ranks 0, 2, 5 on*": one(
            bucket_cap_mb=5 if odd else 25
        ),
        "*argument buckets_in_flight is 2 on ranks 0, 2, 3 on rank 1*": one(
            cls=Stage2, buckets_in_flight=3 if odd else 2
        ),
        "*ranks 0, 1, 2: optimizer got an empty parameter list*": one([]),
        "*no parameter requires a gradient; at least*": one([torch.zeros(3)]),
        "*params argument*iterable*": one(torch.ones(3)),
        "*params is a Linear; pass model.parameters()*": one(nn.Linear(2, 2)),
        "*can only optimize Tensors*int*": one([1, 2]),
        "*some parameters appear in more than one parameter group*": one(twice),
        "*parameters 0 and 1 are two objects that share memory*": one(views),
        "*parameter 0 is on the meta device*": one(meta),
        "*uninitialized*": one([*nn.LazyLinear(3).parameters()]),
        "*optimizer_class is Adafactor, which cannot step parts of a tensor: its step "
        "on two parts differs from its step on *NaiveZeroRedundancy*": one(
            of=Adafactor
        ),
        "*LBFGS*differs from its step on the whole*": one(of=torch.optim.LBFGS),
        "*optimizer_class is an object of type Adagrad; pass a class*": one(
            of=torch.optim.Adagrad(linear(3, 3))
        ),
        "*optimizer_class is an object of type str; pass a class*": one(of="AdamW"),
        "*0, 1, 2: Invalid learning rate: -1.0. Nothing*": one(lr=-1.0),
        "*1, 2: SGD*unexpected keyword argument 'nonsense'. Nothing*": one(nonsense=3),
        "*bucket_cap_mb is 0; it must be*above 0*": one(bucket_cap_mb=0),
        "*buckets_in_flight is 0; it must be*": one(cls=Stage2, buckets_in_flight=0),
        "*flight is True; it*": one(cls=Stage2, buckets_in_flight=True),
    }


def refused() -> dict[str, str]:
    """On every rank: the errors of all wrong constructions, then of what is made."""
    odd = dist.get_rank() == 1
    right = Stage1(linear(3, 3), SGD, lr=0.1)
    wrong = {"params": linear(3, 5 if odd else 4)}
    return tried(
        {f"ReplicaError: {words}": call for words, call in constructions(odd).items()}
        | {
            "ReplicaError: *the ranks differ*2 is float32*0, 2*on rank 1*": (
                lambda: right.add_param_group(wrong)
            ),
            "ReplicaError: *this is no state_dict of an optimizer*": (
                lambda: right.load_state_dict({"state": {}})
            ),
            "ReplicaError: *argument to is 0 on ranks 0, 2, 1 on rank 1*": (
                lambda: right.consolidate_state_dict(to=int(odd))
            ),
            "ReplicaError: ranks 0, 1, 2: to is 3; it can be 0 to 2. *": (
                lambda: right.consolidate_state_dict(to=3)
            ),
            "ReplicaError: ranks 0, 1, 2: to is '0'; it can be 0 to 2. *": (
                lambda: right.consolidate_state_dict(to="0")
            ),
            "ValueError: max_norm is -1; it must be a number, 0 or more": (
                lambda: right.clip_grad_norm_(-1)
            ),
            "ValueError: sharded is of type Stage1; it must be a Fully*": (
                lambda: sharded_checkpoint.save("nowhere", right)
            ),
        }
    )


def test_wrong_constructions_are_refused_on_every_rank_and_nothing_is_sent(three_ranks):
    """And the ranks can go on: what the tests below look at comes after that."""
    assert_refused(three_ranks["refused"], kind="")


# ---- in the middle of training -------------------------------------------------------


def small(make=Stage1, **more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, make(model.parameters(), SGD, lr=0.1, bucket_cap_mb=1e-5, **more)


def x() -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(dist.get_rank()))


def step(model, opt, *wrappers) -> None:
    opt.zero_grad()
    for wrap in wrappers:
        model = wrap(model)
    model(x()).square().sum().backward()
    opt.step()


def moved() -> None:
    model, opt = small()
    model.double()
    opt.step()


def thawed() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].weight.requires_grad_(False)
    opt = Stage1(model.named_parameters(), SGD, lr=0.1)
    model[0].weight.requires_grad_(True)
    step(model, opt)


def sparse() -> None:
    layer = nn.Embedding(4, 3, sparse=True)
    opt = Stage1(layer.parameters(), SGD, lr=0.1)
    layer(torch.tensor([1])).sum().backward()
    opt.step()


def with_another(wrap, make, *, before: bool) -> None:
    model = nn.Linear(3, 3)
    wrapped = wrap(model) if before else None
    opt = make(model.parameters(), SGD, lr=0.1)
    step(wrapped or wrap(model), opt)


def averaged_by_hand(make=Stage1) -> None:
    """As PyTorch's class wants it, and its own test does it."""
    model, opt = small(make)
    model(x()).square().sum().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    opt.step()


def set_by_hand() -> None:
    model, opt = small(Stage2)
    model(x()).square().sum().backward()
    model[0].weight.grad = torch.full((4, 3), 1.0 + dist.get_rank())
    opt.step()


def clipped_by_pytorch(make=Stage1) -> None:
    model, opt = small(make)
    model(x()).square().sum().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)


def two_optimizers() -> None:
    model, opt = small()
    again = Stage1(model.parameters(), SGD, lr=0.1)
    step(model, again)


def not_zeroed() -> None:
    model, opt = small(Stage2)
    step(model, opt)
    model.zero_grad()
    model(x()).sum().backward()


def grown_since() -> None:
    model, opt = small()
    opt.consolidate_state_dict(to=0)
    opt.add_param_group({"params": linear(3, 3)})
    opt.state_dict()


IN_TRAINING = {
    "parameter 0 has been moved to another device or type*": moved,
    "parameter 0.weight was frozen at first*": thawed,
    "the gradient of parameter 0 is torch.sparse_coo; only dense*": sparse,
    "another wrapper or optimizer averages parameter *": two_optimizers,
    "all ranks have the same gradients, so they were avera*": averaged_by_hand,
    "this rank has only parts of the gradients of 4 of these 4*": clipped_by_pytorch,
    "parameter 0 has a gradient that this optimizer did not *": set_by_hand,
    "the gradients of the last step were not zeroed: call*": not_zeroed,
    "each rank has its own part of the state: call consolid*": grown_since,
    "stage 2 stores no whole gradients*": lambda: small(Stage2)[1].no_sync(),
}
OTHERS = {"ours": OurDDP, "torch": DDP, "views": lambda m: DDP(
    m, gradient_as_bucket_view=True)}  # fmt: skip


def in_training() -> dict[str, str]:
    error = {words: error_of(call) for words, call in IN_TRAINING.items()}
    for other, wrap in OTHERS.items():
        for name, make in {"1": Stage1, "2": Stage2}.items():
            for before in (True, False):
                error[f"{other} {name} {before}"] = error_of(
                    lambda w=wrap, m=make, b=before: with_another(w, m, before=b)
                )
    return error


def test_wrong_steps_are_refused_on_every_rank(three_ranks):
    for rank in three_ranks["in_training"]:
        for words in IN_TRAINING:
            text = rank.pop(words)
            assert fnmatch.fnmatchcase(text, f"RuntimeError: {words}"), (words, text)
        assert len(rank) == 12
        for name, text in rank.items():
            by_ddp = "views 1" in name and "not the expected DDP bucket view" in text
            assert by_ddp or "gradients='averaged'" in text, (name, text)


# ---- what goes well ------------------------------------------------------------------


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.last(Fails.apply(self.first(x)))


def after_an_error(make) -> list:
    """A backward pass ends in an error; the next one is right all the same."""
    model = Failing()
    opt = make(model.parameters(), SGD, lr=0.1, bucket_cap_mb=1e-5)
    Fails.wanted = True
    with pytest.raises(ArithmeticError):
        model(x()).square().sum().backward()
    Fails.wanted = False
    step(model, opt)
    return [p.detach() for p in model.parameters()]


def checkpointed(make, reentrant: bool | None) -> list:
    model = Failing()
    Fails.wanted = False
    opt = make(model.parameters(), SGD, lr=0.1, bucket_cap_mb=1e-5)
    for _ in range(2):
        opt.zero_grad()
        h = x().requires_grad_()
        for layer in (model.first, model.last):
            h = layer(h) if reentrant is None else checkpoint(
                layer, h, use_reentrant=reentrant)  # fmt: skip
        h.square().sum().backward()
        opt.step()
    return [p.detach() for p in model.parameters()]


def own_group(make) -> list:
    """Ranks 0 and 2 train together, and rank 1 alone."""
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    mine = groups[dist.get_rank() % 2]
    model, opt = small(make, process_group=mine)
    step(model, opt)
    opt.consolidate_state_dict(to=0)
    return [p.detach() for p in model.parameters()]


def added_later(make) -> list:
    """The second layer is trained from the third step on."""
    model = Failing()
    Fails.wanted = False
    opt = make(model.first.parameters(), SGD, lr=0.1, momentum=0.9, bucket_cap_mb=1e-5)
    model.last.requires_grad_(False)
    for k in range(4):
        if k == 2:
            model.last.requires_grad_(True)
            opt.add_param_group({"params": model.last.parameters(), "lr": 0.2})
        step(model, opt)
    return [p.detach() for p in model.parameters()]


def by_closure(make) -> list:
    model, opt = small(make)

    def closure():
        opt.zero_grad()
        loss = model(x()).square().sum()
        loss.backward()
        return loss

    assert all(opt.step(closure).requires_grad for _ in range(2))
    return [p.detach() for p in model.parameters()]


class Plain(SGD):
    """One process: averages the gradients of all ranks' rows, by all-reduce."""

    def __init__(self, params, cls, process_group=None, bucket_cap_mb=None, **defaults):
        super().__init__(params, **defaults)
        self.process_group = process_group

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    dist.all_reduce(p.grad, group=self.process_group)
                    p.grad /= dist.get_world_size(self.process_group)
        super().step()
        return loss

    def consolidate_state_dict(self, to):
        pass


WAYS = {
    "after an error": after_an_error,
    "not checkpointed": lambda make: checkpointed(make, None),
    "checkpointed": lambda make: checkpointed(make, False),
    "reentrant": lambda make: checkpointed(make, True),
    "own group": own_group,
    "added later": added_later,
    "by closure": by_closure,
}


def going_well() -> dict:
    return {
        way: {make.__name__: run(make) for make in (Plain, Stage1, Stage2)}
        for way, run in WAYS.items()
    }


def test_errors_checkpoints_groups_and_closures(three_ranks):
    for rank in three_ranks["going_well"]:
        for way, result in rank.items():
            for name in ("Stage1", "Stage2"):
                assert same(result[name], result["Plain"], rtol=1e-5, atol=1e-6), way


def other_things() -> dict[str, object]:
    results = {}
    model, opt = small()
    kept = weakref.ref(opt.reducer), weakref.ref(opt.engine)
    step(model, opt)
    gc.collect()
    gc.disable()
    del opt
    results["gone with the optimizer"] = all(ref() is None for ref in kept)
    gc.enable()
    again = Stage1(model.parameters(), AdamW)  # as one does in a notebook
    step(model, again)
    old = [p.detach().clone() for p in model.parameters()]
    out = model(x()).square().sum()
    step(model, again)
    results["step is seen"] = error_of(lambda: out.backward()).startswith(
        "RuntimeError"
    )
    results["changed"] = not any(map(torch.equal, old, model.parameters()))
    for make in (Naive, Stage1, Stage2):  # fewer elements than ranks
        tiny = nn.Parameter(torch.ones(2))
        few = make([tiny], SGD, lr=0.5)
        (tiny * torch.tensor([1.0, -1.0])).sum().backward()
        few.step()
        results[f"few, {make.__name__}"] = tiny.tolist() == [0.5, 1.5]
    model = Odd()
    mine, theirs = Stage1(model.parameters(), AdamW), AdamW(Odd().parameters())
    results["groups"] = [*mine.param_groups[0]] == [*theirs.param_groups[0]]
    results["defaults"] = mine.defaults == theirs.defaults
    model = Odd(one_type=True)
    dealt = pytorchs(model.parameters(), AdamW)._partition_parameters()
    owners = deal([p.numel() for p in model.parameters()], [0] * dist.get_world_size())
    results["dealt as PyTorch deals"] = all(
        any(p is q for group in dealt[owner] for q in group["params"])
        for p, owner in zip(model.parameters(), owners, strict=True)
    )
    return results


def with_whole_tensors() -> list:
    """Train with optimizers that look at whole tensors, as one process does."""
    found = []
    for of in (Adafactor, torch.optim.Muon):
        for alone in (False, True):
            model = small()[0]
            matrices = [p for p in model.parameters() if p.dim() == 2]
            opt = of(matrices, lr=0.1) if alone else Naive(matrices, of, lr=0.1)
            for step in range(3):
                ranks = range(dist.get_world_size()) if alone else [dist.get_rank()]
                opt.zero_grad()
                for rank in ranks:
                    generator = torch.Generator().manual_seed(10 * step + rank)
                    loss = model(torch.randn(2, 3, generator=generator)).square().sum()
                    (loss / len(ranks)).backward()
                opt.step()
            found.append([p.detach() for p in matrices])
    return found


def test_optimizers_of_whole_tensors(three_ranks):
    for result in three_ranks["with_whole_tensors"]:
        assert same(result[::2], result[1::2], rtol=1e-4, atol=1e-5)


def test_other_things(three_ranks):
    for result in three_ranks["other_things"]:
        assert all(result.values()), result


three_ranks = launched(
    3, refused, going_well, with_whole_tensors, other_things, in_training
)
