"""The exercises of chapter 07: pieces of parameters, a step of stage 1, a norm."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.chapters.ch07_zero import solutions
from ddp_course.lab.answers import Answer, code
from ddp_course.lab.exercises import exercise, shown
from ddp_course.lab.judge import AGAIN, Case, Draw, same_as, same_on_ranks
from ddp_course.lab.values import equal_values

# ---- my_pieces ---------------------------------------------------------------------


@exercise("my_pieces", solution=solutions.my_pieces)
def check_my_pieces(answer: Answer) -> str:
    """`my_pieces(numels, rank, world_size)`: pieces (k, first, last) that `rank` owns.

    Where does your shard begin and end in the long row, and where does parameter k?

    Divide the sum of all lengths by the number of ranks, and round up: that is the
    length of a shard. Go along the row and note where each parameter begins. Your piece
    of a parameter is the overlap of both intervals, counted from the parameter's
    beginning; leave an empty piece out.
    """
    hints = {"fits": wrong_pieces, "right": wrong_pieces}
    same_as(answer, solutions.my_pieces, _row, cases=200, hints=hints)
    return (
        "200 cases, some with empty parameters or more ranks than elements: every "
        "element has one owner, and all shards are equally long"
    )


def _row(d: Draw) -> tuple[list[int], int, int]:
    n, sizes = d.same.randint(1, 5), (1, 2, 3, 7, 12, 1000)
    if d.case > 60:  # empty parameters come last: common mistakes show first
        sizes = (0, *sizes)
    count = d.same.randint(int(d.case < 60), 5)
    if d.case > 195:  # long parameters, many ranks
        sizes, count, n = (0, 1, 70_001), 3, (2, 300)[d.case % 2]
    if d.case == 199:  # many parameters
        sizes, count = (0, 1, 3), 1200
    numels = d.same.choices(sizes, k=count)
    rank = d.same.randrange(n)
    if d.case == 198:  # a fraction just above a whole number must be rounded up, too
        numels, rank, n = [60_000, 0, 1], 10_000, 20_000
    numels = numels[::-1] if d.number >= AGAIN else numels
    return numels, rank, n


def wrong_pieces(case: Case) -> str:
    """Describe the mistake in a rank's pieces."""
    numels, rank, n = case.args.values()
    got, sum_, length = case.got, sum(numels), -(-sum(numels) // n)
    returned = f"returned {code(str(got))};"
    try:
        pieces = [(int(k), int(first), int(last)) for k, first, last in got]
    except (TypeError, ValueError):
        return f"{returned} expected a list of tuples of three whole numbers."
    for k, first, last in pieces:
        piece = code(f"({k}, {first}, {last})")
        if not 0 <= k < len(numels):
            return f"{returned} there is no parameter {k}."
        if first >= last:
            return f"{returned} {piece} is empty; leave it out."
        if first < 0 or last > numels[k]:
            return (
                f"{returned} {piece} does not lie in parameter {k}, whose elements are "
                f"0 up to {numels[k]}. Count from the parameter's beginning, not from "
                "the row's."
            )
    for other in range(n):
        if other != rank and pieces and pieces == solutions.my_pieces(numels, other, n):
            return f"{returned} these elements belong to rank {other}."
    total = sum(last - first for _, first, last in pieces)
    left = min(max(sum_ - rank * length, 0), length)
    return (
        f"{returned} {total} elements. The row of {sum_} is padded to {n} shards of "
        f"{length}; rank {rank}'s shard is the elements {rank * length} up to "
        f"{(rank + 1) * length}, one stretch without gaps, with the parameters in "
        f"their order; {left} of its elements are real."
    )


# ---- sharded_step ------------------------------------------------------------------

STEP = {
    "kept": "changed `gradient`; leave it as it is.",
    "library": "called {called}; use `reduce_scatter_single` and `all_gather_single` "
    "of `ddp_course.collectives`, whose bytes the meter counts.",
    "least": "sent {sent_bytes} bytes; 2 (N - 1) / N of the bytes of `weights` are "
    "{wanted_bytes}, as much as DDP sends. {hint}",
    "few": "called {called}; one reduce-scatter and one all-gather are enough, and "
    "every call costs a latency.",
    "memory": "keeps {more} bytes from step to step, beside `weights` and your shard "
    "of the momentum: then the momentum is sharded in name only.",
}


@exercise("sharded_step", solution=solutions.sharded_step)
def check_sharded_step(answer: Answer) -> str:
    """`sharded_step(weights, gradient, momentum, lr, beta)`: a step of stage 1.

    An all-reduce has two halves. What does a rank that has only its shard of the
    momentum do between them?

    Reduce-scatter the gradient into a tensor as long as `momentum`, and divide it by
    the number of ranks. The new momentum is beta times the old one, plus that mean.
    Subtract lr times the momentum from your part of `weights`, in place. All-gather the
    parts into `weights`.
    """
    hint = (
        "Reduce-scatter the gradients into a tensor as long as `momentum`, step your "
        "part of `weights`, and gather the parts."
    )
    same_on_ranks(
        *(answer, solutions.sharded_step, _step),
        cases=9,
        watch=["collectives", "memory", "storage"],
        hints=STEP | {"in_place": wrong_step},
        hint=hint,
    )
    return (
        "on 1, 2 and 3 real ranks: the solution's weights, 1/N of the momentum on each "
        "rank, and not a byte more than DDP sends"
    )


def _step(d: Draw) -> tuple[Tensor, Tensor, Tensor, float, float]:
    dtype = (torch.float32, torch.float64)[d.case % 2]
    part = d.same.choice([600, 1001]) if d.case < 8 else 1
    everyones = Draw(d.number + 1000)  # the weights are equal on all ranks
    weights = everyones.tensor((part * d.n,), dtype)
    gradient, momentum = d.tensor((part * d.n,), dtype), d.tensor((part,), dtype)
    if d.case % 4 == 1:
        gradient[:part] = 0  # on all ranks; rank 0's momentum must still decay
    if d.case == 6:  # then the mean is infinite, or nan
        gradient[d.rank :: part - 1] = (math.inf, math.nan)[d.rank % 2]
    # float32 rounds these rates, so a float64 step with rounded rates is wrong.
    lr, beta = d.same.choice([0.3, 1.7]), d.same.choice([0.6, 0.9])
    if d.case == 3:  # the first rate of a warm-up: only the momentum changes
        lr = 0.0
    return weights, gradient, momentum, lr, beta


def wrong_step(case: Case) -> str:
    """Describe what is wrong: this rank's weights, other ranks', or the momentum."""
    if equal_values(case.after["weights"], case.right["weights"]):
        return (
            "has an old momentum: `momentum` is not the new momentum of your part; "
            "change it in place."
        )
    momentum = case.args["momentum"]
    length, kind = len(momentum), str(momentum.dtype).removeprefix("torch.")
    mine = slice(dist.get_rank() * length, (dist.get_rank() + 1) * length)
    if not equal_values(case.after["weights"][mine], case.right["weights"][mine]):
        return (
            f"has wrong {kind} numbers: your part of `weights` is wrong. Is the "
            "gradient a mean? Is it your part, and is the momentum changed in place?"
        )
    return (
        f"has wrong {kind} numbers: your part of `weights` is right, the others' parts "
        "are not. Gather the parts after the step, into `weights` itself."
    )


# ---- clip_shards -------------------------------------------------------------------

ONE = (
    "called {called}, with {sent_bytes} bytes; one `all_reduce` of a single number, by "
    "`dist`, is enough."
)


def _scaled(case: Case) -> str:
    """Return the hint for wrongly scaled shards: wrong by rounding, or by more."""
    got, wanted = case.after["shards"], case.right["shards"]
    if equal_values([s.bfloat16() for s in got], [s.bfloat16() for s in wanted]):
        if equal_values(got, case.args["shards"], exact=True):
            return "did not scale: a norm just above `max_norm` is larger, too."
        return (
            f"left the shards nearly as {shown(wanted)}: was the factor rounded to a "
            "narrower type?"
        )
    return (
        f"left the shards as {shown(got)}; expected {shown(wanted)}, in the same "
        "tensors. All are scaled by the same factor, in a single step, and none if the "
        "norm is small enough."
    )


CLIP = {
    "right": "returned {got}; the norm of all gradients before clipping is {wanted}: "
    "the root of the sum of all squares.",
    **dict.fromkeys(("in_place", "kept"), _scaled),
    **dict.fromkeys(("library", "few", "least"), ONE),
}


@exercise("clip_shards", solution=solutions.clip_shards)
def check_clip_shards(answer: Answer) -> str:
    """`clip_shards(shards, max_norm)`: scale all ranks' shards; return their norm.

    The norm of all shards is not the sum of norms. Which numbers can ranks add up?

    Add up the squares of your shards, in float64, and then over the ranks; a rank
    without shards adds 0. The root is the norm. If it is above `max_norm`, multiply all
    your shards, in place, by `max_norm` divided by the norm.
    """
    same_on_ranks(
        *(answer, solutions.clip_shards, _shards),
        worlds=(2, 3, 1),
        cases=20,
        watch=["collectives", "storage"],
        hints=CLIP,
        hint="Every rank must call one `dist.all_reduce`, even one without shards.",
    )
    return (
        "60 cases on 1 to 3 real ranks, some of them without shards, with large and "
        "tiny numbers of four dtypes: the norm of all shards together, the same factor "
        "for all ranks, and one small all-reduce"
    )


def _shards(d: Draw) -> tuple[list[Tensor], float]:
    everyones = [_on_rank(Draw(d.number, r, d.n)) for r in range(d.n)]
    squares = sum(s.double().square().sum() for shards in everyones for s in shards)
    factor = (0.9, 0.01, 1.5, 1.3e-6)[d.case % 4]
    if d.case == 12:  # in float64: hardly larger is larger, too
        factor = 0.9999
    max_norm = math.sqrt(squares) * factor or 0.001
    # In case 10 the norm is 0, too: 0 / 0 is no factor.
    return everyones[d.rank], 0.0 if d.case in (10, 16) else max_norm


def _on_rank(d: Draw) -> list[Tensor]:
    """Return zero, one or three shards; some are empty, some strided, some mixed."""
    form = Draw(d.case, d.rank, d.n).own  # the same when a case is drawn again
    count = form.choice([1, 3] if d.case < 2 else [0, 1, 3])
    shapes = [(3,), (2, 2), (5, 1), *([] if d.case < 2 else [(0,), ()])]
    types = (torch.float32, torch.float16, torch.float64, torch.bfloat16)
    size = (1, 1, 2.0**80, 2.0**-40)[d.case // 2 % 4]  # in float32, 2^160 overflows
    shards = []
    for shape in form.choices(shapes, k=count):
        dtype = form.choice(types) if d.case % 5 == 4 else types[d.case % 5]
        # Beside huge shards, a float16 divided by the norm is 0.
        size_here = 1 if dtype == torch.float16 else size
        if dtype == torch.float64 and size_here > 1:  # the norm overflows float32
            size_here = 2.0**200
        shards.append(d.tensor(shape, dtype, strided=True) * size_here)
    return shards
