"""The exercises of chapter 03: a plan of a ring, a reduce-scatter, a hierarchy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course import theory
from ddp_course.chapters.ch03_all_reduce import solutions
from ddp_course.collectives import barrier
from ddp_course.collectives.call import all_reduce_by
from ddp_course.collectives.plan import Plan, Transfer, make_plan, mistakes
from ddp_course.lab.answers import Answer, on_ranks
from ddp_course.lab.exercises import exercise, expect, judge, shown
from ddp_course.lab.judge import Draw, same_on_ranks
from ddp_course.launch import Topology, here
from ddp_course.measure import ByteMeter, EventLog, TorchCollectives

# ---- ring_transfers ----------------------------------------------------------------


@exercise("ring_transfers", solution=solutions.ring_transfers)
def check_ring_transfers(answer: Answer) -> str:
    """`ring_transfers(world_size)`: the transfers of a ring all-reduce, as a list.

    Try it with three ranks. How many times must a chunk be sent until all ranks have
    added to it?

    A chunk needs N - 1 steps to collect all numbers, and N - 1 more to reach all ranks:
    the first half of 2 (N - 1) steps adds. In every step a rank passes on the chunk
    that it got in the step before, so the chunk's number goes down by one, modulo N.
    """
    for place, n in enumerate((2, 3, 4, 5, 8, 11, 6, 40, 1, 2)):
        plan = _as_plan(answer, n)
        where, wrong = f"With {n} rank{'s' * (n > 1)},", mistakes(plan)
        expect(
            not wrong,
            f"{where} {(wrong or [''])[0]} (each rank once). Which steps add, and "
            f"which copy? `print(make_plan('mine', {n}, {n}, ring_transfers({n})))` "
            "lists them.",
        )
        for t in plan:
            right = (t.src + 1) % n
            says = f"in step {t.step}; in this ring it sends to rank {right} only."
            says = f"{where} rank {t.src} sends to rank {t.dst} {says}"
            expect(t.dst == right, says)
        for rank, chunks in enumerate(plan.chunks_sent()):
            says = f"{chunks} chunks in all, of S/{n} each; the least is {2 * (n - 1)}."
            expect(chunks == 2 * (n - 1), f"{where} rank {rank} sends {says}")
        at_once: Counter[tuple[int, int]] = Counter()  # chunks by step and rank
        for t in plan:
            at_once[t.step, t.src] += t.last - t.first
        for (step, rank), chunks in at_once.items():
            says = f"sends {chunks} chunks in step {step}, and none in another step."
            also = "If each sends one chunk in every step, no rank waits for another."
            # Not the first time, for two ranks: with three, the hints above say more.
            expect(chunks == 1 or place == 0, f"{where} rank {rank} {says} {also}")
        expect(
            plan.steps == 2 * (n - 1),
            f"{where} your ring has {plan.steps} steps; if all ranks send at the same "
            f"time, one chunk each, {2 * (n - 1)} are enough.",
        )
    for rank, facts in enumerate(on_ranks(_run, _as_plan(answer, 4), world_size=4)):
        judge(f"On 4 real ranks, rank {rank}", facts, RAN)
    return (
        "1 to 6, 8, 11 and 40 ranks end with the numbers of every rank, once; each "
        "sends 2 (N - 1) chunks to its right; 4 real ranks did the same"
    )


def _as_plan(answer: Answer, n: int) -> Plan:
    """Return the plan of the answer's transfers; raise a Hint if they do not fit."""
    got, call = answer(n), answer.call(n)
    listed = isinstance(got, list) and all(isinstance(t, Transfer) for t in got)
    expect(listed, f"{call} returned {shown(got)}; expected a list of `Transfer`s.")
    for t in got:
        whole = all(isinstance(value, int) for value in (t.step, t.src, t.dst))
        fits = whole and 0 <= t.src < n and 0 <= t.dst < n and t.step >= 0
        says = f"In {call}, {shown(t)} does not fit: ranks and chunks are 0 to {n - 1}."
        expect(fits and 0 <= t.first < t.last <= n, says)
    return make_plan("ring_transfers", n, n, got)


RAN = {
    "right": "ends with {numbers}; expected {total} in every chunk, as the ranks "
    "brought 1, 10, 100, and so on.",
    "least": "sent {sent} S instead of {wanted} S.",
}


def _run(plan: Plan) -> dict[str, Any]:
    n = plan.world_size
    total = sum(10**rank for rank in range(n))
    x = torch.full((1000 * n,), 10 ** dist.get_rank())
    with ByteMeter() as meter:
        all_reduce_by("ring_transfers", lambda world_size: plan, x)
    sent, wanted = meter.total_sent / x.nbytes, theory.least_bytes("all_reduce", n, 1)
    facts = {"numbers": x[::1000].tolist(), "total": total}
    facts["right"] = bool((x == total).all())
    return facts | {"sent": sent, "wanted": wanted, "least": abs(sent - wanted) < 1e-9}


# ---- ring_reduce_scatter -----------------------------------------------------------

RING = {
    "messages": "sent {sent}, as (rank, numbers); expected {wanted_sent}: every chunk "
    "but the rank's own, once, to the right neighbour only, in this order.",
    "bytes": "wrote {written:,} bytes by the operating system's count; the solution's "
    "messages have {needed:,}: there were other messages, or numbers of another type.",
    "right": "has {got}; expected {wanted}{place}: the sum of the chunks {rank} of all "
    "ranks. {hint}",
    "kept": "has changed `chunks`; add up in tensors of your own.",
}


@exercise("ring_reduce_scatter", solution=solutions.ring_reduce_scatter)
def check_ring_reduce_scatter(answer: Answer) -> str:
    """`ring_reduce_scatter(chunks)`: the sum over all ranks of `chunks[rank]`.

    Rank r ends with chunk r. Where was this chunk one step earlier, and on which rank
    did it begin?

    Begin with your chunk rank - 1 as the sum. Then N - 1 times: start to send the sum
    to the right, receive the next lower chunk from the left, and add your own numbers
    of that chunk: this is the next sum, in a new tensor.
    """
    hint = (
        "In step k rank r sends chunk r - 1 - k to the right, and adds its own numbers "
        "to what arrives from the left. Start to send (`isend`), then receive."
    )
    same_on_ranks(
        *(answer, solutions.ring_reduce_scatter, _chunks),
        worlds=(2, 5, 1),
        cases=6,
        watch=["messages", "bytes"],
        hints=RING,
        hint=hint,
    )
    return (
        "1, 2 and 5 ranks, chunks of equal and different lengths, empty ones, four "
        "dtypes: right sums, unchanged inputs, and N - 1 messages, each a chunk to the "
        "right neighbour"
    )


def _chunks(d: Draw) -> tuple[list[Tensor]]:
    """Return chunks of one dtype, in two cases long ones.

    In case 1 they are too long for socket buffers.
    """
    shapes = [(3,), (5,), (2, 3), (7,), (0,), (3, 1)][d.case == 0 :]
    dtype = d.same.choice([torch.int64, torch.float32, torch.float64])
    if d.case == 5:
        few = [d.tensor((4,), torch.bfloat16) % 8 for _ in range(d.n)]
        chunks = [four.repeat(5000) for four in few]  # one sees a wider type's bytes
        chunks[0][1] = torch.inf if d.rank else torch.nan
        return (chunks,)
    if d.case == 1:
        return ([d.tensor((200,), dtype).repeat(1000) for _ in range(d.n)],)
    return ([d.tensor(d.same.choice(shapes), dtype) for _ in range(d.n)],)


# ---- hierarchical_sum --------------------------------------------------------------

# {(nodes, ranks per node): (shape, dtype)}. The number of elements is a multiple of the
# ranks on a node, and large enough for rings; the number of rows is not, if a node has
# several ranks. In the 2 x 2 cluster half the number of elements is odd. With three
# nodes rank 1 has zeros.
CLUSTERS = {
    (2, 2): ((61, 1002), torch.int64),
    (3, 2): ((121, 1002), torch.float32),
    (1, 2): ((51, 1000), torch.int64),
    (2, 1): ((51, 1000), torch.float64),
}
HIERARCHY = {
    "right": "has only {parts:g} % of the sums: the first wrong number is "
    "{first}.{why} {hint}",
    "counted": "called collectives that the byte meter does not see; use those of "
    "`ddp_course.collectives`.",
    "between_right": "sent {between:.6g} S to other nodes; expected {between_least:g} "
    "S. {hint}",
    "inside_right": "sent {inside:.3g} S on its node; {inside_least:.3g} S are "
    "enough. {hint}",
    "own_work": "called the package's own hierarchy, which `all_reduce` of all ranks "
    "uses; build it from three collectives, in `node` and in `peers`.",
    "again": "has wrong sums in a second call, with as many numbers of another type.",
    "same_tensor": "has wrong sums in a third call, with other numbers in the tensor "
    "of the second one.",
    "narrow_right": "sent {narrow:.6g} S of a tensor of bfloat16 to other nodes; "
    "expected {between_least:g} S. Keep the tensor's type.",
    "small_sums": "has wrong sums of a tensor of {numbers} numbers.",
    "small_right": "sent {small} bytes to other nodes for a tensor of {numbers} "
    "numbers; expected {small_least}: spare the slow links for small tensors, too.",
}


@exercise("hierarchical_sum", solution=solutions.hierarchical_sum)
def check_hierarchical_sum(answer: Answer) -> str:
    """`hierarchical_sum(tensor, node, peers)`: the sum over all ranks, in place.

    How many bytes must leave a node once its ranks have added up their tensors? Can
    each of these ranks send a part of them?

    A reduce-scatter on the node gives each rank the node's sum of one shard. An
    all-reduce among the peers makes it the sum over all nodes. An all-gather on the
    node joins the shards in `tensor`.
    """
    hint = (
        "Reduce-scatter inside the node, all-reduce the shard among the peers, "
        "all-gather inside the node."
    )
    for nnodes, size in CLUSTERS:
        shape = {"nnodes": nnodes, "nproc_per_node": size}
        real = on_ranks(_sum_over_nodes, answer, **shape, hint=hint)
        for rank, facts in enumerate(real):
            where = f"On a real {nnodes} x {size} cluster rank {rank}"
            judge(where, facts | {"hint": hint}, HIERARCHY)
    return (
        "on real clusters from 1 x 2 to 3 x 2 the sums are right, and each rank "
        "sends 2 (G - 1) / G S / g to other nodes, with G nodes of g ranks"
    )


def _sum_over_nodes(function: Callable) -> dict[str, Any]:
    """Call the reader's function on this rank; return facts about sums and bytes."""
    me, shape = here(), here().topology
    g, ranks = shape.nproc_per_node, range(shape.world_size)
    nodes = [dist.new_group([*ranks[first : first + g]]) for first in ranks[::g]]
    peers = [dist.new_group([*ranks[local::g]]) for local in range(g)]
    everyones = [_numbers(rank, shape) for rank in ranks]
    first_rank = me.rank - me.local_rank
    x = everyones[me.rank].clone()
    view = x.view(-1)
    barrier()
    with ByteMeter() as meter, EventLog() as log, TorchCollectives() as torch_log:
        function(x, nodes[me.node_rank], peers[me.local_rank])
    total = sum(everyones).flatten()
    wrong = view != total
    first = int(wrong.int().argmax())
    facts: dict[str, Any] = {"parts": int(1000 * (1 - wrong.double().mean())) / 10}
    facts["first"] = f"{view[first]} in place {first}; expected {total[first]}"
    on_node, n = sum(everyones[first_rank : first_rank + g]).flatten(), len(ranks)
    facts["why"] = ""
    for away, why in (
        (view - everyones[me.rank].flatten(), "`tensor` itself is unchanged"),
        (view - on_node, "That is the sum of this node's ranks"),
        ((n * view - total) / n, "That is the mean"),  # exact for large integers
    ):
        if not facts["why"] and (away.abs() < 1).all():
            facts["why"] = f" {why}."
    report, least = meter.report(), theory.hierarchical_bytes_sent(shape.nnodes, g)
    for way in ("between", "inside"):
        facts[way] = getattr(report, way) / x.nbytes
        wanted = getattr(least[me.rank], way)
        facts[f"{way}_right"] = getattr(report, way) == wanted * x.nbytes
        facts[f"{way}_least"] = float(wanted)
    # Messages inside a node are cheap, so a whole all-reduce there is accepted.
    facts["inside_right"] = facts["inside"] <= 1.51 * facts["inside_least"]
    facts |= {
        "right": not wrong.any(),
        "counted": not torch_log.calls and facts["between"] + facts["inside"] > 0,
    }
    facts["own_work"] = not any(e.op.startswith("hierarchical") for e in log.events)
    ones = [one.bool().to(torch.bfloat16) for one in everyones]
    x = ones[me.rank].clone()
    function(x, nodes[me.node_rank], peers[me.local_rank])
    facts["again"] = torch.equal(x, sum(ones))
    x.copy_(ones[(me.rank + 1) % shape.world_size])
    x[0] = math.inf if me.rank else math.nan
    with ByteMeter() as meter:
        function(x, nodes[me.node_rank], peers[me.local_rank])
    facts["same_tensor"] = bool(x[0].isnan().all())
    facts["same_tensor"] &= torch.equal(x[1:], sum(ones)[1:])
    facts |= {"narrow": meter.report().between / x.nbytes}
    facts["narrow_right"] = facts["narrow"] == facts["between_least"]
    x = torch.ones(g, dtype=torch.int8)  # a byte for each of the ranks on a node
    with ByteMeter() as meter:
        function(x, nodes[me.node_rank], peers[me.local_rank])
    # With more than two nodes the bytes depend on the algorithm of `all_reduce`.
    facts |= {"small": meter.report().between, "small_least": x.nbytes // g}
    facts["small_right"] = shape.nnodes != 2 or facts["small"] == facts["small_least"]
    facts["small_sums"] = bool((x == shape.world_size).all())
    facts["numbers"] = x.numel()
    return facts


def _numbers(rank: int, cluster: Topology) -> Tensor:
    """Return a rank's numbers: multiples of 1/8, so that no sum is rounded."""
    shape, dtype = CLUSTERS[cluster.nnodes, cluster.nproc_per_node]
    dice = torch.Generator().manual_seed(rank)
    numbers = torch.randint(-(2**20), 2**20, shape, generator=dice)
    if dtype.is_floating_point:
        numbers = numbers / 8 + (2**-30 if dtype == torch.float64 else 0)
    else:  # a float64 cannot hold the sum
        numbers += 2**58
    if cluster.nnodes == 3 and rank == 1:
        numbers = torch.zeros_like(numbers)
    return numbers.to(dtype)
