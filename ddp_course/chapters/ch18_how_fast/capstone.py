"""The capstone: a GPT, a cluster in which no single rank has room for it, and runs.

`run` trains with `ddp_course.train.train` on real ranks (`bench.emulated`), and returns
what was measured. `choices` are the layouts that `train` can run there. Chapter 18.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from pathlib import Path

from ddp_course.bench.emulated import EmulatedRank, OutOfMemory
from ddp_course.bench.predict import latency
from ddp_course.gpt_config import GPTConfig
from ddp_course.launch import Link, Links, RankError, spawn
from ddp_course.planning.accelerators import Accelerator, Cluster
from ddp_course.planning.search import divisors, why_impossible
from ddp_course.planning.step_time import (
    ROOM,
    SUSTAINED,
    Candidate,
    Prediction,
    Software,
    layer_seconds,
    predict,
)
from ddp_course.planning.workload import Workload
from ddp_course.train import train

CONFIG = GPTConfig(block_size=32, n_layer=8, n_head=8, d_model=64)
GPT = Workload.of_gpt(CONFIG, rows=16)
LIMIT = 3_500_000  # bytes that a rank may keep
INSIDE, BETWEEN = 20e6, 2e6  # bytes/s of a link inside a node, and between nodes
LINKS = Links(Link(0.0, INSIDE), Link(0.0, BETWEEN))
# 300 MFLOP/s, and never waits for its memory
CHIP = Accelerator(
    300e6, LIMIT / ROOM, 1e15, INSIDE, None, matmul=1 / SUSTAINED, node=4
)
SOFTWARE = Software(
    sequence_parallel=False, precision="fp32", data_outermost=True, frees=True,
    bucket=1e6, gathers_ahead=False,
)  # fmt: skip
# Each run has a first step, one in which memory is logged, and two that are timed.
LOGGED, STEPS = 1, 4


def cluster_of(ranks: int, delay: float = 1e-3) -> Cluster:
    """Return nodes of four ranks; `delay`: seconds of a message beyond its link."""
    return Cluster(
        CHIP, ranks, node=4, network=BETWEEN, latency=delay, reached=1, rails=False
    )


@cache
def measured_delay() -> float:
    """Return the seconds that a message takes here beyond its link, measured once."""
    run = partial(spawn, nnodes=2, nproc_per_node=4, links=LINKS, output="none")
    return statistics.median(run(latency))


def choices(ranks: int) -> Iterator[Candidate]:
    """Yield the layouts for `ranks` ranks that `train` can run.

    Without a pipeline a rank computes all its rows at once. ZeRO-2 is left out: its one
    bucket would be as large as the gradients.
    """
    cluster = cluster_of(ranks)
    for pp in divisors(ranks):
        for tp in divisors(min(4, ranks // pp)):
            dp = ranks // (pp * tp)
            mine = GPT.rows // dp
            for zero in (0, 1, 3) if dp > 1 else (0,):
                for rows in divisors(mine) if pp > 1 else [mine]:
                    layout = Candidate(dp, pp, 1, tp, zero, microbatch=rows)
                    if why_impossible(layout, GPT, cluster) is None:
                        yield layout


def foreseen(layout: Candidate, cluster: Cluster) -> Prediction:
    """Return the prediction for the capstone's GPT in a layout."""
    return predict(GPT, cluster, layout, SOFTWARE)


def best_found(cluster: Cluster) -> Prediction:
    """Return the fastest predicted layout that keeps at most 95 % of the limit."""
    every = (foreseen(layout, cluster) for layout in choices(cluster.gpus))
    fits = [each for each in every if each.ledger.total <= 0.95 * LIMIT]
    return min(fits, key=lambda each: each.seconds)


@dataclass(frozen=True)
class Measured:
    """Measurements of one layout's run.

    Attributes:
        memory: bytes on the rank that kept most, at its peak.
        sent: bytes that the rank sent in a step that sent most.
        seconds: the seconds of the fastest timed step.
        losses: the losses of all steps, including those of an earlier run.
        resumed_at: the steps of the earlier run.
    """

    memory: int
    sent: int
    seconds: float
    losses: list[float]
    resumed_at: int


def run(
    layouts: Sequence[Candidate],
    ranks: int = 8,
    checkpoint: str | Path | None = None,
    steps: int = STEPS,
) -> list[Measured]:
    """Train in each layout on the same ranks; return what was measured.

    The first layout's run resumes from the folder `checkpoint`, if it is not empty, and
    saves into it; each run adds `steps` steps. Raises OutOfMemory if a rank keeps more
    than LIMIT bytes. The other layouts are for comparison: their memory has no limit,
    since what earlier layouts leave behind in a process would count.
    """
    folders = [checkpoint, *[None] * (len(layouts) - 1)]
    how = {"nnodes": ranks // 4, "nproc_per_node": 4, "links": LINKS, "output": "none"}
    try:
        results = spawn(_train_each, layouts, folders, steps, **how, timeout=300)
    except RankError as error:
        if OutOfMemory.__name__ not in str(error):
            raise
        where = str(error).partition(f"{OutOfMemory.__name__}: ")[2]
        raise OutOfMemory(f"rank {error.rank}: {where}") from None
    return [_summary([each[k] for each in results]) for k in range(len(layouts))]


def _train_each(
    layouts: Sequence[Candidate], folders: Sequence[Path | None], steps: int
) -> list[tuple]:
    """Train in each layout on this rank; return (steps, losses, resumed_at) of each."""
    found = []
    for layout, folder in zip(layouts, folders, strict=True):
        gc.collect()  # frees the previous layout's model
        limit = inf if found else LIMIT
        found.append(_train(layout, folder, steps, limit))
    return found


def _train(layout: Candidate, folder: Path | None, steps: int, limit: float) -> tuple:
    watching: list[EmulatedRank] = []

    def watched(model, optimizer) -> EmulatedRank:  # noqa: ANN001
        rank = EmulatedRank(model, optimizer, limit, partial(_seconds, layout), LOGGED)
        watching.append(rank)
        return rank

    options = options_of(layout)
    how = {"batch_size": GPT.rows, "preset": CONFIG, "checkpoint": folder}
    before = 0
    if folder is not None and any(Path(folder).iterdir()):
        before = STEPS
    history = train(before + steps, watched=watched, **how, **options)
    return watching[0].steps, history.losses, history.resumed_at


def options_of(layout: Candidate) -> dict[str, int]:
    """Return the arguments with which `train` uses this layout."""
    parts = GPT.rows // (layout.dp * layout.microbatch)
    options = {axis: getattr(layout, axis) for axis in ("dp", "pp", "tp", "zero")}
    return options | ({"microbatches": parts} if layout.pp > 1 else {})


def _seconds(layout: Candidate, rows: int) -> tuple[float, float]:
    """Return the emulated chip's seconds for a layer's forward and backward."""
    part = Candidate(tp=layout.tp, microbatch=rows)
    forward, backward, _ = layer_seconds(GPT, cluster_of(8), part, SOFTWARE)
    return forward, backward


def _summary(ranks: Sequence[tuple]) -> Measured:
    steps = [each[0] for each in ranks]
    timed = [
        max(rank[k].end for rank in steps) - min(rank[k].start for rank in steps)
        for k in range(LOGGED + 1, len(steps[0]))
    ]
    memory = max(rank[LOGGED].peak.total for rank in steps)
    sent = max(rank[LOGGED].sent for rank in steps)
    _, losses, resumed_at = ranks[0]
    return Measured(memory, sent, min(timed, default=0.0), losses, resumed_at)
