"""A program that knows nothing of this course: PyTorch's DDP, FSDP and pipelining.

Run by `test_strict.py` under torchrun, on two ranks. Each gives the gradients of one
process.
"""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def model() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = [6, 12, 3]
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def same(gradients: dict, right: dict) -> None:
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, right[name])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    x, y = torch.randn(12, 6), torch.randn(12, 3)
    my_x, my_y = x.chunk(size)[rank], y.chunk(size)[rank]
    alone = model()
    mse_loss(alone(x), y).backward()
    right = {name: p.grad for name, p in alone.named_parameters()}

    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.0005)
    mse_loss(ddp(my_x), my_y).backward()
    same({name: p.grad for name, p in ddp.module.named_parameters()}, right)

    sharded = model()
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    mse_loss(sharded(my_x), my_y).backward()
    same({n: p.grad.full_tensor() for n, p in sharded.named_parameters()}, right)

    whole = model()
    stage = PipelineStage(whole[rank], rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=mse_loss)
    schedule.step(*[x] * (rank == 0), target=y if rank == size - 1 else None)
    mine = {f"{rank}.{name}": p.grad for name, p in whole[rank].named_parameters()}
    same(mine, right)

    group = dist.new_group([0, 1], backend="nccl")
    if rank == 0:
        assert dist.get_backend(group) == "strict"
        print(f"DDP, FSDP and 1F1B over {dist.get_backend()}")
    dist.barrier()
    dist.destroy_process_group()
