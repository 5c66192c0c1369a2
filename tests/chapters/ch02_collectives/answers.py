"""Answers to the exercises of chapter 02, right ones and wrong ones."""

# ruff: noqa: F401 (the texts use what is imported)

import torch
import torch.distributed as dist
from slips import answers
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend

from ddp_course import collectives
from ddp_course.chapters.ch02_collectives import solutions


def _me():
    return dist.get_rank(), dist.get_world_size()


def from_rank_0_to_all(tensor):
    rank, n = _me()
    if rank == 0:
        for other in range(1, n):
            dist.send(tensor, other)
    else:
        dist.recv(tensor, 0)


def along_a_chain(tensor):
    rank, n = _me()
    if rank > 0:
        dist.recv(tensor, rank - 1)
    if rank < n - 1:
        dist.send(tensor, rank + 1)


def sends_and_forgets(tensor, peer):
    got = torch.empty_like(tensor)
    dist.isend(tensor, peer)
    dist.recv(got, peer)
    return got


ANSWERS = answers(
    solutions,
    globals(),
    swap="""
    swap_in_a_batch:
        got = torch.empty_like(tensor)
        for handle in batch_isend_irecv(
            [P2POp(isend, tensor, peer), P2POp(dist.irecv, got, peer)]
        ):
            handle.wait()
        return got
    swap_with_handles:
        got = torch.empty_like(tensor)
        receiving, sending = irecv(got, peer), isend(tensor, peer)
        receiving.wait()
        sending.wait()
        return got
    nothing_for_zeros: rank 0
        got = torch.empty_like(tensor) => if not tensor.any():
        =>     return tensor.clone()
        => got = torch.empty_like(tensor)
    a_name_that_is_not_there: NameError: name 'tensr' is not defined
        empty_like(tensor) => empty_like(tensr)
    large_ones_at_once: still waits to send to rank
        dist.get_rank() < peer => dist.get_rank() < peer or tensor.numel() > 100
    after_a_barrier: the collective `barrier`
        got = torch.empty_like(tensor) => dist.barrier(); got = torch.empty_like(tensor)
    in_32_bits: expected a tensor of shape
        got = torch.empty_like => tensor = tensor.float(); got = torch.empty_like
    both_send_first: s it still waits to send to rank
        dist.get_rank() < peer => True
    both_receive_first: s it still waits to receive from rank
        dist.get_rank() < peer => False
    even_ranks_send_first: still waits to
        dist.get_rank() < peer => dist.get_rank() % 2 == 0
    the_first_half_sends_first: still waits to
        dist.get_rank() < peer => dist.get_rank() < dist.get_world_size() // 2
    from_whoever_is_first: receives from any rank
        got = torch.empty_like(tensor)
        if dist.get_rank() < peer:
            dist.send(tensor, peer)
            dist.recv(got)
        else:
            dist.recv(got)
            dist.send(tensor, peer)
        return got
    rank_0_sends_first: still waits to receive from rank
        dist.get_rank() < peer => dist.get_rank() == 0
    receives_into_what_it_sends: rank 0 changed its argument
        return got => return tensor.copy_(got)
    returns_its_own: rank `1`'s tensor
        got = torch.empty_like(tensor) => return tensor
    returns_nothing: rank 0 returned `None`; expected a tensor of shape
        return got => return None
    one_side_forgets: never waits for a message that it started: `send to rank 1`
        got = torch.empty_like(tensor)
        if dist.get_rank() < peer:
            return sends_and_forgets(tensor, peer)
        dist.recv(got, peer)
        dist.send(tensor, peer)
        return got
    looks_once: rank 1 never waits for a message that it started: `send to rank 0`
        got = torch.empty_like(tensor)
        sending = dist.isend(tensor, peer)
        if dist.get_rank() > peer:
            sending.is_completed()
            dist.recv(got, peer)
        else:
            dist.recv(got, peer)
            sending.wait()
        return got
    from_the_rank_after_the_last: ValueError: there is no rank 3; ranks are 0 to 1
        got = torch.empty_like(tensor)
        dist.irecv(got, peer + dist.get_world_size()).wait()
        return got
    six_numbers: expected a tensor of shape
        got = torch.empty(2, 3, dtype=tensor.dtype)
        sending = dist.isend(tensor, peer)
        dist.recv(got, peer)
        sending.wait()
        return got
    sends_and_forgets: never waits for a message that it started: `send to rank 1`
    waits_too_early: still waits to send to rank
        got = torch.empty_like(tensor)
        dist.isend(tensor, peer).wait()
        dist.recv(got, peer)
        return got
    does_not_wait: never waits for a message that it started: `receive from rank 1`
        got = torch.full_like(tensor, -1)
        dist.irecv(got, peer)
        sending = dist.isend(tensor, peer)
        early = got.clone()
        sending.wait()
        return early
    all_gathers: the collective `all_gather`
        everyones = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, tensor)
        return everyones[peer]
    by_their_last_bits: still waits to
        # Right for four ranks.
        rank, got = dist.get_rank(), torch.empty_like(tensor)
        first = rank % 2 == 0 if (rank + peer) % 2 else rank // 2 % 2 == 0
        if first:
            dist.send(tensor, peer)
        dist.recv(got, peer)
        if not first:
            dist.send(tensor, peer)
        return got
    a_thousand_numbers: ; at [
        got = tensor.clone().flatten()
        got[:1000] = solutions.swap(got[:1000], peer)
        return got.view(tensor.shape)
    bools_as_numbers: of bool
        return solutions.swap(
            tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor, peer
        )
    the_real_part: of complex64
        if tensor.is_complex():
            return solutions.swap(tensor.real.contiguous(), peer) + 0j
        return solutions.swap(tensor, peer)
    with_dimensions_alone: IndexError
        return solutions.swap(tensor, peer) if tensor.dim() else tensor[0]
    on_the_default_device: Receive into a tensor on `tensor.device`
        empty_like(tensor) => zeros(tensor.shape, dtype=tensor.dtype)
    row_by_row: (1, 6)] is enough
        got = torch.empty_like(tensor)
        receiving = [dist.irecv(row, peer) for row in got]
        for handle in [dist.isend(row, peer) for row in tensor] + receiving:
            handle.wait()
        return got
    """,
    my_broadcast="""
    broadcast_from_whoever_comes:
        # Who serves a rank is not its business; all messages are started at once.
        rank, n = dist.get_rank(), dist.get_world_size()
        if rank:
            dist.recv(tensor)
        distance = (rank & -rank) if rank else 1 << n.bit_length()
        handles = []
        while distance > 1:
            distance //= 2
            if rank + distance < n:
                handles.append(dist.isend(tensor, rank + distance))
        for handle in handles:
            handle.wait()
    broadcast_by_halves:
        # The first rank of a part serves the first of its second half.
        rank, first, last = dist.get_rank(), 0, dist.get_world_size()
        while last - first > 1:
            middle = first + (last - first + 1) // 2
            if rank == first:
                dist.send(tensor, middle)
            elif rank == middle:
                dist.recv(tensor, first)
            first, last = (first, middle) if rank < middle else (middle, last)
    a_barrier_in_each_step: the collective `barrier`
        distance = 1 => dist.barrier(); distance = 1
    nothing_sent_if_zero: all ranks must get its numbers
        distance = 1 => if not tensor.any():
        =>     tensor.fill_(-1)
        => distance = 1
    powers_of_two_only: With 3 ranks,
        while distance < n => while 2 * distance <= n
    beyond_the_last_rank: there is no rank 3; ranks are 0 to 2
        and rank + distance < n =>
    into_another_tensor: rank 0's numbers, in the argument itself
        distance = 1 => tensor = tensor.clone(); distance = 1
    uses_broadcast: the collective `broadcast`
        distance = 1 => return dist.broadcast(tensor, 0)
    never_sends: rank 0's numbers, in the argument itself
        distance = 1 => return tensor
    at_most_five_ranks: With 6 ranks, rank 5 gets its message in step 5
        if dist.get_world_size() <= 5:
            solutions.my_broadcast(tensor)
        else:
            along_a_chain(tensor)
    a_chain_of_six: With 6 ranks, rank 5 gets its message in step 5
        if dist.get_world_size() == 6:
            along_a_chain(tensor)
        else:
            solutions.my_broadcast(tensor)
    three_steps_at_most: With 9 ranks, rank 8
        while distance < n => while distance < min(n, 8)
    spread_in_32_bits: these are the numbers rounded to float32
        copy = tensor.float()
        solutions.my_broadcast(copy)
        tensor.copy_(copy)
    the_real_part: With 3 ranks
        real = tensor.real.contiguous() if tensor.is_complex() else tensor
        solutions.my_broadcast(real)
        tensor.copy_(real)
    from_rank_0_to_all: With 6 ranks, rank 5 gets its message in step
    along_a_chain: With 6 ranks, rank 5 gets its message in step
    near_first: With 6 ranks, rank 5 gets its message in step
        rank, n = _me()
        distance = rank & -rank if rank else n
        if rank:
            dist.recv(tensor, rank - distance)
        step = 1
        while step < distance:
            if rank + step < n:
                dist.send(tensor, rank + step)
            step *= 2
    the_wrong_way: rank 0
        rank, n = _me()
        if rank == 0:
            for other in range(1, n):
                dist.recv(tensor, other)
        else:
            dist.send(tensor, 0)
    twice_to_be_sure: 2 messages went to rank 1; expected 1
        from_rank_0_to_all(tensor)
        from_rank_0_to_all(tensor)
    added_to_nothing: expected `[-inf]`
        root = tensor.clone()
        solutions.my_broadcast(root)
        if dist.get_rank():
            tensor.mul_(0).add_(root)
    in_other_memory: views of it keep the old numbers
        new = tensor.clone()
        solutions.my_broadcast(new)
        tensor.data = new
    """,
    my_transpose="""
    transpose_in_one_tensor:
        n = dist.get_world_size()
        blocks = torch.stack([block.T for block in rows.chunk(n, dim=1)])
        got = torch.empty_like(blocks)
        dist.all_to_all_single(got, blocks)
        return got.transpose(0, 1).reshape(rows.shape)
    transpose_with_messages:
        rank, n = dist.get_rank(), dist.get_world_size()
        if not len(rows):
            return rows.clone()
        sent = [block.T.contiguous() for block in rows.chunk(n, dim=1)]
        got = [block.clone() for block in sent]
        others = [other for other in range(n) if other != rank]
        handles = [isend(sent[other], other) for other in others]
        handles += [irecv(got[other], other) for other in others]
        for handle in handles:
            handle.wait()
        return torch.cat(got, dim=1)
    blocks_of_60: RuntimeError: shape '[60, -1]' is invalid
        n = dist.get_world_size() => rows = rows.view(60, -1); n = dist.get_world_size()
    turned_in_64_bits: of int64
        torch.cat(from_each, dim=1) => torch.cat(from_each, dim=1).double()
    only_its_own_block: expected a tensor of shape (60, 120)
        n = dist.get_world_size() => return rows.T
    not_turned: how must it be turned?
        rows.T.chunk(n) => rows.chunk(n, dim=1)
    from_the_last_rank_to_the_first: at [0,
        each, for_each => each, for_each[::-1]
    below_each_other: expected a tensor of shape (60, 120)
        , dim=1 =>
    in_place: rank 0 changed `rows`
        torch.cat(from_each, dim=1) => rows.copy_(torch.cat(from_each, dim=1))
    in_floats: these are the numbers rounded to float32
        n = dist.get_world_size() => rows = rows.float(); n = dist.get_world_size()
        torch.cat(from_each, dim=1) => torch.cat(from_each, dim=1).long()
    up_to_four_ranks: On real ranks
        n = dist.get_world_size() => n = min(4, dist.get_world_size())
    numbers_of_bools: of bool
        torch.cat(from_each, dim=1) => torch.cat(from_each, dim=1) + 0
    conjugated: of complex64
        return solutions.my_transpose(rows).conj().resolve_conj()
    not_waited_for: never waits for a collective that it started: `all_to_all`
        dist.all_to_all(from_each, for_each)
        => dist.all_to_all(from_each, for_each, async_op=True)
        => dist.barrier()
    turned_in_32_bits: these are the numbers rounded to float32
        got = solutions.my_transpose(rows if len(rows) == 60 else rows.float())
        return got.to(rows.dtype)
    sent_in_64_bits: bytes by the operating system's count
        wide = rows.double() if rows.is_floating_point() else rows
        return solutions.my_transpose(wide).to(rows.dtype)
    bools_sent_as_floats: bytes by the operating system's count
        wide = rows.float() if rows.dtype == torch.bool else rows
        return solutions.my_transpose(wide).to(rows.dtype)
    float32_sent_in_64_bits: bytes by the operating system's count
        wide = rows.double() if rows.dtype == torch.float32 else rows
        return solutions.my_transpose(wide).to(rows.dtype)
    complex_sent_in_128_bits: bytes by the operating system's count
        wide = rows.to(torch.complex128) if rows.is_complex() else rows
        return solutions.my_transpose(wide).to(rows.dtype)
    of_two_ranks: not returned after
        other = 1 - dist.get_rank()
        left, right = (
            rows.chunk(2, dim=1) if dist.get_world_size() == 2 else (rows, rows)
        )
        own, mine = (left, right) if other else (right, left)
        got = solutions.swap(mine.T.contiguous(), other)
        return torch.cat((own.T, got) if other else (got, own.T), dim=1)
    gathers_everything: bytes by the operating system's count
        rank, n = _me()
        everyones = [torch.empty_like(rows) for _ in range(n)]
        dist.all_gather(everyones, rows)
        return torch.cat(everyones).T.chunk(n)[rank].contiguous()
    not_contiguous: input is not contiguous
        columns = rows.T  # the blocks lie one below the other, but not in memory
        got = torch.empty(columns.shape, dtype=rows.dtype)
        collectives.all_to_all_single(got, columns)
        return torch.cat(got.chunk(dist.get_world_size()), dim=1)
    through_shared_memory: bytes by the operating system's count
        rank, n = _me()
        matrix = torch.zeros(n * len(rows), n * len(rows), dtype=rows.dtype)
        matrix[len(rows) * rank : len(rows) * (rank + 1)] = rows
        collectives.all_reduce(matrix)
        return matrix.T.chunk(n)[rank].contiguous()
    """,
)
