"""The collectives that a compressor needs: a sum, an all-gather, an all-to-all.

`Exchange` calls torch.distributed and waits for the result. `CourseExchange` runs the
course's own collectives while backward goes on, and `play` runs all ranks in one
process. Chapter 14.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """The collectives of a process group (None: all ranks), on contiguous tensors."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    @property
    def size(self) -> int:
        """The number of ranks."""
        return dist.get_world_size(self.group)

    def run_async(self, job: Callable[[], Tensor]) -> torch.futures.Future[Tensor]:
        """Run `job`, which calls collectives; return a future of its result."""
        future = torch.futures.Future()
        future.set_result(job())
        return future

    def add_up(self, tensor: Tensor) -> None:
        """Sum `tensor` over all ranks, in place."""
        dist.all_reduce(tensor, group=self.group)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return all ranks' tensors, [size, ...], in the order of the ranks."""
        rows = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(rows, tensor, group=self.group)
        return torch.stack(rows)

    def swap(self, rows: Tensor) -> Tensor:
        """Send row r of `rows` [size, ...] to rank r; return the rows received."""
        received = torch.empty_like(rows)
        dist.all_to_all_single(received.view(-1), rows.view(-1), group=self.group)
        return received
