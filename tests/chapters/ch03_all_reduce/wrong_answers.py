"""Wrong answers to the exercises of chapter 03, each with a word of its hint."""

from dataclasses import replace

import torch
import torch.distributed as dist

from ddp_course import collectives
from ddp_course.chapters.ch03_all_reduce import solutions
from ddp_course.collectives import ReduceOp, hierarchical, ring
from ddp_course.collectives.plan import Transfer

# ring_transfers


def _transfers(n, adds, steps=None, chunk=None, way=1, step=lambda k, r: k):
    """Return a ring's transfers: in each step k one of every rank r."""
    chunk = chunk or (lambda r, k: r - 1 - k)
    return [
        Transfer(step(k, r), r, (r + way) % n, c, c + 1, adds(k))
        for k in range(2 * (n - 1) if steps is None else steps)
        for r in range(n)
        for c in [chunk(r, k) % n]
    ]


def ring_for_two(n):
    """The one of the notebook."""
    return _transfers(n, lambda k: k < n // 2)


def adds_in_every_step(n):
    return _transfers(n, lambda k: True)


def reduce_scatter_only(n):
    return _transfers(n, lambda k: True, steps=n - 1)


def off_by_one_in_the_second_half(n):
    return _transfers(
        n, lambda k: k < n - 1, chunk=lambda r, k: r - 1 - k - (k >= n - 1)
    )


def to_the_left(n):
    return _transfers(n, lambda k: k < n - 1, chunk=lambda r, k: r + 1 + k, way=-1)


def one_message_at_a_time(n):
    return _transfers(n, lambda k: k < n - 1, step=lambda k, r: k * n + r)


def all_through_rank_0(world_size):
    n = world_size
    up = [Transfer(r - 1, r, 0, 0, n, True) for r in range(1, n)]
    return up + [Transfer(n - 2 + r, 0, r, 0, n, False) for r in range(1, n)]


def the_whole_tensor_down_a_chain_and_around(world_size):
    n = world_size
    up = [Transfer(r, r, r + 1, 0, n, True) for r in range(n - 1)]
    return up + [
        Transfer(n - 1 + k, (n - 1 + k) % n, k, 0, n, False) for k in range(n - 1)
    ]


def chunks_beyond_the_end(world_size):
    return [Transfer(0, 0, 1, world_size, world_size + 1, True)]


def a_generator(world_size):
    return (t for t in ring_for_two(world_size))


def tuples(world_size):
    return [(0, 0, 1, 0, 1, True)]


# ring_reduce_scatter


def _pass(outgoing, like, by=1):
    """Send so many ranks to the right; return what arrives, as large as `like`."""
    rank, n = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(outgoing, (rank + by) % n)
    arrived = torch.empty_like(like)
    dist.recv(arrived, (rank - by) % n)
    sending.wait()
    return arrived


def _ring(chunks, passed_on):
    rank, n = dist.get_rank(), dist.get_world_size()
    passing_by = chunks[(rank - 1) % n]
    for k in range(n - 1):
        mine = chunks[(rank - 2 - k) % n]
        passing_by = passed_on(_pass(passing_by, mine), mine)
    return passing_by


def passes_on_its_own_only(chunks):
    """Right for two ranks."""
    rank, n = dist.get_rank(), dist.get_world_size()
    total = chunks[rank].clone()
    for k in range(n - 1):
        arrived = _pass(chunks[(rank - 1 - k) % n], chunks[(rank - 2 - k) % n])
    return total + arrived


def adds_in_place(chunks):
    return _ring(chunks, lambda arrived, mine: mine.add_(arrived))


def forgets_its_own(chunks):
    return _ring(chunks, lambda arrived, mine: arrived)


def the_mean(chunks):
    return _ring(chunks, torch.add) // dist.get_world_size()


def nothing_returned(chunks):
    _ring(chunks, torch.add)


def one_chunk_further(chunks):
    """As in many texts: rank r ends with chunk r + 1."""
    return _ring([*chunks[1:], chunks[0]], torch.add)


def straight_to_its_rank(chunks):
    rank, n = dist.get_rank(), dist.get_world_size()
    total = chunks[rank].clone()
    for k in range(1, n):
        total += _pass(chunks[(rank + k) % n], total, k)
    return total


def whole_tensors_around(chunks):
    rank, n = dist.get_rank(), dist.get_world_size()
    passing_by, total = torch.cat(chunks), torch.cat(chunks)
    for _ in range(n - 1):
        passing_by = _pass(passing_by, passing_by)
        total += passing_by
    return total.split([len(chunk) for chunk in chunks])[rank]


def equal_lengths_only(chunks):
    total = torch.stack(chunks)
    dist.all_reduce(total)
    return total[dist.get_rank()]


def all_reduces(chunks):
    totals = [chunk.clone() for chunk in chunks]
    for total in totals:
        dist.all_reduce(total)
    return totals[dist.get_rank()]


def through_the_back_door(chunks):
    for chunk in (totals := [chunk.clone() for chunk in chunks]):
        dist.group.WORLD.allreduce([chunk]).wait()
    _ring(chunks, torch.add)
    return totals[dist.get_rank()]


def through_the_store(chunks):
    """The ring is for show: the numbers come from the store in which ranks meet."""
    store = dist.distributed_c10d._get_default_store()
    rank, n = dist.get_rank(), dist.get_world_size()
    for c, chunk in enumerate(chunks):
        store.set(f"{rank}: {c}", chunk.numpy().tobytes().hex())
    _ring(chunks, torch.add)
    given = [bytes.fromhex(store.get(f"{r}: {rank}").decode()) for r in range(n)]
    return sum(torch.frombuffer(bytearray(g), dtype=chunks[0].dtype) for g in given)


def never_ends(chunks):
    """Everybody receives before anybody sends."""
    rank, n = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty_like(chunks[(rank - 2) % n])
    dist.recv(arrived, (rank - 1) % n)
    dist.send(chunks[(rank - 1) % n], (rank + 1) % n)
    return arrived


# hierarchical_sum


def _empty(tensor, group):
    return tensor.new_empty(tensor.numel() // dist.get_world_size(group))


def a_flat_ring(tensor, node, peers):
    ring.all_reduce(tensor)


def whole_tensors_between(tensor, node, peers):
    collectives.all_reduce(tensor, group=node)
    collectives.all_reduce(tensor, group=peers)


def leaders_only(tensor, node, peers):
    hierarchical.all_reduce(tensor, variant="leader")


def groups_swapped(tensor, node, peers):
    shard = _empty(tensor, peers)
    collectives.reduce_scatter_single(shard, tensor, group=peers)
    collectives.all_reduce(shard, group=node)
    collectives.all_gather_single(tensor, shard, group=peers)


def nothing_between(tensor, node, peers):
    shard = _empty(tensor, node)
    collectives.reduce_scatter_single(shard, tensor, group=node)
    collectives.all_gather_single(tensor, shard, group=node)


def not_gathered(tensor, node, peers):
    shard = _empty(tensor, node)
    collectives.reduce_scatter_single(shard, tensor, group=node)
    collectives.all_reduce(shard, group=peers)
    tensor.view(-1)[: shard.numel()] = shard


def returned_not_in_place(tensor, node, peers):
    result, shard = tensor.clone(), _empty(tensor, node)
    collectives.reduce_scatter_single(shard, tensor, group=node)
    collectives.all_reduce(shard, group=peers)
    collectives.all_gather_single(result, shard, group=node)
    return result


def the_largest(tensor, node, peers):
    shard = _empty(tensor, node)
    collectives.reduce_scatter_single(shard, tensor, ReduceOp.MAX, group=node)
    collectives.all_reduce(shard, group=peers)
    collectives.all_gather_single(tensor, shard, group=node)


def one_line_of_pytorch(tensor, node, peers):
    dist.all_reduce(tensor)


def one_line_of_the_package(tensor, node, peers):
    collectives.all_reduce(tensor)


def on_node_0_only(tensor, node, peers):
    if dist.get_rank(peers) == 0:
        collectives.all_reduce(tensor, group=node)
    raise RuntimeError("nothing to do here")


# What more than one kind of tensor finds out


def up_to_eight_ranks(world_size):
    return solutions.ring_transfers(min(world_size, 8))


def in_32_bits(chunks):
    total = solutions.ring_reduce_scatter([chunk.float() for chunk in chunks])
    return total.to(chunks[0].dtype)


def flat(chunks):
    return solutions.ring_reduce_scatter([chunk.flatten() for chunk in chunks])


def of_one_dimension(tensor, node, peers):
    part = len(tensor) // dist.get_world_size(node)
    shard = torch.empty(part, dtype=tensor.dtype)
    collectives.reduce_scatter_single(shard, tensor, group=node)
    collectives.all_reduce(shard, group=peers)
    collectives.all_gather_single(tensor, shard, group=node)


def adds_once_too_often(world_size):
    return [
        replace(t, reduce=t.step < world_size)
        for t in solutions.ring_transfers(world_size)
    ]


def every_other_chunk_whole(world_size):
    n = world_size
    return [
        replace(t, first=0, last=n) if n % 2 == 0 and n > 4 else t
        for t in solutions.ring_transfers(n)
    ]


def nothing_sent_of_zeros(chunks):
    rank, n = dist.get_rank(), dist.get_world_size()
    passing_by = chunks[(rank - 1) % n]
    for k in range(n - 1):
        mine = chunks[(rank - 2 - k) % n]
        sending = dist.isend(passing_by, (rank + 1) % n) if passing_by.any() else None
        arrived = torch.empty_like(mine)
        dist.recv(arrived, (rank - 1) % n)
        if sending:
            sending.wait()
        passing_by = arrived + mine
    return passing_by


def without_empty_ones(chunks):
    rank, n = dist.get_rank(), dist.get_world_size()
    passing_by = chunks[(rank - 1) % n]
    for k in range(n - 1):
        mine, arrived = chunks[(rank - 2 - k) % n], None
        sending = dist.isend(passing_by, (rank + 1) % n) if len(passing_by) else None
        if len(mine):
            arrived = torch.empty_like(mine)
            dist.recv(arrived, (rank - 1) % n)
        if sending:
            sending.wait()
        passing_by = mine if arrived is None else arrived + mine
    return passing_by


def in_floats(tensor, node, peers):
    shard = torch.empty(tensor.numel() // dist.get_world_size(node))
    collectives.reduce_scatter_single(shard, tensor, group=node)
    collectives.all_reduce(shard, group=peers)
    collectives.all_gather_single(tensor, shard, group=node)


def the_shard_of_rank_0(tensor, node, peers):
    collectives.all_reduce(tensor, group=node)
    shard = tensor.flatten().chunk(dist.get_world_size(node))[0].clone()
    collectives.all_reduce(shard, group=peers)
    collectives.all_gather_single(tensor, shard, group=node)


WRONG = {
    "ring_transfers": {
        adds_once_too_often: "With 2 ranks, rank 0 ends with",
        every_other_chunk_whole: "With 8 ranks",
        up_to_eight_ranks: "With 11 ranks",
        ring_for_two: "With 3 ranks, rank 0 ends with",
        adds_in_every_step: "With 2 ranks, rank 0 ends with (0, 0, 1)",
        reduce_scatter_only: "With 2 ranks, rank 0 ends with (0,) in chunk 1",
        off_by_one_in_the_second_half: "ends with",
        all_through_rank_0: "in this ring it sends to rank",
        the_whole_tensor_down_a_chain_and_around: "rank 0 sends 6 chunks in all",
        to_the_left: "With 3 ranks, rank 0 sends to rank 2 in step 0",
        one_message_at_a_time: "steps; if all ranks send at the same time",
        chunks_beyond_the_end: "does not fit",
        a_generator: "expected a list of `Transfer`s",
        tuples: "expected a list of `Transfer`s",
    },
    "ring_reduce_scatter": {
        nothing_sent_of_zeros: "On real ranks: `rank",
        without_empty_ones: "in this order",
        in_32_bits: "expected 11101.0000",
        flat: "expected a tensor of shape (2, 3), of torch.float64",
        passes_on_its_own_only: "With 3 ranks",
        adds_in_place: "were changed",
        forgets_its_own: "With 2 ranks",
        the_mean: "expected 11s",
        nothing_returned: "returned `None`; expected a tensor",
        one_chunk_further: "With 2 ranks",
        straight_to_its_rank: "right neighbour only",
        whole_tensors_around: "every chunk but its own, once",
        equal_lengths_only: "On real ranks: `rank",
        all_reduces: "the collective `all_reduce`",
        through_the_back_door: "the collective `all_reduce`",
        through_the_store: "there were other messages",
        never_ends: "still waits to receive from rank",
    },
    "hierarchical_sum": {
        in_floats: "On real ranks",
        the_shard_of_rank_0: "of the sums",
        of_one_dimension: "On real ranks: `rank",
        a_flat_ring: "to other nodes; expected 0.5 S",
        whole_tensors_between: "rank 0 sent 1 S to other nodes; expected 0.5 S",
        leaders_only: "rank 0 sent 1 S to other nodes",
        groups_swapped: "to other nodes; expected 0.5 S",
        nothing_between: "rank 0 has only 0 % of the sums",
        not_gathered: "rank 0 has only 50 % of the sums",
        returned_not_in_place: "Is `tensor` itself changed?",
        the_largest: "is 1010 in place 0; expected 1111",
        one_line_of_pytorch: "rank 0 has a byte meter that counted nothing",
        one_line_of_the_package: "the package's own hierarchy",
        on_node_0_only: "RuntimeError: nothing to do here",
    },
}
