"""What a reader's function sends and receives: watched, and never waited for too long.

    with watched() as told:
        got = function(tensor)
    told["sent"]  # [(to which rank, how many numbers), ...], in order

Below `send`, `isend` and `batch_isend_irecv`, and below all collectives, are methods of
the process group. Whoever watches those sees everything, in whatever style it is
written and however it was imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives import barrier
from ddp_course.lab.answers import Hint, code, one_line
from ddp_course.measure import EventLog

PATIENCE = 4.0  # seconds: nobody comes any more
LATE = 0.05  # seconds by which each rank comes later than the one before it
COLLECTIVES = {  # the process group's method -> what it is called in torch.distributed
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

    def wait(self, timeout: timedelta = timedelta(seconds=PATIENCE)) -> bool:
        try:
            return self.work.wait(timeout)
        except RuntimeError as error:
            if "Timed out" not in str(error):
                raise
        told = f"after {timeout.total_seconds():g} s it still waits to {self.to_what}"
        raise TimeoutError(told)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


@contextmanager
def watched() -> Iterator[dict[str, list]]:
    """Note, on this rank, every message and every collective, in order."""
    told: dict[str, list] = {"sent": [], "received": [], "collectives": []}
    group = dist.ProcessGroup
    send, recv, recv_anysource = group.send, group.recv, group.recv_anysource

    def sending(self: Any, tensors: list[Tensor], dst: int, tag: int) -> _UnderWay:
        if not 0 <= dst < self.size():
            raise ValueError(f"there is no rank {dst}: the last is {self.size() - 1}")
        told["sent"].append((dst, tensors[0].numel()))
        return _UnderWay(send(self, tensors, dst, tag), f"send to rank {dst}")

    def receiving(self: Any, tensors: list[Tensor], src: int, tag: int) -> _UnderWay:
        told["received"].append((src, tensors[0].numel()))
        return _UnderWay(recv(self, tensors, src, tag), f"receive from rank {src}")

    def receiving_any(self: Any, tensors: list[Tensor], tag: int) -> _UnderWay:
        told["received"].append((None, tensors[0].numel()))
        return _UnderWay(recv_anysource(self, tensors, tag), "receive from any rank")

    def noting(name: str) -> Callable:
        real = getattr(group, name)

        def collective(*args: Any, **options: Any) -> Any:
            told["collectives"].append(COLLECTIVES[name])
            return real(*args, **options)

        return collective

    ours = {"send": sending, "recv": receiving, "recv_anysource": receiving_any}
    known = [name for name in COLLECTIVES if hasattr(group, name)]  # by this PyTorch
    ours |= {name: noting(name) for name in known}
    with ExitStack() as stack, EventLog() as log:
        for name, function in ours.items():
            stack.enter_context(mock.patch.object(group, name, function))
        yield told
    told["collectives"] += [event.op for event in log.events]  # of this package


def call_late(function: Callable, tensor: Tensor, *args: Any) -> dict[str, Any]:
    """Call a function on this rank, each rank a little later; tell what can be judged.

    That is what it sent and received, what it `got`, the tensor it was `given` as it is
    afterwards, and whether that is `untouched`.
    """
    before = tensor.clone()
    barrier()
    time.sleep(LATE * dist.get_rank())
    with watched() as told:
        got = function(tensor, *args)
        told["got"] = copied(got)
    told["given"], told["untouched"] = tensor.clone(), torch.equal(tensor, before)
    return told


class _Words(str):
    """A value in words, as `one_line` writes it."""

    __repr__ = str.__str__


def copied(got: Any) -> Any:
    """Return tensors as they are now, and anything else in words."""
    if isinstance(got, Tensor):
        return got.clone()
    if isinstance(got, (list, tuple)) and all(isinstance(t, Tensor) for t in got):
        return [t.clone() for t in got]
    return _Words(one_line(got))


def only_messages(where: str, told: dict[str, Any]) -> None:
    """Refuse a function that called a collective."""
    for name in told["collectives"]:
        raise Hint(
            f"{where} your function called the collective {code(name)}; build it from "
            "`dist.send` and `dist.recv`, or `dist.isend` and `dist.irecv`."
        )
