"""Judge an answer by its solution: both run on the same drawn inputs, and are compared.

    def draw(d):                                 # the arguments of one case on one rank
        return d.tensor(), d.same.choice([1, 2])

    same_as(answer, solutions.f, draw, hints={"right": "has {got}; expected {wanted}."})
    same_on_ranks(answer, solutions.f, draw, watch=["messages"], hints=...)

`Draw` makes inputs without a pattern: several sizes and types, unequal numbers, zeros
on one rank, a special number in any place. What is compared are properties, in the
order of `TABLE`; each has a hint, which an exercise can replace by one of its own:

    fits      the type of the result, of a tensor also its shape and dtype
    right     its values (where the solution returns None, any result will do)
    kept      the arguments that the solution leaves as they are
    in_place  the arguments that the solution changes
    bytes     the bytes that a rank writes, within a fiftieth of the solution's
    sends     nothing: the messages are noted, and collectives are refused
    messages  the messages: to whom, and how many numbers
    calls     the collectives, by name
    later     whether a later call has changed an earlier result
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives import barrier
from ddp_course.lab.answers import Answer, Hint, one_line
from ddp_course.lab.exercises import judge_ranks, shown, written_by
from ddp_course.lab.messages import LATE, MESSAGES, WAITED, messages_of

TABLE = {
    "fits": "returned {got}; expected {form}.",
    "right": "has {got}; expected {wanted}{place}. {hint}",
    "kept": "changed `{changed}`, which it was given; work on a copy.",
    "in_place": "left {got_in_place} in `{changed}`; expected "
    "{wanted_in_place}{place_in_place}. {hint}",
    "bytes": "wrote {written:,} bytes by the operating system's count; the solution "
    "writes {needed:,}.",
    "messages": "sent {sent}, as (rank, numbers); {wanted_sent} is enough.",
    "calls": "called {called}; expected {wanted_called}.",
    "later": "changed the result of an earlier call: return a tensor of its own.",
}
SHAPES = ((1,), (5,), (2, 3), (4, 1), (3, 2, 2), (11, 13))
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
WIDE = {torch.float64: 2**-20, torch.int64: 2**32}  # added, they fit no 32 bits
NARROW = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}


class Draw:
    """The random inputs of one case, on one rank of `n`.

    `same` draws what all ranks have in common, such as a size; `own` what each has for
    itself. The same case has the same inputs in every run.
    """

    def __init__(self, case: int, rank: int = 0, n: int = 1) -> None:
        self.case, self.rank, self.n = case, rank, n
        self.same = random.Random(f"case {case} of {n}")
        self.own = random.Random(f"case {case} of {n}, rank {rank}")
        self.zeros_on = self.same.choice([None, None, *range(n)])

    def tensor(
        self,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        *,
        strided: bool = False,
    ) -> Tensor:
        """Return a tensor of shape and dtype (drawn if None) that all ranks share.

        Its numbers are the rank's own; in 64 bits one of them, in any place, fits no
        narrower type. On one rank all may be zero. If `strided`, a matrix is not
        contiguous.
        """
        shape = self.same.choice(SHAPES) if shape is None else tuple(shape)
        dtype = self.same.choice(TYPES) if dtype is None else dtype
        numbers = [self.own.randint(-999, 999) for _ in range(math.prod(shape))]
        tensor = torch.tensor(numbers, dtype=torch.float64).view(shape)
        if self.rank == self.zeros_on:
            tensor.zero_()
        elif numbers and dtype in WIDE:
            tensor.view(-1)[self.own.randrange(len(numbers))] += WIDE[dtype]
        tensor = tensor.to(dtype)
        if strided and tensor.dim() == 2:
            tensor = tensor.T.contiguous().T
        return tensor


def same_as(
    answer: Answer,
    solution: Callable,
    draw: Callable[[Draw], tuple],
    *,
    cases: int = 60,
    hints: Mapping[str, str | Callable[..., str]] | None = None,
) -> None:
    """Compare `answer` with `solution` in this process, on `cases` drawn inputs.

    `hints` replaces hints of `TABLE`; a hint can be a function of the arguments by
    name, `got` and `wanted`, which returns the text. Raises Hint at the first
    difference.
    """
    table = _table(hints, ("fits", "right", "kept", "in_place", "later"))
    names = list(inspect.signature(solution).parameters)
    results: list[tuple[Any, Any]] = []
    for case in range(cases):
        args = draw(Draw(case))
        passed, own = copy.deepcopy(args), copy.deepcopy(args)
        wanted, got = solution(*own), answer(*passed)
        facts = compare(names, args, (got, passed), (wanted, own))
        results.append((got, copy.deepcopy(got)))
        facts["later"] = all(_equal(now, then) for now, then in results)
        _judge(answer.call(*args), facts | {"hint": ""}, table)


def same_on_ranks(
    answer: Answer,
    solution: Callable,
    draw: Callable[[Draw], tuple],
    *,
    worlds: Sequence[int] = (2, 3, 1),
    cases: int = 8,
    watch: Sequence[str] = (),
    hints: Mapping[str, str] | None = None,
    hint: str = "",
) -> list[Any]:
    """Compare `answer` with `solution` on real ranks, in worlds of several sizes.

    `watch` names what is compared besides results and arguments: "bytes" (each rank's,
    by the operating system), "sends" (messages are noted; collectives are refused),
    "messages" (they must also be the solution's) or "calls". `hint` ends hints, also
    those of ranks that hang. Returns what the ranks of the last world saw, case by
    case. Raises Hint at the first difference.
    """
    compared = [name for name in watch if name in TABLE]
    table = _table(hints, ("fits", "right", "kept", "in_place", *compared, "later"))
    if {"sends", "messages"} & {*watch}:
        table = {**MESSAGES, **WAITED, **table}
    used = _on_a_rank, answer, solution, draw, cases, tuple(watch)
    return judge_ranks(table, *used, worlds=worlds, hint=hint)


def _table(hints: Mapping[str, Any] | None, compared: Sequence[str]) -> dict[str, Any]:
    return {name: (hints or {}).get(name, TABLE[name]) for name in compared}


def _judge(where: str, facts: dict[str, Any], table: Mapping[str, Any]) -> None:
    for name, hint in table.items():
        if not facts[name]:
            text = hint(facts) if callable(hint) else hint.format_map(facts)
            raise Hint(f"{where} {text}")


def _on_a_rank(
    function: Callable,
    solution: Callable,
    draw: Callable[[Draw], tuple],
    cases: int,
    watch: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Yield, case by case, how the function compares with the solution on this rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    names = list(inspect.signature(solution).parameters)
    results: list[tuple[Any, Any]] = []
    for case in range(cases):
        args = draw(Draw(case, rank, n))
        passed, own = copy.deepcopy(args), copy.deepcopy(args)
        wanted, theirs = _run(solution, own, watch)
        got, facts = _run(function, passed, watch)
        results.append((got, copy.deepcopy(got)))
        facts |= compare(names, args, (got, passed), (wanted, own))
        facts["messages"] = facts.get("sent") == theirs.get("sent")
        facts["wanted_sent"] = theirs.get("sent")
        facts["calls"] = facts.get("called") == theirs.get("called")
        facts["wanted_called"] = theirs.get("called")
        written, needed = facts.get("written"), theirs.get("written")
        slack = 0.02 * (needed or 0) + 4000 * n
        facts["bytes"] = written is None or abs(written - needed) <= slack
        facts |= {"needed": needed, "numel": _numel(args)}
        facts["later"] = all(_equal(now, then) for now, then in results)
        yield facts


def _run(
    function: Callable, args: tuple, watch: Sequence[str]
) -> tuple[Any, dict[str, Any]]:
    """Call a function; return its result, and what `watch` asks for."""
    barrier()
    if {"sends", "messages", "calls"} & {*watch}:
        time.sleep(LATE * dist.get_rank())  # ranks that come one after the other
        with messages_of() as facts:
            got = function(*args)
        return got, facts | {"called": facts["collectives"]}
    if "bytes" in watch:
        got, written = written_by(function, *args)
        return got, {"written": written}
    return function(*args), {}


def _numel(args: tuple) -> int:
    return sum(arg.numel() for arg in args if isinstance(arg, Tensor))


def compare(
    names: Sequence[str],
    args: tuple,
    answers: tuple[Any, tuple],
    solutions: tuple[Any, tuple],
) -> dict[str, Any]:
    """Return which properties hold, and the values that hints may show.

    `args` are the arguments before the calls; `answers` and `solutions` are the result
    of each and the arguments afterwards. Arguments are shown by their names.
    """
    (got, passed), (wanted, own) = answers, solutions
    facts: dict[str, Any] = {n: shown(a) for n, a in zip(names, args, strict=False)}
    facts |= {"args": dict(zip(names, args, strict=False))}
    facts |= {"got_value": got, "wanted_value": wanted}
    facts |= {"got": shown(got), "wanted": shown(wanted), "form": form_of(wanted)}
    facts |= {"fits": wanted is None or _fits(got, wanted), "place": ""}
    facts["right"] = wanted is None or (facts["fits"] and _equal(got, wanted))
    if facts["fits"] and not facts["right"]:
        facts["place"] = _place(got, wanted)
    facts |= {"kept": True, "in_place": True, "changed": ""}
    facts |= {"got_in_place": "", "wanted_in_place": "", "place_in_place": ""}
    for name, before, mine, right in zip(names, args, passed, own, strict=False):
        if _equal(mine, right):
            continue
        kind = "kept" if _equal(right, before) else "in_place"
        facts |= {kind: False, "changed": name, "place_in_place": _place(mine, right)}
        facts |= {"got_in_place": shown(mine), "wanted_in_place": shown(right)}
    return facts


def form_of(value: Any) -> str:
    """Describe what a result must be: "a tensor of shape (2, 3), of float32"."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"a tensor of shape {tuple(value.shape)}, of {dtype}"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}: {one_line(value)}"
    return "nothing" if value is None else f"{one_line(value)}"


def _fits(got: Any, wanted: Any) -> bool:
    """Tell whether a result has the type, shape and dtype that it must have."""
    if isinstance(wanted, Tensor):
        alike = isinstance(got, Tensor) and got.shape == wanted.shape
        return alike and got.dtype == wanted.dtype
    if isinstance(wanted, (list, tuple)):
        alike = isinstance(got, (list, tuple)) and len(got) == len(wanted)
        return alike and all(map(_fits, got, wanted))
    if isinstance(wanted, bool):
        return type(got).__name__ in ("bool", "bool_")
    if isinstance(wanted, Number):  # of numpy, too
        return isinstance(got, Number) and not isinstance(got, bool)
    return isinstance(got, type(wanted))


def _equal(got: Any, wanted: Any) -> bool:
    """Tell whether two values are equal, floating-point numbers within their rounding.

    Lists and tuples with equal values are equal, as are numbers of Python and NumPy.
    """
    if isinstance(wanted, Tensor):
        if not _fits(got, wanted):
            return False
        near = TOLERANCE.get(wanted.dtype, 0)
        if not near:
            return torch.equal(got, wanted)
        close = {"rtol": near, "atol": near, "equal_nan": True}
        return torch.allclose(got.detach().double(), wanted.detach().double(), **close)
    if isinstance(wanted, (list, tuple)):
        alike = isinstance(got, (list, tuple)) and len(got) == len(wanted)
        return alike and all(map(_equal, got, wanted))
    if isinstance(wanted, Mapping):
        alike = isinstance(got, Mapping) and got.keys() == wanted.keys()
        return alike and all(_equal(got[key], wanted[key]) for key in wanted)
    if isinstance(wanted, float) and isinstance(got, Number):
        return math.isclose(got, wanted, rel_tol=1e-9, abs_tol=1e-12)
    return bool(got == wanted)


def _place(got: Any, wanted: Any) -> str:
    """Say more of how two tensors of one form differ: rounded numbers, the first place.

    Of small tensors the place can be seen, as they are shown whole.
    """
    if not isinstance(wanted, Tensor) or not _fits(got, wanted):
        return ""
    for dtype in NARROW if wanted.dtype not in NARROW else ():
        if torch.equal(got, wanted.to(dtype).to(wanted.dtype)):
            name = str(dtype).removeprefix("torch.")
            return f": these are the numbers rounded to {name} on their way"
    if wanted.numel() <= 12:
        return ""
    near = TOLERANCE.get(wanted.dtype, 0)
    same = torch.isclose(got.double(), wanted.double(), near, near, equal_nan=True)
    where = tuple((~same).nonzero()[0].tolist())
    return f"; at {list(where)} it has {got[where].item()}, not {wanted[where].item()}"
