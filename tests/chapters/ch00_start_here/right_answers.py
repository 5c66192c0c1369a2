"""Right answers to the exercises of chapter 00, in other styles than the solutions."""

import torch
import torch.distributed as dist


def in_chunks(batch, rank, world_size):
    return batch.chunk(world_size)[rank]


def chosen_by_number(batch, rank, world_size):
    each = len(batch) // world_size
    return batch.index_select(0, torch.arange(each) + rank * each)


def divides_first(tensor):
    tensor.div_(dist.get_world_size())
    dist.all_reduce(tensor)


def gathers_and_stacks(tensor):
    everyones = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, tensor)
    tensor.copy_(torch.stack(everyones).mean(dim=0))


RIGHT = {
    "my_slice": [in_chunks, chosen_by_number],
    "my_average": [divides_first, gathers_and_stacks],
}
