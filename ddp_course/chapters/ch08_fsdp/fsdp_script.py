"""Train with PyTorch's fully_shard: a file to copy. Chapter 08.

torchrun --nproc-per-node 4 fsdp_script.py --epochs 3 --checkpoints run

It needs only PyTorch. Replace `build_model`, `first_numbers` and `build_data` by your
own functions. No rank ever has the whole model or the whole checkpoint.

It ends with `os._exit`, so functions registered with `atexit` are not called: close a
logger, for example, at the end of `main`.
"""

import argparse
import os
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset


def main() -> None:
    """Join the ranks that torchrun has started, train, and leave."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank")
    parser.add_argument("--checkpoints", type=Path, default="run", help="a folder")
    args = parser.parse_args()
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    try:
        train(device, args.epochs, args.batch_size, args.checkpoints)
        dist.barrier()  # no rank leaves while another may still need it
    finally:
        dist.destroy_process_group()


def train(device: torch.device, epochs: int, batch_size: int, folder: Path) -> None:
    """Train up to `epochs` epochs, from the last checkpoint in `folder`, if any."""
    rank = dist.get_rank()
    with torch.device("meta"):  # only shapes: no memory for any number
        model = build_model()
    half = torch.bfloat16 if device.type == "cuda" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for block in model.blocks:  # each block is a unit, gathered as one
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)  # the other parameters: the root unit
    model.to_empty(device=device)  # allocates only this rank's shards
    first_numbers(model.named_parameters(), rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after sharding
    done = load(folder, model, optimizer)
    data = build_data()
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size, sampler=sampler)
    for epoch in range(done, epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=device)  # [sum of losses, number of losses]
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm over all ranks
            optimizer.step()
            total += torch.stack([loss.detach() * len(x), total.new_tensor(len(x))])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: mean loss {total[0] / total[1]:.6f}", flush=True)
        save(folder, epoch + 1, model, optimizer)


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    """Return a checkpoint's contents: shards, with the plain model's names."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model_state_dict": of_model, "optim_state_dict": of_optimizer}


def save(
    folder: Path, epochs: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Write a checkpoint, a file for each rank; rename its folder when it is whole."""
    unfinished = folder / "unfinished"
    dcp.save(states(model, optimizer), checkpoint_id=unfinished)
    if dist.get_rank() == 0:  # `dcp.save` returns when all ranks have written
        unfinished.rename(folder / f"{epochs:06}")
    dist.barrier()


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Fill the shards from the last checkpoint; return how many epochs it has seen."""
    finished = sorted(folder.glob("[0-9]*"))
    if not finished:
        return 0
    found = states(model, optimizer)  # to be filled: each rank reads its own part
    dcp.load(found, checkpoint_id=finished[-1])
    set_state_dict(model, optimizer, **found)
    return int(finished[-1].name)


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` (rows, width) plus the block's output."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Some blocks between two layers."""

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, width), nn.Linear(width, 2)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (rows, 2) of `x` (rows, 20)."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def build_model() -> nn.Module:
    """Return the model; built on the meta device, it has no numbers yet."""
    return Model()


@torch.no_grad()
def first_numbers(named_parameters: Iterable[tuple[str, Tensor]], rank: int) -> None:
    """Fill this rank's shards; each rank draws random numbers for its own rows."""
    torch.manual_seed(rank)
    for name, parameter in named_parameters:
        shard = parameter.to_local()
        if parameter.dim() > 1:
            shard.normal_(std=parameter.shape[-1] ** -0.5)
        else:
            shard.fill_(0.0 if name.endswith("bias") else 1.0)  # a norm's weight


def build_data(rows: int = 320) -> Dataset:
    """Return the samples, the same on every rank: the sampler divides them."""
    x = torch.randn(rows, 20, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, :5].sum(dim=1) > 0).long())


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the group and abort a normal exit
