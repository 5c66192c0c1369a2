"""Solutions of the exercises of chapter 18."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_course.chapters.ch18_how_fast.capstone import LIMIT, choices, foreseen
from ddp_course.planning.accelerators import Cluster
from ddp_course.planning.step_time import Candidate


def my_flops(
    layers: int, hidden: int, vocab: int, sequence: int, recompute: bool
) -> int:
    """Count forward once, backward twice, and the layers once more if recomputed."""
    layer = 2 * 12 * hidden**2 + 4 * hidden * sequence
    head = 2 * hidden * vocab
    return (3 + recompute) * layers * layer + 3 * head


def my_exposed(events: Sequence[tuple[float, float, str]]) -> float:
    """Walk over all starts and ends, and count the running events of each kind."""
    edges = []
    for start, end, kind in events:
        edges += [(start, 1, kind), (end, -1, kind)]
    running = {"compute": 0, "communication": 0}
    exposed = before = 0.0
    for at, change, kind in sorted(edges):
        if running["communication"] and not running["compute"]:
            exposed += at - before
        running[kind] += change
        before = at
    return exposed


def my_straggler(starts: Sequence[Sequence[float]]) -> tuple[int, float]:
    """Add to each collective's last rank its delay after the second to last."""
    cost = [0.0] * len(starts[0])
    for times in starts:
        *_, second, last = sorted(times)
        cost[times.index(last)] += last - second
    worst = max(range(len(cost)), key=lambda rank: cost[rank])
    return worst, cost[worst]


def my_gaps(
    events: Sequence[tuple[float, float, str]], start: float, end: float
) -> list[tuple[float, float]]:
    """Walk over the events by their starts, and remember the latest end so far."""
    gaps, reached = [], start
    for begins, ends, _ in sorted(events):
        begins = min(begins, end)  # a gap after the step does not count
        if begins > reached:
            gaps.append((reached, begins))
        reached = max(reached, ends)
    if end > reached:
        gaps.append((reached, end))
    return gaps


def my_step_time(
    forward: float, backward: float, bucket: float, layers: int, pp: int, m: int
) -> float:
    """Add m microbatches, the bubble, and the buckets that backward does not hide."""
    stage = layers * (forward + backward)
    exposed = max(bucket, layers * bucket - (layers - 1) * backward)
    return (m + pp - 1) * stage + exposed


def my_layout(cluster: Cluster) -> tuple[Candidate, int, float, float]:
    """Predict all layouts; of those that fit, take the fastest."""
    every = [foreseen(layout, cluster) for layout in choices(cluster.gpus)]
    fits = [each for each in every if each.ledger.total <= 0.95 * LIMIT]
    best = min(fits, key=lambda each: each.seconds)
    sent = sum(best.sent.values())
    return best.candidate, best.ledger.total, sent, best.seconds
