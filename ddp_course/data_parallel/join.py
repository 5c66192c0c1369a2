"""Uneven numbers of batches: a rank without a batch must still send what others expect.

    with Join([ddp]):                  # torch.distributed.algorithms.Join
        for x, y in my_batches:        # more of them on some ranks than on others
            ...

A rank that has run out of batches stays in the `with` block and shadows the others: for
each of their collectives it calls the same one, with zeros, or with nothing to say.
When all have run out, everyone gets the parameters of the rank that trained longest.

The order of the collectives of a step, which both sides must keep to:

    1  how many ranks still train (`Join` itself)
    2  whose buffers count, and the buffers        if there are any to be sent
    3  is this step averaged, or in `no_sync`?
    4  the buckets                                 if it is

PyTorch: torch/distributed/algorithms/join.py, and `_DDPJoinHook` in
torch/nn/parallel/distributed.py. Chapter 05.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from ddp_course.collectives import communicator
from ddp_course.mechanisms.replicas import broadcast_all

if TYPE_CHECKING:
    from ddp_course.data_parallel.ddp import DistributedDataParallel


class ShadowHook(JoinHook):
    """What a rank does for a `DistributedDataParallel` when it has no batch any more.

    `divide_by_initial_world_size`: a mean is over all ranks, so that every batch
    counts the same; otherwise over those that still train.
    """

    def __init__(
        self, ddp: DistributedDataParallel, divide_by_initial_world_size: bool = True
    ) -> None:
        self.ddp = ddp
        ddp.divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """Shadow one forward and one backward of the others."""
        ddp = self.ddp
        if ddp.will_sync_buffers():
            ddp.sync_buffers(trains=False)
        ddp.require_forward_param_sync = _is_averaged(ddp, trains=False)
        if ddp.require_forward_param_sync:
            ddp.reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have run out: take over what the last one has."""
        src = common_rank(self.ddp, is_last_joiner)
        states = list(self.ddp.module.parameters())
        if self.ddp.broadcast_buffers:
            states += self.ddp.module.buffers()
        broadcast_all(states, src, self.ddp.process_group)


def tell_join(ddp: DistributedDataParallel) -> None:
    """Say, at the beginning of a forward, that this rank still trains."""
    work = Join.notify_join_context(ddp)
    if work is not None and not ddp.divide_by_initial_world_size:
        training = work.get_future().wait()[0]
        ddp.reducer.scale = 1 / training.item()


def tell_averaged(ddp: DistributedDataParallel) -> None:
    """Say whether this forward's backward will be averaged."""
    if ddp._join_config.enable:
        _is_averaged(ddp, trains=True)


def _is_averaged(ddp: DistributedDataParallel, trains: bool) -> bool:
    said = float(trains and ddp.require_backward_grad_sync)
    sum_of_all = torch.full((1,), said, device=ddp.join_device)
    dist.all_reduce(sum_of_all, group=ddp.process_group)
    return bool(sum_of_all)


def common_rank(ddp: Any, candidate: bool) -> int:
    """Return the highest rank (of the job) that is a candidate."""
    rank = torch.tensor([dist.get_rank() if candidate else -1], device=ddp.join_device)
    dist.all_reduce(rank, dist.ReduceOp.MAX, communicator(ddp.process_group).group)
    return int(rank)
