"""The launcher that most people write first: torch.multiprocessing, and nothing else.

`fn` must live in a module that the ranks can import: each rank is a new Python process.
"""

import os
import socket
import sys
from collections.abc import Callable

import torch.distributed as dist
import torch.multiprocessing as mp


def spawn(fn: Callable[[], None], world_size: int = 4) -> None:
    """Call `fn()` on every rank, with the process group ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # another program may take it before rank 0 does
    mp.spawn(_rank, args=(fn, world_size, port), nprocs=world_size)


def _rank(rank: int, fn: Callable[[], None], world_size: int, port: int) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    fn()
    dist.barrier()  # no rank leaves while another may still need it
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # now and then, PyTorch's threads abort a rank that exits normally
