"""The exercises of chapter 03; those about rings are in `rings`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course import theory
from ddp_course.chapters.ch03_all_reduce import solutions
from ddp_course.collectives import barrier
from ddp_course.collectives.common import all_reduce_by
from ddp_course.collectives.plan import Plan, Transfer, make_plan, mistakes
from ddp_course.lab.answers import (
    Answer,
    code,
    on_ranks,
    one_line,
)
from ddp_course.lab.exercises import exercise, expect, expect_call
from ddp_course.lab.messages import copied, only_messages, watched
from ddp_course.launch import Link, Topology, here
from ddp_course.measure import ByteMeter, EventLog, SystemBytes

# ---- ring_transfers ----------------------------------------------------------------


@exercise("ring_transfers", solution=solutions.ring_transfers)
def check_ring_transfers(answer: Answer) -> str:
    """`ring_transfers(world_size)`: the transfers of a ring all-reduce, as a list."""
    for n in (2, 3, 4, 5, 8, 1):
        plan = _as_plan(answer, n)
        where = f"With {n} ranks,"
        wrong = mistakes(plan)
        expect(
            not wrong,
            f"{where} {(wrong or [''])[0]} (each rank once). Which steps add, and "
            "which keep? Print `simulate` of your plan, step by step.",
        )
        for t in plan:
            expect(
                t.dst == (t.src + 1) % n,
                f"{where} rank {t.src} sends to rank {t.dst} in step {t.step}; in this "
                f"ring it sends to rank {(t.src + 1) % n} only.",
            )
        for rank, chunks in enumerate(plan.chunks_sent()):
            expect(
                chunks == 2 * (n - 1),
                f"{where} rank {rank} sends {chunks} chunks in all, of S/{n} each; the "
                f"least is {2 * (n - 1)}.",
            )
        expect(
            plan.steps == 2 * (n - 1),
            f"{where} your ring has {plan.steps} steps; if all ranks send at the same "
            f"time, one chunk each, {2 * (n - 1)} are enough.",
        )
    for n in (3, 4):
        _judge_real_ring(on_ranks(_run_plan, _as_plan(answer, n), world_size=n))
    return (
        "1 to 8 ranks end with the numbers of every rank, once; each sends 2 (N - 1) "
        "chunks to its right; and so did 3 and 4 real ranks"
    )


def _as_plan(answer: Answer, n: int) -> Plan:
    """Make a plan of what the reader returned, if it is a list of transfers."""
    got = answer(n)
    call = answer.call(n)
    expect(
        isinstance(got, list) and all(isinstance(t, Transfer) for t in got),
        f"{call} returned {code(one_line(got))}; expected a list of `Transfer`s.",
    )
    for t in got:
        whole = all(isinstance(value, int) for value in (t.step, t.src, t.dst))
        fits = whole and 0 <= t.src < n and 0 <= t.dst < n and t.step >= 0
        expect(
            fits and 0 <= t.first < t.last <= n,
            f"In {call}, {code(repr(t))} does not fit: ranks and chunks are 0 to "
            f"{n - 1}.",
        )
    return make_plan("ring_transfers", n, n, got)


def _run_plan(plan: Plan) -> tuple[list[int], float]:
    """On every rank: carry the plan out; return the numbers, and S sent."""
    n = plan.world_size
    x = torch.full((1000 * n,), 10 ** dist.get_rank())
    with ByteMeter() as meter:
        all_reduce_by("ring_transfers", lambda world_size: plan, x)
    return x[::1000].tolist(), meter.total_sent / x.nbytes


def _judge_real_ring(real: list[tuple[list[int], float]]) -> None:
    n = len(real)
    right = sum(10**rank for rank in range(n))
    for rank, (numbers, sent) in enumerate(real):
        expect(
            set(numbers) == {right},
            f"On {n} real ranks that brought 1, 10, 100, ..., rank {rank} ends with "
            f"{numbers}; expected {right} in every chunk.",
        )
        least = theory.least_bytes("all_reduce", n, 1)
        expect(
            abs(sent - least) < 1e-9,
            f"On {n} real ranks, rank {rank} sent {sent:g} S instead of {least:g} S.",
        )


# ---- ring_reduce_scatter -----------------------------------------------------------


@exercise("ring_reduce_scatter", solution=solutions.ring_reduce_scatter)
def check_ring_reduce_scatter(answer: Answer) -> str:
    """`ring_reduce_scatter(chunks)`: the sum over all ranks of `chunks[rank]`."""
    hint = (
        "In step k rank r sends chunk r - 1 - k to the right, and adds its own numbers "
        "to what arrives from the left. Start to send (`isend`), then receive."
    )
    for sizes in ([3, 5], [4, 4, 4], [3, 1, 5, 2], [2, 7, 1, 8, 3], [200_000] * 3):
        n = len(sizes)
        real = on_ranks(_scatter, answer, sizes, world_size=n, hint=hint)
        where = f"With {n} ranks and chunks of {', '.join(map(str, sizes))} numbers,"
        for rank, told in enumerate(real):
            _judge_messages(where, rank, sizes, told)
        for rank, told in enumerate(real):
            _judge_sum(where, rank, sizes, told, hint)
    return (
        "2 to 5 ranks, chunks of equal and of different lengths: right sums, untouched "
        "inputs, and every message a chunk to the right neighbour, N - 1 of them"
    )


def _scatter(function: Callable, sizes: list[int]) -> dict[str, Any]:
    """On every rank: call the reader's function and watch what it sends."""
    rank = dist.get_rank()
    chunks = [
        torch.full((size,), (c + 1) * 10**rank, dtype=torch.int64)
        for c, size in enumerate(sizes)
    ]
    before = [chunk.clone() for chunk in chunks]
    barrier()
    with watched() as told, _system() as system:
        got = function(chunks)
        told["got"] = copied(got)
    told["untouched"] = all(map(torch.equal, chunks, before))
    told["written"] = getattr(system, "written", 0)
    return told


def _system() -> Any:
    """Count what the system writes; where it does not tell, count nothing."""
    try:
        with SystemBytes():
            return SystemBytes()
    except RuntimeError:
        return ExitStack()


def _judge_messages(where: str, rank: int, sizes: list[int], told: dict) -> None:
    """Look at what one rank has sent: chunks, to its right, and nothing besides."""
    n, messages = len(sizes), told["sent"]
    only_messages(where, told)
    right = (rank + 1) % n
    for dst, _ in messages:
        expect(
            dst == right,
            f"{where} rank {rank} sent a message to rank {dst}; in this ring it sends "
            f"to its right neighbour only, rank {right}.",
        )
    lengths = [length for _, length in messages]
    wanted = [sizes[(rank - 1 - k) % n] for k in range(n - 1)]
    expect(
        sum(lengths) == sum(wanted),
        f"{where} rank {rank} sent {sum(lengths)} numbers; expected {sum(wanted)}: "
        f"every chunk but its own, once.",
    )
    expect(
        lengths == wanted,
        f"{where} rank {rank} sent messages of {lengths} numbers; expected {wanted}: "
        f"chunks {', '.join(str((rank - 1 - k) % n) for k in range(n - 1))}, in this "
        "order.",
    )
    seen = 8 * sum(lengths)
    expect(
        told["written"] <= 1.02 * seen + 4000 * n,
        f"{where} rank {rank} sent {seen} bytes with `dist.isend`, but the operating "
        f"system counted {told['written']}: there were other messages.",
    )


def _judge_sum(where: str, rank: int, sizes: list[int], told: dict, hint: str) -> None:
    got, ones = told["got"], sum(10**r for r in range(len(sizes)))
    value = (rank + 1) * ones
    expect(
        isinstance(got, Tensor),
        f"{where} rank {rank} returned {code(one_line(got))}; expected a tensor.",
    )
    expect(
        got.shape == (sizes[rank],),
        f"{where} rank {rank} returned a tensor of shape {tuple(got.shape)}; chunk "
        f"{rank} has {sizes[rank]} numbers.",
    )
    expect(
        bool((got == value).all()),
        f"{where} rank {rank} returned {got.flatten()[0].item():g}s; expected {value}s,"
        f" as rank r brought {rank + 1} x 10^r in chunk {rank}. {hint}",
    )
    expect(
        told["untouched"],
        f"{where} `chunks` of rank {rank} were changed; add up in tensors of your own.",
    )


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
