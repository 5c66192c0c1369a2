"""Train on the nodes that are running: a program that torchrun starts. Chapter 19.

torchrun --nnodes 1:2 --max-restarts 3 elastic_script.py run

torchrun resumes nothing. It starts this program anew, on all nodes, and the program
loads its checkpoint. The nodes share the folder `run`.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

ROWS, BATCH, STEPS = 96, 8, 12  # BATCH: rows of a step, of all ranks together


def main() -> None:
    """Join the ranks that torchrun has started, train, and leave."""
    from ddp_course.launch.torchrun import join, leave

    folder = Path(sys.argv[1])
    join(timedelta(seconds=60))
    note_start(folder)
    train(folder)
    leave()


def train(folder: Path, steps: int = STEPS, lr: float = 0.05) -> dict:
    """Train from the last checkpoint on, until `steps` steps are done.

    Returns the loss and the number of ranks of each step, and all rows in the order in
    which the ranks together have used them.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    x, y = build_data()
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    record = load(folder, model, optimizer)
    for step in range(len(record["losses"]), steps):
        wait_for_permission(folder, step)
        batch = order[step * BATCH : (step + 1) * BATCH]
        mine = batch.chunk(world_size)[rank]  # same batch for any world_size
        loss = nn.functional.mse_loss(model(x[mine]), y[mine])
        optimizer.zero_grad()
        loss.backward()
        for value in [*(p.grad for p in model.parameters()), loss.detach()]:
            dist.all_reduce(value)
            value /= world_size
        optimizer.step()
        parts = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(parts, mine)
        record["losses"].append(loss.item())
        record["ranks"].append(world_size)
        record["rows"] += torch.cat(parts).tolist()
        if rank == 0:
            save(folder, model, optimizer, record)
    dist.barrier()  # no rank looks for the checkpoint before it exists
    return record


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Load the checkpoint, if there is one, and return the record of its steps."""
    path = folder / "checkpoint.pt"
    if not path.exists():
        return {"losses": [], "ranks": [], "rows": []}
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["record"]


def save(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, record: dict
) -> None:
    """Write a checkpoint beside the last one, then rename it to replace that one."""
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    unfinished = folder / "checkpoint.new"
    torch.save({**states, "record": record}, unfinished)
    unfinished.replace(folder / "checkpoint.pt")


def build_model() -> nn.Module:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def build_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and targets, the same on every rank."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, 8, generator=generator, dtype=torch.float64)
    return x, x[:, :4].sum(dim=1, keepdim=True)


def note_start(folder: Path) -> None:
    """Append this process's node, rank and process id to the file `starts`."""
    names = "NODE", "RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"
    place = {name: os.environ.get(name) for name in names} | {"pid": os.getpid()}
    with (folder / "starts").open("a") as file:
        file.write(json.dumps(place) + "\n")


def wait_for_permission(folder: Path, step: int) -> None:
    """Wait until the file `allowed`, if it exists, has a number above `step`."""
    agent, allowed = os.getppid(), folder / "allowed"
    while allowed.exists() and int(allowed.read_text()) <= step:
        if os.getppid() != agent:
            sys.exit("the agent of this node has ended")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
