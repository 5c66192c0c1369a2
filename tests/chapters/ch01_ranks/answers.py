"""Answers to the exercises of chapter 01, right ones and wrong ones."""

# ruff: noqa: F401 (the texts use what is imported)

import time

from slips import answers
from torch.distributed.device_mesh import init_device_mesh

from ddp_course.chapters.ch01_ranks import solutions
from ddp_course.launch import Topology, here


def two_arguments(node_rank, local_rank):
    return node_rank + local_rank


ANSWERS = answers(
    solutions,
    globals(),
    global_rank="""
    counted_one_by_one:
        return sum(1 for _ in range(node_rank * nproc_per_node)) + local_rank
    looked_up:
        places = Topology(node_rank + 1, nproc_per_node).places()
        same = {"node_rank": node_rank, "local_rank": local_rank}
        return next(p.rank for p in places if same.items() <= vars(p).items())
    rank_is_local_rank: `global_rank(1, 0, 4)` returned `0`; expected `4`
        node_rank * nproc_per_node + local_rank => local_rank
    nodes_count_fastest: expected
        node_rank * nproc_per_node + local_rank
        => local_rank * nproc_per_node + node_rank
    counted_from_one: returned `1`; expected `0`
        nproc_per_node + local_rank => nproc_per_node + local_rank + 1
    always_four: `global_rank(1, 0, 3)`
        * nproc_per_node => * 4
    a_float: returned `0.0`; expected `0`
        node_rank * nproc_per_node + local_rank
        => float(node_rank * nproc_per_node + local_rank)
    printed_not_returned: returned `None`
        return node_rank * nproc_per_node + local_rank => pass
    wrong_on_a_rank: On a real rank with RANK=0 your function returned 1
        + local_rank => + local_rank + dist.is_initialized()
    asks_the_environment: raised `KeyError: 'RANK'`, in slip
        return int(os.environ["RANK"])
    two_arguments: takes 2 positional arguments but 3 were given
    in_a_byte: returned `0`; expected `256`
        return (node_rank * nproc_per_node + local_rank) % 256
    up_to_sixteen_ranks: because 1 x 24 ranks are on earlier nodes
        * nproc_per_node => * min(nproc_per_node, 16)
    up_to_eight_nodes: because 10 x 24 ranks
        node_rank * => min(node_rank, 8) *
    in_16_bits: returned `1`; expected `65537`
        return (node_rank * nproc_per_node + local_rank) % 2**16
    up_to_256_ranks_of_a_node: expected `300`
        * nproc_per_node => * min(nproc_per_node, 256)
    of_the_running_rank: for the six ranks of its cluster
        if dist.is_initialized():
            return dist.get_rank()
        return solutions.global_rank(node_rank, local_rank, nproc_per_node)
    nodes_as_large_as_its_own: can describe another cluster
        size = int(os.environ.get("LOCAL_WORLD_SIZE", nproc_per_node))
        return node_rank * size + local_rank
    crashes_on_a_rank: RuntimeError: no such node`, in slip
        if dist.is_initialized() and dist.get_rank() == 4:
            raise RuntimeError("no such node")
        return solutions.global_rank(node_rank, local_rank, nproc_per_node)
    """,
    peer_on_next_node="""
    back_to_the_first:
        peer = rank + nproc_per_node
        return peer if peer < nnodes * nproc_per_node else rank % nproc_per_node
    through_its_place:
        node_rank, local_rank = divmod(rank, nproc_per_node)
        return (node_rank + 1) % nnodes * nproc_per_node + local_rank
    no_way_back: `peer_on_next_node(8, 3, 4)` returned `12`; expected `0`
        (rank + nproc_per_node) % (nnodes * nproc_per_node) => rank + nproc_per_node
    node_before: returned `8`; expected `4`
        rank + => rank -
    next_rank: returned `1`; expected `4`
        rank + nproc_per_node => rank + 1
    next_on_the_same_node: returned `1`; expected `4`
        (rank + nproc_per_node) % (nnodes * nproc_per_node)
        => rank // nproc_per_node * nproc_per_node + (rank + 1) % nproc_per_node
    first_of_the_next_node: `peer_on_next_node(1, 3, 4)`
        (rank + nproc_per_node) % (nnodes * nproc_per_node)
        => (rank // nproc_per_node + 1) % nnodes * nproc_per_node
    wraps_by_the_node: returned `0`; expected `4`
        nnodes * => 1 *
    two_nodes_further: `peer_on_next_node(0, 5, 1)`
        rank + nproc_per_node => rank + nproc_per_node * (1 + (nnodes > 4))
    in_a_byte: returned `24`; expected `280`
        return (rank + nproc_per_node) % (nnodes * nproc_per_node) % 256
    in_16_bits: expected `65561`
        return (rank + nproc_per_node) % (nnodes * nproc_per_node) % 2**16
    up_to_1024_nodes: expected
        nnodes * => min(nnodes, 1024) *
    up_to_256_ranks_of_a_node: expected `599`
        nproc_per_node = min(nproc_per_node, 256)
        return (rank + nproc_per_node) % (nnodes * nproc_per_node)
    myself_in_a_cluster: rank 0 received the place
        if dist.is_initialized():
            return rank // nproc_per_node * nproc_per_node + (rank + 1) % nproc_per_node
        return solutions.peer_on_next_node(rank, nnodes, nproc_per_node)
    rank_of_the_environment: can describe another rank than the calling one
        rank = int(os.environ.get("RANK", rank))
        return solutions.peer_on_next_node(rank, nnodes, nproc_per_node)
    in_the_running_cluster: can describe another cluster
        if dist.is_initialized():
            return (rank + nproc_per_node) % dist.get_world_size()
        return solutions.peer_on_next_node(rank, nnodes, nproc_per_node)
    """,
    node_group="""
    subgroups:
        return dist.new_subgroups(here().topology.nproc_per_node)[0]
    by_enumeration:
        lists = [
            [p.rank for p in here().topology.places() if p.node_rank == node]
            for node in range(here().topology.nnodes)
        ]
        return dist.new_subgroups_by_enumeration(lists)[0]
    from_a_mesh:
        shape = here().topology.nnodes, here().topology.nproc_per_node
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "local"))
        return mesh.get_group("local")
    by_its_members_alone:
        size, first = here().topology.nproc_per_node, here().rank - here().local_rank
        ranks = list(range(first, first + size))
        return dist.new_group(ranks, use_local_synchronization=True)
    own: rank 0 called `new_group([0, 1, 2])` while rank 3 called `new_group([3, 4, 5])`
        range(0, dist.get_world_size(), size) => (int(os.environ["GROUP_RANK"]) * size,)
        groups[int(os.environ["GROUP_RANK"])] => groups[0]
    up_to_three_nodes: rank 3: IndexError
        range(0, dist.get_world_size(), size)
        => range(0, min(dist.get_world_size(), 3 * size), size)
    none_for_one_rank: rank 0 got `None`
        group = solutions.node_group()
        return group if os.environ["LOCAL_WORLD_SIZE"] > "1" else None
    none_on_one_node: 1 x 1 cluster, rank 0 got `None`
        if here().topology.nnodes == 1:
            return None
        return solutions.node_group()
    none_for_a_rank_alone: 1 x 1 cluster, rank 0 got `None`
        if dist.get_world_size() == 1:
            return None
        return solutions.node_group()
    by_local_rank: rank 0 got the group of ranks [0, 3]; expected [0, 1, 2]
        (range(first, first + size)) => (range(first, dist.get_world_size(), size))
        range(0, dist.get_world_size(), size) => range(size)
        GROUP_RANK => LOCAL_RANK
    always_the_first: rank 3 got
        groups[int(os.environ["GROUP_RANK"])] => groups[0]
    nodes_of_two: 2 x 3 cluster, rank 0 got the group of ranks [0, 1]
        int(os.environ["LOCAL_WORLD_SIZE"]) => 2
        groups[int(os.environ["GROUP_RANK"])] => groups[dist.get_rank() // 2]
    two_nodes: IndexError: list index out of range
        int(os.environ["LOCAL_WORLD_SIZE"]) => dist.get_world_size() // 2
    halves: 4 x 1 cluster, rank 2 got `-100`
        range(0, dist.get_world_size(), size) => (0, size)
        groups[int(os.environ["GROUP_RANK"])] => groups[dist.get_rank() >= size]
    only_members_know: rank 0 got `[0, 1, 2]`
        dist.new_group(list(range(first, first + size) => list(range(first, first + size
    only_node_0: called `new_group([0, 1, 2])` while rank 3 returned
        if os.environ["GROUP_RANK"] == "0":
            return dist.new_group(list(range(int(os.environ["LOCAL_WORLD_SIZE"]))))
        return dist.group.WORLD
    own_group_first: while rank 3 called `new_group([3, 4, 5])`
        node, size = int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        groups = {
            n: dist.new_group(list(range(n * size, (n + 1) * size)))
            for n in (node, 1 - node)
        }
        return groups[node]
    everyone: the group of ranks [0, 1, 2, 3, 4, 5]; expected [0, 1, 2]
        return dist.group.WORLD
    nothing: rank 0 got `None`
        return None
    right_on_even_ranks_only: rank 1 got the group of ranks [0, 1, 2, 3, 4, 5]
        mine = solutions.node_group()
        return dist.group.WORLD if dist.get_rank() % 2 else mine
    destroyed: On real ranks: `rank
        mine = solutions.node_group()
        dist.destroy_process_group(mine)
        return mine
    breaks_all_reduce: an all_reduce of the ranks in rank 0's group gave 0; expec
        dist.all_reduce = lambda tensor, group=None: None
        return solutions.node_group()
    never_ends: have not returned after
        time.sleep(1000)
    waits_on_one_rank_only: have not returned after
        if dist.get_rank() == 0:
            dist.barrier()
        return dist.group.WORLD
    leaves: rank 1: ended with exit code 3
        if dist.get_rank() == 1:
            os._exit(3)
        return solutions.node_group()
    """,
)
