"""Endpoints: send and receive a rank's messages, counted, over fast or slow links.

All messages of this course's collectives go through an `Endpoint`. It calls
`dist.isend` and `dist.irecv`, counts each message in open byte meters, delays it on a
slow line (`spawn(..., links=...)`), copies a GPU's tensor to the CPU for gloo, and uses
a tag of its own, so that no other message between two ranks matches. Chapter 02.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.launch.wire import line_to
from ddp_course.measure.blocks import active_meters

TAG = 77  # the tag of all messages


class Handle(Protocol):
    """Something to wait for: a message that is being sent or received."""

    def wait(self) -> object:
        """Wait until the message's memory may be used again."""


class Endpoint:
    """The sender and receiver of one rank's messages in a process group.

    `group` is None for all ranks. `rank`, `size` and all peers are numbers within the
    group. `meters` count each message; None: the meters that are open now.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        meters: Sequence[Any] | None = None,
    ) -> None:
        self.group = dist.group.WORLD if group is None else group
        self.ranks = dist.get_process_group_ranks(self.group)  # global ranks
        self.rank, self.size = dist.get_rank(self.group), len(self.ranks)
        self.backends = _backends(dist.get_backend_config(self.group))
        self.strict = self.backends.get("cpu") == "strict"  # NCCL's rules
        self.meters = active_meters() if meters is None else meters
        self.nbytes_sent = 0

    def in_order(self, tensor: Tensor) -> bool:
        """Return whether messages match by order, not by tags: NCCL and strict."""
        return self.backends.get(tensor.device.type) in ("nccl", "strict")

    def staged(self, tensor: Tensor) -> bool:
        """Return whether a tensor must be copied through the CPU: on a GPU, over gloo.

        `ProcessGroupGloo::send` would read a GPU's address as one of the CPU; only
        gloo's collectives copy by themselves.
        """
        kind = tensor.device.type
        return kind != "cpu" and self.backends.get(kind) == "gloo"

    def send(self, tensor: Tensor, peer: int) -> Handle:
        """Start to send a contiguous tensor; do not change it before `wait()`."""
        to = self.ranks[peer]
        self._count_sent(tensor, to)
        leaving = tensor.to("cpu", copy=True) if self.staged(tensor) else tensor
        send = partial(dist.isend, leaving, to, self.group, TAG)
        if line := line_to(to):
            if not self.in_order(tensor):
                return line.send(send, tensor.nbytes)
            line.pass_by(tensor.nbytes)
        return send()

    def receive(self, tensor: Tensor, peer: int) -> Handle:
        """Start to receive into a contiguous tensor; it is complete after `wait()`."""
        source = self.ranks[peer]
        self._count_received(tensor, source)
        staged = self.staged(tensor)
        arriving = torch.empty_like(tensor, device="cpu") if staged else tensor
        handle = dist.irecv(arriving, source, self.group, TAG)
        return _Landing(handle, arriving, tensor) if staged else handle

    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
    ) -> None:
        """Send and receive several pairs (tensor, peer) at once, and wait for all."""
        for handle in self.start(sends, receives):
            handle.wait()

    def start(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
    ) -> list[Handle]:
        """Start to send and receive several pairs (tensor, peer); return handles.

        All messages are one batch: with single calls, two ranks that send to each other
        can wait for each other forever (over NCCL, for messages of any size).
        """
        sends = [(tensor, peer) for tensor, peer in sends if tensor.numel()]
        receives = [(tensor, peer) for tensor, peer in receives if tensor.numel()]
        both = [tensor for tensor, _ in (*sends, *receives)]
        lines = [(line_to(self.ranks[to]), tensor.nbytes) for tensor, to in sends]
        slow = [(line, nbytes) for line, nbytes in lines if line]
        in_order = any(map(self.in_order, both))
        if any(map(self.staged, both)) or (slow and not in_order):  # one by one
            handles = [self.receive(tensor, peer) for tensor, peer in receives]
            return handles + [self.send(tensor, peer) for tensor, peer in sends]
        for line, nbytes in slow:
            line.pass_by(nbytes)
        batch = [self._part(dist.irecv, *one) for one in receives]
        batch += [self._part(dist.isend, *one) for one in sends]
        return dist.batch_isend_irecv(batch) if batch else []

    def _part(self, op: Callable, tensor: Tensor, peer: int) -> dist.P2POp:
        counts = self._count_sent if op is dist.isend else self._count_received
        counts(tensor, self.ranks[peer])
        return dist.P2POp(op, tensor, self.ranks[peer], self.group, TAG)

    def _count_sent(self, tensor: Tensor, to: int) -> None:
        self.nbytes_sent += tensor.nbytes
        for meter in self.meters:
            meter.count_sent(to, tensor.nbytes)

    def _count_received(self, tensor: Tensor, source: int) -> None:
        for meter in self.meters:
            meter.count_received(source, tensor.nbytes)


@cache
def _backends(config: str) -> dict[str, str]:
    """Return {kind of device: backend} from "cpu:gloo,cuda:nccl"."""
    return dict(pair.split(":") for pair in config.split(","))


class _Landing:
    """A handle that copies a message from the CPU to its tensor when it has arrived."""

    def __init__(self, handle: Handle, arrived: Tensor, tensor: Tensor) -> None:
        self.handle, self.arrived, self.tensor = handle, arrived, tensor

    def wait(self, *patience: timedelta) -> None:
        self.handle.wait(*patience)
        self.tensor.copy_(self.arrived)
