"""Record the messages and collectives of a reader's function, with a deadline for each.

    with watched() as calls:
        got = function(tensor)
    calls["sent"]  # [(receiving rank, number of elements), ...], in order
    calls["received"]  # [sending rank, or None if it may be any, ...], in order

`send`, `isend`, `batch_isend_irecv` and all collectives call methods of the process
group. Patching those records everything, however the reader's code is written, and
however it imported these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from ddp_course.lab.values import equal_values
from ddp_course.launch.parent import patient
from ddp_course.measure import EventLog

PATIENCE = 4.0  # seconds to wait for another rank (`patient` adds more under load)
LATE = 0.05  # seconds by which each rank starts after the previous one
COLLECTIVES = {  # {the process group's method: its name in torch.distributed}
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
# {the process group's method: the function that starts such a message}
ONE_TO_ONE = {"send": "isend", "recv": "irecv", "recv_anysource": "irecv"}
WAYS_TO_WAIT = "get_future", "result", "synchronize", "block_current_stream"


class _Started:
    """A collective or message under way, which notices whether it is waited for.

    `unwaited` is {one that is not: "collective" or "message"}, shared by all. One that
    was waited for is removed, since it keeps its tensors in memory.
    """

    def __init__(
        self, work: dist.Work, to_what: str, unwaited: dict | None = None
    ) -> None:
        self.work = work
        self.to_what = to_what
        self.waited_for = False  # by `wait`, or by seeing that it has completed
        self.unwaited = {} if unwaited is None else unwaited

    def wait(self, *timeout: timedelta) -> bool:
        self.note(True)
        return self.work.wait(*timeout)

    def is_completed(self) -> bool:
        done = self.work.is_completed()
        self.note(done)  # False is no wait
        return done

    def note(self, waited_for: bool) -> None:
        if waited_for:
            self.waited_for = True
            self.unwaited.pop(self, None)

    def __getattr__(self, name: str) -> Any:
        self.note(name in WAYS_TO_WAIT)
        return getattr(self.work, name)


class _UnderWay(_Started):
    """A message under way, with a `wait` that has a deadline.

    A tensor that is sent must not be changed before `wait`: `lent` is the tensor, and a
    copy from when the message was started.
    """

    lent: tuple[Tensor, Tensor] | None = None

    def note(self, waited_for: bool) -> None:
        super().note(waited_for)
        if self.lent is None or not waited_for:
            return
        now, before = self.lent
        self.lent = None  # else it would count as memory
        if not equal_values(now, before, exact=True):
            raise RuntimeError(f"a tensor changed before `wait()`: {self.to_what}")

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.note(True)
        timeout = timeout or timedelta(seconds=patient(PATIENCE))
        try:
            return self.work.wait(timeout)
        except RuntimeError as error:
            if "Timed out" not in str(error):
                raise
        seconds = timeout.total_seconds()
        raise TimeoutError(f"after {seconds:.3g} s it still waits to {self.to_what}")


@contextmanager
def pending() -> Iterator[list[tuple[str, str]]]:
    """List, after the block, what it has started on this rank and not waited for.

    Each is (kind, name), of a collective of PyTorch or of a message.
    """
    ignored: list[tuple[str, str]] = []
    if not dist.is_initialized():
        yield ignored
        return
    unwaited: dict[_Started, str] = {}
    group = dist.ProcessGroup

    def keeping(kind: str, name: str, real: Callable) -> Callable:
        def start(*args: Any, **options: Any) -> Any:
            work = real(*args, **options)
            if work is None:  # the call itself has waited
                return None
            one = _Started(work, name, unwaited)
            unwaited[one] = kind
            return one

        return start

    with ExitStack() as stack:
        for method, name in [*COLLECTIVES.items(), *ONE_TO_ONE.items()]:
            if hasattr(group, method):
                kind = "collective" if method in COLLECTIVES else "message"
                start = keeping(kind, name, getattr(group, method))
                stack.enter_context(mock.patch.object(group, method, start))
        yield ignored
    for one, kind in unwaited.items():
        ignored.append((kind, one.to_what))
        with suppress(Exception):  # the next case must not receive this message
            one.work.wait(timedelta(seconds=patient(PATIENCE)))


def waiting(ignored: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the facts for the hint WAITED; `ignored` is the list of `pending`."""
    kind, begun = ignored[0] if ignored else ("", "")
    return {"waited": not ignored, "kind": kind, "begun": begun}


@contextmanager
def watched() -> Iterator[dict[str, list]]:
    """Record all messages and collectives of this rank, in order.

    The key "ignored" lists messages that were started and never waited for.
    """
    calls: dict[str, list] = {"sent": [], "received": [], "collectives": []}
    started: list[_UnderWay] = []
    group = dist.ProcessGroup
    send, recv, recv_anysource = group.send, group.recv, group.recv_anysource

    def start(work: dist.Work, to_what: str) -> _UnderWay:
        started.append(_UnderWay(work, to_what))
        return started[-1]

    def known(self: Any, rank: int) -> None:
        if not 0 <= rank < self.size():
            raise ValueError(
                f"there is no rank {rank}; ranks are 0 to {self.size() - 1}"
            )

    def sending(self: Any, tensors: list[Tensor], dst: int, tag: int) -> _UnderWay:
        known(self, dst)
        calls["sent"].append((dst, tensors[0].numel()))
        numbers = tensors[0].detach()
        before = numbers.clone()
        work = start(send(self, tensors, dst, tag), f"send to rank {dst}")
        work.lent = numbers, before
        return work

    def receiving(self: Any, tensors: list[Tensor], src: int, tag: int) -> _UnderWay:
        known(self, src)
        if tensors[0].is_meta:  # with gloo the sender would wait for ever
            raise RuntimeError("it receives into a tensor on another device, meta")
        calls["received"].append(src)
        return start(recv(self, tensors, src, tag), f"receive from rank {src}")

    def receiving_any(self: Any, tensors: list[Tensor], tag: int) -> _UnderWay:
        calls["received"].append(None)
        return start(recv_anysource(self, tensors, tag), "receive from any rank")

    def recording(name: str) -> Callable:
        real = getattr(group, name)

        def collective(*args: Any, **options: Any) -> Any:
            calls["collectives"].append(COLLECTIVES[name])
            return real(*args, **options)

        return collective

    patches = {"send": sending, "recv": receiving, "recv_anysource": receiving_any}
    known_here = [name for name in COLLECTIVES if hasattr(group, name)]
    patches |= {name: recording(name) for name in known_here}
    with ExitStack() as stack, EventLog() as log:
        for name, function in patches.items():
            stack.enter_context(mock.patch.object(group, name, function))
        yield calls
    calls["collectives"] += [event.op for event in log.events]  # the course's own
    ignored = [one for one in started if not one.waited_for]
    calls["ignored"] = [one.to_what for one in ignored]
    for one in ignored:  # else the next case would receive these messages
        with suppress(Exception):
            one.wait()


@contextmanager
def messages_of() -> Iterator[dict[str, Any]]:
    """Record as `watched` does; add the facts for the hints MESSAGES and WAITED."""
    with watched() as calls:
        yield calls
    calls["messages_only"] = not calls["collectives"]
    calls["collective"] = "".join(calls["collectives"][:1])
    calls |= waiting([("message", one) for one in calls["ignored"][:1]])


MESSAGES = {  # {property: hint}, for `judge`
    "messages_only": "called the collective `{collective}`; build it from `dist.send` "
    "and `dist.recv`, or `dist.isend` and `dist.irecv`."
}
WAITED = {
    "waited": "never waits for a {kind} that it started: `{begun}`. Until `wait()` "
    "has returned, the numbers may still change, and the next message may never come."
}
