"""Wrong answers to the exercises of chapter 00, each with a word its hint must say."""

import torch
import torch.distributed as dist

from ddp_course.chapters.ch00_start_here import solutions


def everything(batch, rank, world_size):
    return batch


def strided(batch, rank, world_size):
    return batch[rank::world_size]


def overlapping(batch, rank, world_size):
    rows = len(batch) // world_size
    return batch[rank * rows // 2 : rank * rows // 2 + rows]


def last_row_dropped(batch, rank, world_size):
    rows = (len(batch) - 1) // world_size
    return batch[rank * rows : (rank + 1) * rows]


def backwards(batch, rank, world_size):
    return batch.chunk(world_size)[world_size - 1 - rank]


def one_past_the_end(batch, rank, world_size):
    rows = len(batch) // world_size
    return batch[rank * rows : (rank + 1) * rows + 1]


def columns(batch, rank, world_size):
    return batch[:, rank : rank + 1]


def the_same_for_all(batch, rank, world_size):
    return batch[: len(batch) // world_size]


def row_numbers(batch, rank, world_size):
    rows = len(batch) // world_size
    return range(rank * rows, (rank + 1) * rows)


def for_four_ranks_only(batch, rank, world_size):
    return batch[rank * 3 : (rank + 1) * 3]


def columns_mixed(batch, rank, world_size):
    rows = batch.chunk(world_size)[rank]
    return torch.stack([rows[:, 0], rows[:, 1].flip(0)], dim=1)


def first_column_mixed(batch, rank, world_size):
    rows = batch.chunk(world_size)[rank]
    return torch.stack([rows[:, 0].flip(0), rows[:, 1]], dim=1)


def always_rank_0_of_a_group(batch, rank, world_size):
    return batch.chunk(world_size)[0 if dist.is_initialized() else rank]


def sum_only(tensor):
    dist.all_reduce(tensor)


def mean_in_a_new_tensor(tensor):
    new = tensor.clone()
    dist.all_reduce(new)
    return new / dist.get_world_size()


def for_four_only(tensor):
    dist.all_reduce(tensor)
    tensor /= 4


def on_rank_0_only(tensor):
    dist.reduce(tensor, 0)
    tensor /= dist.get_world_size()


def rank_0_stays_away(tensor):
    if dist.get_rank() > 0:
        dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


def largest(tensor):
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)


# What more than one kind of tensor finds out


def in_32_bits(batch, rank, world_size):
    return solutions.my_slice(batch.float(), rank, world_size).to(batch.dtype)


def of_two_dimensions(batch, rank, world_size):
    rows = len(batch) // world_size
    return batch[rank * rows : (rank + 1) * rows, :]


def averaged_in_32_bits(tensor):
    mean = tensor.float()
    solutions.my_average(mean)
    tensor.copy_(mean)


def averaged_in_16_bits(tensor):
    mean = tensor.bfloat16()
    solutions.my_average(mean)
    tensor.copy_(mean)


def the_first_row(tensor):
    solutions.my_average(tensor[0])


def silent_without_a_number(tensor):
    if tensor.any():
        solutions.my_average(tensor)


def through_a_list(batch, rank, world_size):
    return torch.tensor(solutions.my_slice(batch, rank, world_size).tolist())


def up_to_four_ranks(batch, rank, world_size):
    return solutions.my_slice(batch, rank, min(world_size, 4))


def averaged_twice(tensor):
    solutions.my_average(tensor)
    dist.all_reduce(tensor)


def rounded(tensor):
    solutions.my_average(tensor)
    tensor.round_()


def mean_of_its_own(tensor):
    dist.all_reduce(tensor)
    tensor.copy_(tensor.mean())


WRONG = {
    "my_average": {
        averaged_in_32_bits: "float64, rank 0 has",
        averaged_in_16_bits: "float64, rank 0 has",
        the_first_row: "2 x 3 numbers, rank 0 has",
        silent_without_a_number: "On real ranks",
        averaged_twice: "With 4 ranks, a tensor of 2 x 3 numbers, rank 0 has",
        rounded: "With 4 ranks, a tensor of",
        mean_of_its_own: "expected",
        sum_only: "That is the sum",
        mean_in_a_new_tensor: "in the tensor that your function was given",
        for_four_only: "With 3 ranks",
        on_rank_0_only: "rank 1 has",
        rank_0_stays_away: "rank 0 returned while rank",
        largest: "expected",
    },
    "my_slice": {
        in_32_bits: "of torch.float64 as the batch",
        of_two_dimensions: "IndexError: too many indices",
        through_a_list: "of torch.float64 as the batch",
        up_to_four_ranks: "world_size 6: rank 0 got 3 rows; expected 2",
        everything: "12 rows; expected 3",
        strided: "rows [0, 4, 8]",
        overlapping: "a lower rank has row",
        last_row_dropped: "2 rows; expected 3",
        backwards: "expected [0, 1, 2]",
        one_past_the_end: "4 rows; expected 3",
        columns: "whole rows",
        the_same_for_all: "a lower rank has row",
        row_numbers: "expected a tensor",
        for_four_ranks_only: "3 rows; expected 4",
        columns_mixed: "expected [0, 1, 2]",
        first_column_mixed: "expected [0, 1, 2]",
        always_rank_0_of_a_group: "a lower rank has row",
    },
}
