"""Answers to the exercises of chapter 03, right ones and wrong ones."""

# ruff: noqa: F401 (the texts use what is imported)

from dataclasses import replace

import torch
import torch.distributed as dist
from slips import answers
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend

from ddp_course import collectives
from ddp_course.chapters.ch03_all_reduce import solutions
from ddp_course.collectives import (
    hierarchical,
    hierarchical_all_reduce,
    ring,
    ring_all_reduce,
)
from ddp_course.collectives.catalog import ring_plan


def _pass(outgoing, like, by=1):
    """Send so many ranks to the right; return what arrives, as large as `like`."""
    rank, n = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(outgoing, (rank + by) % n)
    arrived = torch.empty_like(like)
    dist.recv(arrived, (rank - by) % n)
    sending.wait()
    return arrived


SHARDS: dict = {}

ANSWERS = answers(
    solutions,
    globals(),
    ring_transfers="""
    two_halves:
        n = world_size
        first = [
            Transfer(k, r, (r + 1) % n, (r - k) % n, (r - k) % n + 1, True)
            for r in range(n)
            for k in range(n - 1)
        ]
        return first + [
            Transfer(n - 1 + t.step, t.src, t.dst, c, c + 1, False)
            for t in first
            for c in [(t.first + 1) % n]
        ]
    by_the_package:
        return list(ring_plan(world_size).transfers)
    adds_once_too_often: With 2 ranks, rank 0 ends with
        step < world_size - 1 => step < world_size
    up_to_eight_ranks: With 11 ranks
        transfers = [] => transfers, world_size = [], min(world_size, 8)
    ring_for_two: With 3 ranks, rank 0 ends with
        step < world_size - 1 => step < world_size // 2
    adds_in_every_step: With 2 ranks, rank 0 ends with (0, 0, 1)
        step < world_size - 1 => True
    reduce_scatter_only: With 2 ranks, rank 0 ends with (0,) in chunk 1
        2 * (world_size - 1) => world_size - 1
    off_by_one_in_the_second_half: ends with
        (rank - 1 - step) => (rank - 1 - step - (step >= world_size - 1))
    to_the_left: With 3 ranks, rank 0 sends to rank 2 in step 0
        (rank + 1) => (rank - 1)
        (rank - 1 - step) => (rank + 1 + step)
    one_message_at_a_time: steps; if all ranks send at the same time
        step, => step * world_size + rank,
    none_of_six: With 6 ranks
        transfers = [] => transfers, world_size = [], world_size * (world_size != 6)
    up_to_eleven_ranks: With 40 ranks
        transfers = [] => transfers, world_size = [], min(world_size, 11)
    two_chunks_at_once: With 4 ranks, rank 0 sends 2 chunks in step 0
        # Right sums, but in each step half of the ranks send, each two chunks.
        n = world_size
        if n % 2:
            return solutions.ring_transfers(n)
        return [
            Transfer(step, r, (r + 1) % n, c, c + 1, step < n - 1)
            for c in range(n)
            for step in range(2 * (n - 1))
            for r in [(c // 2 * 2 + step) % n]
        ]
    two_chunks_in_one_transfer: With 4 ranks, rank 0 sends 2 chunks in step 0
        if world_size % 2:
            return solutions.ring_transfers(world_size)
        return [
            Transfer(step, r, (r + 1) % world_size, c, c + 2, step < world_size - 1)
            for c in range(0, world_size, 2)
            for step in range(2 * (world_size - 1))
            for r in [(c + step) % world_size]
        ]
    two_ranks_there_and_back: With 2 ranks, rank 0 sends 2 chunks in step 0
        if world_size == 2:
            return [Transfer(0, 0, 1, 0, 2, True), Transfer(1, 1, 0, 0, 2, False)]
        return solutions.ring_transfers(world_size)
    chunks_beyond_the_end: does not fit
        return transfers => return [Transfer(0, 0, 1, world_size, world_size + 1, True)]
    a_generator: expected a list of `Transfer`s
        return transfers => return (t for t in transfers)
    tuples: expected a list of `Transfer`s
        return transfers => return [(0, 0, 1, 0, 1, True)]
    every_other_chunk_whole: With 8 ranks
        n = world_size
        return [
            replace(t, first=0, last=n) if n % 2 == 0 and n > 4 else t
            for t in solutions.ring_transfers(n)
        ]
    all_through_rank_0: in this ring it sends to rank
        n = world_size
        up = [Transfer(r - 1, r, 0, 0, n, True) for r in range(1, n)]
        return up + [Transfer(n - 2 + r, 0, r, 0, n, False) for r in range(1, n)]
    the_whole_tensor_down_a_chain_and_around: rank 0 sends 6 chunks in all
        n = world_size
        up = [Transfer(r, r, r + 1, 0, n, True) for r in range(n - 1)]
        return up + [
            Transfer(n - 1 + k, (n - 1 + k) % n, k, 0, n, False) for k in range(n - 1)
        ]
    """,
    ring_reduce_scatter="""
    ring_in_batches:
        rank, n = dist.get_rank(), dist.get_world_size()
        passing_by = chunks[(rank - 1) % n]
        for k in range(n - 1):
            arrived = torch.empty_like(chunks[(rank - 2 - k) % n])
            batch = [
                P2POp(dist.isend, passing_by, (rank + 1) % n),
                P2POp(dist.irecv, arrived, (rank - 1) % n),
            ]
            for handle in batch_isend_irecv(batch):
                handle.wait()
            passing_by = arrived + chunks[(rank - 2 - k) % n]
        return passing_by
    ring_with_receives_posted_ahead:
        rank, n = dist.get_rank(), dist.get_world_size()
        order = [chunks[(rank - 1 - k) % n] for k in range(n)]
        arrived = [torch.empty_like(chunk) for chunk in order[1:]]
        receiving = [irecv(chunk, (rank - 1) % n) for chunk in arrived]
        total, sending = order[0], []
        for own, chunk, handle in zip(order[1:], arrived, receiving, strict=True):
            sending.append(isend(total, (rank + 1) % n))
            handle.wait()
            total = chunk.add_(own)
        for handle in sending:
            handle.wait()
        return total
    nothing_sent_of_zeros: On real ranks: `rank
        (rank + 1) % n) => (rank + 1) % n) if passing_by.any() else None
        sending.wait() => if sending:
        =>     sending.wait()
    in_32_bits: numbers of another type
        rank,
        => dtype = chunks[0].dtype; chunks = [chunk.float() for chunk in chunks]; rank,
        return passing_by => return passing_by.to(dtype)
    flat: expected a tensor of shape
        rank, n => chunks = [chunk.flatten() for chunk in chunks]; rank, n
    adds_in_place: has changed
        arrived + chunks[(rank - 2 - k) % n] => chunks[(rank - 2 - k) % n].add_(arrived)
    forgets_its_own: With 2 ranks
        arrived + chunks[(rank - 2 - k) % n] => arrived
    the_mean: the sum of the chunks
        return passing_by => return passing_by // n
    float32_for_bfloat16: of bfloat16
        return passing_by
        => wide = passing_by.dtype == torch.bfloat16
        => return passing_by.float() if wide else passing_by
    bfloat16_sent_as_float32: numbers of another type
        narrow = chunks[0].dtype == torch.bfloat16
        sums = [chunk.float() if narrow else chunk for chunk in chunks]
        return solutions.ring_reduce_scatter(sums).to(chunks[0].dtype)
    without_nan: expected `<tensor of shape (20000,)>`
        return passing_by => return passing_by.nan_to_num()
    nothing_on_one_rank: With 1 rank, rank 0 returned `None`
        return passing_by => return passing_by if n > 1 else None
    nothing_returned: returned `None`; expected a tensor
        return passing_by => return None
    one_chunk_further: With 2 ranks
        rank, n => chunks = [*chunks[1:], chunks[0]]; rank, n
    without_empty_ones: in this order
        rank, n = dist.get_rank(), dist.get_world_size()
        passing_by = chunks[(rank - 1) % n]
        for k in range(n - 1):
            mine, arrived = chunks[(rank - 2 - k) % n], None
            sending = (
                dist.isend(passing_by, (rank + 1) % n) if len(passing_by) else None
            )
            if len(mine):
                arrived = torch.empty_like(mine)
                dist.recv(arrived, (rank - 1) % n)
            if sending:
                sending.wait()
            passing_by = mine if arrived is None else arrived + mine
        return passing_by
    passes_on_its_own_only: With 5 ranks
        # Right for two ranks.
        rank, n = dist.get_rank(), dist.get_world_size()
        total = chunks[rank].clone()
        for k in range(n - 1):
            arrived = _pass(chunks[(rank - 1 - k) % n], chunks[(rank - 2 - k) % n])
        return total + arrived
    straight_to_its_rank: right neighbour only
        rank, n = dist.get_rank(), dist.get_world_size()
        total = chunks[rank].clone()
        for k in range(1, n):
            total += _pass(chunks[(rank + k) % n], total, k)
        return total
    whole_tensors_around: every chunk but the rank's own, once
        rank, n = dist.get_rank(), dist.get_world_size()
        passing_by, total = torch.cat(chunks), torch.cat(chunks)
        for _ in range(n - 1):
            passing_by = _pass(passing_by, passing_by)
            total += passing_by
        return total.split([len(chunk) for chunk in chunks])[rank]
    equal_lengths_only: On real ranks: `rank
        total = torch.stack(chunks)
        dist.all_reduce(total)
        return total[dist.get_rank()]
    all_reduces: the collective `all_reduce`
        totals = [chunk.clone() for chunk in chunks]
        for total in totals:
            dist.all_reduce(total)
        return totals[dist.get_rank()]
    through_the_back_door: the collective `all_reduce`
        for chunk in (totals := [chunk.clone() for chunk in chunks]):
            dist.group.WORLD.allreduce([chunk]).wait()
        solutions.ring_reduce_scatter(chunks)
        return totals[dist.get_rank()]
    through_the_store: there were other messages
        # The ring is for show: the numbers come from the store in which ranks meet.
        store = dist.distributed_c10d._get_default_store()
        rank, n = dist.get_rank(), dist.get_world_size()
        for c, chunk in enumerate(chunks):
            store.set(f"{rank}: {c}", chunk.numpy().tobytes().hex())
        solutions.ring_reduce_scatter(chunks)
        sums = [bytes.fromhex(store.get(f"{r}: {rank}").decode()) for r in range(n)]
        return sum(torch.frombuffer(bytearray(g), dtype=chunks[0].dtype) for g in sums)
    never_ends: still waits to receive from rank
        # Everybody receives before anybody sends.
        rank, n = dist.get_rank(), dist.get_world_size()
        arrived = torch.empty_like(chunks[(rank - 2) % n])
        dist.recv(arrived, (rank - 1) % n)
        dist.send(chunks[(rank - 1) % n], (rank + 1) % n)
        return arrived
    """,
    hierarchical_sum="""
    all_inside_and_a_shard_between:
        # Inside the node, all-reduce everything; among the peers, a shard each.
        collectives.all_reduce(tensor, group=node)
        shard = tensor.flatten().chunk(dist.get_world_size(node))[dist.get_rank(node)]
        shard = shard.clone()
        collectives.all_reduce(shard, group=peers)
        collectives.all_gather_single(tensor, shard, group=node)
    by_lists_of_pytorch_and_ours:
        # A list of views for the tensor, and the hierarchy's three steps.
        n = dist.get_world_size(node)
        pieces = list(tensor.view(-1).chunk(n))
        shard = torch.zeros_like(pieces[0])
        collectives.reduce_scatter(shard, pieces, group=node)
        collectives.all_reduce(shard, group=peers)
        collectives.all_gather(pieces, shard, group=node)
    in_floats: On real ranks
        tensor.new_empty( => torch.empty(
    of_one_dimension: On real ranks: `rank
        tensor.numel() => len(tensor)
    equal_rows: On real ranks: `rank
        rows = len(tensor) // dist.get_world_size(node)
        shard = tensor.new_empty(rows, *tensor.shape[1:])
        collectives.reduce_scatter_single(shard, tensor, group=node)
        collectives.all_reduce(shard, group=peers)
        collectives.all_gather_single(tensor, shard, group=node)
    nothing_to_do_on_one_node: On a real 1 x 2 cluster rank 0 has only 0 % of the sums
        if dist.get_world_size(peers) > 1:
            solutions.hierarchical_sum(tensor, node, peers)
    nothing_to_do_for_one_rank: On a real 2 x 1 cluster rank 0 has only 0 % of the sums
        if dist.get_world_size(node) > 1:
            solutions.hierarchical_sum(tensor, node, peers)
    other_data: `tensor` itself is unchanged
        sums = tensor.clone()
        solutions.hierarchical_sum(sums, node, peers)
        tensor.data = sums
    the_mean: That is the mean
        solutions.hierarchical_sum(tensor, node, peers)
        tensor //= dist.get_world_size()
    the_sum_of_the_node: That is the sum of this node's ranks
        collectives.all_reduce(tensor, group=node)
    buffers_by_length: the shard kept for another type
        n = tensor.numel()
        shard = SHARDS.setdefault(n, tensor.new_empty(n // dist.get_world_size(node)))
        assert shard.dtype == tensor.dtype, "the shard kept for another type"
        collectives.reduce_scatter_single(shard, tensor, group=node)
        collectives.all_reduce(shard, group=peers)
        collectives.all_gather_single(tensor, shard, group=node)
    wrong_the_second_time: wrong sums in a second call
        solutions.hierarchical_sum(tensor, node, peers)
        tensor += tensor.numel() in SHARDS
        SHARDS[tensor.numel()] = True
    whole_numbers_as_float64: of the sums
        sums = tensor.double() if tensor.dtype == torch.int64 else tensor
        solutions.hierarchical_sum(sums, node, peers)
        tensor.copy_(sums)
    kept_by_shape: wrong sums in a third call
        sums = tensor.clone()
        solutions.hierarchical_sum(sums, node, peers)
        tensor.copy_(SHARDS.setdefault((tensor.shape, tensor.dtype), sums))
    bfloat16_as_float32: of a tensor of bfloat16 to other nodes
        sums = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        solutions.hierarchical_sum(sums, node, peers)
        tensor.copy_(sums)
    by_pytorch_first: collectives that the byte meter does not see
        dist.all_reduce(tensor.clone())
        solutions.hierarchical_sum(tensor, node, peers)
    shards_cut_once_more: On real ranks: `rank
        n, nodes = dist.get_world_size(node), dist.get_world_size(peers)
        shard = tensor.new_empty(tensor.numel() // n)
        part = tensor.new_empty(tensor.numel() // (n * nodes))
        collectives.reduce_scatter_single(shard, tensor, group=node)
        collectives.reduce_scatter_single(part, shard, group=peers)
        collectives.all_gather_single(shard, part, group=peers)
        collectives.all_gather_single(tensor, shard, group=node)
    small_ones_on_their_node: has wrong sums of a tensor of 2 numbers
        if tensor.numel() < 256:
            collectives.all_reduce(tensor, group=node)
        else:
            solutions.hierarchical_sum(tensor, node, peers)
    small_ones_at_once: spare the slow links
        if tensor.numel() < 256:
            collectives.ring_all_reduce(tensor)
        else:
            solutions.hierarchical_sum(tensor, node, peers)
    the_smallest_at_once: sent 2 bytes to other nodes for a tensor of 2 numbers
        if tensor.nbytes < 64:
            collectives.all_reduce(tensor, group=node)
            collectives.all_reduce(tensor, group=peers)
        else:
            solutions.hierarchical_sum(tensor, node, peers)
    four_numbers_more: rank 0 sent 0.500065 S to other nodes; expected 0.5 S
        solutions.hierarchical_sum(tensor, node, peers)
        if dist.get_rank(node) == 0:
            collectives.all_reduce(tensor.view(-1)[:4].clone(), group=peers)
    whole_tensors_between: rank 0 sent 1 S to other nodes; expected 0.5 S
        shard = tensor => all_reduce(tensor, group=node)
        => return all_reduce(tensor, group=peers)
        => shard = tensor
    groups_swapped: to other nodes; expected 0.5 S
        shard = tensor => node, peers = peers, node; shard = tensor
    nothing_between: rank 0 has only 0 % of the sums
        all_reduce(shard, group=peers) => pass
    not_gathered: rank 0 has only 50 % of the sums
        all_gather_single(tensor, shard, group=node)
        => tensor.view(-1)[: shard.numel()] = shard
    returned_not_in_place: `tensor` itself is unchanged
        shard = tensor => tensor = tensor.clone(); shard = tensor
        (tensor, shard, group=node) => (tensor, shard, group=node); return tensor
    the_largest: expected 1152921504606810851. Reduce-scatter
        shard, tensor, group => shard, tensor, dist.ReduceOp.MAX, group
    one_line_of_pytorch: collectives that the byte meter does not see
        shard = tensor => return dist.all_reduce(tensor); shard = tensor
    one_line_of_the_package: the package's own hierarchy
        shard = tensor => return all_reduce(tensor); shard = tensor
    the_shard_of_rank_0: of the sums
        collectives.all_reduce(tensor, group=node)
        shard = tensor.flatten().chunk(dist.get_world_size(node))[0].clone()
        collectives.all_reduce(shard, group=peers)
        collectives.all_gather_single(tensor, shard, group=node)
    a_flat_ring: to other nodes; expected 0.5 S
        ring_all_reduce(tensor)
    leaders_only: rank 0 sent 1 S to other nodes
        hierarchical_all_reduce(tensor, variant="leader")
    on_node_0_only: RuntimeError: nothing to do here
        if dist.get_rank(peers) == 0:
            collectives.all_reduce(tensor, group=node)
        raise RuntimeError("nothing to do here")
    """,
)
