"""The exercises of chapter 01: a rank, a peer on the next node, a node's group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ddp_course.chapters.ch01_ranks import solutions
from ddp_course.lab.answers import Answer, on_ranks, one_line
from ddp_course.lab.exercises import exercise, expect, expect_call, judge
from ddp_course.launch import Topology, here

CLUSTERS = ((3, 4), (2, 3), (3, 2), (1, 4), (5, 1), (1, 1))
SHAPES = f"{len(CLUSTERS)} clusters and some of two large ones"
# Clusters with more ranks than a byte, or 16 bits, can number: {shape: ranks}
LARGE = {
    (3_000, 24): (23, 24, 127, 128, 256, 2049, 7199, 65_537, 71_999),
    (3, 300): (299, 300, 899),
}
PLACES = [(p, p.topology) for it in CLUSTERS for p in Topology(*it).places()]
PLACES += [
    (Topology(*it).place(rank), Topology(*it)) for it in LARGE for rank in LARGE[it]
]
USE_ARGUMENTS = (
    "Use the arguments: they can describe another rank than the calling one."
)


@exercise("global_rank", solution=solutions.global_rank)
def check_global_rank(answer: Answer) -> str:
    """`global_rank(node_rank, local_rank, nproc_per_node)`: the rank of a process.

    Count in the picture: how many ranks are on all the nodes before yours?

    Each node before yours has the same number of ranks: multiply. Then add your place
    on your own node.
    """
    for p, cluster in PLACES:
        size = cluster.nproc_per_node
        before = f"{p.node_rank} x {size} ranks are on earlier nodes"
        why = f"{before}, and {p.local_rank} before it on its own"
        place = p.node_rank, p.local_rank, size
        expect_call(answer, *place, returns=p.rank, because=why)
    real = on_ranks(_all_ranks, answer, nnodes=2, nproc_per_node=3)
    for rank, (everyones, other) in enumerate(real):
        says = f"On a real rank with RANK={rank} your function returned"
        expect(everyones[rank] == rank, f"{says} {everyones[rank]!r}.")
        expect(
            everyones == [*range(6)],
            f"{says} {everyones} for the six ranks of its cluster. {USE_ARGUMENTS}",
        )
        expect(
            other == 14,
            f"{says} {other!r} for `global_rank(2, 4, 5)`; expected 14. The arguments "
            "can describe another cluster than the calling rank's.",
        )
    return f"every rank of {SHAPES}, and RANK on 6 real ranks of a 2 x 3 cluster"


def _all_ranks(global_rank: Callable) -> tuple[list[Any], Any]:
    """Call the reader's function on this rank for the places of all ranks.

    Returns its results, and the one for a place in a cluster of another shape.
    """
    shape = here().topology
    places = [(p.node_rank, p.local_rank) for p in shape.places()]
    ranks = [global_rank(*place, shape.nproc_per_node) for place in places]
    return ranks, global_rank(2, 4, 5)


@exercise("peer_on_next_node", solution=solutions.peer_on_next_node)
def check_peer_on_next_node(answer: Answer) -> str:
    """`peer_on_next_node(rank, nnodes, nproc_per_node)`: same local_rank, next node.

    By how much does the rank grow from one node to the next? And after the last node?

    Add the number of ranks on a node. After the last rank, numbers begin again at 0:
    take the remainder of a division by the number of all ranks.
    """
    for p, cluster in PLACES:
        nnodes, size = cluster.nnodes, cluster.nproc_per_node
        next_node = (p.node_rank + 1) % nnodes
        peer = next_node * size + p.local_rank
        why = (
            f"rank {p.rank} has local_rank {p.local_rank} on node {p.node_rank}, "
            f"and after that node, of {nnodes}, comes node {next_node}"
        )
        expect_call(answer, p.rank, nnodes, size, returns=peer, because=why)
    hint = "Each rank sent its place to the peer that your function named."
    real = on_ranks(_exchange, answer, nnodes=3, nproc_per_node=2, hint=hint)
    ring = [2, 3, 4, 5, 0, 1]
    for rank, (got, wanted, peers, other) in enumerate(real):
        says = "received the place (node_rank, local_rank) ="
        expect(got == wanted, f"On real ranks, rank {rank} {says} {got}, not {wanted}.")
        expect(
            peers == ring,
            f"On a real rank with RANK={rank} your function returned {peers} for the "
            f"six ranks of its cluster; expected {ring}. {USE_ARGUMENTS}",
        )
        expect(
            other == 9,
            f"On a real rank with RANK={rank} `peer_on_next_node(4, 4, 5)` returned "
            f"{other!r}; expected 9. The arguments can describe another cluster than "
            "the calling rank's.",
        )
    return f"every rank of {SHAPES}, and a ring of messages around 3 real nodes"


def _exchange(peer_on_next_node: Callable) -> tuple[tuple, tuple, list, Any]:
    """Send this rank's place to the peer, and receive another's.

    Returns what arrived, what should arrive, the peers of all ranks, and one in a
    cluster of another shape.
    """
    me = here()
    nnodes, size = me.topology.nnodes, me.topology.nproc_per_node
    mine = torch.tensor([me.node_rank, me.local_rank])
    got = torch.empty_like(mine)
    sending = dist.isend(mine, peer_on_next_node(me.rank, nnodes, size))
    dist.recv(got)  # from any rank
    sending.wait()
    peers = [peer_on_next_node(rank, nnodes, size) for rank in range(nnodes * size)]
    wanted = (me.node_rank - 1) % nnodes, me.local_rank
    return tuple(got.tolist()), wanted, peers, peer_on_next_node(4, 4, 5)


GROUP = {
    "in_step": "{alone}. {hint}",
    "a_group": "rank {rank} got {instead}; expected the process group of its node. "
    "(On ranks that are not members, `new_group` returns no group.)",
    "right": "rank {rank} got the group of ranks {members}; expected {wanted}, the "
    "ranks of node {node}.",
}
TOTAL = {
    "adds_up": "an all_reduce of the ranks in rank {rank}'s group gave {total}; "
    "expected {sum}, the sum of {wanted}."
}


@exercise("node_group", solution=solutions.node_group)
def check_node_group(answer: Answer) -> str:
    """`node_group()`, called on every rank: the process group of this rank's node.

    All ranks create all groups, in the same order. Which groups are these, and which
    one is yours?

    Loop over the nodes. For each, create the group of its consecutive ranks and keep it
    in a list, whether you are in it or not. Return the group at your node rank.
    """
    hint = (
        "Every rank must call `dist.new_group` for every node, in the same order, also "
        "for the nodes that it is not on."
    )
    for nnodes, size in ((2, 3), (4, 1), (1, 1)):
        shape = {"nnodes": nnodes, "nproc_per_node": size}
        real = on_ranks(_use, answer, **shape, hint=hint)
        for table in (GROUP, TOTAL):
            for facts in real:
                where = f"On a real {nnodes} x {size} cluster,"
                judge(where, {"hint": hint} | facts, table)
    return (
        "on real clusters of 1, 2 and 4 nodes every rank is in the group of its own "
        "node, and an all_reduce there adds up that node's ranks"
    )


def _use(node_group: Callable) -> dict[str, Any]:
    """Create the groups together with the other ranks, and test this rank's group."""
    me = here()
    wanted = [p.rank for p in me.topology.places() if p.node_rank == me.node_rank]
    facts = {"rank": me.rank, "node": me.node_rank, "wanted": wanted}
    try:
        with _watched(node_group):
            group = node_group()
        _same("returned")
    except _OutOfStep as error:
        return facts | {"in_step": False, "alone": str(error)}
    a_group = isinstance(group, dist.ProcessGroup)
    members = dist.get_process_group_ranks(group) if a_group else None
    facts |= {"in_step": True, "a_group": a_group, "instead": f"`{one_line(group)}`"}
    facts |= {"members": members, "right": members == wanted, "sum": sum(wanted)}
    everyones = _from_all(members)
    # A collective that not all members take part in would hang.
    if a_group and all(everyones[rank] == members for rank in members):
        total = torch.tensor(me.rank)
        dist.all_reduce(total, group=group)
        facts |= {"total": total.item(), "adds_up": total.item() == sum(wanted)}
    return facts


class _OutOfStep(Exception):
    """An error: the ranks do not create the same groups."""


@contextmanager
def _watched(node_group: Callable) -> Iterator[None]:
    """Compare the ranks' calls before each call of `dist.new_group`.

    Ranks that create different groups at the same time hang, or mix up their groups;
    sometimes it happens to work. The comparison makes the verdict certain.
    """
    new_group = dist.new_group

    def in_step(ranks: list[int] | None = None, *args: Any, **options: Any) -> Any:
        if not options.get("use_local_synchronization"):  # with it, only members call
            _same(f"called `new_group({ranks})`")
        return new_group(ranks, *args, **options)

    readers = getattr(node_group, "__globals__", {})  # "from ... import new_group", too
    names = {name: in_step for name, value in readers.items() if value is new_group}
    with mock.patch.object(dist, "new_group", in_step), mock.patch.dict(readers, names):
        yield


def _same(what: str) -> None:
    """Raise _OutOfStep unless all ranks make the same call."""
    said = _from_all(what)
    for rank, other in enumerate(said):
        if other != said[0]:
            raise _OutOfStep(f"rank 0 {said[0]} while rank {rank} {other}")


def _from_all(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
