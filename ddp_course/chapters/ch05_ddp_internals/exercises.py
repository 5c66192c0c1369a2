"""The exercises of chapter 05."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from ddp_course.chapters.ch05_ddp_internals import solutions
from ddp_course.collectives import barrier, ring
from ddp_course.data_parallel import DistributedDataParallel, bucket_plan
from ddp_course.lab.answers import Answer, code, on_ranks, one_line
from ddp_course.lab.exercises import exercise, expect
from ddp_course.measure import EventLog, TorchCollectives
from ddp_course.model import GPTConfig, build_gpt

MIB = 1 << 20
Pairs = list[tuple[str, Tensor]]

# ---- my_bucket_plan ----------------------------------------------------------------


@exercise("my_bucket_plan", solution=solutions.my_bucket_plan)
def check_my_bucket_plan(answer: Answer) -> str:
    """`my_bucket_plan(parameters, cap, first)`: lists of names, as they are sent."""
    cases = 0
    for told, parameters in _models().items():
        for cap, first in ((4000, 1000), (4000, 4000), (400, 100), (10**6, 10**6)):
            where = f"For {told}, cap = {cap} and first = {first},"
            before = list(parameters)
            got = answer(parameters, cap, first)
            _judge_names(where, got, before)
            _judge_sizes(where, got, dict(before), cap, first)
            wanted = [
                list(b.parameters) for b in bucket_plan(before, cap / MIB, first / MIB)
            ]
            expect(
                got == wanted,
                f"{where} the buckets are right, but their order is not: "
                f"{code(one_line(got))}. The bucket whose last gradient is ready first "
                "comes first, whatever its type.",
            )
            same = len(parameters) == len(before) and all(
                a is b for a, b in zip(parameters, before, strict=True)
            )
            expect(same, f"{where} your function changed the list `parameters`.")
            cases += 1
    return (
        f"{cases} plans, with tied and frozen parameters and two types: every gradient "
        "once, the last layers first, buckets closed at their cap"
    )


def _models() -> dict[str, Pairs]:
    """Return lists of parameters that each hide a difficulty, by their description."""
    small = GPTConfig(block_size=8, n_layer=2, n_head=2, d_model=8)
    plain = build_gpt(small)
    tied = build_gpt(GPTConfig(block_size=8, n_layer=1, n_head=2, d_model=8, tied=True))
    frozen = build_gpt(small)
    frozen.blocks[1].requires_grad_(False)
    two_types = build_gpt(small)
    two_types.blocks[0].double()
    two_types.head.norm.double()
    return {
        "a small GPT": list(plain.named_parameters()),
        "a GPT with a tied parameter": list(
            tied.named_parameters(remove_duplicate=False)
        ),
        "a GPT with a frozen block": list(frozen.named_parameters()),
        "a GPT with parameters of two types": list(two_types.named_parameters()),
        "parameters that fill buckets to the byte": [
            (f"p{k}", nn.Parameter(torch.zeros(25 * size)))
            for k, size in enumerate((4, 1, 3, 36, 4, 10, 26, 14, 10))
        ],
    }


def _judge_names(where: str, got: Any, parameters: Pairs) -> None:
    """Look whether every gradient is in one bucket, and in which order."""
    fine = isinstance(got, list) and all(
        isinstance(b, list) and all(isinstance(name, str) for name in b) for b in got
    )
    expect(
        fine,
        f"{where} your function returned {code(one_line(got))}; expected a list of "
        "lists of names.",
    )
    expect(all(got), f"{where} a bucket is empty.")
    known, names = dict(parameters), [name for bucket in got for name in bucket]
    place = {name: k for k, (name, _) in enumerate(parameters)}
    first_name: dict[int, str] = {}
    for name, parameter in parameters:
        first_name.setdefault(id(parameter), name)
    for name in names:
        expect(name in known, f"{where} there is no parameter {code(name)}.")
        expect(
            known[name].requires_grad,
            f"{where} {code(name)} is in a bucket, but it is frozen: no gradient of it "
            "will ever come, and the bucket will never be full.",
        )
        expect(
            first_name[id(known[name])] == name,
            f"{where} {code(name)} is the same parameter as "
            f"{code(first_name[id(known[name])])}: it has one gradient, which travels "
            "once, under its first name.",
        )
        expect(names.count(name) == 1, f"{where} {code(name)} is in two places.")
    for name in first_name.values():
        expect(
            name in names or not known[name].requires_grad,
            f"{where} {code(name)} is in no bucket: it would never be averaged.",
        )
    for bucket in got:
        types = {str(known[name].dtype).removeprefix("torch.") for name in bucket}
        expect(
            len(types) == 1,
            f"{where} a bucket holds gradients of the types {' and '.join(types)}; one "
            "all-reduce adds numbers of one type.",
        )
        places = [place[name] for name in bucket]
        expect(
            places == sorted(places, reverse=True),
            f"{where} in a bucket {code(bucket[0])} comes before {code(bucket[-1])}; "
            "gradients become ready in the opposite order of registration.",
        )


def _judge_sizes(
    where: str, got: list[list[str]], known: dict[str, Tensor], cap: int, first: int
) -> None:
    """Look whether each bucket is closed as soon as it holds its cap."""
    of_type: dict[torch.dtype, list[list[str]]] = {}
    place = {name: k for k, name in enumerate(known)}
    for bucket in got:
        of_type.setdefault(known[bucket[0]].dtype, []).append(bucket)
    for buckets in of_type.values():
        all_names = [name for bucket in buckets for name in bucket]
        expect(
            all_names == sorted(all_names, key=place.get, reverse=True),
            f"{where} {code(all_names[0])} is sent before {code(all_names[-1])}, and "
            "in between the order is not that of the gradients; the last registered "
            "come first, over all buckets of a type.",
        )
        for k, bucket in enumerate(buckets):
            limit = first if k == 0 else cap
            which = "the first bucket" if k == 0 else f"bucket {k}"
            nbytes = sum(known[name].nbytes for name in bucket)
            without_last = nbytes - known[bucket[-1]].nbytes
            expect(
                without_last < limit,
                f"{where} {which} of its type holds {nbytes} bytes; it held its "
                f"{limit} already before {code(bucket[-1])} came, and is closed then.",
            )
            expect(
                nbytes >= limit or k == len(buckets) - 1,
                f"{where} {which} of its type holds {nbytes} bytes only; it is closed "
                f"as soon as it holds {limit} or more, and not before.",
            )


# ---- mini_ddp ----------------------------------------------------------------------

SIZES = (3, 4, 5, 6, 7, 8)  # numbers of parameters 0 to 5
MEMBERS = ((5, 4), (3,), (2, 1, 0))  # of three buckets, all of different sizes
STEPS = 3
ORDERS = ((0, 1, 2, 3, 4, 5), (1, 2, 4, 0, 5, 3), (5, 4, 3, 2, 1, 0))  # of forward


@exercise("mini_ddp", solution=solutions.mini_ddp)
def check_mini_ddp(answer: Answer) -> str:
    """`mini_ddp(buckets, launch, at_the_end)`: make backward average gradients."""
    hint = (
        "In a hook: count the gradients that are missing in the bucket, then launch "
        "what is full, in the order of `buckets`; wait at the end."
    )
    for n in (2, 3, 1):
        real = on_ranks(_use_mini_ddp, answer, world_size=n, hint=hint)
        for rank, steps in enumerate(real):
            for number, told in enumerate(steps, start=1):
                where = f"On {n} real ranks, on rank {rank} in step {number},"
                _judge_launches(where, told, hint)
        for rank, steps in enumerate(real):
            for number, told in enumerate(steps, start=1):
                where = f"On {n} real ranks, on rank {rank} in step {number},"
                _judge_means(where, told, n, number)
    return (
        f"on 1, 2 and 3 real ranks, {STEPS} steps each, every bucket left as soon as "
        "it was full and its turn, once, in one order, and backward returned means"
    )


def _use_mini_ddp(mini_ddp: Callable) -> list[dict[str, Any]]:
    """On every rank: train with the reader's hooks, and note the order of things."""
    rank = dist.get_rank()
    weights = [nn.Parameter(torch.zeros(size)) for size in SIZES]
    buckets = [[weights[k] for k in members] for members in MEMBERS]
    numels = [sum(SIZES[k] for k in members) for members in MEMBERS]
    events: list[tuple[str, int]] = []
    for k, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(
            lambda _, k=k: events.append(("gradient", k))
        )

    def launch(flat: Tensor) -> _Noting:
        bucket = _which_bucket(flat, numels)
        events.append(("launch", bucket))
        _check_turn(events, bucket)
        return _Noting(ring.all_reduce(flat, async_op=True), bucket, events)

    def at_the_end(function: Callable[[], None]) -> None:
        Variable._execution_engine.queue_callback(function)

    mini_ddp(buckets, launch, at_the_end)
    told = []
    for number in range(1, STEPS + 1):
        for weight in weights:  # as `optimizer.zero_grad` does it, in both ways
            weight.grad = None if number < STEPS else weight.grad.zero_()
        events.clear()
        parts = [_share(k, rank, number) * weights[k].sum() for k in ORDERS[rank % 3]]
        barrier()
        with TorchCollectives() as torchs:
            sum(parts).backward()
        gradients = [w.grad.clone() for w in weights]
        told.append(
            {
                "events": list(events),
                "gradients": gradients,
                "others": [call.op for call in torchs.calls],
            }
        )
    return told


class _Noting:
    """A handle that notes when it is waited for."""

    def __init__(self, work: Any, bucket: int, events: list[tuple[str, int]]) -> None:
        self.work, self.bucket, self.events = work, bucket, events

    def wait(self) -> None:
        self.events.append(("wait", self.bucket))
        self.work.wait()


def _which_bucket(flat: Any, numels: list[int]) -> int:
    if not isinstance(flat, Tensor) or flat.numel() not in numels:
        shown = (
            f"{flat.numel()} numbers" if isinstance(flat, Tensor) else one_line(flat)
        )
        raise ValueError(
            f"launch got {shown}; the gradients of the buckets are "
            f"{', '.join(map(str, numels))} numbers"
        )
    if flat.dtype != torch.float32:
        raise ValueError(f"launch got numbers of {flat.dtype}; gradients are float32")
    return numels.index(flat.numel())


def _check_turn(events: list[tuple[str, int]], bucket: int) -> None:
    """Raise before anything is sent that does not belong together."""
    launched = [k for what, k in events if what == "launch"]
    if launched != list(range(len(launched))):
        raise RuntimeError(
            f"bucket {bucket} was launched when it was the turn of bucket "
            f"{launched.index(bucket)}: on all ranks the order must be that of buckets"
        )
    here = [k for what, k in events if what == "gradient"]
    missing = [k for k in MEMBERS[bucket] if k not in here]
    if missing:
        raise RuntimeError(
            f"bucket {bucket} was launched before it was full: {len(missing)} of its "
            f"{len(MEMBERS[bucket])} gradients had not come"
        )


def _share(k: int, rank: int, number: int) -> float:
    """Return the gradient of parameter k on a rank, in a step."""
    return (k + 1) * number * 10.0**rank


def _judge_launches(where: str, told: dict[str, Any], hint: str) -> None:
    """Look at what was launched when, seen from the gradients' order."""
    events = told["events"]
    launched = [k for what, k in events if what == "launch"]
    expect(
        not told["others"],
        f"{where} your function called `{(told['others'] or [''])[0]}` of PyTorch; "
        "send with `launch` alone.",
    )
    expect(
        launched == list(range(len(MEMBERS))),
        f"{where} {len(launched)} of {len(MEMBERS)} buckets were launched. Each "
        "backward sends every bucket once: is all counting set back at the end?",
    )
    last = max(at for at, (what, _) in enumerate(events) if what == "gradient")
    for bucket in launched:
        needed = {k for members in MEMBERS[: bucket + 1] for k in members}
        places = [
            at
            for at, (what, k) in enumerate(events)
            if what == "gradient" and k in needed
        ]
        at = events.index(("launch", bucket))
        late = [k for what, k in events[max(places) + 1 : at] if what == "gradient"]
        expect(
            not late,
            f"{where} bucket {bucket} was full, and all before it launched, but it was "
            f"launched {len(late)} gradient{'s' * (len(late) > 1)} later: no overlap. "
            f"{hint}",
        )
    for at, (what, k) in enumerate(events):
        expect(
            what != "wait" or at > last,
            f"{where} your function waited for bucket {k} while gradients were still "
            "to come: backward stands still meanwhile. Wait at the end.",
        )
    waited = {k for what, k in events if what == "wait"}
    for bucket in launched:
        expect(
            bucket in waited,
            f"{where} nobody waited for bucket {bucket}; until `wait()` has returned, "
            "its numbers may still change.",
        )


def _judge_means(where: str, told: dict[str, Any], n: int, number: int) -> None:
    for k, got in enumerate(told["gradients"]):
        shares = [_share(k, rank, number) for rank in range(n)]
        mean, shown = sum(shares) / n, one_line(got.flatten()[0].item())
        right = got.shape == (SIZES[k],) and bool(
            torch.allclose(got, torch.full_like(got, mean), rtol=1e-5)
        )
        told_sum = abs(got.flatten()[0].item() - sum(shares)) < 1e-3 * sum(shares)
        why = (
            "this is the sum; divide by the number of ranks"
            if told_sum
            else "is the mean back in `grad` when backward returns?"
        )
        expect(
            right,
            f"{where} a gradient is {shown} after backward; the ranks had "
            f"{', '.join(f'{share:g}' for share in shares)}, and the mean is "
            f"{mean:g}: {why}",
        )


# ---- accumulate --------------------------------------------------------------------

PARTS = (
    ((2, 2, 2), (2, 2, 2), (2, 2, 2)),
    ((1, 2, 5), (5, 2, 1), (3, 3, 2)),  # rows of each microbatch, on each rank
    ((4,), (4,), (4,)),
    ((1, 1, 1, 3), (2, 1, 2, 1), (1, 3, 1, 1)),
)


@exercise("accumulate", solution=solutions.accumulate)
def check_accumulate(answer: Answer) -> str:
    """`accumulate(ddp, microbatches)`: the gradient of all of them; send it once."""
    hint = (
        "A forward outside of `no_sync` makes its backward send. And how much does a "
        "microbatch of few rows count?"
    )
    for parts in PARTS:
        n = len(parts)
        real = on_ranks(_accumulate, answer, parts, world_size=n, hint=hint)
        alone = _gradient_of_all(parts)
        for rank, told in enumerate(real):
            where = f"On rank {rank} with microbatches of {parts[rank]} rows,"
            _judge_sending(where, len(parts[rank]), told, hint)
            expect(told["untouched"], f"{where} your function changed the list.")
            right = torch.allclose(told["gradient"], alone, rtol=1e-4, atol=1e-6)
            ratio = (told["gradient"] / alone).median().item()
            expect(
                right,
                f"{where} the gradient is not that of the mean over all rows (in the "
                f"median {ratio:.2f} times as large). {hint}",
            )
    return (
        "3 real ranks, equal and unequal microbatches: the gradient of all rows, and "
        "nothing was sent before the last microbatch"
    )


class _Regression(nn.Module):
    """A small model; called with a batch, it returns the mean loss over its rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layers(x) - y).square().mean()


def _rows(rank: int, sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return the microbatches of a rank."""
    dice = torch.Generator().manual_seed(rank)
    return [
        (
            torch.randn(size, 4, generator=dice),
            torch.randn(size, 1, generator=dice) + 3 * k,
        )
        for k, size in enumerate(sizes)
    ]


def _gradient_of_all(parts: Sequence[Sequence[int]]) -> Tensor:
    pairs = [pair for rank, sizes in enumerate(parts) for pair in _rows(rank, sizes)]
    model = _Regression()
    model(*(torch.cat(column) for column in zip(*pairs, strict=True))).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def _accumulate(accumulate: Callable, parts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """On every rank: call the reader's function, and note what is sent when."""
    rank = dist.get_rank()
    events: list[str] = []

    def noting(flat: Tensor, **options: Any) -> Any:
        events.append("all_reduce")
        return dist.all_reduce(flat, **options)

    model = _Regression()
    model.register_forward_pre_hook(lambda *_: events.append("forward"))
    model.layers[2].register_full_backward_hook(lambda *_: events.append("backward"))
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=1e-5, first_bucket_mb=1e-5, all_reduce=noting
    )
    microbatches = _rows(rank, parts[rank])
    barrier()
    given = list(microbatches)
    with TorchCollectives() as torchs:
        accumulate(ddp, given)
    gradients = [
        torch.zeros_like(p) if p.grad is None else p.grad for p in ddp.parameters()
    ]
    return {
        "events": events,
        "gradient": torch.cat([g.flatten() for g in gradients]),
        "collectives": torchs.count(),
        "untouched": len(given) == len(microbatches),
        "buckets": len(ddp.buckets),
    }


def _judge_sending(where: str, micro: int, told: dict[str, Any], hint: str) -> None:
    events, buckets = told["events"], told["buckets"]
    steps = [e for e in events if e != "all_reduce"]
    expect(
        steps == ["forward", "backward"] * micro,
        f"{where} the order was {code(', '.join(steps))}; expected {micro} times a "
        "forward and then its backward. Accumulation is there to have one microbatch "
        "in memory at a time.",
    )
    passes: list[int] = []  # all-reduces of each microbatch
    for event in events:
        if event == "forward":
            passes.append(0)
        elif event == "all_reduce":
            passes[-1] += 1
    expect(
        sum(passes[:-1]) == 0,
        f"{where} microbatches sent {passes} all-reduces; all but the last should "
        f"send nothing. {hint}",
    )
    expect(
        passes[-1] == buckets,
        f"{where} the last microbatch sent {passes[-1]} all-reduces; expected one for "
        f"each of {buckets} buckets: otherwise the ranks are never averaged.",
    )
    expect(
        told["collectives"] == buckets,
        f"{where} there were {told['collectives'] - buckets} more collectives than "
        "DDP's own; none is needed.",
    )


# ---- mean_loss ---------------------------------------------------------------------

LOSSES = (
    [([1.0], [4]), ([3.0], [4])],
    [([1.0, 2.0], [8, 8]), ([4.5, 5.0], [8, 2]), ([7.25], [3])],
    [([2.0], [1]), ([], []), ([8.0, 6.0, 4.0], [3, 3, 1]), ([5.0, 1.0], [2, 10])],
    [([3.0, 9.125], [1, 2])],
)


@exercise("mean_loss", solution=solutions.mean_loss)
def check_mean_loss(answer: Answer) -> str:
    """`mean_loss(losses, sizes)`: the mean over all samples of all ranks."""
    hint = "Add up sums and numbers of samples over the ranks; divide at the end."
    for given in LOSSES:
        real = on_ranks(_mean, answer, given, world_size=len(given), hint=hint)
        pairs = [p for told in given for p in zip(*told, strict=True)]
        wanted = sum(x * k for x, k in pairs) / sum(k for _, k in pairs)
        for rank, told in enumerate(real):
            where = f"With {given} on {len(given)} real ranks, rank {rank}"
            got = told["got"]
            expect(
                isinstance(got, float) and abs(got - wanted) < 1e-5 * wanted,
                f"{where} returned {code(one_line(got))}; expected {wanted:.6g}, each "
                f"sample counted once. {hint}",
            )
            expect(told["untouched"], f"{where} changed the lists that it was given.")
            calls = told["calls"]
            expect(
                len(calls) <= 1,
                f"{where} called {len(calls)} collectives ({', '.join(calls)}); sum "
                "and number can travel in one tensor.",
            )
    return (
        "1 to 4 real ranks, batches of unequal size and a rank without any: the mean "
        "over all samples, with one collective"
    )


def _mean(mean_loss: Callable, given: Sequence) -> dict[str, Any]:
    losses, sizes = (list(column) for column in given[dist.get_rank()])
    before = list(losses), list(sizes)
    barrier()
    with TorchCollectives() as torchs, EventLog() as log:
        got = mean_loss(losses, sizes)
    if isinstance(got, Tensor) and got.numel() == 1:
        got = got.item()
    return {
        "got": got if isinstance(got, float) else one_line(got),
        "untouched": (losses, sizes) == before,
        "calls": [c.op for c in torchs.calls] + [event.op for event in log.events],
    }
