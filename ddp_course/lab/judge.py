"""Judge an answer by its solution: both run on the same drawn inputs, and are compared.

    def draw(d):                                 # the arguments of one case on one rank
        return d.tensor(), d.same.choice([1, 2])

    same_as(answer, solutions.f, draw, hints={"right": "has {got}; expected {wanted}."})
    same_on_ranks(answer, solutions.f, draw, watch=["messages"], hints=...)

`Draw` makes inputs without a pattern: several sizes and types, unequal numbers, zeros
on one rank, a special number in any place. What is compared are properties. Each has
a hint in `TABLE`; after "fits", those that an exercise replaces are judged first:

    fits      the type of the result, of a tensor also its shape and dtype
    right     its values (if the solution is to return nothing, any result will do)
    kept      the arguments that the solution leaves as they are
    in_place  the arguments that the solution changes
    bytes     the bytes that a rank writes, within a fiftieth of the solution's
    sends     nothing: the messages are noted, and collectives are refused
    messages  the messages: to whom, and how many numbers
    calls     the collectives, by name
    library   whose collectives are called: PyTorch's or the course's
    least     the bytes that these collectives send, at most the solution's
    few       the number of these collectives, at most the solution's
    memory    the bytes that stay in tensors after the call, at most some more
    later     whether a later call has changed an earlier result

"sends" and "messages" go together with nothing else of these; "collectives" stands for
library, least and few. A hint is a text with facts in braces, or a function of a `Case`
that returns a text, for mistakes that have a name. It returns "" where a result differs
from the solution's, and is right, too: some exercises have several right results.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.collectives import barrier
from ddp_course.lab.answers import Answer, code, one_line
from ddp_course.lab.exercises import (
    expect,
    judge_ranks,
    living_bytes,
    shown,
    written_by,
)
from ddp_course.lab.messages import LATE, MESSAGES, WAITED, messages_of
from ddp_course.measure import ByteMeter, EventLog, TorchCollectives

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
    "library": "called {called}; expected {wanted_called}.",
    "least": "sent {sent_bytes} bytes; {wanted_bytes} are enough. {hint}",
    "few": "called {called}; expected {wanted_called}.",
    "memory": "keeps {more} bytes from call to call, beside its arguments.",
    "later": "changed the result of an earlier call: return a tensor of its own.",
}
SHAPES = ((1,), (5,), (2, 3), (4, 1), (3, 2, 2), (11, 13))
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
# Added to one number, these fit no narrower type; of int64 not even float64 does.
# What is lost of a float32 must be more than its tolerance.
WIDE = {torch.float64: 1024 + 2**-20, torch.float32: 2048 + 2**-3, torch.int64: 2**59}
NUMBER = 8  # bytes: one number may be sent as a wider one
NARROW = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 4e-2,
    torch.float16: 4e-3,
}


class Draw:
    """The random inputs of one case, on one rank of `n`.

    `same` draws what all ranks have in common, such as a size; `own` what each has for
    itself. The same case has the same inputs in every run.
    """

    def __init__(self, case: int, rank: int = 0, n: int = 1) -> None:
        self.case, self.rank, self.n = case, rank, n
        self.same = random.Random(f"case {case} of {n}")
        self.own = random.Random(f"case {case} of {n}, rank {rank}")
        # Common mistakes are to be found before those with zeros.
        self.zeros_on = None if case < 2 else self.same.choice([None, *range(n)])

    def tensor(
        self,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        *,
        strided: bool = False,
    ) -> Tensor:
        """Return a tensor of shape and dtype (drawn if None) that all ranks share.

        Its numbers are the rank's own; one of them, in any place, fits no narrower
        type. On one rank all may be zero. If `strided`, a matrix is not contiguous.
        """
        shape = self.same.choice(SHAPES) if shape is None else tuple(shape)
        dtype = self.same.choice(TYPES) if dtype is None else dtype
        numbers = [self.own.randint(-999, 999) for _ in range(math.prod(shape))]
        tensor = torch.tensor(numbers, dtype=torch.float64).view(shape)
        tensor = tensor.to(dtype)
        if self.rank == self.zeros_on:
            tensor.zero_()
        elif numbers and dtype in WIDE:
            tensor.view(-1)[self.own.randrange(len(numbers))] += WIDE[dtype]
        if strided and tensor.dim() == 2:
            tensor = tensor.T.contiguous().T
        return tensor


@dataclass(frozen=True)
class Case:
    """One comparison: what went in, and what came of the answer and of the solution.

    Attributes:
        args: the arguments by name, as they were before the calls.
        got: the answer's result.
        wanted: the solution's result.
        after: the arguments after the answer's call.
        right: the arguments after the solution's call.
        exact: whether floating-point numbers must be equal to the last bit.
        free: arguments that an answer may change as it likes.
        number: of the case, so that a hint can draw what other ranks had.
        nothing: whether the solution returns nothing, so that any result will do.
    """

    args: Mapping[str, Any]
    got: Any
    wanted: Any
    after: Mapping[str, Any]
    right: Mapping[str, Any]
    exact: bool = False
    free: Sequence[str] = ()
    number: int = 0
    nothing: bool = False

    def facts(self) -> dict[str, Any]:
        """Return which properties hold, and the values that hints may show."""
        facts: dict[str, Any] = {name: shown(arg) for name, arg in self.args.items()}
        got, wanted = self.got, self.wanted
        facts |= {"got": shown(got), "wanted": shown(wanted), "form": form_of(wanted)}
        facts["fits"] = self.nothing or fits(got, wanted)
        facts["right"] = self.nothing or equal_values(got, wanted, self.exact)
        facts["place"] = difference(got, wanted)
        facts |= {"kept": True, "in_place": True, "changed": ""}
        for name, arg in reversed(self.args.items()):  # the first one is named
            mine, right = self.after[name], self.right[name]
            if name not in self.free and not equal_values(mine, right, self.exact):
                kind = "kept" if equal_values(right, arg) else "in_place"
                facts |= {kind: False, "changed": name}
                facts |= {"got_in_place": shown(mine), "wanted_in_place": shown(right)}
                facts["place_in_place"] = difference(mine, right)
        return facts


Hints = Mapping[str, str | Callable[[Case], str]]


def same_as(
    answer: Answer,
    solution: Callable,
    draw: Callable[[Draw], tuple],
    *,
    cases: int = 60,
    exact: bool = False,
    where: Callable[[Case], str] | None = None,
    hints: Hints | None = None,
) -> None:
    """Compare `answer` with `solution` in this process, on `cases` drawn inputs.

    Floating-point numbers may differ by their rounding, unless `exact`. `where` writes
    what begins every hint; by default it is the call. `hints` replaces hints of
    `TABLE`. Raises Hint at the first difference.
    """
    table = chosen(hints, ("fits", "right", "kept", "in_place", "later"))
    results: list[tuple[Any, Any]] = []
    for number in range(cases):
        args = draw(Draw(number))
        case, _, _ = run_both(answer, solution, args, ())
        case = replace(case, exact=exact, number=number)
        facts = {"hint": "", **case.facts(), **_later(case.got, results)}
        for name, hint in table.items():
            if not facts[name]:
                text = hint(case) if callable(hint) else hint.format_map(facts)
                begin = where(case) if where else answer.call(*args)
                expect(not text, f"{begin} {text}")


def same_on_ranks(
    answer: Answer,
    solution: Callable,
    draw: Callable[[Draw], tuple],
    *,
    worlds: Sequence[int] = (2, 3, 1),
    cases: int = 8,
    watch: Sequence[str] = (),
    free: Sequence[str] = (),
    most_calls: int = 0,
    hints: Hints | None = None,
    hint: str = "",
) -> list[Any]:
    """Compare `answer` with `solution` on real ranks, in worlds of several sizes.

    `watch` names what is compared besides results and arguments: "bytes" (each rank's,
    by the operating system), "sends" (messages are noted; collectives are refused),
    "messages" (they must also be the solution's), "calls", "collectives" or "memory".
    `free` names arguments that may be changed; `most_calls` collectives are allowed, if
    that is more than the solution's. `hint` ends hints, also those of ranks that hang.
    Returns what the ranks of the last world saw, case by case. Raises Hint at the first
    difference.
    """
    if "collectives" in watch:
        watch = ["library", "least", "few", *(w for w in watch if w != "collectives")]
    compared = [name for name in watch if name in TABLE]
    table = chosen(hints, ("fits", "right", "kept", "in_place", *compared, "later"))
    explained = {name: hint for name, hint in table.items() if callable(hint)}
    table |= {name: f"{{why_{name}}}" for name in explained}
    if {"sends", "messages"} & {*watch}:
        table = {**MESSAGES, **WAITED, **table}
    used = answer, solution, draw, explained, cases, tuple(watch), tuple(free)
    used += (most_calls,)
    return judge_ranks(table, _on_a_rank, *used, worlds=worlds, hint=hint)


def chosen(hints: Hints | None, compared: Sequence[str]) -> dict[str, Any]:
    """Return a hint for each property: of what does not fit first, then its own."""
    own, rest = dict(hints or {}), {name: TABLE[name] for name in compared}
    return {"fits": own.pop("fits", TABLE["fits"]), **own} | {
        name: hint for name, hint in rest.items() if name not in (hints or {})
    }


def _on_a_rank(
    function: Callable,
    solution: Callable,
    draw: Callable[[Draw], tuple],
    explained: Mapping[str, Callable[[Case], str]],
    cases: int,
    watch: Sequence[str],
    free: Sequence[str],
    most_calls: int,
) -> Iterator[dict[str, Any]]:
    """Yield, case by case, how the function compares with the solution on this rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    results: list[tuple[Any, Any]] = []
    for number in range(cases):
        args = draw(Draw(number, rank, n))
        case, facts, theirs = run_both(function, solution, args, watch)
        case = replace(case, free=free, number=number)
        facts |= {**case.facts(), **_later(case.got, results)}
        for name in ("sent", "called", "sent_bytes", "library", "count"):
            facts[f"wanted_{name}"] = theirs.get(name)
        facts["messages"] = facts.get("sent") == theirs.get("sent")
        facts["calls"] = facts.get("called") == theirs.get("called")
        facts["wanted_bytes"] = theirs.get("sent_bytes", 0)
        slack = NUMBER * max(1, most_calls)
        facts["least"] = facts.get("sent_bytes", 0) <= facts["wanted_bytes"] + slack
        facts["few"] = facts.get("count", 0) <= max(most_calls, theirs.get("count", 0))
        facts["library"] = facts.get("library") == theirs.get("library")
        numel = sum(a.numel() for a in args if isinstance(a, Tensor))
        facts["memory"] = facts.get("more", 0) <= theirs.get("more", 0) + numel
        written, facts["needed"] = facts.get("written"), theirs.get("written") or 0
        slack = 0.02 * facts["needed"] + 4000 * n
        facts["bytes"] = written is None or abs(written - facts["needed"]) <= slack
        for name, explain in explained.items():
            facts[f"why_{name}"] = "" if facts[name] else explain(case)
            facts[name] = not facts[f"why_{name}"]
        yield facts


def run_both(
    function: Callable, solution: Callable, args: tuple, watch: Sequence[str]
) -> tuple[Case, dict[str, Any], dict[str, Any]]:
    """Call solution and function on copies of `args`, both watched.

    Returns the case, what was seen of the function, and what of the solution. A list of
    tensors is judged by the tensors that were in it before the call.
    """
    names = list(inspect.signature(solution).parameters)
    outcomes = []
    for called in (solution, function):
        passed = copied(args)
        held = [_tensors(arg) for arg in passed]
        result, seen = _watched_call(called, passed, watch)
        after = [before or now for before, now in zip(held, passed, strict=True)]
        outcomes.append((result, dict(zip(names, after, strict=False)), seen))
    (wanted, right, theirs), (got, after, seen) = outcomes
    case = Case(dict(zip(names, args, strict=False)), got, wanted, after, right)
    nothing = inspect.signature(solution).return_annotation in (None, "None")
    return replace(case, nothing=nothing), seen, theirs


def copied(value: Any) -> Any:
    """Return a deep copy; of a parameter also its gradient, which `deepcopy` leaves."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(copied, value))
    new = copy.deepcopy(value)
    if isinstance(value, nn.Parameter) and value.grad is not None:
        new.grad = value.grad.clone()
    return new


def _tensors(arg: Any) -> list[Tensor]:
    """Return a copy of a list, if it is a list of tensors; otherwise an empty list."""
    is_one = isinstance(arg, list) and all(isinstance(one, Tensor) for one in arg)
    return list(arg) if is_one else []


def _watched_call(
    function: Callable, args: tuple, watch: Sequence[str]
) -> tuple[Any, dict[str, Any]]:
    """Call a function; return its result, and what `watch` asks for."""
    if not watch:
        return function(*args), {}
    barrier()
    call = written_by if "bytes" in watch else lambda f, *args: (f(*args), None)
    if {"sends", "messages", "calls"} & {*watch}:
        time.sleep(LATE * dist.get_rank())  # ranks that come one after the other
        with messages_of() as seen:
            got, written = call(function, *args)
        return got, seen | {"called": seen["collectives"], "written": written}
    if {*watch} == {"bytes"}:
        got, written = call(function, *args)
        return got, {"written": written}
    before = living_bytes()
    with (
        messages_of() as seen,
        EventLog() as log,
        ByteMeter() as meter,
        TorchCollectives() as torchs,
    ):
        got, written = call(function, *args)
    own = [e.op for e in log.events if e.lane == "communication"]
    names = [f"dist.{call.op}" for call in torchs.calls]
    names += [f"{op} of ddp_course" for op in own]
    if not own:  # the course's collectives send messages themselves
        names += ["dist.send"] * len(seen["sent"])
    return got, {
        "called": code(", ".join(names) or "no collective"),
        "library": (bool(torchs.calls), bool(own)),
        "count": len(names),
        "sent_bytes": meter.total_sent + torchs.nbytes,
        "more": living_bytes() - before - _nbytes(got),
        "written": written,
    }


def _nbytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else 0


def _later(got: Any, results: list[tuple[Any, Any]]) -> dict[str, bool]:
    """Keep a result; tell whether all results so far are what they were at first."""
    results.append((got, copy.deepcopy(got)))
    return {"later": all(equal_values(now, then) for now, then in results)}


def form_of(value: Any) -> str:
    """Describe what a result must be: "a tensor of shape (2, 3), of float32"."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"a tensor of shape {tuple(value.shape)}, of {dtype}"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}: {one_line(value)}"
    return "nothing" if value is None else f"{one_line(value)}"


def fits(got: Any, wanted: Any) -> bool:
    """Tell whether a result has the type, shape and dtype that it must have."""
    if isinstance(wanted, Tensor):
        alike = isinstance(got, Tensor) and got.shape == wanted.shape
        return alike and got.dtype == wanted.dtype
    if isinstance(wanted, (list, tuple)):
        alike = isinstance(got, (list, tuple)) and len(got) == len(wanted)
        return alike and all(map(fits, got, wanted))
    if isinstance(wanted, bool):
        return type(got).__name__ in ("bool", "bool_")
    if isinstance(wanted, Number):  # of numpy, too
        return isinstance(got, Number) and not isinstance(got, bool)
    return isinstance(got, type(wanted))


def equal_values(got: Any, wanted: Any, exact: bool = False) -> bool:
    """Tell whether two values are equal, floating-point numbers within their rounding.

    If `exact`, these must be equal, too.
    Lists and tuples with equal values are equal, as are numbers of Python and NumPy.
    Parameters must have equal gradients, too.
    """
    if isinstance(wanted, nn.Parameter) and not equal_values(
        getattr(got, "grad", None), wanted.grad, exact
    ):
        return False
    if isinstance(wanted, Tensor):
        if not fits(got, wanted):
            return False
        near = TOLERANCE.get(wanted.dtype, 0)
        if exact or not near:
            return torch.equal(got, wanted)
        a, b = got.detach().double(), wanted.detach().double()
        return torch.allclose(
            a, b, rtol=near, atol=_slack(b, wanted.dtype), equal_nan=True
        )
    if isinstance(wanted, (list, tuple)):
        alike = isinstance(got, (list, tuple)) and len(got) == len(wanted)
        pairs = zip(got, wanted, strict=True) if alike else ()
        return alike and all(equal_values(a, b, exact) for a, b in pairs)
    if isinstance(wanted, Mapping):
        alike = isinstance(got, Mapping) and got.keys() == wanted.keys()
        return alike and all(equal_values(got[key], wanted[key]) for key in wanted)
    if isinstance(wanted, float) and isinstance(got, Number) and not exact:
        both_nan = wanted != wanted and got != got
        return both_nan or math.isclose(got, wanted, rel_tol=1e-6, abs_tol=1e-12)
    if isinstance(wanted, float) and isinstance(got, Number):
        return repr(float(got)) == repr(wanted)  # of 0 the sign counts, and nan is nan
    if wanted is None or got is None:
        return got is wanted
    return bool(got == wanted)


def _slack(wanted: Tensor, dtype: torch.dtype) -> float:
    """Return by how much sums may differ that were added up in another order."""
    finite = wanted[wanted.isfinite()].abs()
    return TOLERANCE[dtype] * finite.amax().item() if finite.numel() else 0.0


def difference(got: Any, wanted: Any) -> str:
    """Say more of how two tensors of one form differ: rounded numbers, the first place.

    Of small tensors the place can be seen, as they are shown whole. Returns "" if there
    is nothing to say.
    """
    if not isinstance(wanted, Tensor) or not fits(got, wanted):
        return ""
    if equal_values(got, wanted):
        return ""
    for dtype in NARROW if wanted.dtype in WIDE else ():
        if torch.equal(got, wanted.to(dtype).to(wanted.dtype)):
            name = str(dtype).removeprefix("torch.")
            return f": these are the numbers rounded to {name} on their way"
    if wanted.numel() <= 12:
        return ""
    a, b = got.double(), wanted.double()
    near = TOLERANCE.get(wanted.dtype, 0)
    same = torch.isclose(
        a, b, near, _slack(b, wanted.dtype) if near else 0.0, equal_nan=True
    )
    where = tuple((~same).nonzero()[0].tolist())
    return f"; at {list(where)} it has {got[where].item()}, not {wanted[where].item()}"
