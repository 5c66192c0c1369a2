"""All-gather and reduce-scatter shards, by PyTorch's own operations.

gloo's own reduce-scatter is an all-reduce, which sends twice as many bytes as needed.
Here each rank sends every other rank that rank's part, and adds the parts that it
receives to its own: (N - 1) / N of the bytes, all parts at once. Until they are added,
the received parts take (N - 1) / N of the tensor's memory. Over NCCL, and for tensors
on a GPU, PyTorch's own functions run.

Before a collective of tensors on the CPU, the ranks compare their calls. Byte meters
do not count these functions. To count the bytes of a strategy that shards, pass it the
functions of the same names in `ddp_course.collectives`. Chapter 07.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives.meeting import meeting

Group = dist.ProcessGroup | None

# PyTorch 2.13 has renamed them.
native_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
native_reduce_scatter = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class Followed:
    """A handle of messages that are under way; `wait` also calls `then`.

    Args:
        works: the handles of the messages; None for a message that has ended.
        then: uses the received tensors.
    """

    def __init__(self, works: list[Any], then: Callable[[], None]) -> None:
        self.works, self.then = works, then

    def wait(self) -> None:
        """Wait for all messages, then call `then`."""
        for work in self.works:
            if work is not None:
                work.wait()
        self.then()


def all_gather_single(
    output: Tensor, input: Tensor, group: Group = None, async_op: bool = False
) -> Any:
    """Gather all ranks' `input`, one after another, into `output`.

    As in torch.distributed. Raises CollectiveError, on every rank, if the calls differ.
    """
    if not input.is_cuda:
        compare_calls("all-gather", output, group)
    return native_gather(output, input, group=group, async_op=async_op)


def reduce_scatter_single(
    output: Tensor, input: Tensor, group: Group = None, async_op: bool = False
) -> Any:
    """Sum all ranks' `input`; write this rank's part of the sum into `output`.

    `output` may be this rank's part of `input`. As in torch.distributed. Raises
    CollectiveError, on every rank, if the calls differ.
    """
    if not input.is_cuda:
        compare_calls("reduce-scatter", input, group)
    if dist.get_backend(group) != "gloo" or input.is_cuda:
        return native_reduce_scatter(output, input, group=group, async_op=async_op)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    parts = input.view(size, -1)
    received = torch.empty_like(parts[1:])
    messages = []
    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        messages.append(p2p(dist.irecv, received[k - 1], source, group))
        messages.append(p2p(dist.isend, parts[to], to, group))

    def add() -> None:
        if output.data_ptr() != parts[rank].data_ptr():
            output.view(-1).copy_(parts[rank])
        for part in received:
            output.view(-1).add_(part)

    work = Followed(dist.batch_isend_irecv(messages) if messages else [], add)
    return work if async_op else work.wait()


def p2p(op: Callable[..., Any], tensor: Tensor, peer: int, group: Group) -> dist.P2POp:
    """Return a message to or from the group's rank number `peer`."""
    return dist.P2POp(op, tensor, group=group, group_peer=peer)


def compare_calls(name: str, tensor: Tensor, group: Group) -> None:
    """Raise CollectiveError, on every rank, if the ranks' next calls differ.

    gloo compares nothing: it ends the process when a message is longer than expected,
    and it waits forever when one rank gathers while another reduces. Ranks of one
    machine compare in shared memory, within microseconds.
    """
    meeting(group).agree_now(f"{name} of {tensor.numel()} {tensor.dtype}")
