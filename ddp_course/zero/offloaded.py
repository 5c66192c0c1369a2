"""Arguments for FSDP that keep shards, gradients and states on the host, with meters.

    host = HostMemory()
    FullyShardedDataParallel(model, **offloaded.module(host))

On a GPU this does what `cpu_offload=True` does. On the CPU, where that option is
refused, the copies take the time of the emulated link (`launch.Links`), so that the
cost of offload can be seen without a GPU. Messages, labels and events are those of
`metered.module`. Chapter 08.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.mechanisms.host_memory import HostMemory
from ddp_course.zero import metered
from ddp_course.zero.sharded_parts import OffloadedStorage


def module(host: HostMemory, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Return arguments for `FullyShardedDataParallel(module, group)`."""
    arguments = metered.module(group)
    arguments["storage"] = partial(HostStorage, host)
    arguments["parts"] = [*arguments["parts"], Arrivals(host)]
    return arguments


class HostStorage(OffloadedStorage, metered.LabelledStorage):
    """An OffloadedStorage whose copies occupy the lanes of a HostMemory."""

    PIN = torch.cuda.is_available()

    def __init__(self, host: HostMemory, *args: Any, **options: Any) -> None:
        self.host = host
        super().__init__(*args, **options)

    def _prepare(self) -> None:
        """Allocate `whole`, and fetch the shard into its place in it.

        `MeteredMessages` calls this in a thread, while the device computes.
        """
        super()._prepare()
        self.host.to_device.occupy(self.shard.nbytes)
        self.host.to_device.wait()

    def add_gradient(self, mean: Tensor) -> None:
        """Store the mean gradient on the host."""
        super().add_gradient(mean)
        self.host.to_host.occupy(self.shard.nbytes)


class Arrivals:
    """A part that waits until all gradients have arrived on the host."""

    def __init__(self, host: HostMemory) -> None:
        self.host = host

    def after_backward(self, fsdp: Any) -> None:
        """Wait for the last gradient: the CPU needs it for the optimizer's step."""
        self.host.settle()
