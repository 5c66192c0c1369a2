"""All-reduce on several nodes: first inside each, then between them, then inside again.

Links between nodes are slow, so as little as possible should go over them. In
`leader_plan`, the textbook version, one rank of each node sends everything. In
`sharded_plan` every rank sends its part, so all network cards of a node are used
(BlueConnect: Cho et al. 2019; Horovod's NCCLHierarchicalAllreduce). Explained in
chapter 03.
"""

from collections.abc import Callable
from functools import cache

from ddp_course.collectives.catalog import (
    all_gather_ring_plan,
    broadcast_tree_plan,
    reduce_scatter_ring_plan,
    reduce_tree_plan,
    ring_plan,
)
from ddp_course.collectives.plan import Plan, Transfer, among, chain, make_plan


@cache
def leader_plan(nnodes: int, nproc_per_node: int) -> Plan:
    """Reduce to each node's first rank; all-reduce among these; broadcast inside nodes.

    Between G nodes only these leaders send, each 2 (G - 1) / G S for S bytes.
    """
    nodes = _nodes(nnodes, nproc_per_node)
    phases = [
        _in_each(nodes, reduce_tree_plan),
        among(ring_plan(nnodes), [node[0] for node in nodes]),
        _in_each(nodes, broadcast_tree_plan),
    ]
    return _chained("leader", nodes, nnodes, phases)


@cache
def sharded_plan(nnodes: int, nproc_per_node: int) -> Plan:
    """Reduce-scatter in nodes; all-reduce among equal local ranks; all-gather in nodes.

    Of S bytes, every rank sends 2 (G - 1) / G S / g to other nodes, for G nodes of g
    ranks.
    """
    nodes = _nodes(nnodes, nproc_per_node)
    phases = [
        _in_each(nodes, reduce_scatter_ring_plan),
        [
            t
            for local, peers in enumerate(zip(*nodes, strict=True))
            for t in among(ring_plan(nnodes), peers, skip=local * nnodes)
        ],
        _in_each(nodes, all_gather_ring_plan),
    ]
    return _chained("sharded", nodes, nnodes * nproc_per_node, phases)


def _nodes(nnodes: int, nproc_per_node: int) -> list[list[int]]:
    g = nproc_per_node
    return [list(range(node * g, node * g + g)) for node in range(nnodes)]


def _in_each(nodes: list[list[int]], plan: Callable[[int], Plan]) -> list[Transfer]:
    """Return the transfers of `plan` inside every node.

    A chunk of `plan` becomes as many chunks as there are nodes, which share it later.
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
    """Return whether all nodes have equally many ranks, numbered node by node."""
    return nodes == _nodes(len(nodes), len(nodes[0]))


PLANS = {"sharded": sharded_plan, "leader": leader_plan}
