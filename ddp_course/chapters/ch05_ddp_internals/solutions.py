"""Solutions of the exercises of chapter 05."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


def my_bucket_plan(
    parameters: list[tuple[str, Tensor]], cap: int, first: int
) -> list[list[str]]:
    """Return the buckets: last registered first, one type each, capped in bytes."""
    once: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in parameters:
        if parameter.requires_grad and parameter.numel():
            once.setdefault(id(parameter), (name, parameter))
    filling: dict[torch.dtype, list] = {}  # the open bucket of each type
    limit: dict[torch.dtype, int] = {}  # bytes at which that bucket is closed
    closed = []
    for place, (name, parameter) in enumerate(reversed(once.values())):
        dtype = parameter.dtype
        filling.setdefault(dtype, []).append((place, name, parameter.nbytes))
        if sum(n for _, _, n in filling[dtype]) >= limit.get(dtype, min(first, cap)):
            closed.append(filling.pop(dtype))
            limit[dtype] = cap
    closed += filling.values()  # buckets that did not reach their cap
    closed.sort(key=lambda bucket: bucket[-1][0])  # by the last gradient's place
    return [[name for _, name, _ in bucket] for bucket in closed]


def mini_ddp(
    buckets: list[list[Tensor]],
    launch: Callable[[Tensor], dist.Work],
    at_the_end: Callable[[Callable[[], None]], None],
) -> None:
    """Average gradients in backward; launch each full bucket when it is its turn."""
    n = dist.get_world_size()
    full = [len(members) for members in buckets]
    missing = list(full)
    under_way: list[tuple[Tensor, dist.Work]] = []

    def gradient_is_there(k: int) -> None:
        if missing == full:  # the first gradient of this backward
            at_the_end(finish)
        missing[k] -= 1
        while len(under_way) < len(buckets) and missing[len(under_way)] == 0:
            members = buckets[len(under_way)]
            flat = torch.cat([p.grad.flatten() for p in members])
            under_way.append((flat, launch(flat)))

    def finish() -> None:
        for members, (flat, handle) in zip(buckets, under_way, strict=True):
            handle.wait()
            means = (flat / n).split([p.numel() for p in members])
            for parameter, mean in zip(members, means, strict=True):
                parameter.grad.copy_(mean.view_as(parameter))
        under_way.clear()
        missing[:] = full

    for k, members in enumerate(buckets):
        for parameter in members:
            parameter.register_post_accumulate_grad_hook(
                lambda _, k=k: gradient_is_there(k)
            )


def accumulate(ddp: nn.Module, microbatches: list[tuple[Tensor, Tensor]]) -> None:
    """Add up the microbatches' gradients; average the sum in the last backward."""
    rows = sum(len(x) for x, _ in microbatches)
    for x, y in microbatches[:-1]:
        with ddp.no_sync():  # around forward, too: there DDP decides whether to sync
            (ddp(x, y) * len(x) / rows).backward()
    x, y = microbatches[-1]
    (ddp(x, y) * len(x) / rows).backward()


def repaired(
    build_model: Callable[[], nn.Module],
    data: Dataset,
    held_out: Dataset,
    path: Path,
    epochs: int,
) -> float:
    """Train up to `epochs` epochs; return the mean loss over the held-out rows."""
    rank, n = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    model = build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    done = 0
    if path.exists():
        saved = torch.load(path, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["epochs"]
    ddp = DistributedDataParallel(model)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(done, epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(n * epoch + rank)  # different dropout masks on each rank
        for x, y in loader:
            loss = ddp(x.to(device), y.to(device))
            optimizer.zero_grad()
            loss.backward()  # DDP divides by the number of ranks
            optimizer.step()
        if rank == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"epochs": epoch + 1, **states}, path)
    model.eval()
    total = torch.zeros(1, device=device)
    mine = Subset(held_out, range(rank, len(held_out), n))
    with torch.no_grad():
        for x, y in DataLoader(mine, batch_size=8):
            total += model(x.to(device), y.to(device)) * len(x)
    dist.all_reduce(total)
    return total.item() / len(held_out)
