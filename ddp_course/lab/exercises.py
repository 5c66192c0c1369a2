"""Exercises: run the reader's own function, and answer with a verdict and a hint.

    @exercise("global_rank", solution=solutions.global_rank)
    def check_global_rank(answer):
        \"""The question, in one line.

        The first hint: a question, or where to look.

        The second hint: the idea of a solution, in words.
        \"""
        expect(answer(2, 3, 4) == 11, hint="2 nodes of 4 ranks come first, and 3 ranks")
        return "one rank"  # what was verified

`check_global_rank(global_rank)` then shows one of three verdicts: not attempted yet,
not yet (with the hint of the first expectation that fails), or passed. Whatever the
reader's function does, the cell neither raises nor hangs.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from IPython.display import Markdown
from torch import Tensor

from ddp_course.lab.answers import (
    Answer,
    Hint,
    Untouched,
    code,
    error_line,
    on_ranks,
    one_line,
    patient,
)
from ddp_course.lab.messages import PATIENCE
from ddp_course.lab.progress import note
from ddp_course.lab.source import show_source
from ddp_course.learners_copy import STATUSES
from ddp_course.measure import SystemBytes

UNTOUCHED, NOT_YET, PASSED = STATUSES
SIGNS = {UNTOUCHED: "○", NOT_YET: "✗", PASSED: "✓"}


@dataclass(frozen=True)
class Verdict:
    """The result of a check. `status` is one of UNTOUCHED, NOT_YET and PASSED."""

    name: str
    status: str
    message: str

    def _repr_markdown_(self) -> str:
        sign = SIGNS[self.status]
        return f"{sign} **{self.name}: {self.status}.** {self.message}"

    def __repr__(self) -> str:
        return self._repr_markdown_().replace("**", "")


class Exercise:
    """A question, its check, and a solution. Call it with your function to check it."""

    def __init__(self, name: str, check: Callable, solution: Callable) -> None:
        functools.update_wrapper(self, check)
        parts = (" ".join(text.split()) for text in (check.__doc__ or "").split("\n\n"))
        self.question, *self.hints = parts
        self.__doc__ = self.question  # `check_swap?` shows no hints
        self.name = name
        self.check = check
        self.reference = solution

    def __call__(self, answer: Any = None) -> Verdict:
        """Check `answer`, a function, and return the verdict. Never raises."""
        verdict = self._verdict(answer)
        progress = note(self.name, verdict.status)
        return replace(verdict, message=f"{verdict.message} {progress}".rstrip())

    def _verdict(self, answer: Any) -> Verdict:
        try:
            verified = self.check(Answer(self.name, answer))
        except Untouched:
            todo = "Put your code in place of `raise NotImplementedError`, and run "
            return Verdict(self.name, UNTOUCHED, f"{todo}again.")
        except Hint as hint:
            return Verdict(self.name, NOT_YET, str(hint))
        except Exception as error:  # the check cannot handle the answer's result
            what = "The check cannot use what your function returned: "
            return Verdict(self.name, NOT_YET, code(what + error_line(error)))
        return Verdict(self.name, PASSED, f"Verified: {verified}.")

    def hint(self, step: int = 1) -> Markdown:
        """Show a hint: 1 is a question, 2 explains the idea of a solution."""
        if step not in range(1, len(self.hints) + 1):
            raise ValueError(f"step is {step}; {self.name} has {len(self.hints)} hints")
        more = f'hint("{self.name}", {step + 1})'
        if step == len(self.hints):
            more = f'show_solution("{self.name}")'
        return Markdown(f"**Hint {step}.** {self.hints[step - 1]} (More: `{more}`.)")

    def solution(self) -> Markdown:
        """Show a solution."""
        return show_source(self.reference)

    def _repr_markdown_(self) -> str:
        return f"**Exercise {self.name}.** {self.question}"


def exercise(name: str, *, solution: Callable) -> Callable[[Callable], Exercise]:
    """Turn a check into an exercise; a check is a function of the reader's answer.

    The check's docstring has the question and two hints. The check calls the answer,
    states its expectations with `expect` and `expect_call`, and returns a few words
    about what it has verified.
    """
    return lambda check: Exercise(name, check, solution)


def expect(condition: Any, hint: str) -> None:
    """End the check with `hint` unless `condition` is true."""
    if not condition:
        raise Hint(hint)


def judge(where: str, facts: Mapping[str, Any], table: Mapping[str, str]) -> None:
    """Raise the first hint of `table` for which the property in `facts` is false.

    `table` is {property: hint}; each property is a key of `facts`. The message starts
    with `where`. A hint may show any fact: "rank {rank} sent {sent} bytes".
    """
    for name, hint in table.items():
        if not facts[name]:
            raise Hint(f"{where} {hint.format_map(facts)}")


def judge_ranks(
    table: Mapping[str, str],
    use: Callable,
    answer: Answer,
    *args: Any,
    worlds: Sequence[int] = (2, 3, 1),
    nodes: int = 1,
    hint: str = "",
) -> list[Any]:
    """Call `use(answer, *args)` on real ranks, and judge the facts of each rank.

    `use` returns a dictionary of facts, or a list of such dictionaries, one for each
    case; the fact `case` is the case's name. If `use` is a generator, it stops at the
    first case that is wrong on any rank. Use several `nodes` to make local ranks differ
    from ranks. Returns the facts of all ranks for the last number in `worlds`.
    """
    on = f" on {nodes} nodes" if nodes > 1 else ""
    for n in worlds:
        shape = {"world_size": n}
        if nodes > 1:
            shape = {"nnodes": nodes, "nproc_per_node": n // nodes}
        results = on_ranks(_facts, use, table, answer, *args, hint=hint, **shape)
        for rank, facts in enumerate(results):
            for one in facts if isinstance(facts, list) else [facts]:
                case = f" {one['case']}," if "case" in one else ""
                where = f"With {n} rank{'s' * (n > 1)}{on},{case} rank {rank}"
                judge(where, {"rank": rank, "n": n, "hint": hint} | one, table)
    return results


def _facts(use: Callable, table: Mapping[str, str], *args: Any) -> Any:
    facts = use(*args)
    return facts if isinstance(facts, (dict, list)) else until_wrong(facts, table)


def until_wrong(
    cases: Iterable[dict[str, Any]], table: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Collect the cases' facts, up to the first case that is wrong on any rank.

    Later mistakes would only hide the first one. The ranks compare through the store,
    so that the check's collectives cannot interfere with the reader's.
    """
    collected, store = [], dist.distributed_c10d._get_default_store()
    ranks = range(dist.get_world_size())
    for number, case in enumerate(cases):
        collected.append(case)
        right = all(case.get(what) for what in table)
        store.set(f"case {number} of {dist.get_rank()}", str(right))
        keys = [f"case {number} of {rank}" for rank in ranks]
        try:
            store.wait(keys, timedelta(seconds=patient(PATIENCE)))
        except RuntimeError:  # another rank has failed, or hangs
            break
        if not all(store.get(key) == b"True" for key in keys):
            break
    return collected


def equal(got: Any, wanted: Tensor) -> bool:
    """Return whether `got` is a tensor with this type and shape, and equal numbers."""
    alike = isinstance(got, Tensor) and got.shape == wanted.shape
    return alike and got.dtype == wanted.dtype and torch.equal(got, wanted)


def shown(value: Any, longest: int = 80) -> str:
    """Format a value as code, in one line; a small tensor with its numbers."""
    if not isinstance(value, Tensor):
        return code(one_line(value, longest))
    common = value.dtype in (torch.float32, torch.int64)
    more = "" if common else f" of {str(value.dtype).removeprefix('torch.')}"
    if value.numel() > 12 or not value.numel():
        return f"{code(f'<tensor of shape {tuple(value.shape)}>')}{more}"
    return code(one_line(value.tolist(), longest)) + more


def written_by(function: Callable, *args: Any) -> tuple[Any, int | None]:
    """Call a function; return its result, and the bytes that this rank wrote."""
    try:
        with SystemBytes() as system:
            got = function(*args)
        return got, system.written
    except RuntimeError as error:
        if "SystemBytes" not in str(error):
            raise
        return function(*args), None  # this system does not count bytes


def living_bytes() -> int:
    """Return the bytes of all storages that tensors of this process use, each once.

    It finds tensors in globals, attributes and closures. (Tensors that only autograd
    keeps are not found; `torch.autograd.graph.saved_tensors_hooks` sees those.)
    """
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def expect_call(answer: Answer, *args: Any, returns: Any, because: str) -> None:
    """Expect `answer(*args)` to return `returns`; the hint ends with `because`."""
    # Compare texts: so 11.0 and True differ from 11, and == of a tensor cannot raise.
    got, wanted = (one_line(value, 10**6) for value in (answer(*args), returns))
    if got != wanted:
        mine, right = (code(text) for text in where_they_differ(got, wanted))
        call = answer.call(*args)
        raise Hint(f"{call} returned {mine}; expected {right}, because {because}.")


def where_they_differ(*texts: str, longest: int = 80) -> list[str]:
    """Shorten texts to the part around the first place where they differ."""
    begin = len(os.path.commonprefix(texts)) - longest // 2
    if begin > 0 and max(map(len, texts)) > longest:
        texts = tuple(f"...{text[begin:]}" for text in texts)
    return [t if len(t) <= longest else f"{t[: longest - 3]}..." for t in texts]
