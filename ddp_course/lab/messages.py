"""What a reader's function sends and receives: watched, and never waited for too long.

    with watched() as told:
        got = function(tensor)
    told["sent"]  # [(to which rank, how many numbers), ...], in order

Below `send`, `isend` and `batch_isend_irecv`, and below all collectives, are methods of
the process group. Whoever watches those sees everything, in whatever style it is
written and however it was imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from ddp_course.lab.answers import patient
from ddp_course.measure import EventLog

PATIENCE = 4.0  # seconds: nobody comes any more (`patient` makes them more)
LATE = 0.05  # seconds by which each rank comes later than the one before it
COLLECTIVES = {  # the process group's method -> what it is called in torch.distributed
    "barrier": "barrier",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather_single",
    "_allgather_base": "all_gather_single",
    "all_gather_single": "all_gather_single",
    "all_gather_single_coalesced": "all_gather_single",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "broadcast": "broadcast",
    "gather": "gather",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_single": "reduce_scatter_single",
    "reduce_scatter_single_coalesced": "reduce_scatter_single",
    "scatter": "scatter",
}


class _UnderWay:
    """A message that is under way; whoever waits for it does not wait for ever."""

    def __init__(self, work: dist.Work, to_what: str) -> None:
        self.work = work
        self.to_what = to_what
        self.asked = False  # has anybody waited for it, or looked?

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.asked = True
        timeout = timeout or timedelta(seconds=patient(PATIENCE))
        try:
            return self.work.wait(timeout)
        except RuntimeError as error:
            if "Timed out" not in str(error):
                raise
        told = f"after {timeout.total_seconds():.3g} s it still waits to {self.to_what}"
        raise TimeoutError(told)

    def is_completed(self) -> bool:
        done = self.work.is_completed()
        self.asked = self.asked or done  # who looked too early has not waited
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


@contextmanager
def watched() -> Iterator[dict[str, list]]:
    """Note, on this rank, every message sent and every collective, in order.

    "ignored" are messages that were started and that nobody has waited for.
    """
    told: dict[str, list] = {"sent": [], "collectives": []}
    started: list[_UnderWay] = []
    group = dist.ProcessGroup
    send, recv, recv_anysource = group.send, group.recv, group.recv_anysource

    def start(work: dist.Work, to_what: str) -> _UnderWay:
        started.append(_UnderWay(work, to_what))
        return started[-1]

    def known(self: Any, rank: int) -> None:
        if not 0 <= rank < self.size():
            raise ValueError(f"there is no rank {rank}: the last is {self.size() - 1}")

    def sending(self: Any, tensors: list[Tensor], dst: int, tag: int) -> _UnderWay:
        known(self, dst)
        told["sent"].append((dst, tensors[0].numel()))
        return start(send(self, tensors, dst, tag), f"send to rank {dst}")

    def receiving(self: Any, tensors: list[Tensor], src: int, tag: int) -> _UnderWay:
        known(self, src)
        return start(recv(self, tensors, src, tag), f"receive from rank {src}")

    def receiving_any(self: Any, tensors: list[Tensor], tag: int) -> _UnderWay:
        return start(recv_anysource(self, tensors, tag), "receive from any rank")

    def noting(name: str) -> Callable:
        real = getattr(group, name)

        def collective(*args: Any, **options: Any) -> Any:
            told["collectives"].append(COLLECTIVES[name])
            return real(*args, **options)

        return collective

    ours = {"send": sending, "recv": receiving, "recv_anysource": receiving_any}
    there = [name for name in COLLECTIVES if hasattr(group, name)]  # in this PyTorch
    ours |= {name: noting(name) for name in there}
    with ExitStack() as stack, EventLog() as log:
        for name, function in ours.items():
            stack.enter_context(mock.patch.object(group, name, function))
        yield told
    told["collectives"] += [event.op for event in log.events]  # of this package
    ignored = [one for one in started if not one.asked]
    told["ignored"] = [one.to_what for one in ignored]
    for one in ignored:  # what comes next must not find its remains
        with suppress(Exception):
            one.wait()


@contextmanager
def messages_of() -> Iterator[dict[str, Any]]:
    """Watch, and tell in the end what `MESSAGES` and `WAITED` ask for."""
    with watched() as told:
        yield told
    told["messages_only"] = not told["collectives"]
    told["collective"] = "".join(told["collectives"][:1])
    told["waited"], told["begun"] = not told["ignored"], "".join(told["ignored"][:1])


MESSAGES = {  # a table of properties for `judge`
    "messages_only": "called the collective `{collective}`; build it from `dist.send` "
    "and `dist.recv`, or `dist.isend` and `dist.irecv`."
}
WAITED = {
    "waited": "never waits for what it began: `{begun}`. Until `wait()` has returned, "
    "the numbers may still change, and the next message may never come."
}
