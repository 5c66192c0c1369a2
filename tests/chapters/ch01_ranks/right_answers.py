"""Right answers to the exercises of chapter 01, in other styles than the solutions."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ddp_course.launch import Topology, here


def counted_one_by_one(node_rank, local_rank, nproc_per_node):
    return sum(1 for _ in range(node_rank * nproc_per_node)) + local_rank


def looked_up(node_rank, local_rank, nproc_per_node):
    places = Topology(node_rank + 1, nproc_per_node).places()
    same = {"node_rank": node_rank, "local_rank": local_rank}
    return next(p.rank for p in places if same.items() <= vars(p).items())


def back_to_the_first(rank, nnodes, nproc_per_node):
    peer = rank + nproc_per_node
    return peer if peer < nnodes * nproc_per_node else rank % nproc_per_node


def through_its_place(rank, nnodes, nproc_per_node):
    node_rank, local_rank = divmod(rank, nproc_per_node)
    return (node_rank + 1) % nnodes * nproc_per_node + local_rank


def subgroups():
    return dist.new_subgroups(here().topology.nproc_per_node)[0]


def by_enumeration():
    lists = [
        [p.rank for p in here().topology.places() if p.node_rank == node]
        for node in range(here().topology.nnodes)
    ]
    return dist.new_subgroups_by_enumeration(lists)[0]


def from_a_mesh():
    shape = here().topology.nnodes, here().topology.nproc_per_node
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "local"))
    return mesh.get_group("local")


def by_its_members_alone():
    size, first = here().topology.nproc_per_node, here().rank - here().local_rank
    ranks = list(range(first, first + size))
    return dist.new_group(ranks, use_local_synchronization=True)


RIGHT = {
    "global_rank": [counted_one_by_one, looked_up],
    "peer_on_next_node": [back_to_the_first, through_its_place],
    "node_group": [subgroups, by_enumeration, from_a_mesh, by_its_members_alone],
}
