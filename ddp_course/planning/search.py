"""Every layout of a cluster, the fastest first, and why the others do not fit.

    found = search(workload, cluster)
    found.best[0]            # a Prediction
    found.too_large          # those that need too much memory, least first

A layout is dp x pp x cp x tp, a ZeRO stage, recomputation, the rows of a microbatch and
the stages on a rank. All that are possible are predicted: some ten thousand for 512
GPUs, in about a second. Chapter 18.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ddp_course.planning.accelerators import Cluster
from ddp_course.planning.step_time import (
    ROOM,
    Candidate,
    Prediction,
    Software,
    predict,
)
from ddp_course.planning.workload import Workload
from ddp_course.spec import RECOMPUTE, ZERO
from ddp_course.theory.checks import check_choice, check_count

MICROBATCHES = (1, 2, 4, 8, 16)
STAGES = (1, 2, 4)


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        best: predictions that fit, the fastest first.
        too_large: predictions that need more memory than there is, least first.
        limit: bytes that tensors can fill on one accelerator.
    """

    best: list[Prediction]
    too_large: list[Prediction]
    limit: float


def search(
    workload: Workload,
    cluster: Cluster,
    software: Software = Software(),  # noqa: B008 - frozen
    recompute: str | None = None,
) -> Found:
    """Predict time and memory of all possible layouts; raise ValueError if none is.

    Layouts that take the same time are sorted by memory. `recompute` is the only kind
    of recomputation that is tried; None tries all.
    """
    if not isinstance(cluster, Cluster):
        kind = type(cluster).__name__
        raise ValueError(
            f"cluster is of type {kind}; it must be a Cluster, such as "
            'Cluster(ACCELERATORS["h100"], gpus=8)'
        )
    check_count("gpus", cluster.gpus)
    if recompute is not None:
        check_choice("recompute", recompute, RECOMPUTE)
    if recompute == "selective" and software.fused_attention:
        raise ValueError(
            "recompute is 'selective'; fused attention keeps no scores to recompute: "
            "use Software(fused_attention=False), or another kind"
        )
    limit = ROOM * cluster.gpu.memory
    predictions = [
        predict(workload, cluster, candidate, software)
        for candidate in candidates(workload, cluster, software, recompute)
    ]
    if not predictions:
        raise ValueError(
            f"no layout of {cluster.gpus} GPUs divides {workload.rows} rows, "
            f"{workload.layers} layers, {workload.heads} heads and sequences of "
            f"{workload.sequence} tokens; try a number of GPUs with small factors"
        )
    fits = [each for each in predictions if each.ledger.total <= limit]
    others = [each for each in predictions if each.ledger.total > limit]
    fits.sort(key=lambda each: (each.seconds, each.ledger.total))
    others.sort(key=lambda each: each.ledger.total)
    return Found(fits, others, limit)


def candidates(
    workload: Workload,
    cluster: Cluster,
    software: Software,
    recompute: str | None = None,
) -> Iterator[Candidate]:
    """Yield the possible layouts that use all GPUs."""
    kinds = RECOMPUTE if recompute is None else (recompute,)
    if software.fused_attention:  # it keeps no scores to recompute
        kinds = [kind for kind in kinds if kind != "selective"]
    sizes = divisors(cluster.gpus)
    inside = [size for size in sizes if size <= cluster.node]
    for pp, cp, tp in product(sizes, sizes, inside):
        dp, rest = divmod(cluster.gpus, pp * cp * tp)
        if rest or not dp:
            continue
        zeros = ZERO if dp * cp > 1 else (0,)
        stages = STAGES if pp > 1 else (1,)
        for more in product(zeros, kinds, MICROBATCHES, stages):
            candidate = Candidate(dp, pp, cp, tp, *more)
            if why_impossible(candidate, workload, cluster) is None:
                yield candidate


def why_impossible(
    candidate: Candidate, workload: Workload, cluster: Cluster
) -> str | None:
    """Return why a layout is impossible, or why nobody would use it, or None."""
    c, w = candidate, workload
    if c.ranks != cluster.gpus:
        return f"{c} takes {c.ranks} GPUs of {cluster.gpus}"
    if w.heads % c.tp or c.tp > cluster.node:
        return f"tp {c.tp} must divide {w.heads} heads, and stay in a node"
    if w.sequence % (2 * c.cp) and c.cp > 1:
        return f"cp {c.cp} must divide half of the {w.sequence} tokens of a row"
    if c.pp * c.stages > w.layers:
        return f"pp {c.pp} x {c.stages} stages are more than {w.layers} layers"
    if w.rows % (c.dp * c.microbatch):
        return f"dp {c.dp} x {c.microbatch} rows must divide {w.rows} rows"
    if c.stages > 1 and (w.rows // (c.dp * c.microbatch)) % c.pp:
        return f"interleaved stages need a multiple of pp {c.pp} microbatches"
    if c.zero == 3 and c.pp > 1:
        return "ZeRO-3 gathers every layer for every microbatch of a pipeline"
    return None


def divisors(number: int) -> list[int]:
    """Return the whole numbers that divide `number`."""
    low = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return sorted({*low, *(number // i for i in low)})
