"""Train with PyTorch's DistributedDataParallel: a file to copy. Chapter 05.

torchrun --nproc-per-node 4 ddp_script.py --epochs 3 --checkpoint run.pt

It needs only PyTorch. Replace `build_model` and `build_data` by your own functions.

It ends with `os._exit`, so functions registered with `atexit` are not called: close a
logger, for example, at the end of `main`.
"""

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset


def main() -> None:
    """Join the ranks that torchrun has started, train, and leave."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank")
    parser.add_argument("--checkpoint", type=Path, default="run.pt", help="read by all")
    args = parser.parse_args()
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    try:
        train(device, args.epochs, args.batch_size, args.checkpoint)
        dist.barrier()  # no rank leaves while another may still need it
    finally:
        dist.destroy_process_group()


def train(device: torch.device, epochs: int, batch_size: int, path: Path) -> None:
    """Train from the checkpoint at `path`, if any, up to `epochs` epochs in all."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = 0
    if path.exists():  # on every rank: DDP sends no optimizer state
        saved = torch.load(path, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["epochs"]
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    data = build_data()
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size, sampler=sampler)
    for epoch in range(done, epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(epoch * world_size + rank)  # different dropout masks
        total = torch.zeros(2, device=device)  # [sum of losses, number of losses]
        for x, y in loader:
            loss = nn.functional.cross_entropy(ddp(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()  # afterwards gradients are means over the ranks,
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # so all ranks clip alike
            optimizer.step()
            total += torch.stack([loss.detach() * len(x), total.new_tensor(len(x))])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: mean loss {total[0] / total[1]:.6f}", flush=True)
            save(path, epoch + 1, model, optimizer)


def save(
    path: Path, epochs: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Write a checkpoint beside `path`, then rename it to `path`."""
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    unfinished = path.with_name(path.name + ".new")
    torch.save({"epochs": epochs, **states}, unfinished)
    unfinished.replace(path)


def build_model(dropout: float = 0.1) -> nn.Module:
    """Return a model of the same shape on every rank: DDP sends rank 0's numbers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 2)
    )


def build_data(rows: int = 320) -> Dataset:
    """Return the samples, the same on every rank: the sampler divides them."""
    x = torch.randn(rows, 20, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, :5].sum(dim=1) > 0).long())


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the group and abort a normal exit
