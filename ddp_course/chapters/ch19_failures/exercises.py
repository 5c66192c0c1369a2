"""The exercises of chapter 19: an interval, rows, a suspect, and four hangs."""

from __future__ import annotations

import math

from ddp_course.chapters.ch19_failures import solutions
from ddp_course.failures.interval import daly, expected_time, young
from ddp_course.lab.answers import Answer
from ddp_course.lab.exercises import exercise, shown
from ddp_course.lab.judge import Case, Draw, same_as

# ---- my_interval ---------------------------------------------------------------------


@exercise("my_interval", solution=solutions.my_interval)
def check_my_interval(answer: Answer) -> str:
    """`my_interval(save, restart, one, gpus)`: seconds of work between two saves.

    How often does one of all GPUs fail? Which losses become larger with the interval,
    which smaller, and which do not change?

    With M = one / gpus, an interval of work w takes M e^(restart/M) (e^((w + save)/M) -
    1) seconds on average. Divide by w, and find the least value: by trying, or by
    Daly's series. Young's interval is only right if a save is far shorter than M.
    """
    hints = {"fits": _about_interval, "right": _about_interval}
    same_as(answer, solutions.my_interval, _saves, cases=60, hints=hints)
    return "60 clusters, with saves from a thousandth of M to all of it"


def _saves(d: Draw) -> tuple[float, float, float, int]:
    r = d.same
    one, gpus = r.uniform(1e7, 3e8), r.choice([1, 8, 100, 4096, 16_384, 100_000])
    mean = one / gpus
    save = mean * r.choice([0.001, 0.01, 0.1, 0.3, 1.0])
    restart = mean * r.choice([0.0, 0.02, 0.3, 1.5])
    return save, restart, one, gpus


def _about_interval(case: Case) -> str:
    """Return "" if the expected loss is at most a thousandth above the least."""
    save, restart, one, gpus = case.args.values()
    asked = ", ".join(f"{name} {value:.6g}" for name, value in case.args.items())
    found = f"for {asked}: returned {shown(case.got)}; expected {case.wanted:.6g}"
    got, mean = case.got, one / gpus
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        return f"{found}."
    if not 0 < got < math.inf:
        return f"{found}: seconds above 0."
    least = expected_time(case.wanted, save, mean) - 1
    if got < 9 * mean and expected_time(got, save, mean) - 1 <= 1.001 * least:
        return ""
    named = {
        daly(save, one): "one of all GPUs fails far more often than one GPU",
        young(save, one): "one of all GPUs fails far more often than one GPU",
        young(save, one * gpus): "more GPUs fail more often, not less",
        daly(save, one * gpus): "more GPUs fail more often, not less",
        young(save, mean): "Young's interval is for saves far shorter than M",
        case.wanted + save: "seconds of work, without the save itself",
        daly(save + restart, mean): "a restart costs as much at any interval",
        young(save + restart, mean): "a restart costs as much at any interval",
        math.sqrt(save * mean): "a failure loses half an interval on average",
        mean: "that is M; work that is not saved for so long is mostly lost",
        case.wanted / 60: "in seconds",
        case.wanted / 3600: "in seconds",
    }
    for wrong, why in named.items():
        if math.isclose(got, wrong, rel_tol=1e-6):
            return f"{found}: {why}."
    return f"{found}: it is too {'long' if got > case.wanted else 'short'}."


# ---- my_rows -------------------------------------------------------------------------


# ---- my_suspect ----------------------------------------------------------------------


@exercise("my_suspect", solution=solutions.my_suspect)
def check_my_suspect(answer: Answer) -> str:
    """`my_suspect(digests)`: which ranks are wrong, and the first comparison with it.

    Which ranks agree when some differ for the first time? How many must they be, so
    that the others are wrong?

    Go through the comparisons until one is not unanimous. Count how often each digest
    occurs in it. More than half of all ranks: the others are the suspects. Otherwise
    nobody can tell.
    """
    hints = {"fits": _about_suspect, "right": _about_suspect}
    same_as(answer, solutions.my_suspect, _digests, cases=80, hints=hints)
    return "80 trainings of 2 to 8 ranks"


def _digests(d: Draw) -> tuple[list[list[int]]]:
    """Return digests of ranks, some of which leave the others, one after the other."""
    r = d.same
    ranks, rows = r.choice([2, 3, 3, 4, 5, 6, 8]), r.randint(1, 6)
    wrong = r.sample(range(ranks), r.choice([0, 1, 1, 1, 2, ranks // 2, ranks - 1]))
    since = {rank: r.randrange(rows) for rank in wrong}
    if d.case % 2:  # all at once
        since = dict.fromkeys(wrong, r.randrange(rows))
    together = d.case % 3 == 0  # the wrong ones agree with each other
    found = []
    for k in range(rows):
        row = [r.randrange(-(2**63), 2**63)] * ranks
        other = r.randrange(-(2**63), 2**63)
        for rank in wrong:
            if k >= since[rank] and not (d.case % 5 == 4 and k > since[rank]):
                row[rank] = other if together else r.randrange(-(2**63), 2**63)
        found.append(row)
    return (found,)


def _about_suspect(case: Case) -> str:
    digests, got, (ranks, first) = case.args["digests"], case.got, case.wanted
    names = [[chr(65 + sorted({*row}).index(own)) for own in row] for row in digests]
    rows = "; ".join(" ".join(row) for row in names)
    found = f"for comparisons {rows}: returned {shown(got)}"
    found += f"; expected {shown(case.wanted)}"
    if not isinstance(got, (tuple, list)) or len(got) != 2:
        return f"{found}: a list of ranks, and the number of the comparison."
    suspected, k = got
    if first is None:
        return f"{found}: all ranks always agree."
    if k is None:
        return f"{found}: not all ranks agree in comparison {first}."
    if k != first:
        return f"{found}: comparison {first} is the first in which some differ."
    if ranks is None:
        return f"{found}: no digest has more than half of the ranks: nobody can tell."
    if suspected is None:
        return f"{found}: more than half of the ranks agree, so the others are wrong."
    if not isinstance(suspected, (tuple, list)):
        return f"{found}: a list of ranks, also if it is one."
    if {*suspected} == {*range(len(digests[0]))} - {*ranks}:
        return f"{found}: those are the ranks that agree."
    if [*suspected] == [rank + 1 for rank in ranks]:
        return f"{found}: ranks count from 0."
    if sorted(suspected) == ranks:
        return f"{found}: in the order of ranks."
    return f"{found}: all that differ from the majority in comparison {first}."


# ---- my_diagnosis --------------------------------------------------------------------
