"""How a conformance matrix is run: many cases in one launch, one word for each.

An attempt at a case is made on every rank. Then the ranks show each other how it ended:

    equal     what was promised came of it, on all ranks
    refused   by an error of this course, with a sentence, on all ranks together
    FAILS     all else: other numbers, an error out of PyTorch, ranks that wait

A case that hangs, or leaves ranks that do not understand each other any more, ends its
launch; the next launch goes on with the next case.
"""

from __future__ import annotations

import faulthandler
import json
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist

import ddp_course
from ddp_course.launch import RankReport, spawn

HANGS_AFTER = 60.0  # seconds; a rank that was refused waits a fifth of it for others
DONE, EQUAL, REFUSED, RAISES, FAILS = "done", "equal", "refused", "raises", "FAILS"
Case = tuple[str, str]  # a row and a column of the matrix


class Attempt(Protocol):
    """One case on one rank."""

    def train(self) -> Any:
        """Do it; return what the other ranks should see."""

    def judge(self, everyones: Sequence[Any]) -> str:
        """Say what came of it, from what `train` has returned on all ranks."""


def on_rank(
    cases: Sequence[Case], attempt: Callable[[str, str], Attempt], seconds: float
) -> None:
    """Try all cases; print a line when one is over on this rank, and when on all."""
    warnings.simplefilter("ignore")
    for number, case in enumerate(cases):
        faulthandler.dump_traceback_later(seconds, exit=True)
        kind, shown, trial = DONE, None, None
        try:
            trial = attempt(*case)
            shown = trial.train()
        except Exception as error:
            kind = refusal(error) or f"{RAISES} {_in_words(error)}"
            faulthandler.dump_traceback_later(seconds / 5, exit=True)
        print(json.dumps([number, "here", kind]), flush=True)
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, (kind, shown))
        faulthandler.cancel_dump_traceback_later()
        kinds, all_shown = zip(*everyones, strict=True)
        if set(kinds) == {DONE}:
            kind = trial.judge(all_shown)
        elif not all(kind.startswith(REFUSED) for kind in kinds):
            kind = by_rank(kinds)
        print(json.dumps([number, "all", kind]), flush=True)


def refusal(error: Exception) -> str | None:
    """Return what this course says when it refuses, or None: somebody else did."""
    end, package = traceback.extract_tb(error.__traceback__)[-1], ddp_course.__path__[0]
    ours = end.filename.startswith(package) and end.line.startswith("raise")
    counts = getattr(error, "counts", False)  # an error of PyTorch's that may be
    if not (ours and " " in str(error) or counts):
        return None
    return f"{REFUSED}: {_in_words(error)}"


def _in_words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def by_rank(kinds: Sequence[str]) -> str:
    """Say how the ranks ended, of which one failed, or not all did the same."""
    results = [f"rank {kinds.index(kind)}: {kind}" for kind in dict.fromkeys(kinds)]
    return f"{FAILS}: {'; '.join(results) if results[1:] else kinds[0]}"


def outcomes(
    cases: Sequence[Case],
    ranks: int,
    attempt: Callable[[str, str], Attempt],
    seconds: float = HANGS_AFTER,
) -> dict[Case, str]:
    """Return what becomes of each case, in as few launches as there can be."""
    found: dict[Case, str] = {}
    while left := cases[len(found) :]:
        reports = spawn(
            on_rank, left, attempt, seconds, world_size=ranks, check=False,
            output="none", device="cpu", timeout=60 + seconds * len(left),
        )  # fmt: skip
        lines = [_lines(report) for report in reports]
        for number, case in enumerate(left):
            kinds = [of_rank.get((number, "all")) for of_rank in lines]
            if None in kinds:  # this case has ended the launch
                both = zip(lines, reports, strict=True)
                kinds = [known.get((number, "here")) or _end(r) for known, r in both]
                found[case] = by_rank(kinds)
                break
            same = len({kind.partition(": ")[0] for kind in kinds}) == 1
            found[case] = kinds[0] if same else by_rank(kinds)
    return found


def _lines(report: RankReport) -> dict[tuple[int, str], str]:
    lines = [json.loads(line) for line in report.output.splitlines()]
    return {(number, where): kind for number, where, kind in lines}


def _end(report: RankReport) -> str:
    """Say how a rank ended in the middle of a case."""
    waits = report.status == "unfinished" or "Timeout (" in report.stderr
    return "hangs" if waits else report.error or report.status
