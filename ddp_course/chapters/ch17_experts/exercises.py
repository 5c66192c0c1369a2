"""The exercises of chapter 17: a capacity, a dispatch, a loss, and an average."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.chapters.ch17_experts import solutions
from ddp_course.lab.answers import Answer
from ddp_course.lab.exercises import exercise, shown
from ddp_course.lab.judge import Case, Draw, same_as, same_on_ranks

# ---- my_kept -------------------------------------------------------------------------


@exercise("my_kept", solution=solutions.my_kept)
def check_my_kept(answer: Answer) -> str:
    """`my_kept(chosen, num_experts, limit)`: which choices fit into the capacity?

    In which order do choices stand in the queue of an expert?

    Keep a count for each expert. Walk through column 0 from the first token to the
    last, then through column 1: a choice fits while its expert's count is below the
    limit, and each choice adds 1 to that count.
    """
    same_as(answer, solutions.my_kept, _choices, cases=80, hints={"right": _about_kept})
    return "80 batches, with limits from 0 up, k up to 3, and experts that nobody chose"


def _choices(d: Draw) -> tuple[Tensor, int, int]:
    many = d.case == 9  # queues so long that float16 cannot count their places
    num_experts = 4 if many else d.same.choice([4, 5, 8, 300])
    k, tokens = d.same.randint(1, 3), d.same.choice([1, 2, 5, 9, 0, 600])
    k, tokens = (2, 5000) if many else (k, tokens)
    experts = range(num_experts - d.case % 2)
    again = d.case % 5 == 3  # a token may choose an expert twice
    hot = [
        d.own.choices(experts, k=k) if again else d.own.sample(experts, k)
        for _ in range(tokens)
    ]
    chosen = torch.tensor(hot, dtype=torch.int64).view(tokens, k)
    if d.case % 4 == 1:  # not contiguous
        chosen = chosen.T.contiguous().T
    return chosen, num_experts, 2100 if many else d.same.randint(0, 4)


def _about_kept(case: Case) -> str:
    chosen, num_experts, limit = case.args.values()
    kept = torch.bincount(chosen[case.got], minlength=num_experts).tolist()
    if max(kept) > limit:
        return f"keeps {max(kept)} choices for an expert; the limit is {limit}."
    if case.got.sum() < case.wanted.sum():
        return (
            f"keeps {shown(case.got)}; there is room for {int(case.wanted.sum())} "
            "choices."
        )
    return (
        f"keeps {shown(case.got)}; expected {shown(case.wanted)}. All first choices "
        "come before all second ones, and earlier tokens before later ones."
    )


# ---- my_dispatch ---------------------------------------------------------------------


@exercise("my_dispatch", solution=solutions.my_dispatch)
def check_my_dispatch(answer: Answer) -> str:
    """`my_dispatch(rows, expert, num_experts)`: the rows of this rank's experts.

    What must a rank know before it can receive rows, and who knows it?

    Count your rows for each expert, and exchange these counts by an all-to-all of
    whole numbers. Sort your rows by expert: then the rows for one rank lie together,
    and an all-to-all with unequal splits exchanges them. Rows arrive by rank, then by
    expert: sort them by expert, stably.
    """
    hint = "Every rank calls the same collectives, even a rank without rows."
    same_on_ranks(
        *(answer, solutions.my_dispatch, _rows),
        worlds=(2, 3, 1),
        watch=["bytes"],
        hints={"fits": _about_rows, "right": _about_rows, "bytes": _SENT},
        hint=hint,
    )
    return "24 batches of unequal sizes on 1 to 3 real ranks; no row is sent in vain"


_SENT = (
    "wrote {written:,} bytes; {needed:,} are enough: a row goes to one rank only, and "
    "counts say for which expert."
)


def _rows(d: Draw) -> tuple[Tensor, Tensor, int]:
    num_experts, channels = d.n * d.same.randint(1, 3), d.same.choice([8, 33])
    sizes = Draw(d.case, d.rank, d.n).own  # equal if a case is drawn again
    least = 30_000 if d.case == 3 else 300  # counts beyond float16 and int16
    size = 0 if d.rank == d.zeros_on else sizes.randint(least, 2 * least)
    size = sizes.randint(0, 1) if d.case == 7 else size  # one row, or none
    dtype = d.same.choice([torch.float32, torch.float64, torch.bfloat16])
    random = torch.Generator().manual_seed(10 * d.number + d.rank)
    rows = torch.randn(size, channels, generator=random).to(dtype)
    if d.case == 6:  # a collapsed router: all rows are for one of many experts
        num_experts = 32 * d.n
        only = d.same.randrange(num_experts)
        column = rows[:, :1]  # not contiguous, and a shape that squeeze() changes
        return column, torch.full((size,), only), num_experts
    popular = torch.rand(num_experts, generator=random) ** (d.case % 3 * 2) + 1e-6
    popular[0] *= d.case % 2  # an expert that nobody chooses
    if num_experts == 1 or not size:
        return rows, torch.zeros(size, dtype=torch.int64), num_experts
    expert = popular.multinomial(size, replacement=True, generator=random)
    return rows, expert, num_experts


def _about_rows(case: Case) -> str:
    is_pair = isinstance(case.got, (tuple, list)) and len(case.got) == 2
    types = [Tensor, list]
    if not is_pair or not all(map(isinstance, case.got, types)):
        return f"returned {shown(case.got)}; expected the rows and a list of counts."
    (got, counts), (wanted, numbers) = case.got, case.wanted
    if shown(counts) != shown(numbers):
        return f"returned the counts {shown(counts)}; expected {shown(numbers)}."
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"returned {shown(got)}; expected {shown(wanted)}."
    same = torch.equal(got.double().sum(1).sort()[0], wanted.double().sum(1).sort()[0])
    why = "the right rows in another order" if same else "wrong rows"
    return f"returned {why}: by expert, then by rank, then in the rank's own order."


# ---- my_auxiliary_loss ---------------------------------------------------------------


@exercise("my_auxiliary_loss", solution=solutions.my_auxiliary_loss)
def check_my_auxiliary_loss(answer: Answer) -> str:
    """`my_auxiliary_loss(scores, chosen)`: this rank's part of the loss of all tokens.

    Which factor of each term is the same on all ranks, and has no gradient?

    All-reduce the counts of choices, whole numbers: they give the share of each expert
    and, with k, the number of all ranks' tokens. The mean probability over all tokens
    is a sum of one part per rank: the sum over its tokens, divided by that number.
    """
    same_on_ranks(
        _called_by(_with_gradient, answer),
        partial(_with_gradient, solutions.my_auxiliary_loss),
        _scores,
        watch=["collectives"],
        most_calls=3,
        hints={"fits": _about_loss, "right": _about_loss},
        hint="Every rank calls the same all-reduces, even a rank without tokens.",
    )
    return "24 batches of unequal sizes on 1 to 3 real ranks: the loss and its gradient"


def _called_by(use: Callable, answer: Answer) -> Answer:
    return Answer(answer.name, partial(use, answer.function))


def _with_gradient(function: Callable, scores: Tensor, chosen: Tensor) -> Any:
    """Return the loss, and its gradient in `scores`; None if it has none."""
    original, scores = scores, scores.clone().requires_grad_()
    loss = function(scores, chosen)
    original.copy_(scores.detach())  # the kit sees whether the scores were changed
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        return loss, None
    loss.backward()
    return loss.detach(), scores.grad


def _scores(d: Draw) -> tuple[Tensor, Tensor]:
    num_experts, k = d.same.choice([4, 7]), d.same.randint(1, 3)
    sizes = Draw(d.case, d.rank, d.n).own  # equal if a case is drawn again
    size = 0 if d.rank == d.zeros_on and d.n > 1 else sizes.randint(2, 40)
    if d.case == 1:  # more choices than float16 can count
        size = sizes.randint(9000, 9999)
    size = 1 if d.case == 6 else size
    dtype = torch.float64 if d.case % 3 == 2 else torch.float32
    random = torch.Generator().manual_seed(10 * d.number + d.rank)
    scores = torch.randn(size, num_experts, generator=random).to(dtype)
    scores += d.rank * torch.arange(num_experts)  # ranks prefer different experts
    if dtype == torch.float64:  # in 32 bits this would round differences away
        scores += 2**20
    if d.case % 4 == 3:  # exponentials of these overflow
        scores *= 100
    bias = 2 * torch.randn(num_experts, generator=random)  # some choose worse ones
    if d.case % 2:
        bias[-1] = -100  # no rank chooses the last expert
    return scores, (scores + bias).topk(k).indices


def _about_loss(case: Case) -> str:
    (loss, gradient), (right, slope) = case.got, case.wanted
    if gradient is None:
        return f"returned {shown(loss)}; expected a loss that has a gradient."
    if loss.dtype != right.dtype:
        return f"returned a loss of {loss.dtype}; the scores are of {right.dtype}."
    if loss.isnan().any() and case.args["scores"].exp().isinf().any():
        return "returned NaN: the exponentials of large scores are infinite."
    if loss.shape != right.shape or not torch.allclose(loss, right):
        return (
            f"returned the loss {shown(loss)}; expected {shown(right)}. Shares and the "
            "number of tokens are of all ranks, probabilities of your own tokens."
        )
    if torch.allclose(gradient, slope):  # shares may have been computed in float32
        return ""
    return f"has a wrong gradient: {shown(gradient)}; expected {shown(slope)}."


# ---- my_two_averages -----------------------------------------------------------------


@exercise("my_two_averages", solution=solutions.my_two_averages)
def check_my_two_averages(answer: Answer) -> str:
    """`my_two_averages(dense, experts, replicas)`: average all gradients in place.

    How many ranks' tokens already contribute to an expert's gradient?

    All ranks have the dense parameters: all-reduce their gradients over all ranks. Only
    the ranks of `replicas` have the same experts: all-reduce these gradients in that
    group. But the loss is a mean over all ranks, so divide both kinds by the same
    number.
    """
    same_on_ranks(
        _called_by(_in_group, answer),
        partial(_in_group, solutions.my_two_averages),
        _gradients,
        worlds=(2, 4),
        watch=["collectives", "storage"],
        hints={"in_place": _about_average},
        hint="Ranks of one group call the same collectives in the same order.",
    )
    return "16 lists on 2 and 4 real ranks; 1, 2 or all of them have the same experts"


SHAPES = ((), (5,), (2, 3), (4, 1), (3, 2, 2), (11, 13))  # matrices are transposed

# {number of ranks that together have all experts: the group of this rank's replicas}
_GROUPS: dict[int, dist.ProcessGroup] = {}


def _in_group(
    function: Callable, dense: list[Tensor], experts: list[Tensor], ep: int
) -> None:
    return function(dense, experts, _GROUPS[ep])


def _gradients(d: Draw) -> tuple[list[Tensor], list[Tensor], int]:
    for ep in [size for size in range(1, d.n + 1) if d.n % size == 0]:
        groups = [list(range(first, d.n, ep)) for first in range(ep)]
        if ep not in _GROUPS:
            _GROUPS[ep] = dist.new_subgroups_by_enumeration(groups)[0]
    dtype = (torch.float64, torch.float32)[d.case % 2]
    lists = [
        [
            d.tensor(d.same.choice(SHAPES), dtype, strided=True)
            for _ in range(d.same.randint(least, 3))
        ]
        for least in (1, d.case % 2)
    ]
    return *lists, d.same.choice(sorted(_GROUPS))


def _about_average(case: Case) -> str:
    for name in ("dense", "experts"):
        pairs = list(zip(case.after[name], case.right[name], strict=True))
        if all(torch.allclose(got, wanted) for got, wanted in pairs):
            continue
        ratio = torch.cat([(got / wanted).flatten() for got, wanted in pairs])
        same = torch.allclose(ratio, ratio[:1].expand_as(ratio), equal_nan=True)
        times = f" {ratio[0]:.2f} times" if same else " not"
        return f"left gradients in `{name}` that are{times} what they should be."
    return "rounded the gradients; average them in their own dtype."
