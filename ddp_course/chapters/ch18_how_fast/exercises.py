"""The exercises of chapter 18: FLOPs, readings of traces, a step's time, a layout."""

from __future__ import annotations

from tempfile import TemporaryDirectory

from ddp_course.chapters.ch18_how_fast import capstone, solutions
from ddp_course.lab.answers import Answer, Hint
from ddp_course.lab.exercises import exercise, expect, shown
from ddp_course.lab.judge import Case, Draw, same_as
from ddp_course.planning.accelerators import Cluster
from ddp_course.planning.step_time import Candidate

# ---- my_flops ------------------------------------------------------------------------


@exercise("my_flops", solution=solutions.my_flops)
def check_my_flops(answer: Answer) -> str:
    """`my_flops(layers, hidden, vocab, sequence, recompute)`: FLOPs of one token.

    With how many weights of a layer is a token multiplied, and which products does
    attention add? How many products does backward compute for each of forward's?

    A layer's matrices have 12 h² numbers, 2 FLOPs each; attention's two products cost 4
    h T; the output matrix 2 h V. Backward costs twice as much as forward. Recomputation
    is one more forward of the layers, without the output matrix.
    """
    hints = {"fits": _about_flops, "right": _about_flops}
    same_as(answer, solutions.my_flops, _model, cases=40, hints=hints)
    return "40 models, of 1 to 126 layers"


def _model(d: Draw) -> tuple[int, int, int, int, bool]:
    r = d.same
    shape = r.randint(1, 126), r.randint(1, 9999), r.randint(50, 99_999)
    return *shape, r.choice([1, 63, 2048, 131_072]), d.case % 2 == 1


def _about_flops(case: Case) -> str:
    got, wanted, args = case.got, case.wanted, case.args
    asked = ", ".join(f"{name} {value}" for name, value in args.items())
    found = f"for {asked}: returned {shown(got)}; expected {wanted:,}"
    if not isinstance(got, (int, float)):
        return f"{found}."
    layers, hidden, vocab = args["layers"], args["hidden"], args["vocab"]
    head, attention = 2 * hidden * vocab, 4 * layers * hidden * args["sequence"]
    times = 3 + args["recompute"]
    once = layers * 24 * hidden**2 + attention + head
    named = {
        once: "that is forward alone",
        wanted / 2: "a multiplication and an addition are two FLOPs",
        wanted - times * attention: "attention multiplies activations, too",
        wanted - 3 * head: "the output matrix multiplies, too",
    }
    if args["recompute"]:
        named |= {
            3 * once: "that is without recomputation",
            4 * once: "the output matrix is not computed again",
        }
    return f"{found}: {named[got]}." if got in named else f"{found}."


# ---- my_exposed ----------------------------------------------------------------------


@exercise("my_exposed", solution=solutions.my_exposed)
def check_my_exposed(answer: Answer) -> str:
    """`my_exposed(events)`: seconds of communication in which nothing computes.

    Several events may run at once. Does a second count once or twice then?

    Between two neighbouring starts or ends nothing changes. Such a piece of time counts
    if some communication runs in it, and no computing.
    """
    hints = {"fits": _about_exposed, "right": _about_exposed}
    same_as(answer, solutions.my_exposed, _events, cases=60, hints=hints)
    return "60 traces of up to 1,500 events that overlap, touch, and contain each other"


EASY = (
    [(0.0, 4.0, "compute"), (3.0, 6.0, "communication")],
    [(-2.0, 0.0, "communication"), (-1.0, 2.0, "communication"), (3.0, 4.0, "compute")],
    [(1.0, 9.0, "communication"), (2.0, 3.0, "compute"), (5.0, 7.0, "compute")],
    [(0.0, 1.0, "compute"), (2.0, 3.0, "compute")],
)


# A clock may begin anywhere: far above 0, or below it.
CLOCKS = 0, 0, -500, 100_000


def _events(d: Draw) -> tuple[list[tuple[float, float, str]]]:
    if d.case < len(EASY):
        return ([*EASY[d.case]],)
    return (_spans(d, (4, 4096, 2**20)[d.case % 3]),)


def _spans(d: Draw, ticks: int) -> list[tuple[float, float, str]]:
    """Return events whose times are multiples of 1 / ticks."""
    found, zero = [], CLOCKS[d.case % 4]
    many = d.case == 50
    for _ in range(1500 if many else d.same.randint(0, 12)):
        start = d.own.randint(0, 40_000 if many else 40)
        end = start + d.own.randint(1, 20)
        kind = d.own.choice(["compute", "communication"])
        found.append((zero + start / ticks, zero + end / ticks, kind))
    return found


def _about_exposed(case: Case) -> str:
    events = case.args["events"]
    found = f"returned {shown(case.got)}; expected {case.wanted}"
    if not isinstance(case.got, (int, float)):
        return f"{found}."
    alone = [(a, b) for a, b, kind in events if kind == "communication"]
    sending = sum(b - a for a, b in alone)
    union = solutions.my_exposed([(a, b, "communication") for a, b in alone])
    named = {
        sending: "a second counts once, however many events run in it",
        union: "what computing hides does not count",
    }
    if union != case.wanted:
        named[sending] = named[union]
    if case.got == round(case.wanted, 3) != 0:
        return f"{found}: do not round."
    if case.got < 0:
        return f"{found}: a time cannot be below 0."
    if case.got in named:
        return f"{found}: {named[case.got]}."
    if case.got > case.wanted:
        return f"{found}: a second counts once, however many events run in it."
    if events and max(end - start for start, end, _ in events) < 1e-3:
        return f"{found}: microseconds count, too."
    return f"{found}: only computing hides communication, and only while it runs."


# ---- my_straggler --------------------------------------------------------------------


@exercise("my_straggler", solution=solutions.my_straggler)
def check_my_straggler(answer: Answer) -> str:
    """`my_straggler(starts)`: the rank that costs the others most, and the seconds.

    A collective ends when its last rank has joined. How much sooner would it end if
    this rank had joined together with the second to last?

    For each collective find the rank that starts last, and add up its delay after the
    second to last. The rank with the largest sum is the answer.
    """
    hints = {"fits": _about_straggler, "right": _about_straggler}
    same_as(answer, solutions.my_straggler, _starts, cases=60, hints=hints)
    return "60 steps of 2 to 300 ranks, with up to 1,500 collectives"


def _starts(d: Draw) -> tuple[list[list[float]]]:
    """Return starts for which one rank is the right answer, or (once) every rank."""
    if d.case == 58:  # nobody costs anything: every rank is right
        return ([[2.0, 2.0, 1.0], [5.0, 4.0, 5.0]],)
    while True:
        rows = _late_ranks(d)
        worst, _ = solutions.my_straggler(rows)
        mirrored, _ = solutions.my_straggler([row[::-1] for row in rows])
        if worst == len(rows[0]) - 1 - mirrored:  # else two ranks cost the same
            return (rows,)


def _late_ranks(d: Draw) -> list[list[float]]:
    if d.case == 1:  # a collective's last rank comes at 0
        return [[-2.0, 0.0, -1.0], [1.5, 4.0, 2.0]]
    if d.case == 59:  # three ranks come last together
        return [[0.5, 0.5, 0.5, -1.0], [3.0, 1.0, 2.0, 2.5]]
    ranks, collectives = d.same.randint(2, 8), d.same.randint(1, 6)
    if d.case == 50:
        ranks = 300
    if d.case == 51:
        collectives = 1500
    r = d.own
    late = ranks - 1 if d.case == 50 else r.randrange(ranks)
    zero = CLOCKS[d.case % 4]
    rows = []
    for k in range(collectives):
        row = [k * 40 + r.choice([0, 1]) + 2 * x for x in r.sample(range(ranks), ranks)]
        row[late] += r.choice([0, 5, 9]) + 2 * ranks * (d.case == 50)
        if d.case % 3 == 1:  # another rank comes very late, once
            row[(late + 1) % ranks] += 7 * (k == 0)
        while row.count(max(row)) > 1:
            row[row.index(max(row))] += 1
        if d.case % 3 == 2 and k == 0:  # two ranks come last together
            row[(late + 1) % ranks] = max(row)
        ticks = (8, 4096, 8, 2**20)[d.case % 4]  # the last ones are microseconds
        rows.append([zero + x / ticks for x in row])
    return rows


def _about_straggler(case: Case) -> str:
    starts, got, wanted = case.args["starts"], case.got, case.wanted
    found = f"returned {shown(got)}; expected {shown(wanted)}"
    if not isinstance(got, (tuple, list)) or len(got) != 2:
        return f"{found}: a rank and seconds."
    rank, seconds = wanted
    if seconds == 0:
        if got[0] in range(len(starts[0])) and got[1] == 0:
            return ""
        return f"{found}: if nobody costs anything, any rank will do, with 0 seconds."
    if [*got] == [seconds, rank]:
        return f"{found}: the rank, then the seconds."
    if [*got] == [rank + 1, seconds]:
        return f"{found}: ranks count from 0."
    if got[1] == round(seconds, 3) != seconds:
        return f"{found}: do not round; microseconds count, too."
    if got[1] < seconds < 1e-3:
        return f"{found}: microseconds count, too."
    if got[1] > seconds and any(row.count(max(row)) > 1 for row in starts):
        return f"{found}: ranks that come last together cost nothing."
    if got[0] == wanted[0]:
        return f"{found}: without this rank all would wait for the second to last."
    often = [row.index(max(row)) for row in starts]
    if often.count(got[0]) >= often.count(wanted[0]):
        return f"{found}: seconds count, not how often a rank is last."
    if got[0] in {row.index(min(row)) for row in starts}:
        return f"{found}: who starts first waits for the others."
    return f"{found}: add up, for each rank, what it costs the others."


# ---- my_gaps -------------------------------------------------------------------------


@exercise("my_gaps", solution=solutions.my_gaps)
def check_my_gaps(answer: Answer) -> str:
    """`my_gaps(events, start, end)`: when a rank neither computes nor sends.

    At which moments does a gap begin, and what ends it? What about the time before the
    first event, and after the last one?

    Go through the events in the order of their starts, and remember the latest end so
    far. If the next event starts later than that, there is a gap between them; the end
    of the step closes the last gap.
    """
    hints = {"fits": _about_gaps, "right": _about_gaps}
    same_as(answer, solutions.my_gaps, _a_step, cases=60, hints=hints)
    return (
        "60 steps of up to 1,500 events, with gaps at their ends, and with "
        "events that contain each other, or belong to other steps"
    )


STEPS = (  # no events; unsorted; the clock passes 0; events of other steps
    ([], 0.5, 2.0),
    ([(3.0, 4.0, "compute"), (0.0, 1.0, "compute")], 0.0, 4.0),
    ([(1.0, 2.0, "compute"), (6.0, 7.0, "compute")], 0.0, 4.0),
    ([(-3.0, -2.0, "compute")], -4.0, 0.0),
    ([(-1.0, 0.0, "communication")], -1.0, 2.0),
    (
        [
            (-2.0, -1.0, "compute"),
            (-0.5, 1.0, "communication"),
            (2.0, 3.0, "compute"),
            (3.5, 5.0, "communication"),
        ],
        0.0,
        4.0,
    ),
)


def _a_step(d: Draw) -> tuple[list[tuple[float, float, str]], float, float]:
    special = d.case - len(EASY)
    if 0 <= special < len(STEPS):
        events, start, end = STEPS[special]
        return [*events], start, end
    if d.case < len(EASY):
        (events,) = _events(d)
    else:  # times of seconds, microseconds and fractions of a millisecond
        events = _spans(d, (4, 2**20, 4096)[d.case % 3])
    ticks = 4096 if special > 0 and d.case % 2 else 4
    span = [t for a, b, _ in events for t in (a, b)] or [0.0]
    before, behind = (d.same.choice([0, 1, 5]) / ticks for _ in range(2))
    start, end = min(span) - before, max(span) + behind
    if d.case % 5 == 4:  # a step in the middle: some events belong to others
        part = (end - start) / 4
        start, end = start + part, end - part
    return events, start, end


def _about_gaps(case: Case) -> str:
    events, start, end = case.args.values()
    found = f"returned {shown(case.got)}; expected {shown(case.wanted)}"
    got, wanted = case.got, case.wanted
    if not isinstance(got, list) or not all(isinstance(g, tuple) for g in got):
        return f"{found}."
    if sorted(got) == wanted:
        return f"{found}: in order of time."
    if got == [(a, b - a) for a, b in wanted]:
        return f"{found}: where a gap begins and where it ends, not how long it is."
    if any(a >= b for a, b in got):
        return f"{found}: where events touch or overlap, there is no gap."
    if any(a < start or b > end for a, b in got):
        return f"{found}: a gap lies inside the step."
    missing = [gap for gap in wanted if gap not in got]
    if len(missing) + len(got) == len(wanted) and all(
        (a == start or b == end) and b - a > 1e-3 for a, b in missing
    ):
        return f"{found}: a step may begin and end with a gap."
    if missing and all(gap in wanted for gap in got):
        return f"{found}: gap {missing[0]} is missing."
    begun = [each for each in events if start <= each[0]]
    ended = [each for each in events if each[1] <= end]
    for counted in (begun, ended, [each for each in begun if each in ended]):
        if got == solutions.my_gaps(counted, start, end):
            return f"{found}: an event that reaches beyond the step counts in the step."
    for kind, why in WHY_BUSY.items():
        if got == solutions.my_gaps([e for e in events if e[2] == kind], start, end):
            return f"{found}: {why}, a rank is not idle."
    times = {start, end, *(t for a, b, _ in events for t in (a, b))}
    if not times.issuperset(t for gap in got for t in gap):
        return f"{found}: a gap begins and ends where an event or the step does."
    why = "events come in any order, and a long one may last beyond the next ones"
    return f"{found}: {why}."


WHY_BUSY = {
    "compute": "while messages are under way",
    "communication": "while something is computed",
}


# ---- my_step_time --------------------------------------------------------------------


@exercise("my_step_time", solution=solutions.my_step_time)
def check_my_step_time(answer: Answer) -> str:
    """`my_step_time(forward, backward, bucket, layers, pp, m)`: seconds of a step.

    For how many microbatches' time is a pipeline of p stages busy or waiting; and which
    bucket has no computing left to hide behind?

    1F1B takes m + p - 1 times as long as one microbatch in one stage. During the last
    backward the buckets form a queue: each is sent when its layer is done and the
    bucket before it has been sent. The last one is never hidden.
    """
    hints = {"fits": _about_step, "right": _about_step}
    same_as(answer, solutions.my_step_time, _step, cases=60, hints=hints)
    return "60 layouts, with buckets that are hidden and buckets that are not"


def _step(d: Draw) -> tuple[float, float, float, int, int, int]:
    r = d.same
    unit = 2**-15 if d.case % 4 == 3 else 1 / 8  # 30.5 microseconds
    forward = r.randint(1, 16) * unit
    backward = r.choice([0.5, 1, 2, 3]) * forward
    bucket = r.choice([0.0, 0.25, 0.5, 1.0, 1.5, 4.0]) * backward
    pp = 1 if d.case < 3 else r.choice([1, 2, 3, 4, 6, 8])
    large = 100 if d.case == 50 else 1
    layers, m = large * r.randint(1, 12), large * r.randint(1, 16)
    return forward, backward, bucket, layers, pp, m


def _about_step(case: Case) -> str:
    forward, backward, bucket, layers, pp, m = case.args.values()
    asked = ", ".join(f"{name} {value}" for name, value in case.args.items())
    found = f"for {asked}: returned {shown(case.got)}; expected {case.wanted}"
    if not isinstance(case.got, (int, float)):
        return f"{found}."
    stage = layers * (forward + backward)
    last = case.wanted - (m + pp - 1) * stage
    off = case.got - case.wanted
    named = (
        (-last, "the last bucket is sent when nothing is left to compute"),
        (layers * bucket - last, "backward hides buckets of later layers"),
        (-(pp - 1) * stage, "a pipeline has a bubble"),
        (stage, "the bubble is p - 1 microbatches long"),
        (
            max(0.0, layers * (bucket - backward)) - last,
            "the first bucket waits for its layer",
        ),
        (
            (m + pp - 2) * last,
            "gradients are averaged once, behind the last microbatch",
        ),
    )
    for wrong, why in named:
        if wrong and abs(off - wrong) < 1e-9:
            return f"{found}: {why}."
    return f"{found}."


# ---- my_layout -----------------------------------------------------------------------

EXACT, TIMING, SLOWER = 0.1, 0.25, 1.25  # tolerances: bytes; seconds; ratio to the best


@exercise("my_layout", solution=solutions.my_layout)
def check_my_layout(answer: Answer) -> str:
    """`my_layout(cluster)`: a layout that fits and is fast, and what its steps cost.

    Which ranks are on one node, which axis crosses the nodes, and what does each layout
    keep whole that others divide?

    Every layout in the list of choices can be predicted before any is run. Leave out
    those whose ledger comes too close to the limit, and take the one with the fewest
    seconds; its prediction has the other three numbers.
    """
    _choice(answer, capstone.cluster_of(8))  # refuses a stub before ranks start
    delay, found = capstone.measured_delay(), []
    with TemporaryDirectory() as folder:
        for ranks in (8, 4):  # the second node fails after the first run
            found.append(_judge_run(answer, capstone.cluster_of(ranks, delay), folder))
    (eight, before), (four, after) = found
    return (
        f"eight ranks, {eight}, {before.seconds:.1f} s a step; without the second node "
        f"{four}, {after.seconds:.1f} s, resumed after step {after.resumed_at} at loss "
        f"{after.losses[after.resumed_at]:.2f}"
    )


def _choice(answer: Answer, cluster: Cluster) -> tuple[Candidate, float, float, float]:
    """Return the answer's layout, memory, bytes sent and seconds; check their form."""
    got = answer(cluster)
    form = isinstance(got, (tuple, list)) and len(got) == 4
    numbers = form and all(isinstance(n, (int, float)) and n > 0 for n in got[1:])
    expect(
        numbers and isinstance(got[0], Candidate),
        f"For {cluster.gpus} ranks: returned {shown(got)}; expected a tuple of a "
        "Candidate and three numbers above 0: bytes kept, bytes sent, seconds.",
    )
    expect(
        got[0] in capstone.choices(cluster.gpus),
        f"For {cluster.gpus} ranks: {shown(got[0])} is not among "
        f"`choices({cluster.gpus})`.",
    )
    return tuple(got)


def _judge_run(
    answer: Answer, cluster: Cluster, folder: str
) -> tuple[Candidate, capstone.Measured]:
    """Run the answer's layout and the best one; judge the answer by both runs."""
    layout, memory, sent, seconds = _choice(answer, cluster)
    best = capstone.best_found(cluster)
    rows = f"{layout.microbatch} row{'s' * (layout.microbatch > 1)}"
    where = f"{cluster.gpus} ranks, {layout}, {rows} a microbatch"
    both = [layout] if layout == best.candidate else [layout, best.candidate]
    try:
        measured = capstone.run(both, cluster.gpus, folder)
    except capstone.OutOfMemory as error:
        raise Hint(f"{where}: {str(error).splitlines()[0]}") from None
    mine, reference = measured[0], measured[-1]
    for what, predicted, found in (
        ("kept by the rank that keeps most", memory, mine.memory),
        ("sent by the rank that sends most", sent, mine.sent),
    ):
        expect(
            abs(predicted / found - 1) <= EXACT,
            f"{where}: predicted {predicted / 1e6:.2f} MB {what}; measured "
            f"{found / 1e6:.2f}. They may differ by {EXACT:.0%}.",
        )
    expect(
        mine.seconds <= SLOWER * reference.seconds,
        f"{where}: it fits, and took {mine.seconds:.2f} s a step. The best layout "
        f"found took {reference.seconds:.2f} s: {mine.seconds / reference.seconds:.1f} "
        "times as fast.",
    )
    formula = capstone.foreseen(layout, cluster).seconds
    expect(  # on a busy machine all layouts may be equally slow
        formula <= SLOWER * best.seconds,
        f"{where}: it fits, but a step should take {formula:.2f} s on a quiet machine, "
        f"and one of the best layout found {best.seconds:.2f} s: "
        f"{formula / best.seconds:.1f} times as fast.",
    )
    # Other programs slow all layouts, or they have slowed `measured_delay` alone.
    busy = reference.seconds / best.seconds
    ratio = mine.seconds / seconds
    expect(
        any(abs(each - 1) <= TIMING for each in (ratio, ratio / busy)),
        f"{where}: predicted {seconds:.2f} s a step; measured {mine.seconds:.2f}. They "
        f"may differ by {TIMING:.0%} (the best layout found took {busy:.2f} times its "
        "prediction, which is counted in your favour).",
    )
    return layout, mine
