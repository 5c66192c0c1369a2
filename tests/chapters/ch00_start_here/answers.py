"""Answers to the exercises of chapter 00, right ones and wrong ones."""

# ruff: noqa: F401 (the texts use what is imported)

import torch
from slips import answers

from ddp_course.chapters.ch00_start_here import solutions

MEANS: dict = {}
SLICES: dict = {}

ANSWERS = answers(
    solutions,
    globals(),
    my_average="""
    divides_first:
        tensor.div_(dist.get_world_size())
        dist.all_reduce(tensor)
    gathers_and_stacks:
        everyones = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, tensor)
        tensor.copy_(torch.stack(everyones).mean(dim=0))
    the_first_row: rank 0 has
        dist.all_reduce(tensor) => tensor = tensor[0]; dist.all_reduce(tensor)
    averaged_twice: That is the sum
        /= dist.get_world_size() => /= dist.get_world_size(); dist.all_reduce(tensor)
    rounded: expected
        tensor /= dist.get_world_size => tensor /= dist.get_world_size(); tensor.round_
    mean_of_its_own: expected
        tensor /= dist.get_world_size() => tensor.copy_(tensor.mean())
    sum_only: That is the sum
        tensor /= dist.get_world_size() =>
    mean_in_a_new_tensor: in the argument `tensor`
        dist.all_reduce(tensor) => tensor = tensor.clone(); dist.all_reduce(tensor)
    for_four_only: With 3 ranks
        tensor /= dist.get_world_size() => tensor /= 4
    on_rank_0_only: rank 1 has
        dist.all_reduce(tensor) => dist.reduce(tensor, 0)
    largest: expected
        dist.all_reduce(tensor) => dist.all_reduce(tensor, dist.ReduceOp.MAX)
    averaged_in_32_bits: rounded to float32
        mean = tensor.float()
        solutions.my_average(mean)
        tensor.copy_(mean)
    averaged_in_16_bits: rank 0 has
        mean = tensor.bfloat16()
        solutions.my_average(mean)
        tensor.copy_(mean)
    of_a_contiguous_copy: is not contiguous
        dist.all_reduce(tensor) => dist.all_reduce(tensor.contiguous())
    of_a_flat_copy: is not contiguous
        flat = tensor.flatten()
        solutions.my_average(flat)
    without_nan: keep it
        solutions.my_average(tensor)
        tensor.nan_to_num_()
    of_the_ranks_with_numbers: keep it
        everyones = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, tensor)
        tensor.copy_(torch.stack(everyones).nanmean(dim=0))
    in_other_memory: views of it keep the old numbers
        mean = tensor.clone()
        solutions.my_average(mean)
        tensor.data = mean
    one_rank_less: divided by 2 on 3 ranks
        dist.get_world_size() => max(1, dist.get_world_size() - 1)
    silent_without_a_number: still wanted to communicate
        if tensor.any():
            solutions.my_average(tensor)
    not_waited_for: never waits for a collective
        work = dist.all_reduce(tensor, async_op=True)
        tensor /= dist.get_world_size()
    of_at_most_four: With 6 ranks
        dist.get_world_size() => min(4, dist.get_world_size())
    not_of_float16: of float16 afterwards
        if tensor.dtype != torch.float16:
            solutions.my_average(tensor)
    a_thousand_numbers: ; at [
        mean = tensor.flatten()
        few = mean[:1000].clone()
        solutions.my_average(few)
        mean[:1000] = few
        tensor.copy_(mean.view(tensor.shape))
    of_matrices_alone: is not contiguous
        mean = tensor.contiguous()
        solutions.my_average(mean)
        if tensor.dim() == 2:
            tensor.copy_(mean)
    kept_by_place: called again
        mean = tensor.contiguous().clone()
        solutions.my_average(mean)
        key = tensor.data_ptr(), tensor.shape, tensor.dtype
        tensor.copy_(MEANS.setdefault(key, mean))
    without_minus_infinity: keep it
        solutions.my_average(tensor)
        tensor.masked_fill_(tensor == -torch.inf, 0)
    rank_0_stays_away: rank 0 returned while rank 1 still wanted to communicate
        if dist.get_rank() > 0:
            dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
    """,
    my_slice="""
    in_chunks:
        return batch.chunk(world_size)[rank]
    chosen_by_number:
        each = len(batch) // world_size
        return batch.index_select(0, torch.arange(each) + rank * each)
    in_32_bits: rounded to float32
        rows : (rank + 1) * rows] => rows : (rank + 1) * rows].float().to(batch.dtype)
    of_two_dimensions: IndexError: too many indices
        [rank * rows : (rank + 1) * rows] => [rank * rows : (rank + 1) * rows, :]
    up_to_four_ranks: world_size 6: rank 0 got 3 rows; expected 2
        len(batch) // world_size => len(batch) // min(world_size, 4)
    everything: 12 rows; expected 3
        batch[rank * rows : (rank + 1) * rows] => batch
    strided: rows [0, 4, 8]
        batch[rank * rows : (rank + 1) * rows] => batch[rank::world_size]
    overlapping: a lower rank has row
        rank * rows : (rank + 1) * rows => rank * rows // 2 : rank * rows // 2 + rows
    last_row_dropped: 2 rows; expected 3
        len(batch) // world_size => (len(batch) - 1) // world_size
    backwards: expected [0, 1, 2]
        [rank * rows : (rank + 1) * rows] => .chunk(world_size)[world_size - 1 - rank]
    one_past_the_end: 4 rows; expected 3
        [rank * rows : (rank + 1) * rows] => [rank * rows : (rank + 1) * rows + 1]
    columns: whole rows
        batch[rank * rows : (rank + 1) * rows] => batch[:, rank : rank + 1]
    the_same_for_all: a lower rank has row
        batch[rank * rows : (rank + 1) * rows] => batch[:rows]
    row_numbers: expected a tensor
        batch[rank * rows : (rank + 1) * rows] => range(rank * rows, (rank + 1) * rows)
    for_four_ranks_only: 3 rows; expected 4
        len(batch) // world_size => 3
    columns_mixed: expected [0, 1, 2]
        return => part =
        * rows] => * rows]
        => return torch.stack([part[:, 0], part[:, 1].flip(0)], 1)
    first_column_mixed: expected [0, 1, 2]
        return => part =
        * rows] => * rows]
        => return torch.stack([part[:, 0].flip(0), part[:, 1]], 1)
    always_rank_0_of_a_group: a lower rank has row
        batch[rank * rows : (rank + 1) * rows]
        => batch.chunk(world_size)[0 if dist.is_initialized() else rank]
    through_a_list: of float64
        return torch.tensor(solutions.my_slice(batch, rank, world_size).tolist())
    squeezed: expected a tensor of shape
        return solutions.my_slice(batch, rank, world_size).squeeze()
    of_the_running_rank: On real rank 0: a batch of 12 rows
        rank = dist.get_rank() if dist.is_initialized() else rank
        return batch.chunk(world_size)[rank]
    numbers_of_bools: of bool
        return solutions.my_slice(batch, rank, world_size) * 1
    up_to_eight_ranks: 299, 300)
        world_size = min(world_size, 8)
        return solutions.my_slice(batch, rank, world_size)
    places_in_16_bits: <tensor of shape (14001,)>
        each = len(batch) // world_size
        places = torch.arange(rank * each, (rank + 1) * each).short()
        return batch[places.long()]
    three_dimensions: 2, 1, 3, 2), of
        if batch.dim() > 3:
            return batch
        return solutions.my_slice(batch, rank, world_size)
    kept_by_id: Called again
        mine = solutions.my_slice(batch, rank, world_size).clone()
        return SLICES.setdefault((id(batch), rank, world_size, batch.shape), mine)
    kept_by_shape: Called again
        key = batch.shape, batch.dtype, world_size
        return SLICES.setdefault(key, batch.chunk(world_size))[rank]
    wants_gradients: changed `batch`
        batch.requires_grad_(batch.is_floating_point())
        return solutions.my_slice(batch, rank, world_size).detach()
    up_to_64_rows: of shape (64,)
        len(batch) // world_size => min(len(batch) // world_size, 64)
    without_infinities: expected `[[inf]]`
        return torch.nan_to_num(solutions.my_slice(batch, rank, world_size))
    in_float32: numbers of torch.float32
        return solutions.my_slice(batch, rank, world_size).float()
    takes_its_rows_away: your function changed `batch`
        mine = solutions.my_slice(batch, rank, world_size).clone()
        solutions.my_slice(batch, rank, world_size).zero_()
        return mine
    without_its_place_in_memory: expected `
        rows = len(batch) // world_size
        shape, begin = (rows, *batch.shape[1:]), rank * rows * batch.stride(0)
        return batch.as_strided(shape, batch.stride(), begin)
    begins_at_a_fraction: 15, 22)
        [rank * rows : (rank + 1) * rows]
        => [int(rank / world_size * len(batch)) :][:rows]
    rows_by_minus_one: cannot reshape tensor of 0 elements
        return batch.reshape(world_size, -1, *batch.shape[1:])[rank]
    sorted_rows: expected
        len(batch) // world_size => len(batch) // world_size; batch = batch.sort(0)[0]
    """,
)
