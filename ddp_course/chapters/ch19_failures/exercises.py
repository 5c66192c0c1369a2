"""The exercises of chapter 19: an interval, rows, a suspect, and four hangs."""

from __future__ import annotations

import math
from random import Random

from ddp_course.chapters.ch19_failures import solutions
from ddp_course.failures.interval import daly, expected_time, young
from ddp_course.lab.answers import Answer
from ddp_course.lab.exercises import exercise, shown
from ddp_course.lab.judge import Case, Draw, same_as

# ---- my_interval ---------------------------------------------------------------------


@exercise("my_interval", solution=solutions.my_interval)
def check_my_interval(answer: Answer) -> str:
    """`my_interval(save, restart, one, gpus)`: seconds of work between two saves.

    How often does any of the GPUs fail? Which losses become larger with the interval,
    which smaller, and which do not change?

    With M = one / gpus, an interval of work w takes M e^(restart/M) (e^((w + save)/M) -
    1) seconds on average. Divide by w, and find the least value: by trying, or by
    Daly's series. Young's interval is only right if a save is far shorter than M.
    """
    hints = {"fits": _about_interval, "right": _about_interval}
    same_as(answer, solutions.my_interval, _saves, cases=60, hints=hints)
    return "60 clusters, with saves from a ten-millionth of M to all of it"


def _saves(d: Draw) -> tuple[float, float, float, int]:
    if d.case == 59:  # ten GPUs, one of which fails every four months
        return 1.0, 60.0, 1e8, 10
    r = d.same
    one, gpus = 10 ** r.uniform(4, 8.5), r.choice([1, 8, 100, 4096, 16_384, 100_000])
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
        daly(save, one): "some GPU of many fails far more often than a single one",
        young(save, one): "some GPU of many fails far more often than a single one",
        young(save, one * gpus): "more GPUs fail more often, not less",
        daly(save, one * gpus): "more GPUs fail more often, not less",
        young(save, mean): "Young's interval is for saves far shorter than M",
        case.wanted + save: "seconds of work, without the save itself",
        daly(save + restart, mean): "a restart costs as much at any interval",
        young(save + restart, mean): "a restart costs as much at any interval",
        math.sqrt(save * mean): "a failure loses half an interval on average",
        mean: "that is M; work that is not saved for so long is mostly lost",
        round(case.wanted): "do not round",
        int(case.wanted): "do not round",
        case.wanted / 60: "in seconds",
        case.wanted / 3600: "in seconds",
    }
    for wrong, why in named.items():
        if math.isclose(got, wrong, rel_tol=1e-6):
            return f"{found}: {why}."
    return f"{found}: it is too {'long' if got > case.wanted else 'short'}."


# ---- my_rows -------------------------------------------------------------------------


@exercise("my_rows", solution=solutions.my_rows)
def check_my_rows(answer: Answer) -> str:
    """`my_rows(order, seen, old_ranks, batch, rank, ranks)`: a resuming rank's batches.

    Which rows of the order have all old ranks used together? The remaining rows are
    cut into global batches: what does a rank do with the last one?

    Each of the old ranks has used `seen` rows; together they have used old_ranks times
    as many, from the beginning of `order`. Cut the others into global batches of
    `batch` rows, without an incomplete last one, and each batch into equal parts, one
    for each of the new ranks.
    """
    hints = {"fits": _about_rows, "right": _about_rows}
    same_as(answer, solutions.my_rows, _position, cases=80, hints=hints)
    return "80 resumed runs, with 1 to 6 ranks before and 1 to 6 after"


def _position(d: Draw) -> tuple[list[int], int, int, int, int, int]:
    r = d.same
    old, ranks = r.randint(1, 6), r.randint(1, 6)
    batch = ranks * r.randint(1, 4)
    seen = r.randint(0, 7)
    rest = r.choice([0, 1, batch, r.randint(0, 6 * batch)])  # rows not used yet
    if d.case == 50:  # many batches
        batch, seen, rest = ranks, 5000, 2000 * ranks + rest
    length = seen * old + rest
    order, rank = d.own.sample(range(1, 10 * length + 1), length), r.randrange(ranks)
    place = seen * old + rank * (batch // ranks)
    if d.case % 2 and place < length:  # row 0 is a row like any other
        order[place] = 0
    return order, seen, old, batch, rank, ranks


def _about_rows(case: Case) -> str:
    order, seen, old, batch, rank, ranks = case.args.values()
    found = (
        f"rank {rank} of {ranks}, batches of {batch}, after {old} ranks have used "
        f"{seen} rows each of {shown(order)}: returned {shown(case.got)}; expected "
        f"{shown(case.wanted)}"
    )
    if not isinstance(case.got, list) or not all(
        isinstance(rows, list) for rows in case.got
    ):
        return f"{found}: a list of lists, one for each batch."
    others = [
        solutions.my_rows(order, seen, old, batch, r, ranks) for r in range(ranks)
    ]
    named = [
        (solutions.my_rows(order, seen, ranks, batch, rank, ranks),
         "the old ranks have used these rows, not the new ones"),
        (solutions.my_rows(order, seen, 1, batch, rank, ranks),
         "all old ranks together have used more rows than one of them"),
        (solutions.my_rows(order, 0, old, batch, rank, ranks),
         "rows that are used come again"),
        ([batch_of[rank::ranks] for batch_of in _whole(others)],
         "rank 0 has the first rows of a batch, rank 1 the next"),
    ]  # fmt: skip
    for wrong, words in named:
        if case.got == wrong:
            return f"{found}: {words}."
    if case.got[:-1] == case.wanted:
        return f"{found}: the last batch is incomplete, so some ranks would wait."
    if sum(case.got, []) == sum(case.wanted, []):
        return f"{found}: the right rows, in other batches."
    if {*sum(case.got, [])} & {*order[: seen * old]}:
        return f"{found}: rows that are used come again."
    return f"{found}."


def _whole(parts: list[list[list[int]]]) -> list[list[int]]:
    """Join all ranks' parts of each batch into the global batch."""
    return [sum(batch, []) for batch in zip(*parts, strict=True)]


# ---- my_suspect ----------------------------------------------------------------------


@exercise("my_suspect", solution=solutions.my_suspect)
def check_my_suspect(answer: Answer) -> str:
    """`my_suspect(digests)`: the wrong ranks, and the first comparison that shows them.

    Which ranks agree when some differ for the first time? How many ranks must agree,
    so that the others are wrong?

    Go through the comparisons until one is not unanimous. Count how often each digest
    occurs in it. If more than half of all ranks have the same digest, the others are
    the suspects. Otherwise nobody can tell.
    """
    hints = {"fits": _about_suspect, "right": _about_suspect}
    same_as(answer, solutions.my_suspect, _digests, cases=80, hints=hints)
    return "80 training runs of 1 to 300 ranks, with up to 2,000 comparisons"


# Cases with these digests, counted in millions from the right one.
SPECIAL: dict[int, list[list[int]]] = {
    75: [[0, 0, 0], [0, 0, 1]],  # the right digest is 0
    76: [[0], [1]],  # one rank
    77: [],  # no comparison yet
    78: [[0, 0, 1, 1], [0, 0, 0, 1]],  # first a tie, then a majority
    79: [[0, 0, 0, 0, 0], [0, 1, 0, -1, 0], [0, 1, 1, -1, -1]],  # sum and mean agree
}


def _digests(d: Draw) -> tuple[list[list[int]]]:
    """Draw the digests of all ranks in each comparison; some ranks become wrong."""
    ranks, rows = d.same.choice([2, 3, 3, 4, 5, 6, 8]), d.same.randint(1, 6)
    if d.case in (50, 51):
        ranks, rows = (300, 2) if d.case == 50 else (3, 2000)
    r = d.own
    number = r.choice([0, 1, 1, 1, 2, ranks // 2, ranks - 1])
    wrong = r.sample(range(ranks), 20 if d.case == 50 else number)
    since = {rank: r.randrange(rows) for rank in wrong}
    if d.case % 2:  # all become wrong in the same comparison
        since = dict.fromkeys(wrong, r.randrange(rows))
    together = d.case % 3 == 0  # the wrong ranks agree with each other
    found = []
    for k in range(rows):
        right = r.randrange(1 - 2**63, 2**63)
        row, other = [right] * ranks, _another(r, right)
        for rank in wrong:
            if k >= since[rank] and not (d.case % 5 == 4 and k > since[rank]):
                row[rank] = other if together else _another(r, right)
        found.append(row)
    if d.case in SPECIAL:
        signs = SPECIAL[d.case]
        right = 0 if d.case == 75 else r.randrange(10**18)
        found = [[right + sign * 10**6 for sign in row] for row in signs]
    # Each rank's digest is its own object, as after a gather.
    return ([[int(str(own)) for own in row] for row in found],)


def _another(r: Random, right: int) -> int:
    """Draw a wrong digest; some differ from the right one in one bit, or in sign."""
    return r.choice([r.randrange(-(2**63), 2**63), right ^ 1, right ^ 2**62, -right, 0])


def _about_suspect(case: Case) -> str:
    digests, got, (ranks, first) = case.args["digests"], case.got, case.wanted
    names = [[chr(65 + sorted({*row}).index(own)) for own in row] for row in digests]
    rows = "; ".join(" ".join(row) for row in names)
    rows = rows if len(rows) <= 300 else f"{rows[:297]}..."
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
        return f"{found}: a list of ranks, even of one rank."
    if {*suspected} == {*range(len(digests[0]))} - {*ranks}:
        return f"{found}: those are the ranks that agree."
    if [*suspected] == [rank + 1 for rank in ranks]:
        return f"{found}: ranks count from 0."
    if sorted(suspected) == ranks:
        return f"{found}: in the order of ranks."
    return f"{found}: all that differ from the majority in comparison {first}."


# ---- my_diagnosis --------------------------------------------------------------------


@exercise("my_diagnosis", solution=solutions.my_diagnosis)
def check_my_diagnosis(answer: Answer) -> str:
    """`my_diagnosis(calls, where)`: the cause of a hang, and the rank that caused it.

    A rank that waits is a victim. For which rank does it wait: which rank of its group
    has made fewer calls in this group?

    If a rank of the group is behind, and neither in a collective nor in recv, it is the
    cause. If there is none, compare, group by group, the ranks that wait in it: one
    call may have another name. Otherwise two groups wait for each other: of the ranks
    in both, one waits in another group than the rest.
    """
    hints = {"fits": _about_diagnosis, "right": _about_diagnosis}
    same_as(answer, solutions.my_diagnosis, _hang, cases=80, hints=hints)
    return "80 hangs of 4 to 8 ranks, with groups and ranks that only look odd"


CAUSES = "skipped", "order", "stuck", "left"
NAMES = "all_reduce", "broadcast", "barrier", "all_gather", "reduce_scatter"


def _hang(d: Draw) -> tuple[list[list[tuple[str, tuple[int, ...]]]], list[str]]:
    """Draw the calls and places of ranks after some good steps and one that hangs."""
    r, cause = d.own, CAUSES[d.case % 4]
    world = tuple(range(d.same.randint(4, 8)))
    part = tuple(sorted(r.sample(world, r.randint(3, len(world) - 1))))
    calls: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in world]

    def call(group: tuple[int, ...], name: str, but: int = -1) -> None:
        for rank in group:
            if rank != but:
                calls[rank].append((name, group))

    # The calls of this group count for no other, even if that is as large.
    third = tuple(sorted(r.sample(world, r.choice([2, len(part)]))))
    for _ in range(r.randint(0, 6)):
        call(r.choice([world, part, third]), r.choice(NAMES))
    where = ["collective" for _ in world]
    name, other = r.sample(NAMES, 2)
    place = r.choice(["collective", "recv", "code", "returned", "next"])
    gone = cause in ("stuck", "left") and place in ("code", "returned", "next")
    if gone:  # only a broadcast may end on one rank before others have called it
        name, other = "broadcast", r.choice([n for n in NAMES if n != "broadcast"])
    if cause == "order":
        wide, beyond = world, [rank for rank in world if rank not in part]
        if r.random() < 0.5:  # perhaps neither group contains the other
            members = r.sample(part, r.randint(3, len(part)))
            members += r.sample(beyond, r.randint(1, len(beyond)))
            wide = tuple(sorted(members))
        group, second = r.sample([part, wide], 2)
    else:
        group = second = r.choice([world, part])
    odd = r.choice([rank for rank in group if rank in second])
    call(group, name, but=odd)
    if cause == "order":
        late = r.choice([name, other])
        for rank in second:  # one name: two would be a second fault
            if rank == odd or rank not in group:
                calls[rank].append((late, second))
    if cause == "skipped":
        calls[odd].append((other, group))
    one, waits, *_ = r.sample([rank for rank in group if rank != odd], len(group) - 1)
    if cause in ("stuck", "left"):
        where[odd] = "code" if cause == "stuck" else "returned"
        where[one] = place if place != "next" else "collective"
        if place == "recv":  # a message that the odd rank has not sent
            calls[one].pop()
        if place == "next":  # it has gone on, and waits again
            calls[one].append((other, world))
    outside = [rank for rank in world if rank not in group and rank not in second]
    if outside and r.random() < 0.5:  # a rank waits for a rank that waits
        far = outside.pop()
        calls[far].append((other, tuple(sorted([far, waits]))))
    # The ranks outside the groups wait for all ranks, or have finished.
    finished = cause in ("stuck", "left") and place != "next"
    if finished and (gone or r.random() < 0.7):
        for rank in outside:
            where[rank] = r.choice(["returned", "code"])
    else:
        for rank in outside:
            calls[rank].append((other, world))
    return calls, where


def _about_diagnosis(case: Case) -> str:
    (cause, rank), got, where = case.wanted, case.got, case.args["where"]
    places = "; ".join(f"rank {r} {place}" for r, place in enumerate(where))
    found = f"for {places}: returned {shown(got)}; expected {shown(case.wanted)}"
    if not isinstance(got, (tuple, list)) or len(got) != 2:
        return f"{found}: a cause and a rank."
    if [*got] == [rank, cause]:
        return f"{found}: the cause, then the rank."
    if got[0] not in CAUSES:
        return f"{found}: a cause is one of {', '.join(CAUSES)}."
    if got[1] == rank and {got[0], cause} == {"skipped", "order"}:
        return f"{found}: in one group a call was skipped; in two, the order differs."
    if got[1] == rank:
        return f"{found}: look where this rank stands."
    if not isinstance(got[1], int) or got[1] not in range(len(where)):
        return f"{found}: ranks are 0 to {len(where) - 1}."
    if where[got[1]] == "recv":
        return f"{found}: a rank in recv waits for a message: it is a victim."
    if where[got[1]] in ("returned", "code"):
        return f"{found}: nobody waits for rank {got[1]}; look at the groups."
    if cause in ("stuck", "left"):
        return f"{found}: rank {got[1]} waits; for whom?"
    return f"{found}: which rank of the group, or of both groups, differs?"
