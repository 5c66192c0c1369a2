"""All-reduce on several nodes: first inside each, then between them, then inside again.

Links between nodes are slow, so as little as possible should go over them. With
`leader_plan`, the version of the textbooks, one rank of each node carries everything.
With `sharded_plan` every rank carries its part, so each node's network cards all work
(BlueConnect: Cho et al. 2019; Horovod's NCCLHierarchicalAllreduce). `in_shards` is all
of that; `all_reduce` does the same by a plan (as in `ring`). Chapter 03.
"""

from collections.abc import Callable
from functools import cache

import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives import ring
from ddp_course.collectives.call import Collective
from ddp_course.collectives.communicator import Group, Work, communicator
from ddp_course.collectives.plan import Plan, Transfer, among, bounds, chain, make_plan
from ddp_course.collectives.port import Port
from ddp_course.collectives.reduction import Op, ReduceOp
from ddp_course.collectives.rooted import broadcast_tree_plan, reduce_tree_plan
from ddp_course.collectives.unrooted import (
    all_gather_ring_plan,
    reduce_scatter_ring_plan,
)


def in_shards(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Add up all ranks' `tensor` (contiguous), in place; called by all ranks.

    Every node has as many ranks of the group; those of equal local rank are peers.
    """
    port, nodes = Port(group), communicator(group).nodes
    [node] = [node for node in nodes if port.rank in node]
    local = node.index(port.rank)
    inside, across = port.among(node), port.among([other[local] for other in nodes])
    flat, n = tensor.view(-1), len(nodes)
    edges = bounds(flat.numel(), port.size)[1:-1]
    shards = flat.tensor_split(edges[n - 1 :: n])  # one for each rank of a node
    chunks = flat.tensor_split(edges)[local * n : local * n + n]  # of this rank's shard
    ring.reduce_scatter(shards, inside)
    ring.reduce_scatter(chunks, across)
    ring.all_gather(chunks, across)
    ring.all_gather(shards, inside)


@cache
def leader_plan(nnodes: int, nproc_per_node: int) -> Plan:
    """Reduce to each node's first rank; a ring of these; broadcast inside the nodes.

    Between nodes only the leaders talk: each sends 2 (G - 1) / G S bytes, for G nodes.
    """
    nodes = _nodes(nnodes, nproc_per_node)
    phases = [
        _in_each(nodes, reduce_tree_plan),
        among(ring.plan(nnodes), [node[0] for node in nodes]),
        _in_each(nodes, broadcast_tree_plan),
    ]
    return _chained("leader", nodes, nnodes, phases)


@cache
def sharded_plan(nnodes: int, nproc_per_node: int) -> Plan:
    """Reduce-scatter inside; a ring between ranks of equal local rank; all-gather.

    Every rank sends 2 (G - 1) / G S / g bytes to another node, for G nodes of g ranks.
    """
    nodes = _nodes(nnodes, nproc_per_node)
    phases = [
        _in_each(nodes, reduce_scatter_ring_plan),
        [
            t
            for local, peers in enumerate(zip(*nodes, strict=True))
            for t in among(ring.plan(nnodes), peers, skip=local * nnodes)
        ],
        _in_each(nodes, all_gather_ring_plan),
    ]
    return _chained("sharded", nodes, nnodes * nproc_per_node, phases)


def _nodes(nnodes: int, nproc_per_node: int) -> list[list[int]]:
    g = nproc_per_node
    return [list(range(node * g, node * g + g)) for node in range(nnodes)]


def _in_each(nodes: list[list[int]], plan: Callable[[int], Plan]) -> list[Transfer]:
    """Return the transfers of `plan` inside every node.

    What is one chunk there is divided among the nodes, so it is as many chunks here.
    """
    many = len(nodes)
    return [t for node in nodes for t in among(plan(len(node)), node, times=many)]


def _chained(
    name: str, nodes: list[list[int]], chunks: int, phases: list[list[Transfer]]
) -> Plan:
    world_size = sum(map(len, nodes))
    plans = [make_plan(name, world_size, chunks, phase) for phase in phases]
    return chain(f"all_reduce, hierarchical, {name}", *plans)


def regular(nodes: list[list[int]]) -> bool:
    """Tell whether the group's nodes have equally many ranks, one after the other."""
    return nodes == _nodes(len(nodes), len(nodes[0]))


PLANS = {"sharded": sharded_plan, "leader": leader_plan}


def all_reduce(
    tensor: Tensor,
    op: Op = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    variant: str = "sharded",
) -> Work | None:
    """Combine all ranks' `tensor` (any shape, in place), sparing links between nodes.

    Every node must have as many ranks of the group, one node's after the other's.
    `variant` is "sharded" or "leader". See `call.all_reduce_by` for the other
    arguments and errors. Chapter 03.
    """
    call = Collective(group, "hierarchical.all_reduce", variant=variant)
    nodes = call.comm.nodes
    call.choice("variant", variant, PLANS)
    if not regular(nodes):
        call.refuse(f"the group's nodes have the ranks {nodes}, not equally many each")
    plan = lambda _: PLANS[variant](len(nodes), len(nodes[0]))  # noqa: E731
    return call.all_reduce(plan, tensor, op, async_op)
