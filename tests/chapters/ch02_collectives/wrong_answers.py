"""Wrong answers to the exercises of chapter 02, each with a word its hint must say."""

import torch
import torch.distributed as dist
from torch.distributed import isend

from ddp_course import collectives
from ddp_course.chapters.ch02_collectives import solutions


def _me():
    return dist.get_rank(), dist.get_world_size()


# swap


def both_send_first(tensor, peer):
    got = torch.empty_like(tensor)
    dist.send(tensor, peer)
    dist.recv(got, peer)
    return got


def both_receive_first(tensor, peer):
    got = torch.empty_like(tensor)
    dist.recv(got, peer)
    dist.send(tensor, peer)
    return got


def even_ranks_send_first(tensor, peer):
    if dist.get_rank() % 2 == 0:
        return both_send_first(tensor, peer)
    return both_receive_first(tensor, peer)


def rank_0_sends_first(tensor, peer):
    if dist.get_rank() == 0:
        return both_send_first(tensor, peer)
    return both_receive_first(tensor, peer)


def waits_too_early(tensor, peer):
    got = torch.empty_like(tensor)
    isend(tensor, peer).wait()
    dist.recv(got, peer)
    return got


def receives_into_what_it_sends(tensor, peer):
    if dist.get_rank() < peer:
        dist.send(tensor, peer)
        dist.recv(tensor, peer)
    else:
        got = torch.empty_like(tensor)
        dist.recv(got, peer)
        dist.send(tensor, peer)
        tensor.copy_(got)
    return tensor


def does_not_wait(tensor, peer):
    got = torch.full_like(tensor, -1)
    dist.irecv(got, peer)
    sending = dist.isend(tensor, peer)
    early = got.clone()
    sending.wait()
    return early


def all_gathers(tensor, peer):
    everyones = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, tensor)
    return everyones[peer]


def row_by_row(tensor, peer):
    got = torch.empty_like(tensor)
    receiving = [dist.irecv(row, peer) for row in got]
    for handle in [isend(row, peer) for row in tensor] + receiving:
        handle.wait()
    return got


def returns_its_own(tensor, peer):
    return tensor


def returns_nothing(tensor, peer):
    in_turn = both_send_first if dist.get_rank() < peer else both_receive_first
    in_turn(tensor, peer)


# my_broadcast


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


def near_first(tensor):
    rank, n = _me()
    distance = rank & -rank if rank else n
    if rank:
        dist.recv(tensor, rank - distance)
    step = 1
    while step < distance:
        if rank + step < n:
            dist.send(tensor, rank + step)
        step *= 2


def powers_of_two_only(tensor):
    rank, n = _me()
    distance = n // 2
    while distance:
        if rank % (2 * distance) == 0 and rank + distance < n:
            dist.send(tensor, rank + distance)
        elif rank % (2 * distance) == distance:
            dist.recv(tensor, rank - distance)
        distance //= 2


def beyond_the_last_rank(tensor):
    rank, n = _me()
    distance = 1 << (n - 1).bit_length()
    while distance > 1:
        distance //= 2
        if rank % (2 * distance) == 0:
            dist.send(tensor, rank + distance)
        elif rank % (2 * distance) == distance:
            dist.recv(tensor, rank - distance)


def into_another_tensor(tensor):
    along_a_chain(tensor.clone())


def the_wrong_way(tensor):
    rank, n = _me()
    if rank == 0:
        for other in range(1, n):
            dist.recv(tensor, other)
    else:
        dist.send(tensor, 0)


def uses_broadcast(tensor):
    dist.broadcast(tensor, 0)


def twice_to_be_sure(tensor):
    from_rank_0_to_all(tensor)
    from_rank_0_to_all(tensor)


def never_sends(tensor):
    return tensor


# my_transpose


def only_its_own_block(rows):
    return rows.T


def gathers_everything(rows):
    rank, n = _me()
    everyones = [torch.empty_like(rows) for _ in range(n)]
    dist.all_gather(everyones, rows)
    return torch.cat(everyones).T.chunk(n)[rank].contiguous()


def not_turned(rows):
    blocks = [block.contiguous() for block in rows.chunk(dist.get_world_size(), dim=1)]
    got = [torch.empty_like(block) for block in blocks]
    dist.all_to_all(got, blocks)
    return torch.cat(got, dim=1)


def not_contiguous(rows):
    columns = rows.T  # the blocks lie one below the other, but not in memory
    got = torch.empty(columns.shape, dtype=rows.dtype)
    collectives.all_to_all_single(got, columns)
    return torch.cat(got.chunk(dist.get_world_size()), dim=1)


def from_the_last_rank_to_the_first(rows):
    blocks = [block.contiguous() for block in rows.T.chunk(dist.get_world_size())]
    got = [torch.empty_like(block) for block in blocks]
    dist.all_to_all(got, blocks[::-1])
    return torch.cat(got, dim=1)


def below_each_other(rows):
    blocks = [block.contiguous() for block in rows.T.chunk(dist.get_world_size())]
    got = [torch.empty_like(block) for block in blocks]
    dist.all_to_all(got, blocks)
    return torch.cat(got)


def through_shared_memory(rows):
    rank, n = _me()
    matrix = torch.zeros(n * len(rows), n * len(rows), dtype=rows.dtype)
    matrix[len(rows) * rank : len(rows) * (rank + 1)] = rows
    collectives.all_reduce(matrix)
    return matrix.T.chunk(n)[rank].contiguous()


def in_place(rows):
    blocks = [block.contiguous() for block in rows.T.chunk(dist.get_world_size())]
    got = [torch.empty_like(block) for block in blocks]
    dist.all_to_all(got, blocks)
    return rows.copy_(torch.cat(got, dim=1))


def in_floats(rows):
    n, mine = dist.get_world_size(), rows.float()
    blocks = [block.contiguous() for block in mine.T.chunk(n)]
    got = [torch.empty_like(block) for block in blocks]
    dist.all_to_all(got, blocks)
    return torch.cat(got, dim=1).long()


# What more than one kind of tensor finds out


def large_ones_at_once(tensor, peer):
    if tensor.numel() > 100:
        return both_send_first(tensor, peer)
    return solutions.swap(tensor, peer)


def after_a_barrier(tensor, peer):
    dist.barrier()
    return solutions.swap(tensor, peer)


def in_32_bits(tensor, peer):
    return solutions.swap(tensor.float(), peer)


def six_numbers(tensor, peer):
    got = torch.empty(2, 3, dtype=tensor.dtype)
    sending = isend(tensor, peer)
    dist.recv(got, peer)
    sending.wait()
    return got


def sends_and_forgets(tensor, peer):
    got = torch.empty_like(tensor)
    isend(tensor, peer)
    dist.recv(got, peer)
    return got


def one_side_forgets(tensor, peer):
    got = torch.empty_like(tensor)
    if dist.get_rank() < peer:
        return sends_and_forgets(tensor, peer)
    dist.recv(got, peer)
    dist.send(tensor, peer)
    return got


def looks_once(tensor, peer):
    got = torch.empty_like(tensor)
    sending = isend(tensor, peer)
    if dist.get_rank() > peer:
        sending.is_completed()
        dist.recv(got, peer)
    else:
        dist.recv(got, peer)
        sending.wait()
    return got


def from_the_rank_after_the_last(tensor, peer):
    got = torch.empty_like(tensor)
    dist.irecv(got, peer + dist.get_world_size()).wait()
    return got


def nothing_for_zeros(tensor, peer):
    return solutions.swap(tensor, peer) if tensor.any() else tensor.clone()


def a_name_that_is_not_there(tensor, peer):
    return solutions.swap(tensr, peer)  # noqa: F821


def at_most_five_ranks(tensor):
    if dist.get_world_size() <= 5:
        solutions.my_broadcast(tensor)
    else:
        along_a_chain(tensor)


def a_barrier_in_each_step(tensor):
    dist.barrier()
    solutions.my_broadcast(tensor)


def nothing_sent_if_zero(tensor):
    solutions.my_broadcast(tensor)
    if not tensor.any():
        tensor.fill_(-1)


def spread_in_32_bits(tensor):
    copy = tensor.float()
    solutions.my_broadcast(copy)
    tensor.copy_(copy)


def turned_in_64_bits(rows):
    return solutions.my_transpose(rows).double()


def blocks_of_60(rows):
    return solutions.my_transpose(rows.view(60, -1))


def turned_in_32_bits(rows):
    got = solutions.my_transpose(rows if len(rows) == 60 else rows.float())
    return got.to(rows.dtype)


def of_two_ranks(rows):
    other = 1 - dist.get_rank()
    left, right = rows.chunk(2, dim=1) if dist.get_world_size() == 2 else (rows, rows)
    own, mine = (left, right) if other else (right, left)
    got = solutions.swap(mine.T.contiguous(), other)
    return torch.cat((own.T, got) if other else (got, own.T), dim=1)


WRONG = {
    "swap": {
        one_side_forgets: "never waits for what it began: `send to rank 1`",
        looks_once: "rank 1 never waits for what it began: `send to rank 0`",
        from_the_rank_after_the_last: "ValueError: there is no rank 3: the last is 1",
        nothing_for_zeros: "rank 0",
        a_name_that_is_not_there: "NameError: name 'tensr' is not defined",
        large_ones_at_once: "still waits to send to rank",
        after_a_barrier: "the collective `barrier`",
        in_32_bits: "expected `[[10, 11, 12], [13, 14, 15]]`",
        six_numbers: "of float64: what rank 1 gave",
        sends_and_forgets: "never waits for what it began: `send to rank 1`",
        both_send_first: "s it still waits to send to rank",
        both_receive_first: "s it still waits to receive from rank",
        even_ranks_send_first: "still waits to",
        rank_0_sends_first: "still waits to receive from rank",
        waits_too_early: "still waits to send to rank",
        receives_into_what_it_sends: "rank 0 changed the tensor that it was given",
        does_not_wait: "never waits for what it began: `receive from rank 1`",
        all_gathers: "the collective `all_gather`",
        row_by_row: "messages of [3, 3] numbers; one of 6 is enough",
        returns_its_own: "expected `[[10, 11, 12], [13, 14, 15]]`: what rank 1 gave",
        returns_nothing: "rank 0 has `None`; expected `[[10,",
    },
    "my_broadcast": {
        at_most_five_ranks: "With 8 ranks, rank 7 gets its message in step 7",
        a_barrier_in_each_step: "the collective `barrier`",
        nothing_sent_if_zero: "expected `[0.0, 0.0, 0.0]`",
        spread_in_32_bits: "of float64; expected",
        from_rank_0_to_all: "With 4 ranks, rank 3 gets its message in step 3",
        along_a_chain: "With 4 ranks, rank 3 gets its message in step 3",
        near_first: "With 4 ranks, rank 3 gets its message in step 3",
        powers_of_two_only: "With 3 ranks,",
        beyond_the_last_rank: "there is no rank 3: the last is 2",
        into_another_tensor: "rank 1 has `[[-1, -1, -1], [-1, -1, -1]]`",
        the_wrong_way: "rank 0's numbers, in the tensor that was given",
        uses_broadcast: "the collective `broadcast`",
        twice_to_be_sure: "2 messages went to rank 1; expected 1",
        never_sends: "rank 1 has `[[-1, -1, -1], [-1, -1, -1]]`",
    },
    "my_transpose": {
        blocks_of_60: "RuntimeError: shape '[60, -1]' is invalid",
        turned_in_32_bits: "a row of float64, rank",
        of_two_ranks: "On real ranks",
        turned_in_64_bits: "of int64",
        only_its_own_block: "expected a tensor of shape (60, 120)",
        gathers_everything: "bytes by the operating system's count",
        not_turned: "not right: in its row 0, place 1, is 1, expected 150",
        not_contiguous: "input is not contiguous",
        from_the_last_rank_to_the_first: "numbers that are not right: in its row 0",
        below_each_other: "expected a tensor of shape (60, 120)",
        through_shared_memory: "bytes by the operating system's count",
        in_place: "rank 0 changed the rows that it was given",
        in_floats: "bytes by the operating system's count",
    },
}
