"""The memory of the host: larger than the device's memory, and far from the device.

On a GPU a copy between the two is a real one: pinned memory, `non_blocking=True`. On
the CPU both are the same memory, so a copy ends at once, and a clock for each direction
says when it would have arrived: `spawn(..., links=Links(host=Link(...)))`. Code that
needs the numbers waits until then. Chapter 08.
"""

import time

import torch
from torch import Tensor

from ddp_course.launch.links import Link, current_links


class Lane:
    """One direction of the link to the host: its copies run one after the other.

    Attributes:
        nbytes: the bytes that were copied.
        free_at: `time.perf_counter()` at which the last copy arrives.
    """

    def __init__(self, link: Link) -> None:
        self.link, self.nbytes, self.free_at = link, 0, 0.0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy `source` into `target`; `wait` returns when it has arrived."""
        target.copy_(source, non_blocking=True)
        self.occupy(source.nbytes)

    def occupy(self, nbytes: int) -> None:
        """Count a copy that the caller has begun, and reserve the time for it."""
        self.nbytes += nbytes
        begin = max(time.perf_counter(), self.free_at)
        self.free_at = begin + self.link.seconds(nbytes)

    def wait(self) -> None:
        """Sleep until the last copy would have arrived."""
        time.sleep(max(0.0, self.free_at - time.perf_counter()))


class HostMemory:
    """The memory of the CPU beside the device that computes, and the link to it.

    Args:
        link: the link; None means the one that the rank was launched with.

    Attributes:
        to_device: the lane for copies from the host to the device.
        to_host: the lane for copies from the device to the host.
    """

    def __init__(self, link: Link | None = None) -> None:
        link = current_links().host if link is None else link
        if not isinstance(link, Link):
            raise ValueError(f"link is {link!r}; it must be a Link, or None")
        self.to_device, self.to_host = Lane(link), Lane(link)

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Allocate memory on the CPU; pinned, if the tensor is on a GPU."""
        options = {"device": "cpu", "pin_memory": tensor.is_cuda}
        return torch.empty(tensor.shape, dtype=tensor.dtype, **options)

    def settle(self) -> None:
        """Wait until all copies to the host have arrived, and the CPU can use them."""
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        self.to_host.wait()
