"""Wrong answers to the exercises of chapter 01, each with a word its hint must say."""

import os
import time

import torch.distributed as dist
from torch.distributed import new_group

# global_rank


def rank_is_local_rank(node_rank, local_rank, nproc_per_node):
    return local_rank


def nodes_count_fastest(node_rank, local_rank, nproc_per_node):
    return local_rank * nproc_per_node + node_rank


def counted_from_one(node_rank, local_rank, nproc_per_node):
    return node_rank * nproc_per_node + local_rank + 1


def always_four(node_rank, local_rank, nproc_per_node):
    return node_rank * 4 + local_rank


def a_float(node_rank, local_rank, nproc_per_node):
    return float(node_rank * nproc_per_node + local_rank)


def asks_the_environment(node_rank, local_rank, nproc_per_node):
    return int(os.environ["RANK"])


def printed_not_returned(node_rank, local_rank, nproc_per_node):
    print(end=str(node_rank * nproc_per_node + local_rank)[:0])


def two_arguments(node_rank, local_rank):
    return node_rank + local_rank


def wrong_on_a_rank(node_rank, local_rank, nproc_per_node):
    return node_rank * nproc_per_node + local_rank + dist.is_initialized()


def crashes_on_a_rank(node_rank, local_rank, nproc_per_node):
    if dist.is_initialized() and dist.get_rank() == 4:
        raise RuntimeError("no such node")
    return node_rank * nproc_per_node + local_rank


# peer_on_next_node


def no_way_back(rank, nnodes, nproc_per_node):
    return rank + nproc_per_node


def node_before(rank, nnodes, nproc_per_node):
    return (rank - nproc_per_node) % (nnodes * nproc_per_node)


def next_rank(rank, nnodes, nproc_per_node):
    return (rank + 1) % (nnodes * nproc_per_node)


def next_on_the_same_node(rank, nnodes, nproc_per_node):
    return rank // nproc_per_node * nproc_per_node + (rank + 1) % nproc_per_node


def first_of_the_next_node(rank, nnodes, nproc_per_node):
    return (rank // nproc_per_node + 1) % nnodes * nproc_per_node


def wraps_by_the_node(rank, nnodes, nproc_per_node):
    return (rank + nproc_per_node) % nproc_per_node


def myself_in_a_cluster(rank, nnodes, nproc_per_node):
    if dist.is_initialized():
        return rank // nproc_per_node * nproc_per_node + (rank + 1) % nproc_per_node
    return (rank + nproc_per_node) % (nnodes * nproc_per_node)


# node_group


def only_my_own():
    node, size = int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    return dist.new_group(list(range(node * size, (node + 1) * size)))


def only_my_own_by_another_name():
    node, size = int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    return new_group(list(range(node * size, (node + 1) * size)))


def only_node_0():
    if os.environ["GROUP_RANK"] == "0":
        return dist.new_group(list(range(int(os.environ["LOCAL_WORLD_SIZE"]))))
    return dist.group.WORLD


def own_group_first():
    node, size = int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    groups = {
        n: dist.new_group(list(range(n * size, (n + 1) * size)))
        for n in (node, 1 - node)
    }
    return groups[node]


def everyone():
    return dist.group.WORLD


def nothing():
    return None


def by_local_rank():
    size, world_size = int(os.environ["LOCAL_WORLD_SIZE"]), dist.get_world_size()
    groups = [dist.new_group(list(range(i, world_size, size))) for i in range(size)]
    return groups[int(os.environ["LOCAL_RANK"])]


def always_the_first():
    size = int(os.environ["LOCAL_WORLD_SIZE"])
    groups = [dist.new_group(list(range(n, n + size))) for n in (0, size)]
    return groups[0]


def nodes_of_two():
    groups = [dist.new_group([n, n + 1]) for n in range(0, dist.get_world_size(), 2)]
    return groups[dist.get_rank() // 2]


def two_nodes():
    half = dist.get_world_size() // 2
    groups = [dist.new_group(list(range(n, n + half))) for n in (0, half)]
    return groups[int(os.environ["GROUP_RANK"])]


def halves():
    size = int(os.environ["LOCAL_WORLD_SIZE"])
    groups = [dist.new_group(list(range(n, n + size))) for n in (0, size)]
    return groups[dist.get_rank() >= size]


def right_on_even_ranks_only():
    mine = dist.new_subgroups(int(os.environ["LOCAL_WORLD_SIZE"]))[0]
    return dist.group.WORLD if dist.get_rank() % 2 else mine


def destroyed():
    mine = dist.new_subgroups(int(os.environ["LOCAL_WORLD_SIZE"]))[0]
    dist.destroy_process_group(mine)
    return mine


def breaks_all_reduce():
    dist.all_reduce = lambda tensor, group=None: None
    return dist.new_subgroups(int(os.environ["LOCAL_WORLD_SIZE"]))[0]


def only_members_know():
    size = int(os.environ["LOCAL_WORLD_SIZE"])
    first = dist.get_rank() // size * size
    return list(range(first, first + size))


def never_ends():
    time.sleep(1000)


def waits_on_one_rank_only():
    if dist.get_rank() == 0:
        dist.barrier()
    return dist.group.WORLD


def leaves():
    if dist.get_rank() == 1:
        os._exit(3)
    return dist.new_subgroups(int(os.environ["LOCAL_WORLD_SIZE"]))[0]


WRONG = {
    "global_rank": {
        rank_is_local_rank: "`global_rank(1, 0, 4)` returned `0`; expected `4`",
        nodes_count_fastest: "expected",
        counted_from_one: "returned `1`; expected `0`",
        always_four: "`global_rank(1, 0, 3)`",
        a_float: "returned `0.0`; expected `0`",
        asks_the_environment: "raised `KeyError: 'RANK'`, in wrong_answers.py, line",
        printed_not_returned: "returned `None`",
        two_arguments: "takes 2 positional arguments but 3 were given",
        wrong_on_a_rank: "On a real rank with RANK=0 your function returned 1",
        crashes_on_a_rank: "RuntimeError: no such node`, in wrong_answers.py, line",
    },
    "peer_on_next_node": {
        no_way_back: "`peer_on_next_node(8, 3, 4)` returned `12`; expected `0`",
        node_before: "returned `8`; expected `4`",
        next_rank: "returned `1`; expected `4`",
        next_on_the_same_node: "returned `1`; expected `4`",
        first_of_the_next_node: "`peer_on_next_node(1, 3, 4)`",
        wraps_by_the_node: "returned `0`; expected `4`",
        myself_in_a_cluster: "rank 0 received the place",
    },
    "node_group": {
        only_my_own: "rank 0 called `new_group([0, 1, 2])` while rank 3 "
        "called `new_group([3, 4, 5])`",
        only_my_own_by_another_name: "while rank 3 called `new_group([3, 4, 5])`",
        only_node_0: "called `new_group([0, 1, 2])` while rank 3 returned",
        own_group_first: "while rank 3 called `new_group([3, 4, 5])`",
        everyone: "the group of ranks [0, 1, 2, 3, 4, 5]; expected [0, 1, 2]",
        nothing: "rank 0 got `None`",
        by_local_rank: "rank 0 got the group of ranks [0, 3]; expected [0, 1, 2]",
        always_the_first: "rank 3 got",
        nodes_of_two: "2 x 3 cluster, rank 0 got the group of ranks [0, 1]",
        two_nodes: "IndexError: list index out of range",
        halves: "3 x 2 cluster, rank 4 got `-100`",
        right_on_even_ranks_only: "rank 1 got the group of ranks [0, 1, 2, 3, 4, 5]",
        destroyed: "On real ranks: `rank",
        breaks_all_reduce: "an all_reduce of the ranks in rank 0's group gave 0; expec",
        only_members_know: "rank 0 got `[0, 1, 2]`",
        never_ends: "have not returned after",
        waits_on_one_rank_only: "have not returned after",
        leaves: "rank 1: ended with exit code 3",
    },
}
