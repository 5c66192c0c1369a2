"""Ports: how a rank's messages leave and arrive, counted, over links fast and slow.

Everything that the collectives of this course send from rank to rank goes through
`Port.send` and `Port.receive`, which are `dist.isend` and `dist.irecv` and some things
more: a byte meter that is open counts the message; a link that was described as slow
(`spawn(..., links=...)`) takes its time; what lies on a GPU goes through the CPU if it
is gloo's to carry; and our messages have a tag of their own, so that they never mix
with other messages between the same ranks. Chapter 02.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import cache, partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.launch import Link, Links, here, links_here
from ddp_course.measure import ByteMeter, active_meters

TAG = 77  # of all our messages


class Handle(Protocol):
    """Something to wait for: a message that is being sent or received."""

    def wait(self) -> object:
        """Return when the message's memory may be used again."""


class Port:
    """One rank's way to the other ranks of a process group (None: all ranks).

    `rank`, `size` and all peers are numbers within the group. `meters` count each
    message; None are those that are open now.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        meters: Sequence[ByteMeter] | None = None,
    ) -> None:
        self.group = dist.group.WORLD if group is None else group
        self.ranks = dist.get_process_group_ranks(self.group)  # in the job
        self.rank, self.size = dist.get_rank(self.group), len(self.ranks)
        self.backends = _backends(dist.get_backend_config(self.group))
        self.strict = self.backends.get("cpu") == "strict"  # NCCL's rules
        self.meters = active_meters() if meters is None else meters
        self.nbytes_sent = 0

    def among(self, members: Sequence[int]) -> Port:
        """Return a port to some ranks of the group, this one among them."""
        port = Port(self.group, self.meters)
        port.ranks = [self.ranks[member] for member in members]
        port.rank, port.size = members.index(self.rank), len(members)
        return port

    def in_order(self, tensor: Tensor) -> bool:
        """Whether its messages match by their order alone: over NCCL, or strict."""
        return self.backends.get(tensor.device.type) in ("nccl", "strict")

    def staged(self, tensor: Tensor) -> bool:
        """Whether it goes through the CPU: gloo would take a GPU's address for its own.

        (`ProcessGroupGloo::send`; its collectives, but these two, copy by themselves.)
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
        """Send and receive several (tensor, peer) at once, and wait for all of them.

        All of it is handed over as one batch: one by one, two ranks that send to each
        other can wait for each other for ever (on NCCL, with any size).
        """
        sends = [(tensor, peer) for tensor, peer in sends if tensor.numel()]
        receives = [(tensor, peer) for tensor, peer in receives if tensor.numel()]
        both = [tensor for tensor, _ in (*sends, *receives)]
        lines = [(line_to(self.ranks[to]), tensor.nbytes) for tensor, to in sends]
        slow = [(line, nbytes) for line, nbytes in lines if line]
        in_order = any(map(self.in_order, both))
        if any(map(self.staged, both)) or (slow and not in_order):  # one by one
            handles = [self.receive(tensor, peer) for tensor, peer in receives]
            handles += [self.send(tensor, peer) for tensor, peer in sends]
        else:
            for line, nbytes in slow:
                line.pass_by(nbytes)
            batch = [self._part(dist.irecv, *one) for one in receives]
            batch += [self._part(dist.isend, *one) for one in sends]
            handles = dist.batch_isend_irecv(batch) if batch else []
        for handle in handles:
            handle.wait()

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
    """Return kind of device -> backend, of "cpu:gloo,cuda:nccl"."""
    return dict(pair.split(":") for pair in config.split(","))


class _Landing:
    """A message that goes on to where it belongs when it has arrived on the CPU."""

    def __init__(self, handle: Handle, arrived: Tensor, tensor: Tensor) -> None:
        self.handle, self.arrived, self.tensor = handle, arrived, tensor

    def wait(self, *patience: timedelta) -> None:
        self.handle.wait(*patience)
        self.tensor.copy_(self.arrived)


_making = threading.Lock()


@cache
def line_to(rank: int) -> Line | None:
    """Return the slow line that leads to `rank`; None if messages take no extra time.

    Like a machine with one network card, this process has one line to all ranks on
    other nodes, and one to those on its own, whatever the process group.
    """
    if links_here() == Links():
        return None
    with _making:  # threads that come together get the same line
        return _line(outside=not here().same_node(rank))


@cache
def _line(outside: bool) -> Line | None:
    links = links_here()
    link = links.between if outside else links.inside
    return None if link == Link() else Line(link)


class Line:
    """A link that takes its time: messages pass one after the other, in order.

    A message occupies the line for bytes / bandwidth and arrives `latency` later; the
    next one may follow meanwhile. A thread waits for that time, without using the CPU.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.free = 0.0  # when the line has sent what was given to it so far
        self.lock = threading.Lock()  # several threads may send
        self.waiting: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._carry, daemon=True, name="slow line").start()

    def send(self, start: Callable[[], Handle], nbytes: int) -> Handle:
        """Call `start`, which hands over the message, when it has arrived."""
        started: Future[Handle] = Future()
        self.waiting.put((self._arrival(nbytes), start, started))
        return _Delayed(started)

    def pass_by(self, nbytes: int) -> None:
        """Wait as long as a message takes: handed over later, it were out of order."""
        time.sleep(max(0.0, self._arrival(nbytes) - time.monotonic()))

    def _arrival(self, nbytes: int) -> float:
        with self.lock:
            start = max(self.free, time.monotonic())
            self.free = start + nbytes / self.link.bandwidth
            return self.free + self.link.latency

    def _carry(self) -> None:
        while True:
            at, start, started = self.waiting.get()
            time.sleep(max(0.0, at - time.monotonic()))
            try:
                started.set_result(start())
            except BaseException as error:  # tell whoever waits
                started.set_exception(error)


class _Delayed:
    def __init__(self, started: Future[Handle]) -> None:
        self.started = started

    def wait(self, *patience: timedelta) -> None:
        self.started.result().wait(*patience)
