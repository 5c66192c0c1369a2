"""The exercises of chapter 01."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ddp_course.chapters.ch01_ranks import solutions
from ddp_course.lab.answers import Answer, on_ranks, one_line
from ddp_course.lab.exercises import exercise, expect, expect_call
from ddp_course.launch import Topology, here

CLUSTERS = [
    Topology(*shape) for shape in ((3, 4), (2, 3), (3, 2), (1, 4), (5, 1), (1, 1))
]
SHAPES = f"{len(CLUSTERS)} clusters, from 1 x 1 to 3 x 4"


@exercise("global_rank", solution=solutions.global_rank)
def check_global_rank(answer: Answer) -> str:
    """`global_rank(node_rank, local_rank, nproc_per_node)`: the rank of a process."""
    for cluster in CLUSTERS:
        size = cluster.nproc_per_node
        for p in cluster.places():
            because = (
                f"before it come {p.node_rank} whole nodes of {size}, and "
                f"{p.local_rank} on its own node"
            )
            args = p.node_rank, p.local_rank, size
            expect_call(answer, *args, returns=p.rank, because=because)
    real = on_ranks(_my_rank, answer, nnodes=2, nproc_per_node=3)
    for rank, got in enumerate(real):
        expect(
            got == rank,
            f"On a real rank with RANK={rank} your function returned {got!r}.",
        )
    return f"every rank of {SHAPES}, and RANK on 6 real ranks of a 2 x 3 cluster"


def _my_rank(global_rank: Callable) -> Any:
    """On every rank: compute the rank from the other variables."""
    me = here()
    return global_rank(me.node_rank, me.local_rank, me.topology.nproc_per_node)


@exercise("place", solution=solutions.place)
def check_place(answer: Answer) -> str:
    """`place(rank, nproc_per_node)`: the tuple (node_rank, local_rank) of that rank."""
    for cluster in CLUSTERS:
        size = cluster.nproc_per_node
        for p in cluster.places():
            because = (
                f"the {p.rank} before it fill whole nodes of {size}, {p.node_rank} of "
                f"them, and {p.local_rank} more sit on its own node (whole numbers: "
                "`//` and `%`)"
            )
            wanted = p.node_rank, p.local_rank
            expect_call(answer, p.rank, size, returns=wanted, because=because)
    real = on_ranks(_my_place, answer, nnodes=2, nproc_per_node=3)
    for rank, (got, wanted) in enumerate(real):
        expect(
            got == wanted,
            f"On real rank {rank}, (GROUP_RANK, LOCAL_RANK) is {wanted}, but your "
            f"function returned {got!r}.",
        )
    return (
        f"every rank of {SHAPES}, and (GROUP_RANK, LOCAL_RANK) on 6 real ranks of a "
        "2 x 3 cluster"
    )


def _my_place(place: Callable) -> tuple[Any, tuple[int, int]]:
    """On every rank: compute the place from the rank, and look it up."""
    me = here()
    return place(me.rank, me.topology.nproc_per_node), (me.node_rank, me.local_rank)


@exercise("peer_on_next_node", solution=solutions.peer_on_next_node)
def check_peer_on_next_node(answer: Answer) -> str:
    """`peer_on_next_node(rank, nnodes, nproc_per_node)`: same local_rank, next node."""
    for cluster in CLUSTERS:
        for p in cluster.places():
            next_node = (p.node_rank + 1) % cluster.nnodes
            peer = next_node * cluster.nproc_per_node + p.local_rank
            because = (
                f"rank {p.rank} has local_rank {p.local_rank} on node {p.node_rank}, "
                f"and after that node, of {cluster.nnodes}, comes node {next_node}"
            )
            args = p.rank, cluster.nnodes, cluster.nproc_per_node
            expect_call(answer, *args, returns=peer, because=because)
    hint = "Each rank sent its place to the peer that your function named."
    real = on_ranks(_exchange, answer, nnodes=3, nproc_per_node=2, hint=hint)
    for rank, (got, wanted) in enumerate(real):
        expect(
            got == wanted,
            f"On real ranks, rank {rank} received the place (node_rank, local_rank) = "
            f"{got} instead of {wanted}.",
        )
    return f"every rank of {SHAPES}, and a ring of messages around 3 real nodes"


def _exchange(peer_on_next_node: Callable) -> tuple[tuple, tuple]:
    """On every rank: send the own place to the peer, and receive one."""
    me = here()
    nnodes, size = me.topology.nnodes, me.topology.nproc_per_node
    mine = torch.tensor([me.node_rank, me.local_rank])
    got = torch.empty_like(mine)
    sending = dist.isend(mine, peer_on_next_node(me.rank, nnodes, size))
    dist.recv(got)  # from whoever sends
    sending.wait()
    return tuple(got.tolist()), ((me.node_rank - 1) % nnodes, me.local_rank)


@exercise("node_group", solution=solutions.node_group)
def check_node_group(answer: Answer) -> str:
    """`node_group()`, called on every rank: the process group of this rank's node."""
    hint = (
        "Every rank must call `dist.new_group` for every node, in the same order, also "
        "for the nodes that it is not on."
    )
    for cluster in (Topology(2, 3), Topology(3, 2)):
        shape = {"nnodes": cluster.nnodes, "nproc_per_node": cluster.nproc_per_node}
        real = on_ranks(_use, answer, **shape, hint=hint)
        where = f"On a real {cluster.nnodes} x {cluster.nproc_per_node} cluster,"
        expect("alone" not in real[0], f"{where} {real[0].get('alone')}. {hint}")
        _judge_groups(cluster, real, where)
    return (
        "on real 2 x 3 and 3 x 2 clusters every rank is in the group of its own node, "
        "and an all_reduce there adds up that node's ranks"
    )


def _judge_groups(cluster: Topology, real: list[dict[str, Any]], where: str) -> None:
    """Look at what each rank got: a group, of the right ranks, that can add them up."""
    ranks = range(cluster.world_size)
    nodes = [cluster.place(rank).node_rank for rank in ranks]
    wanted = [[r for r in ranks if nodes[r] == node] for node in nodes]
    for rank, got in enumerate(real):
        expect(
            "members" in got,
            f"{where} rank {rank} got {got.get('instead')}; expected the process group "
            "of its node. (`new_group` returns no group on ranks that are no members.)",
        )
        expect(
            got["members"] == wanted[rank],
            f"{where} rank {rank} got the group of ranks {got['members']}; expected "
            f"{wanted[rank]}, the ranks of node {nodes[rank]}.",
        )
    for rank, got in enumerate(real):
        expect(
            got["total"] == sum(wanted[rank]),
            f"{where} an all_reduce of the ranks in rank {rank}'s group gave "
            f"{got['total']}; expected {sum(wanted[rank])}, the sum of {wanted[rank]}.",
        )


def _use(node_group: Callable) -> dict[str, Any]:
    """On every rank: make the groups in step with the others, and try the own one."""
    try:
        with _watched(node_group):
            group = node_group()
        _same("returned")
    except _OutOfStep as error:
        return {"alone": str(error)}
    if isinstance(group, dist.ProcessGroup):
        got = {"members": dist.get_process_group_ranks(group)}
    else:
        got = {"instead": f"`{one_line(group)}`"}
    everyone = _from_all(got)
    # A collective that not all members take part in would hang.
    if "members" in got and all(everyone[rank] == got for rank in got["members"]):
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total, group=group)
        got["total"] = total.item()
    return got


class _OutOfStep(Exception):
    """Not all ranks make the same groups."""


@contextmanager
def _watched(node_group: Callable) -> Iterator[None]:
    """Let every rank see what the others call before it calls `dist.new_group`.

    Ranks that make different groups at the same time hang, or their groups are mixed
    up, which now and then goes well: that must not be left to luck.
    """
    new_group = dist.new_group

    def in_step(ranks: list[int] | None = None, *args: Any, **options: Any) -> Any:
        if not options.get("use_local_synchronization"):  # then members alone may call
            _same(f"called `new_group({ranks})`")
        return new_group(ranks, *args, **options)

    readers = getattr(node_group, "__globals__", {})  # "from ... import new_group", too
    names = {name: in_step for name, value in readers.items() if value is new_group}
    with mock.patch.object(dist, "new_group", in_step), mock.patch.dict(readers, names):
        yield


def _same(what: str) -> None:
    """Raise _OutOfStep unless all ranks say the same here."""
    said = _from_all(what)
    for rank, other in enumerate(said):
        if other != said[0]:
            raise _OutOfStep(f"rank 0 {said[0]} while rank {rank} {other}")


def _from_all(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
