"""The exercises of chapter 03; those about rings are in `rings`."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist

from ddp_course import theory
from ddp_course.collectives import barrier
from ddp_course.lab.answers import Answer, on_ranks
from ddp_course.lab.exercises import exercise, expect, expect_call
from ddp_course.lab.rings import check_ring_reduce_scatter, check_ring_transfers
from ddp_course.lab.solutions import ch03 as solutions
from ddp_course.launch import Link, Topology, here
from ddp_course.measure import ByteMeter, EventLog

__all__ = [
    "check_hierarchical_sum",
    "check_ring_reduce_scatter",
    "check_ring_transfers",
    "check_tree_or_ring",
]

# ---- tree_or_ring ------------------------------------------------------------------


@exercise("tree_or_ring", solution=solutions.tree_or_ring)
def check_tree_or_ring(answer: Answer) -> str:
    """`tree_or_ring(world_size, nbytes, alpha, beta)`: "tree" or "ring"."""
    cases, links = 0, [(20e-6, 1e-9), (2e-6, 1e-10), (0.0, 1e-9)]
    for n in (4, 6, 2, 3, 8, 5, 7, 12, 64, 1000, 1):
        for alpha, beta in links:
            for nbytes in (0, *(int(1024 * 1.5**k) for k in range(34))):
                link = Link(alpha, 1 / beta)
                tree = theory.all_reduce_tree(n, nbytes).over(link)
                ring = theory.all_reduce_ring(n, nbytes).over(link)
                clear = abs(tree - ring) > 0.01 * max(tree, ring)
                if not clear and (nbytes or n == 1):
                    continue  # too close to call, for floats
                cases += 1
                expect_call(
                    answer,
                    n,
                    nbytes,
                    alpha,
                    beta,
                    returns="tree" if tree < ring else "ring",
                    because=f"the tree takes {tree:.3g} s and the ring {ring:.3g} s",
                )
    return f"{cases} cases, from 2 to 1000 ranks and from 0 bytes to some 600 MiB"


# ---- hierarchical_sum --------------------------------------------------------------

NUMEL = 240_000  # divisible by all that is needed, and large enough for rings


@exercise("hierarchical_sum", solution=solutions.hierarchical_sum)
def check_hierarchical_sum(answer: Answer) -> str:
    """`hierarchical_sum(tensor, node, peers)`: the sum over all ranks, in place."""
    hint = (
        "Reduce-scatter inside the node, all-reduce the shard among the peers, "
        "all-gather inside the node."
    )
    for cluster in (Topology(2, 2), Topology(2, 3), Topology(3, 2)):
        shape = {"nnodes": cluster.nnodes, "nproc_per_node": cluster.nproc_per_node}
        real = on_ranks(_sum_over_nodes, answer, **shape, hint=hint)
        _judge_hierarchy(cluster, real, hint)
    return (
        "on real 2 x 2, 2 x 3 and 3 x 2 clusters the sums are right, and each rank "
        "sends 2 (G - 1) / G S / g to other nodes, G nodes of g ranks"
    )


def _sum_over_nodes(function: Callable) -> dict[str, Any]:
    """On every rank: call the reader's function, count bytes by link."""
    me, shape = here(), here().topology
    g, ranks = shape.nproc_per_node, range(shape.world_size)
    nodes = [dist.new_group([*ranks[first : first + g]]) for first in ranks[::g]]
    peers = [dist.new_group([*ranks[local::g]]) for local in range(g)]
    pattern = torch.arange(NUMEL) % 7 + 1
    x = pattern * 10**me.rank
    barrier()
    with ByteMeter() as meter, EventLog() as log:
        function(x, nodes[me.node_rank], peers[me.local_rank])
    total = pattern * sum(10**rank for rank in ranks)
    wrong = torch.ne(x, total)
    first = int(wrong.int().argmax())
    report = meter.report()
    return {
        "right": torch.equal(x, total),
        "first": f"{x[first]} in place {first}; expected {total[first]}",
        "parts": 1 - wrong.float().mean().item(),
        "inside": report.inside / x.nbytes,
        "between": report.between / x.nbytes,
        "calls": [event.op for event in log.events],
    }


def _judge_hierarchy(cluster: Topology, real: list[dict], hint: str) -> None:
    nnodes, g = cluster.nnodes, cluster.nproc_per_node
    where = f"On a real {nnodes} x {g} cluster"
    for rank, told in enumerate(real):
        part = f"only {100 * told['parts']:.0f} % of rank {rank}'s numbers are the sum"
        expect(
            told["right"],
            f"{where} that brought 1, 10, 100, ..., {part}: the first that "
            f"is not, is {told['first']}. Is `tensor` itself changed? {hint}",
        )
    wanted = theory.hierarchical_bytes_sent(nnodes, g)
    for rank, (told, least) in enumerate(zip(real, wanted, strict=True)):
        expect(
            told["inside"] + told["between"] > 0,
            f"{where} the byte meter of rank {rank} counted nothing; use the "
            "collectives of `ddp_course.collectives`, which it can see.",
        )
        for way, place in (("between", "to other nodes"), ("inside", "on its node")):
            right = getattr(least, way)
            expect(
                Fraction(told[way]).limit_denominator(1000) == right,
                f"{where} rank {rank} sent {told[way]:.3g} S {place}; expected "
                f"{float(right):.3g} S. {hint}",
            )
        expect(
            not any(call.startswith("hierarchical") for call in told["calls"]),
            f"{where} your function called the package's own hierarchy; build it from "
            "three collectives, in `node` and in `peers`.",
        )
