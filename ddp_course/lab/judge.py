"""Compare an answer with the solution: run both on the same randomly drawn inputs.

    def draw(d):                                 # the arguments of one case on one rank
        return d.tensor(), d.same.choice([1, 2])

    same_as(answer, solutions.f, draw, hints={"right": "has {got}; expected {wanted}."})
    same_on_ranks(answer, solutions.f, draw, watch=["messages"], hints=...)

`Draw` draws inputs without a pattern: several sizes and types, unequal numbers, zeros
on one rank, a special number in any place. These properties are compared. Each has a
hint in `TABLE`. "fits" is judged first, then the properties for which an exercise
passes its own hint, then the others:

    fits      the type of the result; for a tensor also its shape and dtype
    right     its values (any result is right if the solution returns nothing)
    kept      the arguments that the solution does not change
    in_place  the arguments that the solution changes
    bytes     the bytes that a rank writes, within 2 % of the solution's
    sends     not compared: messages are recorded, and collectives are refused
    messages  the messages: their receivers and numbers of elements
    calls     the collectives, by name
    library   the library of these collectives: PyTorch or the course
    least     the bytes that these collectives send, at most the solution's
    few       the number of these collectives, at most the solution's
    memory    the bytes that stay in tensors after the call, with a small allowance
    list      whether lists of tensors still have the same tensors, in the same order
    storage   whether tensors that are arguments still have the same memory
    later     whether a later call has changed an earlier result
    waited    on ranks, whether everything that was started has been waited for

In each of the first cases both are called twice, the second time with other numbers in
the same tensors; in the first two also a third time, with new tensors. "sends" and
"messages" cannot be combined with others that count calls; "collectives" stands for
library, least and few. A hint is a text with facts in braces, or a function that takes
a `Case` and returns a text, for well-known mistakes. The function returns "" for a
result that differs from the solution's and is right all the same.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.collectives import barrier
from ddp_course.lab.answers import Answer, code
from ddp_course.lab.exercises import (
    expect,
    judge_ranks,
    living_bytes,
    shown,
    written_by,
)
from ddp_course.lab.messages import (
    LATE,
    MESSAGES,
    WAITED,
    messages_of,
    pending,
    waiting,
)
from ddp_course.lab.values import (
    WIDE,
    difference,
    equal_values,
    fits,
    form_of,
)
from ddp_course.measure import ByteMeter, EventLog, TorchCollectives

TABLE = {
    "fits": "returned {got}; expected {form}.",
    "right": "has {got}; expected {wanted}{place}. {hint}",
    "kept": "changed `{changed}`, which it was given; work on a copy.",
    "in_place": "left {got_in_place} in `{changed}`; expected "
    "{wanted_in_place}{place_in_place}. {hint}",
    "storage": "gave `{moved}` other memory, as `.data = ...` does; views of it keep "
    "the old numbers. Change the numbers in place.",
    "list": "changed the list `{changed_list}` itself; change its tensors alone.",
    "bytes": "wrote {written:,} bytes by the operating system's count; the solution "
    "writes {needed:,}.",
    "messages": "sent {sent}, as (rank, numbers); {wanted_sent} is enough.",
    "calls": "called {called}; expected {wanted_called}.",
    "library": "called {called}; expected {wanted_called}.",
    "least": "sent {sent_bytes} bytes; {wanted_bytes} are enough. {hint}",
    "few": "called {called}; expected {wanted_called}.",
    "memory": "keeps {more} bytes from call to call, beside its arguments.",
    "later": "changed the result of an earlier call: return {instead}.",
}
ALWAYS = "fits", "right", "kept", "in_place", "list"
SHAPES = ((1,), (5,), (2, 3), (4, 1), (3, 2, 2), (11, 13))
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
AGAIN = 1_000_000  # added to a case's number: the same sizes, with other numbers
CALLED_AGAIN = "called again, with other numbers of the same sizes"
NUMBER = 8  # bytes of the widest type in which a number may be sent


class Draw:
    """A source of random inputs for one case, on one rank of `n`.

    `same` draws values that are equal on all ranks, such as a size; `own` draws
    different ones on each rank. The same case has the same inputs in every run. From
    number AGAIN on, a case is drawn again: `same` draws what it drew for the case
    `number % AGAIN`, and `own` draws other numbers.
    """

    def __init__(self, number: int, rank: int = 0, n: int = 1) -> None:
        self.number, self.case = number, number % AGAIN
        self.rank, self.n = rank, n
        self.same = random.Random(f"case {self.case} of {n}")
        self.own = random.Random(f"case {number} of {n}, rank {rank}")
        # No zeros in the first two cases: they would hide common mistakes.
        self.zeros_on = None if self.case < 2 else self.same.choice([None, *range(n)])

    def tensor(
        self,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        *,
        strided: bool = False,
    ) -> Tensor:
        """Return a tensor; shape and dtype (drawn if None) are the same on all ranks.

        Its numbers differ from rank to rank. One of them, in any place, cannot be
        represented in a narrower type. On one rank all may be zero. In every third case
        it is a part of a larger tensor. If `strided`, a matrix is not contiguous.
        """
        shape = self.same.choice(SHAPES) if shape is None else tuple(shape)
        dtype = self.same.choice(TYPES) if dtype is None else dtype
        numbers = [self.own.randint(-999, 999) for _ in range(math.prod(shape))]
        before = [0] * (self.case % 3 == 2)  # the beginning of the larger tensor
        larger = torch.tensor(before + numbers, dtype=torch.float64).to(dtype)
        tensor = larger[len(before) :].view(shape)
        if self.rank == self.zeros_on:
            tensor.zero_()
        elif numbers and dtype in WIDE:
            tensor.view(-1)[self.own.randrange(len(numbers))] += WIDE[dtype]
        if strided and tensor.dim() == 2:
            tensor = tensor.T.contiguous().T
        return tensor


@dataclass(frozen=True)
class Case:
    """One comparison: the arguments, and the outcomes of answer and solution.

    Attributes:
        args: the arguments by name, as they were before the calls.
        got: the answer's result.
        wanted: the solution's result.
        after: the arguments after the answer's call.
        right: the arguments after the solution's call.
        exact: whether floating-point numbers must be equal to the last bit.
        free: names of arguments that an answer may change.
        number: the case's number, with which a hint can draw other ranks' inputs: one
            from AGAIN on if it was drawn again.
        nothing: whether the solution returns nothing, so that any result is right.
        lists: names of arguments, lists of tensors, in which only the answer has put,
            removed or moved a tensor.
        moved: names of arguments to whose tensors only the answer gave other memory.
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
    lists: Sequence[str] = ()
    moved: Sequence[str] = ()

    def facts(self) -> dict[str, Any]:
        """Return which properties hold, and the names of what has changed."""
        facts: dict[str, Any] = {
            "fits": self.nothing or fits(self.got, self.wanted),
            "right": self.nothing or equal_values(self.got, self.wanted, self.exact),
            "kept": True,
            "in_place": True,
            "changed": "",
        }
        lists = [name for name in self.lists if name not in self.free]
        facts |= {"list": not lists, "changed_list": ", ".join(lists)}
        moved = [name for name in self.moved if name not in self.free]
        facts |= {"storage": not moved, "moved": ", ".join(moved)}
        for name, arg in reversed(self.args.items()):  # the first one is named
            mine, right = self.after[name], self.right[name]
            # Dividing an argument and multiplying it again changes its last bits.
            kept = equal_values(right, arg, exact=True)
            same = equal_values(mine, right, self.exact or kept)
            same = same and _alike(mine, right)
            if name not in self.free and not same:
                facts |= {"kept" if kept else "in_place": False, "changed": name}
        return facts

    def words(self, changed: str) -> dict[str, Any]:
        """Return the values that hints may show; `changed` names an argument, or none.

        It takes as long as all comparisons, so only a case with a mistake is described.
        """
        got, wanted = self.got, self.wanted
        words: dict[str, Any] = {name: shown(arg) for name, arg in self.args.items()}
        words |= {"got": shown(got), "wanted": shown(wanted), "form": form_of(wanted)}
        words["place"] = difference(got, wanted)
        words["instead"] = "nothing" if self.nothing else "a tensor of its own"
        if changed:
            mine, right = self.after[changed], self.right[changed]
            words |= {"got_in_place": shown(mine), "wanted_in_place": shown(right)}
            words["place_in_place"] = difference(mine, right)
        return words


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

    "storage" is compared, too. Floating-point numbers may differ by rounding, unless
    `exact`. `where` returns the text with which every hint begins; by default that is
    the call. `hints` replaces hints of `TABLE`. Raises Hint at the first difference.
    """
    table = chosen(hints, (*ALWAYS, "storage", "later"))
    results: list[tuple[Any, Any]] = []
    before: tuple = ()
    numbers = _numbers(cases)
    for number in numbers:
        args = draw(Draw(number))
        passed = copied(args)
        if number // AGAIN == 1:
            passed = _refilled(before, args, results)
        case, _, _ = run_both(answer, solution, args, ["storage"], passed)
        before = passed
        case = replace(case, exact=exact, number=number)
        facts = {"hint": "", **case.facts()}
        facts["later"] = _unchanged(results, case.got, number == numbers[-1])
        for name, hint in table.items():
            if not facts[name]:
                words = {**facts, **case.words(facts["changed"])}
                text = hint(case) if callable(hint) else hint.format_map(words)
                begin = where(case) if where else answer.call(*args)
                if number >= AGAIN:
                    begin = f"{CALLED_AGAIN.capitalize()}: {begin}"
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
    counted by the operating system), "sends" (messages are recorded, collectives are
    refused), "messages" (they must also equal the solution's), "calls", "collectives",
    "memory" or "storage". `free` names arguments that may be changed. `most_calls`
    collectives are allowed, if that is more than the solution's number. `hint` is added
    to hints, also when ranks hang. Returns the facts of each rank of the last world,
    case by case. Raises Hint at the first difference.
    """
    if "collectives" in watch:
        watch = ["library", "least", "few", *(w for w in watch if w != "collectives")]
    compared = [name for name in watch if name in TABLE]
    table = chosen(hints, (*ALWAYS, *compared, "later"))
    explained = {name: hint for name, hint in table.items() if callable(hint)}
    table |= {name: f"{{why_{name}}}" for name in explained}
    table = {**WAITED, **table}
    if {"sends", "messages"} & {*watch}:
        table = {**MESSAGES, **table}
    used = answer, solution, draw, explained, cases, tuple(watch), tuple(free)
    used += (most_calls,)
    return judge_ranks(table, _on_a_rank, *used, worlds=worlds, hint=hint)


def _numbers(cases: int, most: int = 20) -> list[int]:
    """Return the numbers of all cases; the first ones are drawn again.

    So a function that keeps something from call to call meets other numbers of the
    same sizes: in the same tensors in each of the first `most` cases, and in new
    tensors in the first two.
    """
    times = [3 if k < 2 else 2 if k < most else 1 for k in range(cases)]
    return [k + j * AGAIN for k in range(cases) for j in range(times[k])]


def chosen(hints: Hints | None, compared: Sequence[str]) -> dict[str, Any]:
    """Return {property: hint} in the order of judging: "fits", `hints`, the others."""
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
    """Yield, for each case, the facts of comparing answer and solution on this rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    results: list[tuple[Any, Any]] = []
    before: tuple = ()
    numbers = _numbers(cases, most=2)
    for number in numbers:
        args = draw(Draw(number, rank, n))
        passed = copied(args)
        if number // AGAIN == 1 and "memory" not in watch:  # old memory may be freed
            passed = _refilled(before, args, results)
        case, facts, theirs = run_both(function, solution, args, watch, passed)
        before = passed
        case = replace(case, free=free, number=number)
        facts |= case.facts()
        facts["later"] = _unchanged(results, case.got, number == numbers[-1])
        if number >= AGAIN:
            facts["case"] = CALLED_AGAIN
        for name in ("sent", "called", "sent_bytes", "library", "count"):
            facts[f"wanted_{name}"] = theirs.get(name)
        facts["messages"] = facts.get("sent") == theirs.get("sent")
        facts["calls"] = facts.get("called") == theirs.get("called")
        facts["wanted_bytes"] = theirs.get("sent_bytes", 0)
        most_bytes = facts["wanted_bytes"] + NUMBER * max(1, most_calls)
        if facts["wanted_bytes"] <= NUMBER and not most_calls:
            most_bytes = NUMBER  # one number, of any type
        facts["least"] = facts.get("sent_bytes", 0) <= most_bytes
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
        if any(value is False for value in facts.values()):
            facts |= case.words(facts["changed"])
        yield facts


def run_both(
    function: Callable,
    solution: Callable,
    args: tuple,
    watch: Sequence[str],
    passed: tuple,
) -> tuple[Case, dict[str, Any], dict[str, Any]]:
    """Call the solution on a copy of `args`, the function on `passed`; watch both.

    `passed` has the same values as `args`. Returns the case, the facts observed of the
    function, and those of the solution. In a list of tensors, the tensors that were in
    it before the call are compared.
    """
    names = list(inspect.signature(solution).parameters)
    outcomes = []
    for called, own in ((solution, copied(args)), (function, passed)):
        contents = [_tensors(arg) for arg in own]
        memory = _storages(own) if "storage" in watch else []
        result, seen = _watched_call(called, own, watch, late=called is function)
        after, changed = {}, set()
        for name, old, now in zip(names, contents, own, strict=False):
            after[name] = old or now
            if old and [*map(id, old)] != [*map(id, now)]:
                changed.add(name)
        moved = {
            names[k]
            for k, tensor, storage in memory
            if tensor.untyped_storage().data_ptr() != storage.data_ptr()
        }
        outcomes.append((result, after, seen, changed, moved))
    (wanted, right, theirs, *allowed), (got, after, seen, changed, moved) = outcomes
    case = Case(dict(zip(names, args, strict=False)), got, wanted, after, right)
    nothing = inspect.signature(solution).return_annotation in (None, "None")
    lists, moved = sorted(changed - allowed[0]), sorted(moved - allowed[1])
    case = replace(case, nothing=nothing, lists=lists, moved=moved)
    return case, seen, theirs


def copied(value: Any) -> Any:
    """Return a deep copy, with gradients, which `deepcopy` does not copy."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(copied, value))
    new = copy.deepcopy(value)
    if isinstance(value, nn.Parameter) and value.grad is not None:
        new.grad = value.grad.clone()
    return new


def _refilled(before: tuple, args: tuple, results: list[tuple[Any, Any]]) -> tuple:
    """Write `args` into the tensors of the previous call, and return these.

    So a function that knows a tensor by its `id` or `data_ptr` meets other numbers in
    it. If the previous result shares their memory, it is removed from `results`.
    """
    passed = tuple(
        _written_into(old, new) for old, new in zip(before, args, strict=True)
    )
    if results and _memory(results[-1][0]) & _memory(passed):
        results.pop()
    return passed


def _written_into(old: Any, new: Any) -> Any:
    """Copy a value into the tensors of `old`; if they do not fit, return a new copy."""
    if isinstance(new, list) and isinstance(old, list) and len(old) == len(new):
        old[:] = [_written_into(*pair) for pair in zip(old, new, strict=True)]
        return old
    alike = type(old) is type(new) and isinstance(new, Tensor) and fits(old, new)
    alike = alike and old.stride() == new.stride()
    if not alike or old.requires_grad != new.requires_grad:
        return copied(new)
    with torch.no_grad():
        old.copy_(new)
    old.grad = None if new.grad is None else new.grad.clone()
    return old


def _memory(value: Any) -> set[int]:
    """Return the addresses of the storages of all tensors in `value`."""
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr()} if value.numel() else set()
    if isinstance(value, Mapping):
        value = list(value.values())
    nested = value if isinstance(value, (list, tuple)) else ()
    return set().union(*map(_memory, nested))


def _tensors(arg: Any) -> list[Tensor]:
    """Return a copy of a list, if it is a list of tensors; otherwise an empty list."""
    is_one = isinstance(arg, list) and all(isinstance(one, Tensor) for one in arg)
    return list(arg) if is_one else []


def _storages(args: tuple) -> list[tuple[int, Tensor, torch.UntypedStorage]]:
    """Return (number of the argument, tensor, its memory) of all tensors in `args`."""
    return [
        (k, tensor, tensor.untyped_storage())
        for k, arg in enumerate(args)
        for tensor in _tensors(arg) or [arg]
        if isinstance(tensor, Tensor)
    ]


def _watched_call(
    function: Callable, args: tuple, watch: Sequence[str], *, late: bool
) -> tuple[Any, dict[str, Any]]:
    """Call a function; return its result, and the facts that `watch` names.

    On ranks they also say whether the function waits for all that it starts. If `late`
    and messages are watched, ranks call one after the other.
    """
    with pending() as ignored:
        got, seen = _seen_call(function, args, watch, LATE if late else 0)
    ignored += [("message", one) for one in seen.get("ignored", ())]
    return got, seen | waiting(ignored)


def _seen_call(
    function: Callable, args: tuple, watch: Sequence[str], lag: float
) -> tuple[Any, dict[str, Any]]:
    if not {*watch} - {"storage"}:
        return function(*args), {}
    barrier()
    call = written_by if "bytes" in watch else lambda f, *args: (f(*args), None)
    if {"sends", "messages", "calls"} & {*watch}:
        time.sleep(lag * dist.get_rank())
        with messages_of() as seen:
            got, written = call(function, *args)
        return got, seen | {"called": seen["collectives"], "written": written}
    if {*watch} == {"bytes"}:
        got, written = call(function, *args)
        return got, {"written": written}
    living = living_bytes if "memory" in watch else lambda: 0  # counting takes long
    before = living()
    with (
        messages_of() as seen,
        EventLog() as log,
        ByteMeter() as meter,
        TorchCollectives() as torch_log,
    ):
        got, written = call(function, *args)
    own = [e.op for e in log.events if e.lane == "communication"]
    names = [f"dist.{call.op}" for call in torch_log.calls]
    names += [f"{op} of ddp_course" for op in own]
    if not own:  # the course's collectives send messages themselves
        names += ["dist.send"] * len(seen["sent"])
    return got, {
        "called": code(", ".join(names) or "no collective"),
        "library": (bool(torch_log.calls), bool(own)),
        "count": len(names),
        "sent_bytes": meter.total_sent + torch_log.nbytes,
        "more": living() - before - _nbytes(got),
        "written": written,
    }


def _nbytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else 0


def _unchanged(results: list[tuple[Any, Any]], got: Any, is_last: bool) -> bool:
    """Return whether earlier results are unchanged, and append `got` to them.

    After each case only the previous result is compared, after the last case all: a
    function may reuse its memory for results of the same size.
    """
    earlier = results if is_last else results[-1:]
    unchanged = all(equal_values(now, then) for now, then in earlier)
    results.append((got, copy.deepcopy(got)))
    return unchanged


def _alike(mine: Any, right: Any) -> bool:
    """Return whether two arguments require a gradient alike, and so do their items."""
    if isinstance(right, Tensor):
        return mine.requires_grad == right.requires_grad
    nested = isinstance(right, (list, tuple))
    return all(map(_alike, mine, right)) if nested else True
