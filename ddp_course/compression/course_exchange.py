"""`CourseExchange`: the course's collectives, which run while backward goes on.

Only the course's collectives are counted by byte meters and delayed by slow links. They
run in a thread of the process group, so that backward goes on while a bucket is
compressed and sent. Chapter 14.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives import (
    all_to_all_single,
    communicator,
    ring_all_reduce,
)
from ddp_course.compression.exchange import Exchange


class CourseExchange(Exchange):
    """An `Exchange` that runs the course's collectives in the process group's thread.

    Args:
        group: the ranks; None means all.
        all_reduce: `ring_all_reduce`, `dist.all_reduce` or one with the same arguments.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        all_reduce: Callable[..., Any] = ring_all_reduce,
    ) -> None:
        super().__init__(group)
        self.all_reduce = all_reduce

    def run_async(self, job: Callable[[], Tensor]) -> torch.futures.Future[Tensor]:
        """Run `job` while backward goes on; return a future of its result.

        The group's thread runs jobs in the same order on all ranks. PyTorch's
        all-reduce takes its order from the calling thread, so it runs at once.
        """
        future = torch.futures.Future()

        def work() -> None:
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
                raise

        own = self.all_reduce is not dist.all_reduce
        communicator(self.group).perform(work, async_op=own)
        return future

    def add_up(self, tensor: Tensor) -> None:
        """Sum `tensor` over all ranks, in place."""
        self.all_reduce(tensor, group=self.group)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return all ranks' tensors, [size, ...], in the order of the ranks.

        Sends to each rank directly: as many bytes as around a ring, but no message
        waits for another.
        """
        return self.swap(tensor.expand(self.size, *tensor.shape).contiguous())

    def swap(self, rows: Tensor) -> Tensor:
        """Send row r of `rows` [size, ...] to rank r; return the rows received."""
        received = torch.empty_like(rows)
        all_to_all_single(received.view(-1), rows.view(-1), group=self.group)
        return received
