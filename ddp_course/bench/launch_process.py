"""Launch ranks on request, by this course's launcher or PyTorch's, and time it.

    python launch_process.py ours|theirs

reads lines such as `step 4`, launches 4 ranks that each run `step`, and prints two
numbers: the seconds of this launch, and the seconds since the first import below. It
runs as a script, so that "theirs" imports no module of this course, like a script of a
user of PyTorch.
"""

# ruff: noqa: E402
import sys
import time

STARTED = time.perf_counter()

if sys.argv[1:2] == ["ours"]:
    from ddp_course.launch import spawn

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def all_reduce() -> None:
    """All-reduce one number from each rank."""
    number = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(number)
    n = dist.get_world_size()
    assert number.item() == n * (n + 1) // 2


def step() -> None:
    """Train a small model for one step."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()


def launch(side: str, case: str, ranks: int) -> None:
    """Launch with this course's `spawn`, or with `torch.multiprocessing.spawn`."""
    if side == "ours":
        spawn(CASES[case], world_size=ranks, output="none", device="cpu")
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    try:
        mp.spawn(their_rank, args=(case, ranks, port), nprocs=ranks)
    except mp.ProcessExitedException as error:
        # Now and then PyTorch's threads abort a rank that exits. (A rank that aborted
        # before its work was done would count as fast, in PyTorch's favour.)
        if error.signal_name != "SIGABRT":
            raise


def their_rank(rank: int, case: str, ranks: int, port: int) -> None:
    """Join the process group, do the work, leave the group."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    CASES[case]()
    dist.barrier()  # no rank leaves while another may still need it
    dist.destroy_process_group()


CASES = {"all_reduce": all_reduce, "step": step}

if __name__ == "__main__":
    for line in sys.stdin:
        case, ranks = line.split()
        before = time.perf_counter()
        launch(sys.argv[1], case, int(ranks))
        now = time.perf_counter()
        print(now - before, now - STARTED, flush=True)
