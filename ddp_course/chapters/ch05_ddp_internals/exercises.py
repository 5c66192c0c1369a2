"""The exercises of chapter 05: buckets, hooks, accumulation, and a script to repair."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from ddp_course.chapters.ch05_ddp_internals import solutions
from ddp_course.chapters.ch05_ddp_internals.repair import faults, run_script
from ddp_course.collectives import barrier, ring_all_reduce
from ddp_course.data_parallel import DistributedDataParallel, bucket_plan
from ddp_course.lab.answers import Answer, code, on_ranks, one_line
from ddp_course.lab.exercises import exercise, expect, judge, judge_ranks
from ddp_course.lab.values import equal_values
from ddp_course.measure import TorchCollectives
from ddp_course.model import GPTConfig, build_gpt

MIB = 1 << 20
Pairs = list[tuple[str, Tensor]]

# ---- my_bucket_plan ----------------------------------------------------------------

CAPS = ((4000, 1000), (4000, 4000), (400, 100), (10**6, 10**6), (400, 2000), (403, 101))


@exercise("my_bucket_plan", solution=solutions.my_bucket_plan)
def check_my_bucket_plan(answer: Answer) -> str:
    """`my_bucket_plan(parameters, cap, first)`: buckets of names, in sending order.

    In which order do gradients become ready, and what closes a bucket? Each type has
    its own open bucket and its own limit.

    Leave out frozen and empty parameters and second names; go through the others
    backwards. A parameter joins the open bucket of its type; when the bucket's bytes
    reach the limit, close it: the first limit is the smaller of `first` and `cap`, all
    later ones are `cap`. At the end close all open buckets, and sort the buckets by the
    place of their last members.
    """
    models = _models()
    for title, parameters in models.items():
        for cap, first in CAPS:
            where = f"For {title}, cap = {cap} and first = {first},"
            before, trained = list(parameters), [p.requires_grad for _, p in parameters]
            got = answer(parameters, cap, first)
            same = [p.requires_grad for _, p in before] == trained
            expect(same, f"{where} your function froze parameters, or thawed them.")
            _judge_plan(where, got, before, cap, first)
            same = [id(p) for _, p in parameters] == [id(p) for _, p in before]
            expect(same, f"{where} your function changed the list `parameters`.")
        if not parameters:
            continue
        parameters[-1][1].requires_grad_(False)
        where = f"Called again for {title}, the last parameter of which is frozen now,"
        _judge_plan(where, answer(parameters, *CAPS[0]), parameters, *CAPS[0])
    return (
        f"{len(models) * len(CAPS)} plans, with tied, frozen and empty parameters and "
        "up to five dtypes: every gradient once, the last layers first, each bucket "
        "closed at its cap"
    )


def _models() -> dict[str, Pairs]:
    """Return {description: named parameters}; each list hides a difficulty."""
    small = GPTConfig(block_size=8, n_layer=2, n_head=2, d_model=8)
    tied = build_gpt(GPTConfig(block_size=8, n_layer=1, n_head=2, d_model=8, tied=True))
    frozen, two_types = build_gpt(small), build_gpt(small)
    frozen.blocks[1].requires_grad_(False)
    two_types.blocks[0].double()
    two_types.head.norm.double()
    sizes = (4, 1, 3, 0, 36, 4, 10, 26, 0, 14, 10)
    filling = [nn.Parameter(torch.zeros(25 * size)) for size in sizes]
    half, double, other_half = torch.bfloat16, torch.float64, torch.float16
    shapes = (((3, 0), half), ((), half), ((9,), double), ((), None), ((300,), half))
    shapes += (((7,), other_half), ((5,), torch.complex64))
    mixed = [nn.Parameter(torch.zeros(s, dtype=d)) for s, d in shapes * 3]
    large = [nn.Parameter(torch.empty(2**30 + k, device="meta")) for k in range(3)]
    many = [nn.Parameter(torch.zeros(1)) for _ in range(1200)]
    return {
        "a small GPT": list(build_gpt(small).named_parameters()),
        "a GPT with a tied parameter": [*tied.named_parameters(remove_duplicate=False)],
        "a GPT with a frozen block": list(frozen.named_parameters()),
        "a GPT with parameters of two types": list(two_types.named_parameters()),
        "parameters that fill buckets to the byte": _named(filling),
        "parameters of five types, some without dimensions": _named(mixed),
        "parameters of 4 GiB": _named(large),
        "1,200 parameters of one number": _named(many),
        "one parameter": [("p", nn.Parameter(torch.zeros(3)))],
        "no parameters": [],
    }


def _named(parameters: list[nn.Parameter]) -> Pairs:
    return [(f"p{k}", parameter) for k, parameter in enumerate(parameters)]


NAMED = {  # hints about one name in a bucket
    "known": "there is no parameter {name}.",
    "trained": "{name} is in a bucket, but it is frozen: it never gets a gradient, and "
    "the bucket will never be full.",
    "some": "{name} is in a bucket, but it has no numbers.",
    "first": "{name} is the same parameter as {other}: it has one gradient, which "
    "travels once, under its first name.",
    "once": "{name} is in two places.",
}
PLAN = {
    "all": "{left_out} is in no bucket: it would never be averaged.",
    "one_type": "a bucket holds gradients of the types {types}; one all-reduce adds "
    "numbers of one type.",
}
OF_A_TYPE = {
    "in_order": "of its type {begin} comes first and {end} last, but not all names are "
    "in the order of gradients, which become ready in the opposite order of "
    "registration.",
    "closed": "{which} holds {nbytes} bytes; it held its {limit} already before {last} "
    "came; close it then.",
    "full": "{which} holds only {nbytes} bytes; close it as soon as it holds {limit} "
    "or more, and not before.",
}


def _judge_plan(where: str, got: Any, parameters: Pairs, cap: int, first: int) -> None:
    """Raise a Hint for a wrong plan, about its most obvious fault."""
    lists = isinstance(got, list) and all(
        isinstance(b, list) and all(isinstance(name, str) for name in b) for b in got
    )
    says = f"your function returned {code(one_line(got))}; expected a list of lists of"
    expect(lists, f"{where} {says} names.")
    expect(all(got), f"{where} a bucket is empty.")
    known, names = dict(parameters), [name for bucket in got for name in bucket]
    first_name: dict[int, str] = {}
    for name, parameter in parameters:
        first_name.setdefault(id(parameter), name)
    for name in names:
        facts = {"name": code(name), "known": name in known}
        if facts["known"]:
            p, other = known[name], first_name[id(known[name])]
            facts |= {
                "trained": p.requires_grad,
                "some": p.numel(),
                "other": code(other),
            }
            facts |= {"first": other == name, "once": names.count(name) == 1}
        judge(where, facts, NAMED)
    right = bucket_plan(parameters, cap / MIB, first / MIB)
    left_out = [n for b in right for n in b.parameters if n not in names]
    types = [{str(known[n].dtype).removeprefix("torch.") for n in b} for b in got]
    mixed = next((its for its in types if len(its) > 1), ())
    facts = {"all": not left_out, "left_out": code((left_out or [""])[0])}
    judge(where, facts | {"one_type": not mixed, "types": " and ".join(mixed)}, PLAN)
    for dtype in dict.fromkeys(known[name].dtype for name in names):
        buckets = [bucket for bucket in got if known[bucket[0]].dtype == dtype]
        for facts in _each_bucket(buckets, known, cap, first):
            judge(where, facts, OF_A_TYPE)
    says = f"the buckets are right, but their order is not: {code(one_line(got))}. The"
    says += " bucket whose last gradient is ready first comes first, whatever its type."
    expect(got == [list(b.parameters) for b in right], f"{where} {says}")


def _each_bucket(
    buckets: list[list[str]], known: dict[str, Tensor], cap: int, first: int
) -> Iterator[dict[str, Any]]:
    """Yield facts about each bucket of one type: its order, and whether it is full."""
    names = [name for bucket in buckets for name in bucket]
    in_order = names == sorted(names, key=[*known].index, reverse=True)
    ends = {"begin": code(names[0]), "end": code(names[-1]), "in_order": in_order}
    for k, bucket in enumerate(buckets):
        limit, last = cap if k else min(first, cap), bucket[-1]
        nbytes = sum(known[name].nbytes for name in bucket)
        which = f"{f'bucket {k}' if k else 'the first bucket'} of its type"
        facts = {"which": which, "nbytes": nbytes, "limit": limit, "last": code(last)}
        facts["closed"] = nbytes - known[last].nbytes < limit
        yield ends | facts | {"full": nbytes >= limit or k == len(buckets) - 1}


# ---- mini_ddp ----------------------------------------------------------------------

SHAPES = ((), (2, 2), (5,), (3, 2), (7,), (2, 2, 2))  # parameters 0 to 5
MEMBERS = {  # {number of ranks: parameters of each bucket}; buckets differ in size
    1: ((5, 3, 1), (4, 2, 0)),
    2: ((5, 4), (3,), (2, 1, 0)),
    3: ((5,), (4, 3), (2, 1), (0,)),
}
TYPES = {1: torch.bfloat16, 2: torch.float32, 3: torch.float64}  # by number of ranks
# for each rank, the order in which forward uses the parameters
ORDERS = ((0, 1, 2, 3, 4, 5), (1, 2, 4, 0, 5, 3), (5, 4, 3, 2, 1, 0))
LAUNCHES = {
    "alone": "called `{other}` of PyTorch; send only with `launch`.",
    "all_sent": "launched {sent} of {buckets} buckets. Each backward sends every "
    "bucket once: are all counts reset at the end?",
    "at_once": "launched a bucket {late} later than it was full and all before it "
    "launched: no overlap. In a hook: count the gradients that are missing in the "
    "bucket, then launch the full buckets, in the order of `buckets`.",
    "in_a_hook": "launched a bucket at the end of backward, which may have gone on "
    "since the last gradient. Launch the last bucket, too, in the hook that fills it.",
    "goes_on": "waited for a bucket while gradients were still to come: backward "
    "stands still meanwhile. Wait at the end.",
    "waited": "did not wait for each bucket; until `wait()` has returned, its numbers "
    "may still change.",
    "once": "waited {waits} times for {buckets} buckets: also for buckets of an "
    "earlier backward. Forget their tensors and handles at the end.",
    "unchanged": "changed a bucket's tensor after `launch` and before `wait()`, while "
    "the ranks add it up. Divide before `launch`, or after `wait()`.",
    "same_weights": "has changed parameters; average only gradients.",
    "means": "has a gradient {got} after backward; the mean over the ranks is "
    "{wanted}{why}.",
}


@exercise("mini_ddp", solution=solutions.mini_ddp)
def check_mini_ddp(answer: Answer) -> str:
    """`mini_ddp(buckets, launch, at_the_end)`: make backward average gradients.

    How can a hook know that a bucket is full, and that all buckets before it were
    launched? And who calls you when backward is over?

    Count the missing gradients of every bucket. A hook subtracts one; then, as long as
    the next bucket in order is full, join its gradients, launch them, and keep tensor
    and handle. The first hook of a backward asks for a call at its end; that call waits
    for each handle, writes the means into `grad`, and resets the counts.
    """
    judge_ranks(LAUNCHES, _use_mini_ddp, answer)
    return (
        "on 1, 2 and 3 real ranks, with three dtypes, 3 steps each: every bucket was "
        "launched once, as soon as it was full and its turn, and the gradients are "
        "means"
    )


def _use_mini_ddp(mini_ddp: Callable) -> list[dict[str, Any]]:
    """Train with the reader's hooks on this rank, and record the order of events."""
    rank, n = dist.get_rank(), dist.get_world_size()
    weights = [nn.Parameter(_share(k, n, 0, n)) for k, _ in enumerate(SHAPES)]
    strided = weights[3].detach().T.contiguous().T  # its gradient is strided, too
    weights[3] = nn.Parameter(strided)
    buckets = [[weights[k] for k in members] for members in MEMBERS[n]]
    events: list[tuple[str, int]] = []
    for k, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(
            lambda _, k=k: events.append(("gradient", k))
        )

    def launch(flat: Tensor) -> _Noting:
        bucket = _which_bucket(flat, buckets)
        events.append(("launch", bucket))
        _check_turn(events, bucket, MEMBERS[n])
        return _Noting(flat, bucket, events)

    def at_the_end(function: Callable[[], None]) -> None:
        def end() -> None:
            events.append(("end", 0))
            function()

        Variable._execution_engine.queue_callback(end)

    mini_ddp(buckets, launch, at_the_end)
    facts = []
    for step in (1, 2, 3):
        for weight in weights:  # like `optimizer.zero_grad`, in both of its ways
            weight.grad = None if step < 3 else weight.grad.zero_()
        events.clear()
        parts = [(_share(k, rank, step, n) * weights[k]).sum() for k in ORDERS[rank]]
        barrier()
        with TorchCollectives() as torch_log:
            sum(parts).backward()
        one = _launches(events, MEMBERS[n]) | _means([w.grad for w in weights], step, n)
        kept = [torch.equal(w, _share(k, n, 0, n)) for k, w in enumerate(weights)]
        one["same_weights"] = all(kept)
        calls = [call.op for call in torch_log.calls]
        one |= {"alone": not calls, "other": (calls or [""])[0]}
        facts.append(one | {"case": f"in step {step}"})
    return facts


class _Noting:
    """A handle that records when it is waited for, and earlier changes of `flat`.

    The ranks add up a copy, and the first `wait` writes the sum into `flat`. So what an
    answer reads or writes before does not depend on how far the all-reduce has come.
    """

    def __init__(
        self, flat: Tensor, bucket: int, events: list[tuple[str, int]]
    ) -> None:
        self.flat, self.bucket, self.events = flat.detach(), bucket, events
        self.before, self.total = self.flat.clone(), self.flat.clone()
        self.work = ring_all_reduce(self.total, async_op=True)
        self.waited = False

    def wait(self) -> None:
        self.events.append(("wait", self.bucket))
        self.work.wait()
        if not self.waited:
            if not torch.equal(self.flat, self.before):
                self.events.append(("change", self.bucket))
            self.flat.copy_(self.total)
        self.waited = True


def _which_bucket(flat: Any, buckets: list[list[Tensor]]) -> int:
    numels = [sum(p.numel() for p in members) for members in buckets]
    is_tensor, dtype = isinstance(flat, Tensor), buckets[0][0].dtype
    if not is_tensor or flat.numel() not in numels:
        got = f"{flat.numel()} numbers" if is_tensor else one_line(flat)
        wanted = f"the buckets have {', '.join(map(str, numels))} numbers"
        raise ValueError(f"launch got {got}; {wanted}")
    if flat.dtype != dtype:
        raise ValueError(f"launch got numbers of {flat.dtype}; gradients are {dtype}")
    return numels.index(flat.numel())


def _check_turn(
    events: list[tuple[str, int]], bucket: int, members: Sequence[Sequence[int]]
) -> None:
    """Raise RuntimeError for a bucket out of order or not full, before it is sent."""
    launched = [k for what, k in events if what == "launch"]
    if launched != list(range(len(launched))):
        raise RuntimeError(
            f"bucket {bucket} was launched when it was the turn of bucket "
            f"{launched.index(bucket)}: all ranks must launch in the order of `buckets`"
        )
    here = [k for what, k in events if what == "gradient"]
    missing = [k for k in members[bucket] if k not in here]
    if missing:
        raise RuntimeError(
            f"bucket {bucket} was launched before it was full: {len(missing)} of its "
            f"{len(members[bucket])} gradients were missing"
        )


def _share(k: int, rank: int, step: int, n: int) -> Tensor:
    """Return the gradient of parameter k: multiples of 1/4, in one case all zero.

    float64 numbers are 2^-30 larger, which smaller types would lose.
    """
    dice = torch.Generator().manual_seed(100 * k + 10 * step + rank)
    numbers = torch.randint(-99, 100, SHAPES[k], generator=dice).to(TYPES[n]) / 4
    if TYPES[n] == torch.float64:
        numbers += 2**-30
    return numbers * 0 if (k, rank, step) == (3, 1, 2) else numbers


def _launches(
    events: list[tuple[str, int]], members: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return facts about the order of launches, waits and gradients."""
    launched = [k for what, k in events if what == "launch"]
    came = [at for at, (what, _) in enumerate(events) if what == "gradient"]
    late = 0
    for bucket in launched:
        needed = {k for one in members[: bucket + 1] for k in one}
        ready = max(at for at in came if events[at][1] in needed)
        late = max(
            late, sum(ready < at < events.index(("launch", bucket)) for at in came)
        )
    waits = [(at, k) for at, (what, k) in enumerate(events) if what == "wait"]
    every = list(range(len(members)))
    facts = {"all_sent": launched == every, "sent": len(launched)}
    facts |= {
        "buckets": len(every),
        "waits": len(waits),
        "once": len(waits) <= len(every),
    }
    facts |= {"at_once": not late, "late": f"{late} gradient{'s' * (late > 1)}"}
    first_end = events.index(("end", 0)) if ("end", 0) in events else len(events)
    facts["in_a_hook"] = all(what != "launch" for what, _ in events[first_end:])
    facts["goes_on"] = all(at > max(came) for at, _ in waits)
    facts["unchanged"] = all(what != "change" for what, _ in events)
    return facts | {"waited": {k for _, k in waits} == {*every}}


def _means(gradients: list[Tensor], step: int, n: int) -> dict[str, Any]:
    facts = {"means": True, "got": "", "wanted": "", "why": ""}
    for k, got in enumerate(gradients):
        total = sum(_share(k, rank, step, n) for rank in range(n))
        if not equal_values(got, total / n):
            is_sum = equal_values(got, total)
            why = ": is the mean back in `grad` when backward returns?"
            why = ": this is the sum; divide by the number of ranks" if is_sum else why
            facts = {"means": False, "got": code(one_line(got.tolist())), "why": why}
            facts["wanted"] = code(one_line((total / n).tolist()))
    return facts


# ---- accumulate --------------------------------------------------------------------

PARTS = {  # {number of ranks: cases, each with the rows of each rank's microbatches}
    2: (
        ((2, 2, 2), (2, 2, 2)),
        ((1, 2, 5), (5, 2, 1)),
        ((4,), (4,)),
        ((1, 1, 1, 3), (2, 1, 2, 1)),
        ((1, 2) * 20, (2, 1) * 20),
    ),
    3: (((1, 2, 5), (5, 2, 1), (3, 3, 2)),),
    1: (((3, 1, 2),),),
}
SENDING = {
    "in_turns": "had the order {order}; expected {micro} times a forward and then its "
    "backward. Accumulation keeps only one microbatch in memory at a time.",
    "quiet": "sent {passes} all-reduces in its microbatches; all but the last should "
    "send nothing. A forward outside of `no_sync` makes its backward send.",
    "sends": "sent {last} all-reduces in the last microbatch; expected one for each of "
    "{buckets} buckets: otherwise the ranks are never averaged.",
    "no_more": "called {more} collectives beside DDP's own; none is needed.",
    "untouched": "has a changed list, or other numbers in it, or rows that require a "
    "gradient: leave `microbatches` as it is.",
    "same_weights": "has changed parameters; leave the step to the optimizer.",
    "as_before": "left `ddp` in another state than before: {state}. Later backwards "
    "need it as it was.",
    "right": "has a gradient that is not the gradient of the mean over all rows (in "
    "the median {ratio:.2f} times as large). How much does a microbatch of few rows "
    "count? DDP itself averages over the ranks.",
}


@exercise("accumulate", solution=solutions.accumulate)
def check_accumulate(answer: Answer) -> str:
    """`accumulate(ddp, microbatches)`: add up all gradients; average them once.

    Only one microbatch has to send. And which factor makes the mean over a
    microbatch's rows a part of the mean over all rows?

    Multiply each loss by its share of the rows. Run forward *and* backward of all
    microbatches but the last inside `no_sync`; run the last one outside of it: its
    backward averages the sum of all gradients.
    """
    judge_ranks(SENDING, _accumulate_all, answer, worlds=[*PARTS])
    return (
        "1 to 3 real ranks, up to 40 microbatches of equal and unequal sizes: the "
        "gradient of all rows, and nothing was sent before the last microbatch"
    )


class _Regression(nn.Module):
    """A small model; called with a batch, it returns the mean loss over its rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        self.layers[0].bias.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layers(x) - y).square().mean()

    def gradient(self) -> Tensor:
        """Return the gradient of all trained parameters, in one row."""
        trained = (p for p in self.parameters() if p is not self.layers[0].bias)
        zeros_or = ((p.grad, torch.zeros_like(p)) for p in trained)
        return torch.cat([(z if g is None else g).flatten() for g, z in zeros_or])


def _rows(rank: int, sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    dice = torch.Generator().manual_seed(rank)
    numbers = [torch.randn(size, 5, generator=dice) for size in sizes]
    pairs = [(t[:, :4], t[:, 4:] + 3 * (k % 12)) for k, t in enumerate(numbers)]
    if sizes[0] == sizes[-1]:  # the last one is known by its place alone
        pairs[0] = pairs[-1]
    return pairs


def _gradient_of_all(parts: Sequence[Sequence[int]]) -> Tensor:
    pairs = [pair for rank, sizes in enumerate(parts) for pair in _rows(rank, sizes)]
    model = _Regression()
    model(*(torch.cat(column) for column in zip(*pairs, strict=True))).backward()
    return model.gradient()


def _accumulate_all(accumulate: Callable) -> Iterator[dict[str, Any]]:
    for parts in PARTS[dist.get_world_size()]:
        yield from _accumulate(accumulate, parts)


def _accumulate(
    accumulate: Callable, parts: Sequence[Sequence[int]]
) -> Iterator[dict[str, Any]]:
    """Call the reader's function with `parts`, and twice more, with other rows."""
    rank, events, model = dist.get_rank(), [], _Regression()

    def noting(flat: Tensor, **options: Any) -> Any:
        events.append("all_reduce")
        return dist.all_reduce(flat, **options)

    model.register_forward_pre_hook(lambda *_: events.append("forward"))
    model.layers[2].register_full_backward_hook(lambda *_: events.append("backward"))
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=1e-5, first_bucket_mb=1e-5, all_reduce=noting
    )
    facts = _accumulated(accumulate, parts, ddp, events)
    yield facts | {"case": f"with microbatches of {one_line(parts[rank], 40)} rows"}
    larger, more = [[k + 1 for k in one] for one in parts], [[*p, 2] for p in parts]
    for call, again in (("second", larger), ("third", more)):
        model.zero_grad(set_to_none=False)
        events.clear()
        facts = _accumulated(accumulate, again, ddp, events)
        sizes = one_line(tuple(again[rank]), 40)
        yield facts | {"case": f"in a {call} call, with microbatches of {sizes} rows"}


def _accumulated(
    accumulate: Callable,
    parts: Sequence[Sequence[int]],
    ddp: DistributedDataParallel,
    events: list[str],
) -> dict[str, Any]:
    """Call the reader's function on this rank, and record what it sends and when."""
    rank, sizes, model = dist.get_rank(), parts[dist.get_rank()], ddp.module
    microbatches = _rows(rank, sizes)
    barrier()
    batches = list(microbatches)
    with TorchCollectives() as torch_log:
        accumulate(ddp, batches)
    order = [event for event in events if event != "all_reduce"]
    passes = [part.count("a") for part in "".join(e[0] for e in events).split("f")[1:]]
    got, wanted, buckets = model.gradient(), _gradient_of_all(parts), len(ddp.buckets)
    facts: dict[str, Any] = {"micro": len(sizes)}
    facts |= {"order": code(one_line(", ".join(order))), "passes": passes}
    facts |= {"in_turns": order == ["forward", "backward"] * len(sizes)}
    facts |= {"quiet": not any(passes[:-1]), "buckets": buckets}
    facts |= {"sends": passes[-1:] == [buckets], "last": passes[-1] if passes else 0}
    more = torch_log.count() - buckets
    facts |= {"no_more": not more, "more": more}
    same = [*map(id, batches)] == [*map(id, microbatches)]
    facts["untouched"] = same and equal_values(microbatches, _rows(rank, sizes))
    facts["untouched"] &= not any(
        t.requires_grad for pair in microbatches for t in pair
    )
    pairs = zip(model.parameters(), _Regression().parameters(), strict=True)
    facts["same_weights"] = all(torch.equal(now, before) for now, before in pairs)
    state = ["it no longer synchronises"] * (not ddp.require_backward_grad_sync)
    state += ["it is in eval mode"] * (not ddp.training)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    state += ["other parameters are frozen"] * (frozen != ["layers.0.bias"])
    has_one = model.layers[0].bias.grad is not None
    state += ["a frozen parameter has a gradient"] * has_one
    facts |= {"as_before": not state, "state": " and ".join(state)}
    facts["right"] = torch.allclose(got, wanted, rtol=1e-4, atol=1e-5)
    return facts | {"ratio": (got / wanted).median().item()}


# ---- repaired ----------------------------------------------------------------------

MACHINES = {
    "2 machines with 2 ranks each": {"nnodes": 2, "nproc_per_node": 2},
    "one machine with 3 ranks": {"nnodes": 1, "nproc_per_node": 3},
}


@exercise("repaired", solution=solutions.repaired)
def check_repaired(answer: Answer) -> str:
    """`repaired(build_model, data, held_out, path, epochs)`: the script, repaired.

    Go through the script line by line, and ask of each: what does it do on rank 3, on a
    second machine, in the second epoch, and when the file exists already?

    First choose the GPU by the local rank; load the file onto it. Let a sampler divide
    the rows, and set its epoch. DDP has averaged already. Seed each rank differently
    once the model is built. Only one rank writes. Each rank evaluates a share of the
    held-out rows; sums can be added up over the ranks, means cannot.
    """
    for machines, shape in MACHINES.items():
        with TemporaryDirectory() as folder:
            wrong = faults(on_ranks(run_script, answer, folder, **shape))
        more = f" (And {len(wrong) - 1} more.)" if len(wrong) > 1 else ""
        expect(not wrong, f"On {machines}: {(wrong or [''])[0]}{more}")
    return (
        "on two machines with 2 imagined GPUs each, and on one with 3, every rank used "
        "its own GPU, its share of the rows in new orders, its own dropout masks and "
        "the mean gradient; one rank wrote the file, all resumed from it and evaluated"
    )
