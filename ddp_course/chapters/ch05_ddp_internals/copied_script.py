"""Train a model with DDP, pieced together from notes and forums. It runs. Chapter 05.

torchrun --nproc-per-node 4 copied_script.py

`train` has eight mistakes; an exercise of the chapter is to repair them.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset


def train(
    build_model: Callable[[], nn.Module],
    data: Dataset,
    held_out: Dataset,
    path: Path,
    epochs: int,
) -> float | None:
    """Train up to `epochs` epochs; return the mean loss over the held-out rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    done = 0
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["epochs"]
    ddp = DistributedDataParallel(model)
    loader = DataLoader(data, batch_size=8)
    for epoch in range(done, epochs):
        for x, y in loader:
            loss = ddp(x.to(device), y.to(device)) / dist.get_world_size()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({"epochs": epoch + 1, **states}, path)
    if dist.get_rank() > 0:
        return None
    model.eval()
    total = 0.0
    with torch.no_grad():
        for x, y in DataLoader(held_out, batch_size=8):
            total += model(x.to(device), y.to(device)).item() * len(x)
    return total / len(held_out)


class Classifier(nn.Module):
    """Two layers; called with a batch, it returns the mean loss over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return nn.functional.cross_entropy(self.layers(x), y)


def build_data(rows: int, seed: int) -> Dataset:
    """Return samples, the same on every rank."""
    x = torch.randn(rows, 20, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, :5].sum(dim=1) > 0).long())


def main() -> None:
    """Join the ranks that torchrun has started, train, and leave."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    data, held_out = build_data(320, seed=0), build_data(70, seed=1)
    loss = train(Classifier, data, held_out, Path("copied.pt"), epochs=3)
    print(f"rank {dist.get_rank()}: loss of the held-out rows {loss}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
