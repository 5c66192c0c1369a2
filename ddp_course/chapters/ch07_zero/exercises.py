"""The exercises of chapter 07: who owns what, a step of stage 1, one norm for all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.chapters.ch07_zero import solutions
from ddp_course.collectives import barrier
from ddp_course.lab.answers import Answer, code, on_ranks, one_line
from ddp_course.lab.exercises import exercise, judge, judge_ranks, living_bytes, shown
from ddp_course.measure import ByteMeter, EventLog, TorchCollectives

# ---- my_pieces ---------------------------------------------------------------------

ROWS = (
    *(([4, 2], 2), ([2, 6, 3, 12], 4), ([5, 1, 1, 7, 3], 3), ([1000, 3, 1], 4)),
    *(([7], 3), ([2, 1], 5)),  # more ranks than elements
    *(([3, 0, 4], 2), ([], 2), ([3, 4, 5], 1)),
)


PIECES = {
    "tuples": "expected a list of tuples of three whole numbers.",
    "there": "there is no parameter {k}.",
    "some": "{piece} is empty, and should not be there.",
    "inside": "{piece} does not lie in parameter {k}, whose elements are 0 up to "
    "{numel}. Count from the parameter's beginning, not from the row's.",
    "alone": "but element {element} of parameter {k} belongs to rank {other} already.",
}
SHARD = {
    "real": "{total} elements; the row of {sum} is padded to {n} shards of {length}, "
    "and {left} elements of rank {rank}'s shard are real.",
    "right": "its shard is the elements {begin} up to {end} of the row, one stretch "
    "without gaps, with the parameters in their order.",
}


@exercise("my_pieces", solution=solutions.my_pieces)
def check_my_pieces(answer: Answer) -> str:
    """`my_pieces(numels, rank, world_size)`: tuples (k, first, last) that it owns.

    Where does your shard begin and end in the long row, and where does parameter k?

    A shard has the sum of all lengths over the ranks, rounded up. Go along the row and
    note where each parameter begins. Your piece of it is where both intervals overlap,
    less that beginning; leave it out if it is empty.
    """
    for numels, n in ROWS:
        length = -(-sum(numels) // n)
        owners: dict[tuple[int, int], int] = {}
        for rank in range(n):
            pieces = answer.pure(list(numels), rank, n)
            where = f"{answer.call(numels, rank, n)} returned {code(one_line(pieces))};"
            for told in _each_piece(pieces, numels, owners, rank):
                judge(where, told, PIECES)
            told = {"total": sum(last - first for _, first, last in pieces)}
            told |= {"sum": sum(numels), "n": n, "length": length, "rank": rank}
            told |= {"begin": rank * length, "end": (rank + 1) * length}
            told["left"] = min(max(sum(numels) - rank * length, 0), length)
            told["real"] = told["total"] == told["left"]
            told["right"] = pieces == solutions.my_pieces(numels, rank, n)
            judge(where, told, SHARD)
    return (
        f"{len(ROWS)} rows of parameters, among them one with more ranks than "
        "elements: every element has one owner, and all shards are equally long"
    )


def _each_piece(
    pieces: Any, numels: list[int], owners: dict[tuple[int, int], int], rank: int
) -> Iterator[dict[str, Any]]:
    """Tell of each piece whether it is one, and whether nobody else owns it."""
    fine = isinstance(pieces, list) and all(
        isinstance(piece, tuple) and [type(part) for part in piece] == [int] * 3
        for piece in pieces
    )
    told: dict[str, Any] = dict.fromkeys(PIECES, True) | {"tuples": fine}
    yield told
    for k, first, last in pieces:
        there = 0 <= k < len(numels)
        inside = there and first >= 0 and last <= numels[k]
        told |= {"k": k, "piece": code(f"({k}, {first}, {last})"), "there": there}
        told |= {"some": first < last, "inside": inside, "numel": there and numels[k]}
        for element in range(first, last if inside else first):
            other = owners.setdefault((k, element), rank)
            if other != rank:
                told |= {"alone": False, "element": element, "other": other}
        yield told


# ---- sharded_step ------------------------------------------------------------------

LR, BETA = 0.25, 0.5  # powers of two: all sums and products are exact
STEP = {
    "ours": "called `{by_torch}` of `torch.distributed`; use the two of "
    "`ddp_course.collectives`, whose bytes the meter counts.",
    "untouched": "changed `gradient`; leave it as it is.",
    "mine": "has wrong numbers: your part of `weights` is wrong. They are {weights}; "
    "one process has {right}. Is the gradient a mean? Is it your part, and is its "
    "momentum kept in place?",
    "all": "has wrong numbers: your part of `weights` is right, the other ranks' parts "
    "are not: {weights}; one process has {right}. Gather the parts after they were "
    "stepped, into `weights` itself.",
    "kept": "has an old momentum: `momentum` is not the new momentum of your part; "
    "change it in place.",
    "least": "sent {sent} bytes; 2 (N - 1) / N of the {S} bytes of `weights` are "
    "{most}, as much as DDP sends. {hint}",
    "few": "called {calls} collectives; one reduce-scatter and one all-gather are "
    "enough, and every call costs a latency.",
    "no_more": "keeps {more} bytes from step to step, beside `weights` and your shard "
    "of the momentum: sharded in name only.",
}


@exercise("sharded_step", solution=solutions.sharded_step)
def check_sharded_step(answer: Answer) -> str:
    """`sharded_step(weights, gradient, momentum, lr, beta)`: a step of stage 1.

    An all-reduce has two halves. What lies between them for a rank that has its shard
    of the momentum only?

    Reduce-scatter the gradient into a tensor as long as `momentum`, and make a mean of
    it. The new momentum is beta times the old one, plus that mean. From your part of
    `weights` take lr times it, in place. All-gather the parts into `weights`.
    """
    hint = (
        "Reduce-scatter the gradients into a tensor as long as `momentum`, step your "
        "part of `weights`, and gather the parts."
    )
    judge_ranks(STEP, _steps, answer, worlds=(2, 3, 1), hint=hint)
    return (
        "on 1, 2 and 3 real ranks: the weights of one process, bit for bit, 1/N of the "
        "momentum on each rank, and not a byte more than DDP sends"
    )


def _steps(sharded_step: Callable) -> Iterator[dict[str, Any]]:
    """On every rank: some steps, each with what it should have come to."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for dtype, steps in ((torch.float32, 3), (torch.float64, 2)):
        numel = 600 * n
        weights, momentum = torch.arange(float(numel)), torch.zeros(numel // n)
        weights, momentum = weights.to(dtype), momentum.to(dtype)
        right, velocity = weights.clone(), torch.zeros(numel, dtype=dtype)
        part = slice(rank * numel // n, (rank + 1) * numel // n)
        most = 2 * (n - 1) * weights.nbytes // n
        # What the collectives keep for themselves is there before anything is counted.
        solutions.sharded_step(weights.clone(), weights, momentum.clone(), LR, BETA)
        for number in range(steps):
            gradients = [_gradient(r, number, numel, n, dtype) for r in range(n)]
            mine = gradients[rank].clone()
            velocity = BETA * velocity + sum(gradients) / n
            right = right - LR * velocity
            barrier()
            before, log = living_bytes(), EventLog()
            with log, ByteMeter() as meter, TorchCollectives() as torchs:
                sharded_step(weights, mine, momentum, LR, BETA)
            more = living_bytes() - before
            calls = len([e for e in log.events if e.lane == "communication"])
            by_torch, sent = ", ".join(c.op for c in torchs.calls), meter.total_sent
            told = {"case": f"in step {number + 1} of {str(dtype)[len('torch.') :]}"}
            told |= {"ours": not by_torch, "by_torch": by_torch}
            told["untouched"] = torch.equal(mine, gradients[rank])
            told["mine"] = torch.equal(weights[part], right[part])
            told["all"] = torch.equal(weights, right)
            told["kept"] = torch.equal(momentum, velocity[part])
            told |= {"weights": shown(weights.tolist(), 60)}
            told |= {"right": shown(right.tolist(), 60), "S": weights.nbytes}
            told |= {"least": sent <= most, "sent": sent, "most": most}
            told |= {"few": calls <= 2, "calls": calls, "more": more}
            yield told | {"no_more": more < weights.nbytes // max(n, 2)}


def _gradient(rank: int, number: int, numel: int, n: int, dtype: torch.dtype) -> Tensor:
    """Return numbers that fit this type and no smaller one, for exact means; or 0."""
    if (rank, number) == (1, 1):
        return torch.zeros(numel, dtype=dtype)
    whole = (torch.arange(numel, dtype=dtype) * (rank + 2) + number) % 1999 - 700
    return n * (whole + (2**-30 if dtype == torch.float64 else 0))


# ---- clip_shards -------------------------------------------------------------------

CASES = (  # the shards of each rank, and the norm that is allowed
    ((((3.0,),), ((4.0,),)), 1.0),  # a norm of 5
    ((((1.0, 2.0), (2.0,)), (), ((4.0, 4.0, 8.0), (4.0,))), 2.0),  # 11; one has none
    ((((0.3,), (0.4,)), ((0.0, 0.0), ())), 1.0),  # 0.5: small enough; one is empty
    ((((0.6, 0.0),), ((0.8,),)), 0.9),  # 1, and nobody's own is too large
    ((((0.0,),), ()), 1.0),  # nothing at all
    ((((300.0, 400.0),), ((0.0,),)), 5.0),  # 500, whose square no 16 bits can hold
    ((((6.0, 8.0),),), 5.0),  # one rank
)
CLIP = {
    "one": "your function called {calls}, with {nbytes} bytes; one all_reduce of a "
    "single number, by `dist`, is enough.",
    "norm": "it returned {norm_got}; the norm of all gradients before clipping is "
    "{norm_wanted}: the root of the sum of all squares.",
    "close": "the shards are {after} afterwards; expected {wanted}, in the same "
    "tensors. All are scaled by the same factor, and none if the norm is small enough.",
}


@exercise("clip_shards", solution=solutions.clip_shards)
def check_clip_shards(answer: Answer) -> str:
    """`clip_shards(shards, max_norm)`: scale all ranks' shards; return their norm.

    A norm of all is no sum of norms. Which numbers of the ranks may be added up?

    Add up the squares of your shards, in float32, and then over the ranks; a rank
    without shards brings 0. The root is the norm. Where it is above `max_norm`,
    multiply all your shards, in place, by what brings it down to that.
    """
    hint = "Every rank must call one `dist.all_reduce`, one without shards, too."
    for shards, most in CASES:
        n = len(shards)
        told = on_ranks(_clip, answer, shards, most, world_size=n, hint=hint)
        lists = shown([[list(one) for one in rank] for rank in shards])
        for rank, its in enumerate(told):
            where = f"On {n} ranks with {lists}, with max_norm = {most:g}, on rank"
            judge(f"{where} {rank}:", its, CLIP)
    return (
        f"{len(CASES)} times on 1 to 3 real ranks, one of them without shards: the "
        "norm of all together, the same factor for all, and one small all-reduce"
    )


def _clip(clip_shards: Callable, shards: tuple, max_norm: float) -> dict[str, Any]:
    flat = [x for rank in shards for one in rank for x in one]
    norm = math.sqrt(sum(x * x for x in flat))
    scale = min(1.0, max_norm / (norm or 1))
    dtype = torch.float16 if max(flat) > 100 else torch.float32
    own = shards[dist.get_rank()]  # each a column of a matrix, beside zeros
    mine = [torch.tensor([one, [0.0] * len(one)], dtype=dtype).T for one in own]
    given = list(mine)
    barrier()
    with EventLog() as log, ByteMeter() as meter, TorchCollectives() as torchs:
        got = clip_shards(given, max_norm)
    calls, nbytes = [c.op for c in torchs.calls], torchs.nbytes + meter.total_sent
    ours = [f"{e.op} of ddp_course" for e in log.events if e.lane == "communication"]
    wanted = [[scale * x for x in one] for one in own]
    after = [shard[:, 0].tolist() for shard in mine]
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    pairs = zip(sum(after, []), sum(wanted, []), strict=True)
    told = {"one": calls == ["all_reduce"] and nbytes <= 16, "nbytes": nbytes}
    told["calls"] = code(", ".join(calls + ours) or "no collective")
    told["norm"] = isinstance(got, float) and math.isclose(got, norm, rel_tol=1e-4)
    told |= {"norm_got": shown(got), "norm_wanted": code(f"{norm:.4g}")}
    told["close"] = all(math.isclose(x, y, rel_tol=tolerance) for x, y in pairs)
    wanted = [[round(x, 4) for x in one] for one in wanted]
    return told | {"after": shown(after), "wanted": shown(wanted)}
