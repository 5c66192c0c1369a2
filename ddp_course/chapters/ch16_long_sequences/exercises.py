"""The exercises of chapter 16: a merge, an assignment, a ring, and a gradient check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ddp_course.chapters.ch16_long_sequences import solutions
from ddp_course.collectives.endpoint import Endpoint
from ddp_course.context_parallel.online_softmax import attend
from ddp_course.lab.answers import Answer
from ddp_course.lab.exercises import exercise, expect, judge_ranks, shown
from ddp_course.lab.judge import Case, Draw, same_as
from ddp_course.lab.values import equal_values

# ---- my_merge ------------------------------------------------------------------------

INF = float("inf")


@exercise("my_merge", solution=solutions.my_merge)
def check_my_merge(answer: Answer) -> str:
    """`my_merge(out1, lse1, out2, lse2)`: output and lse over two blocks of keys.

    Which share of the sum of all exponentials does each block have, and how do you
    compute it if you may only exponentiate the difference of two logarithms?

    The new lse is the logarithm of the sum of both exponentials, for which PyTorch has
    a function that does not overflow. A block's output is weighted by e to the power
    of its own lse minus the new one. Where both are minus infinity, that difference is
    not a number: subtract 0 instead of the new lse there.
    """
    hints = {"right": _about_merge}
    same_as(answer, solutions.my_merge, _blocks, cases=80, hints=hints)
    return "80 pairs of blocks, lses of up to a million, queries that see no key"


def _blocks(d: Draw) -> tuple[Tensor, ...]:
    if d.case == 79:
        return _equal_blocks(d)
    large = d.case % 2
    dtype = torch.float64 if large else d.same.choice([torch.float32, torch.float64])
    shape = d.same.choice([(1,), (5,), (2, 3), (2, 3, 4), (2, 0)])
    random = torch.Generator().manual_seed(d.number)
    outs = [torch.randn(*shape, d.case % 3 + 1, generator=random).to(dtype)
            for _ in range(2)]  # fmt: skip
    middle, spread = (d.same.choice([-1e4, 0, 1e3, 1e4]), 5.0) if large else (0, 3.0)
    if d.case % 4 == 3:  # the queries' lses lie far apart
        middle = 1e4 * (2 * torch.rand(shape, generator=random) - 1)
    lses = [(middle + spread * torch.randn(shape, generator=random)).to(dtype)
            for _ in range(2)]  # fmt: skip
    if d.case % 5 == 1:  # the blocks' lses do, too
        gap = d.same.choice([200 if dtype == torch.float32 else 1000, 9e5])
        sign = torch.randint(-1, 2, shape, generator=random)
        lses[d.case // 5 % 2] += gap * sign
    if d.case >= 4:  # some queries see no key of a block
        for out, lse in zip(outs, lses, strict=True):
            blind = torch.rand(shape, generator=random) < 0.4
            lse[blind], out[blind] = -INF, 0.0
    if d.case % 5 == 2:  # not contiguous
        outs = [out.mT.contiguous().mT for out in outs]
    return outs[0], lses[0], outs[1], lses[1]


def _equal_blocks(d: Draw) -> tuple[Tensor, ...]:
    """Return blocks with equal lses, lses of 0, and an output of 0 that saw keys."""
    random = torch.Generator().manual_seed(d.number)
    out1, out2 = (torch.randn(4, 2, generator=random).double() for _ in range(2))
    out1[3] = 0
    lse1, lse2 = torch.tensor([[0, 3, 0, 1], [0, 3, 2, 0]]).double()
    return out1, lse1, out2, lse2


def _about_merge(case: Case) -> str:
    lses = case.args["lse1"], case.args["lse2"]
    of = f"for lses {shown(lses[0])} and {shown(lses[1])}"
    if not all(isinstance(x, Tensor) for x in case.got):
        return f"{of}: return two tensors, the output and the lse."
    out, lse = case.got
    right_out, right_lse = case.wanted
    if not (out.isfinite().all() and (lse < INF).all()):
        blind = (torch.stack(lses) == -INF).all(0).any()
        why = "the exponential of such an lse is infinite, or 0 for all"
        if blind and torch.equal(out.isnan().any(-1), right_lse.isneginf()):
            why = "a query that sees no key of either block has the output 0"
        return f"{of} gave infinity or NaN: {why}."
    seeing = lses[0].isfinite() | lses[1].isfinite()
    if (lse.isneginf() & seeing).any():
        return (
            f"{of} gave the lse minus infinity for a query that sees keys. "
            "Subtract the maximum of each query's own two lses; only minus infinity "
            "itself means that the query sees no key of a block."
        )
    if not equal_values(lse, right_lse):
        return f"{of} gave the lse {shown(lse)}; expected {shown(right_lse)}."
    return (
        f"{of} gave the output {shown(out)}; expected {shown(right_out)}. The block "
        "with the larger lse weighs more."
    )


# ---- my_zigzag -----------------------------------------------------------------------


@exercise("my_zigzag", solution=solutions.my_zigzag)
def check_my_zigzag(answer: Answer) -> str:
    """`my_zigzag(length, ranks)`: for each rank, the list of its positions.

    How many chunks are there, and which two of them belong to a rank?

    Round the length of a chunk up, so that twice as many chunks as ranks hold all
    positions. Rank r has chunk r from the front and chunk r from the end; each chunk is
    cut off where the sequence ends.
    """
    hints = {"fits": _about_zigzag, "right": _about_zigzag}
    same_as(answer, solutions.my_zigzag, _sequence, cases=60, hints=hints)
    return "60 sequences, most of which cannot be divided equally"


SEQUENCES = (  # (length, ranks)
    *((8, 2), (16, 4), (6, 1), (7, 2), (10, 4)),
    *((3, 4), (0, 3), (70_001, 4), (999, 300), (1201, 600)),
)


def _sequence(d: Draw) -> tuple[int, int]:
    if d.case < len(SEQUENCES):
        return SEQUENCES[d.case]
    longest = 5000 if d.case % 8 == 0 else 70
    return d.same.randint(1, longest), d.same.randint(1, 9)


def _about_zigzag(case: Case) -> str:
    length, ranks = case.args.values()
    comparison = f"returned {shown(case.got)}; expected {shown(case.wanted)}"
    try:
        flat = sorted(int(i) for its in case.got for i in its)
    except (TypeError, ValueError):
        return f"{comparison}: a list of positions for each rank."
    missing = sorted({*range(length)} - {*flat})
    if missing:
        return f"{comparison}: no rank has position {missing[0]}."
    if flat != [*range(length)]:
        return f"{comparison}: each position once, and none beyond the last."
    if any([*its] != sorted(its) for its in case.got):
        return f"{comparison}: a rank's positions ascend."
    return f"{comparison}: a chunk from the front, and one as far from the end."


# ---- my_ring -------------------------------------------------------------------------


class _Neighbours:
    """The other ranks of a ring, simulated for one rank; they record its calls."""

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor]], rank: int) -> None:
        self.parts, self.rank = parts, rank
        self.log: list[str] = []
        self.passed: list[tuple[Tensor, Tensor]] = []
        self.keys: list[int] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Compute attention as the package does."""
        self.log.append("attend")
        self.keys.append(k.shape[-2])
        return attend(q, k, v)

    def pass_on(self, k: Tensor, v: Tensor) -> _Arriving:
        """Record the tensors sent on; return those of the left neighbour."""
        self.log.append("pass_on")
        self.passed.append((k.clone(), v.clone()))
        source = (self.rank - len(self.passed)) % len(self.parts)
        return _Arriving(self, self.parts[source])


class _Arriving:
    def __init__(self, neighbours: _Neighbours, part: tuple[Tensor, Tensor]) -> None:
        self.neighbours, self.part = neighbours, part

    def wait(self) -> tuple[Tensor, Tensor]:
        self.neighbours.log.append("wait")
        return tuple(x.clone() for x in self.part)


@exercise("my_ring", solution=solutions.my_ring)
def check_my_ring(answer: Answer) -> str:
    """`my_ring(q, k, v, ranks, attend, pass_on)`: the outputs of this rank's queries.

    What can a rank compute while the next keys and values travel, and in which step has
    it nothing left to pass on?

    In every step but the last one, begin to pass on the keys and values that you have.
    Attend to them, merge the result with that of earlier steps, and only then wait for
    the next keys and values. Start from an output of 0 with an lse of minus infinity:
    it has seen no key yet.
    """
    outs = []
    for ranks in (3, 1, 2, 4, 5, 9):
        for rank in range(ranks):
            outs.append(_judge_ring(answer, ranks, rank))
    expect(
        all(equal_values(now, then) for now, then in outs),
        "A later call of `my_ring` changed the outputs of an earlier one: return a new "
        "tensor.",
    )
    judge_ranks(REAL, _on_real_ranks, answer, worlds=(3,))
    return (
        "rings of 1 to 9 ranks, and three real ones; no rank waits before it computes"
    )


REAL = {"right": "returned outputs that differ from attention over the whole sequence."}


def _whole(ranks: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shape = (1, 3, ranks, 4) if ranks == 5 else (2, 2, 3 * ranks, 4)  # (B, H, T, D)
    q, k, v = (torch.randn(shape, generator=random) for _ in range(3))
    if ranks % 2:  # exponentials of these scores overflow
        q, k, v = q.double(), 400 * k.double(), v.double()
    return q, k, v


def _as_heads(x: Tensor) -> Tensor:
    """Return a copy in the layout of heads cut from rows: not contiguous."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _judge_ring(answer: Answer, ranks: int, rank: int) -> tuple[Tensor, Tensor]:
    """Judge one rank's call; return its outputs, and a copy of them."""
    q, k, v = _whole(ranks, ranks)
    parts = list(zip(k.chunk(ranks, 2), v.chunk(ranks, 2), strict=True))
    mine, seen = q.chunk(ranks, 2)[rank], _Neighbours(parts, rank)
    own = [_as_heads(x) for x in (mine, *parts[rank])]
    out = answer(*own, ranks, seen.attend, seen.pass_on)
    where = f"With {ranks} rank{'s' * (ranks > 1)}, rank {rank}"
    called = f"{where} called {', '.join(seen.log) or 'nothing'}"
    times = f"{ranks - 1} time{'s' * (ranks != 2)}"
    expect(
        len(seen.passed) == ranks - 1,
        f"{called}. Each part has to be passed on {times} for all ranks to see it.",
    )
    for step, passed in enumerate(seen.passed):
        source = (rank - step) % ranks
        expect(
            equal_values(passed, parts[source]),
            f"{where} has the keys and values of rank {source} in step {step}, but "
            "passed on something else.",
        )
    expect(
        seen.keys == [mine.shape[2]] * ranks,
        f"{called}, with {seen.keys} keys. A rank attends to one part in each step.",
    )
    wanted = ["pass_on", "attend", "wait"] * (ranks - 1) + ["attend"]
    expect(
        seen.log == wanted,
        f"{called}. Begin to pass on, compute while that is under way, then wait.",
    )
    right = F.scaled_dot_product_attention(mine, k, v)
    expect(
        isinstance(out, Tensor) and out.shape == right.shape,
        f"{where} returned {shown(out)}; expected a tensor of {tuple(right.shape)}.",
    )
    expect(
        equal_values(out, right),
        f"{where} returned outputs that differ from attention over the whole sequence.",
    )
    expect(
        equal_values(own, (mine, *parts[rank])),
        f"{where} changed its queries, keys or values; work on tensors of your own.",
    )
    return out, out.clone()


def _on_real_ranks(my_ring: Callable) -> dict[str, Any]:
    """Run the answer on this rank over real messages, and compare."""
    n, rank = dist.get_world_size(), dist.get_rank()
    endpoint, (q, k, v) = Endpoint(), _whole(n, 0)

    class Message:
        def __init__(self, k: Tensor, v: Tensor) -> None:
            leaving = torch.stack((k, v))
            self.arriving = torch.empty_like(leaving)
            ways = [(leaving, (rank + 1) % n)], [(self.arriving, (rank - 1) % n)]
            self.leaving, self.handles = leaving, endpoint.start(*ways)

        def wait(self) -> tuple[Tensor, Tensor]:
            for handle in self.handles:
                handle.wait()
            return tuple(self.arriving.unbind())

    mine = [x.chunk(n, 2)[rank].contiguous() for x in (q, k, v)]
    out = my_ring(*mine, n, attend, Message)
    right = F.scaled_dot_product_attention(mine[0], k, v)
    return {"right": equal_values(out, right)}


# ---- my_gradient_check ---------------------------------------------------------------


Change = Callable[[Tensor, Tensor], Tensor | None]  # (gradient, its tensor)


class _Tampered(Function):
    """The identity, with a backward that returns a changed gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Change) -> Tensor:
        ctx.change = change
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        return ctx.change(gradient, *ctx.saved_tensors), None


def _right(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient


def _but_one(gradient: Tensor, x: Tensor, place: int) -> Tensor:
    changed = gradient.clone()
    changed.view(-1)[place] += 1
    return changed


def _with_same_sum(gradient: Tensor, x: Tensor) -> Tensor:
    """Add numbers with sum 0, which a check that moves all elements alike misses."""
    added = torch.linspace(-1, 1, x.numel(), dtype=x.dtype)
    return gradient + added.view(x.shape)


def _across(gradient: Tensor, x: Tensor) -> Tensor:
    """Add a vector orthogonal to x, which a check that moves x along itself misses."""
    ones = torch.ones_like(x)
    return gradient + ones - x * (x.sum() / x.square().sum())


CHANGES: dict[str, Change] = {  # each changes backward's result
    "the right gradient": _right,
    "half of the gradient": lambda g, x: g / 2,
    "the gradient with the other sign": lambda g, x: -g,
    "the gradient of other rows": lambda g, x: g.roll(1, 0) + 0.1,
    "zeros": lambda g, x: torch.zeros_like(g),
    "no gradient at all": lambda g, x: None,
    "the gradient, wrong in its first element": partial(_but_one, place=0),
    "the gradient, wrong in its last element": partial(_but_one, place=-1),
    "a gradient with the same sum": _with_same_sum,
    "a gradient that is wrong across the tensor": _across,
    "a gradient that is off by a hundredth": lambda g, x: 1.01 * g,
}


def _weighted(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.softmax(x @ y.T, -1) @ z + x


def _averaged(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Run backward as if all elements of the output had the same gradient."""
    return _Tampered.apply(_weighted(x, y, z), lambda g, _: g.mean().expand_as(g))


def _without(place: int, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Run backward without one element of the output."""

    def change(gradient: Tensor, _: Tensor) -> Tensor:
        changed = gradient.clone()
        changed.view(-1)[place] = 0
        return changed

    return _Tampered.apply(_weighted(x, y, z), change)


def _unused(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return x.sin() * y.sum() + 3 * x**3


def _number(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (x * y.mean(0)).exp().sum() / 7 + z.tanh().square().sum()


def _of_any_shape(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return x.sin() * y.cos() + z.square().sum()


def _of_any_number(*tensors: Tensor) -> Tensor:
    return sum((k + 1) * x.sin().sum() for k, x in enumerate(tensors))


def _of_length_one(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Return numbers with the sum of squares 1, whatever the tensors are."""
    sums = x + y.sin() * z
    return sums / sums.norm()


def _of_no_number(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Return a tensor without elements: all gradients are 0."""
    return x[:0] * y.sum() + z.sum()


def _unequal(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return 100 * x.sin() + 3e-4 * (y + z.tanh())


FUNCTIONS = {
    "attention": _weighted,
    "a function of two of its tensors": _unused,
    "a number": _number,
    "an attention whose backward takes all outputs alike": _averaged,
    "an attention whose backward forgets its first element": partial(_without, 0),
    "an attention whose backward forgets its last element": partial(_without, -1),
}


# name, function, shapes of its tensors, index of the tensor with a wrong gradient, and
# the mistake in that gradient
SPECIAL = (
    ("a function of any shapes", _of_any_shape, ((3, 2), (), (0, 3)), 0, "half of"),
    ("a function of any shapes", _of_any_shape, ((3, 2), (), (0, 3)), 1, "half of"),
    ("a vector of length 1", _of_length_one, ((2, 3),) * 3, 1, "half of"),
    ("very unequal gradients", _unequal, ((2, 3),) * 3, 2, "half of"),
    ("very unequal gradients", _unequal, ((2, 3),) * 3, 1, "NaN for"),
    ("a function of one tensor", _of_any_number, ((2, 3),), 0, "half of"),
    ("a function of five", _of_any_number, ((2, 3),) * 5, 4, "half of"),
    ("a function at 0", _unequal, ((2, 3),) * 3, 0, "half of"),
    ("a function of any shapes", _of_any_shape, ((3, 2), (), (0, 3)), 1, "inf for"),
    ("a function that returns no number", _of_no_number, ((3,),) * 3, 0, "all of"),
)
FACTORS = {"half of": 0.5, "all of": 1.0, "NaN for": float("nan"), "inf for": INF}


@exercise("my_gradient_check", solution=solutions.my_gradient_check)
def check_my_gradient_check(answer: Answer) -> str:
    """`my_gradient_check(function, tensors)`: for each tensor, is its gradient right?

    By how much does a function change if one of its arguments changes a little, and
    what do gradients say about that?

    Reduce the output to one number: the sum of its elements, each with a random weight.
    Run backward. Then move one tensor at a time by a tiny step in a random direction,
    and by the same step in the opposite direction: the difference of the two numbers,
    divided by the distance, should equal the sum of gradient times direction. A missing
    gradient counts as 0.
    """
    with torch.random.fork_rng(devices=[]):  # the same directions in every run
        torch.manual_seed(0)
        same_as(
            answer,
            _solved,
            _function,
            cases=60 + len(SPECIAL),
            where=lambda case: case.args["function"].words,
            hints={"fits": _about_check, "right": _about_check},
        )
    _expect_no_traces(answer)
    return (
        f"{60 + len(SPECIAL)} functions of one to five tensors, some of them empty, "
        "transposed or zero, with eleven kinds of wrong gradients"
    )


def _solved(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[bool]:
    """Call the solution, with the same random directions whatever the answer drew."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return solutions.my_gradient_check(function, tensors)


def _expect_no_traces(answer: Answer) -> None:
    # A step there and back changes the last bits of numbers smaller than the step.
    random = torch.Generator().manual_seed(0)
    tensors = [1e-8 * torch.randn(4, 5, generator=random).double() for _ in "xyz"]
    before = [x.clone() for x in tensors]
    tensors[1].requires_grad_()
    tensors[1].grad = before[0].clone()  # left by an earlier backward
    answer(_unused, tensors)
    expect(
        all(map(torch.equal, tensors, before)),
        "`my_gradient_check(function, tensors)` changed the numbers in `tensors`, "
        "perhaps only their last bits: a step there and back is rounded. Work on "
        "copies.",
    )
    kept = [x.requires_grad for x in tensors] == [False, True, False]
    expect(
        kept and equal_values([x.grad for x in tensors], [None, before[0], None]),
        "`my_gradient_check(function, tensors)` changed `tensors`: a gradient, or "
        "another `requires_grad`, was left in them, or an earlier gradient has "
        "changed. Work on copies.",
    )


def _special(number: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
    name, body, shapes, wrong, kind = SPECIAL[number]
    random = torch.Generator().manual_seed(number)
    tensors = [torch.randn(s[::-1], generator=random).double() for s in shapes]
    tensors = [x.T if x.dim() == 2 else x for x in tensors]  # not contiguous
    if body is _unequal:  # small values, so that rounding hides no small gradient
        tensors[0].zero_()

    def function(*inputs: Tensor) -> Tensor:
        changed = list(inputs)
        changed[wrong] = _Tampered.apply(inputs[wrong], lambda g, _: FACTORS[kind] * g)
        return body(*changed)

    function.words = (
        f"For {name}, whose tensor {wrong} of the shape {shapes[wrong]} gets {kind} "
        "the gradient in backward, `my_gradient_check(function, tensors)`"
    )
    return function, tensors


def _function(d: Draw) -> tuple[Callable[..., Tensor], list[Tensor]]:
    if d.case >= 60:
        return _special(d.case - 60)
    kinds = list(CHANGES)
    name = list(FUNCTIONS)[d.case % 3 + 3 * (d.case >= 50)]
    wrong = d.same.randrange(2 if FUNCTIONS[name] is _unused else 3)
    kind = kinds[d.case % len(kinds)]
    # small gradients: a check with an absolute tolerance accepts half of one
    small = kind == "half of the gradient" and d.case > len(kinds)
    scale, times = (1e-4, ", times 0.0001") if small else (1.0, "")
    changes = [CHANGES[kind] if k == wrong else _right for k in range(3)]
    random = torch.Generator().manual_seed(d.number)
    rows, channels = d.same.choice([(2, 3), (4, 2), (1, 5)])
    tensors = [torch.randn(rows, channels, generator=random).double() for _ in "xyz"]
    tensors[1].requires_grad_(d.case % 2 == 1)

    def function(*inputs: Tensor) -> Tensor:
        pairs = zip(inputs, changes, strict=True)
        return scale * FUNCTIONS[name](*(_Tampered.apply(*pair) for pair in pairs))

    function.words = (
        f"For {name}, of {rows} rows{times}, whose tensor {wrong} gets {kind} in "
        "backward, `my_gradient_check(function, tensors)`"
    )
    return function, tensors


def _about_check(case: Case) -> str:
    return f"returned {shown(case.got)}; expected {shown(case.wanted)}."
