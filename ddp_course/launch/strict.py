"""NCCL's rules on a laptop: a backend for tensors on the CPU, as strict as on GPUs.

gloo forgives much. It tells messages apart by their tags, lets both ranks send first,
takes counts that differ. On GPUs, over NCCL, the same program hangs, or finishes with
wrong numbers, and nothing says why. This backend carries everything over gloo, but

* unbatched sends and receives of two ranks run one after the other; a send lasts until
  it is received;
* messages match by their order alone, whatever their tags;
* a batch (`batch_isend_irecv`) is one group. It meets the same group on the peer, and
  never a message that is sent alone (over NCCL these take different communicators);
* batches and collectives of a process group run one after the other;
* tensors are contiguous, operations those that NCCL has.

Before anything is sent, the ranks show each other what they are about to do. Where NCCL
would hang or mix up numbers, both raise a `StrictError` that names both calls; a circle
of ranks that wait for each other raises a `DeadlockError`.

    spawn(program, world_size=2, backend="strict")
    torchrun --nproc-per-node 2 -m ddp_course.launch --strict program.py

The second line runs a program that knows nothing of this course: whichever backend it
asks for, it gets this one. With STRICT_TAGS=ignored in the environment, messages whose
tags differ pass as over NCCL, and one is taken for another.

Three things are not as on GPUs. `wait` lets the host wait, not a stream, so a program
that reads a result before its stream has it is not caught. Kernels cost nothing. And a
message to oneself is refused, even in a batch, where NCCL would copy it.

Sources: NVIDIA/nccl issues 479, 584, 783, 1279; torch/csrc/distributed/c10d/
ProcessGroupNCCL.cpp. The rules as tables: `strict_rules`. Chapters 01, 02 and 10.
"""

from __future__ import annotations

import queue
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partialmethod, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ddp_course.launch.deadlock import SLICE, DeadlockError, Watch, default_store
from ddp_course.launch.reports import LOST
from ddp_course.launch.strict_rules import (
    COLLECTIVES,
    WHY,
    Facts,
    Message,
    batch_facts,
    counts_by_rank,
    facts_of,
    in_words,
    note,
    problem_with,
    read,
    tensors_in,
    why_stuck,
)

NAME = "strict"
GROUP, PAIR = 0, 2  # gloo's tags for the stream of a group, or of two ranks: of notes,
DATA = 1  # and that much more of messages
MOMENT = 0.3  # seconds that a rank which found something wrong leaves others to see it


class StrictError(RuntimeError):
    """A call, or the calls of two ranks, that NCCL's rules do not allow."""


class StrictWork(dist._Work):
    """A call under way: in a stream it meets `facts[peer]` of each peer, then `do`es.

    As `isend`, `irecv` and `async_op=True` return it.
    """

    def __init__(
        self, stream: Stream, told: str, facts: dict[int, Facts], do: Callable[[], Any]
    ) -> None:
        super().__init__()
        self.stream, self.told, self.facts, self.do = stream, told, facts, do
        self.done = threading.Event()
        self.value: Any = None  # what came of it
        self.error: BaseException | None = None
        self.for_future = False
        self.late: list[int] = []  # a rank that it waits for

    def carry_out(self, broken: BaseException | None) -> BaseException | None:
        """Do it, unless something is broken; let go of whoever waits."""
        try:
            if broken is not None:
                raise broken
            self.stream.meet(self)
            self.value = self.do()
        except BaseException as error:
            self.error = error
            if error is not broken and LOST.search(str(error)):
                time.sleep(MOMENT)
                ranks, me = self.stream.group.ranks, self.stream.group.me
                gone = f"rank {self.late[0]}" if self.late else "another rank"
                self.error = RuntimeError(
                    f"rank {ranks[me]} calls {self.told}, {gone} has ended: connection "
                    "closed by peer"
                )
        self.done.set()
        return self.error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for it, and all before it in its stream; raise what it raised."""
        group, start, watch = self.stream.group, time.monotonic(), None
        limit = timeout.total_seconds() if timeout else 0.0
        limit = limit if limit > 0 else group.timeout
        while not self.done.wait(min(SLICE, limit)):
            head = self.stream.head  # what all are waiting for
            if time.monotonic() - start > limit:
                late = ", ".join(f"rank {rank}" for rank in head.late) or "its data"
                raise StrictError(
                    f"{head.told} has waited {limit:g} s for {late}, in the group of "
                    f"ranks {group.ranks}"
                )
            # Who waits for a future comes to nothing else: that thread may speak.
            of_main = threading.current_thread() is threading.main_thread()
            if of_main or (self.for_future and head is self):
                watch = watch or group.watch()
                watch.doing = head.told
                try:
                    watch(head.late)
                except DeadlockError as error:
                    raise DeadlockError(f"{error}{why_stuck(str(error))}") from None
        if watch:
            watch.over()
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Tell whether it is done."""
        return self.done.is_set()

    def get_future(self) -> torch.futures.Future:
        """Return what C++ waits for (DistributedDataParallel); it fails as `wait` does.

        An error that is *set* is an object to C++, which crashes on it; one raised in a
        callback is an error there, too.
        """
        begun, self.for_future = torch.futures.Future(), True
        ended = begun.then(lambda _: self.wait() and self.value)
        threading.Thread(target=begun.set_result, args=[None], daemon=True).start()
        return ended


class Stream:
    """Calls that are carried out one after the other, as by a CUDA stream."""

    def __init__(self, group: StrictGroup, tags: int) -> None:
        self.group, self.tags = group, tags
        self.calls: queue.SimpleQueue[StrictWork | None] = queue.SimpleQueue()
        self.head: StrictWork | None = None
        threading.Thread(target=self._run, daemon=True, name="strict stream").start()

    def _run(self) -> None:
        broken: BaseException | None = None  # after an error nothing can be trusted
        while call := self.calls.get():
            self.head = call
            broken = call.carry_out(broken)

    def meet(self, call: StrictWork) -> None:
        """Show the peers what is to be done, and see whether they mean the same."""
        gloo, ranks = self.group.gloo, self.group.ranks
        notes = {peer: note(facts, call.told) for peer, facts in call.facts.items()}
        sent = []
        for peer, own in notes.items():
            call.late = [ranks[peer]]
            sent.append(gloo.send([own], peer, self.tags))
        for peer, own in notes.items():
            call.late = [ranks[peer]]
            shown = torch.empty_like(own)
            gloo.recv([shown], peer, self.tags).wait()
            (mine, _), (theirs, told) = read(own), read(shown)
            wrong = [fact for fact in WHY if mine.get(fact) != theirs.get(fact)]
            if wrong:
                time.sleep(MOMENT)
                # The lowest rank speaks for all that are known to mean the same.
                same = [p for p, n in notes.items() if p < peer and n.equal(own)]
                calls = {min([self.group.me, *same]): call.told, peer: told}
                both = [f"rank {ranks[r]} calls {calls[r]}" for r in sorted(calls)]
                raise StrictError(f"{', '.join(both)}: {WHY[wrong[0]]}")
        call.late = []
        for work in sent:
            work.wait()


class StrictGroup(dist.ProcessGroup):
    """A process group under NCCL's rules; everything goes through its `gloo`."""

    def __init__(self, options: c10d._DistributedBackendOptions, *_: Any) -> None:
        self.me, size, store = options.group_rank, options.group_size, options.store
        super().__init__(self.me, size)
        self.ranks = list(options.global_ranks_in_group) or list(range(size))
        self.timeout = options.timeout.total_seconds()
        kind, ever = dist.ProcessGroup.BackendType.GLOO, timedelta(days=1)
        gloo = dist.ProcessGroupGloo(store, self.me, size, timeout=ever)
        self.gloo = dist.ProcessGroup(store, self.me, size)  # has all methods
        self.gloo._set_default_backend(kind)
        self.gloo._register_backend(torch.device("cpu"), kind, gloo)
        self.streams: dict[int | None, Stream] = {}  # the group's is that of None
        self.together: list[Message] | None = None  # what is being coalesced

    def getBackendName(self) -> str:
        """Return the name, for C++."""
        return NAME

    _get_backend_name = getBackendName

    def _set_group_name(self, name: str) -> None:
        self.named = name

    @property
    def group_name(self) -> str:
        """The name by which PyTorch knows the group; DeviceMesh wants it."""
        return self.named

    def shutdown(self) -> None:
        """End the streams, when they have done what they have to."""
        for stream in self.streams.values():
            stream.calls.put(None)

    def watch(self) -> Watch:
        """Return who looks after this rank while it waits."""
        return Watch(default_store(), self.ranks, self.ranks[self.me])

    def _call(self, told: str, facts: dict[int, Facts], do: Callable, pair=None):
        """Append a call to the stream of the group, or to that with one peer."""
        if pair not in self.streams:
            self.streams[pair] = Stream(self, GROUP if pair is None else PAIR)
        stream = self.streams[pair]
        work = StrictWork(stream, told, facts, do)
        stream.calls.put(work)
        return work

    # ---- messages --------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> StrictWork | None:
        """Send a tensor to rank `dst` of the group, alone or in a batch."""
        return self._message(Message("send", tensors[0], dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> StrictWork | None:
        """Receive a tensor from rank `src` of the group, alone or in a batch."""
        return self._message(Message("recv", tensors[0], src, tag))

    def recv_anysource(self, *_: Any) -> None:
        """Refuse."""
        raise StrictError("recv without src: NCCL must know who sends")

    def _message(self, message: Message) -> StrictWork | None:
        told, peer = self._checked(message), message.peer
        if self.together is not None:
            self.together.append(message)
            return None
        facts = {"call": "a message", **message.facts(self.me)}
        return self._call(
            told, {peer: facts}, lambda: self._carry([message], PAIR), peer
        )

    def _checked(self, message: Message) -> str:
        """Return a message in words; StrictError if NCCL's rules do not allow it."""
        told = message.told(self.ranks)
        _check(told, [message.tensor])
        if message.peer == self.me:
            raise StrictError(f"{told} is to itself")
        return told

    def batch(self, messages: list[Message]) -> StrictWork:
        """Begin a batch, behind the collectives. Each peer must have its other half."""
        for message in messages:
            self._checked(message)
        peers = sorted({m.peer for m in messages})
        facts = {peer: batch_facts(messages, peer, self.me) for peer in peers}
        told = f"a batch of {', '.join(m.told(self.ranks) for m in messages)}"
        return self._call(told, facts, lambda: self._carry(messages, GROUP))

    def _carry(self, messages: list[Message], tags: int) -> None:
        """Send and receive over gloo, all at once."""
        move = {"send": self.gloo.send, "recv": self.gloo.recv}
        works = [move[m.kind]([m.tensor], m.peer, tags + DATA) for m in messages]
        for work in works:
            work.wait()

    def _start_coalescing(self, device: torch.device) -> None:
        self.together = []

    def _end_coalescing(self, device: torch.device) -> StrictWork:
        messages, self.together = self.together or [], None
        return self.batch(messages)

    # ---- collectives -----------------------------------------------------------------

    def _collective(
        self, method: str, name: str, alike: int | None, *args: Any, **more: Any
    ) -> StrictWork:
        """Begin a collective: `method` of gloo, called `name` by the reader."""
        args = (*args, *more.values())
        tensors = [] if alike is None else list(tensors_in(args[alike]))
        options = args[-1]
        facts, words = {"call": name, **facts_of(tensors)}, [in_words(tensors)]
        if op := getattr(options, "reduceOp", None):
            facts["op"] = str(getattr(op, "op", op)).split(".")[-1]
            words.append(facts["op"])
        if name in ("broadcast", "reduce", "gather", "scatter"):
            facts["root"] = self.ranks[options.rootRank]
            words.append(f"root {facts['root']}")
        told = f"{name}({', '.join(filter(None, words))})"
        _check(told, tensors_in(args), facts.get("op", "SUM"))
        every = {peer: {**facts} for peer in range(len(self.ranks)) if peer != self.me}
        if name.startswith("all_to_all"):
            gets, gives = (counts_by_rank(args, k, len(self.ranks)) for k in (0, 1))
            for peer, fact in every.items():
                both = ([self.me, peer], gives[peer]), ([peer, self.me], gets[peer])
                fact["count"] = sorted(both)

        def do() -> Any:
            getattr(self.gloo, method)(*args).wait()
            return args[0] if args else None  # DistributedDataParallel looks at it

        return self._call(told, every, do)


for _name, (_alike, _methods) in COLLECTIVES.items():
    for _method in _methods.split():
        _way = partialmethod(StrictGroup._collective, _method, _name, _alike)
        setattr(StrictGroup, _method, _way)


def wrap_batches() -> None:
    """Let `batch_isend_irecv` hand a strict group its messages as one batch.

    PyTorch groups a batch for its own process groups only; for others it calls `isend`
    and `irecv` one by one. Called in each rank before anything else is imported.
    """
    original = c10d.batch_isend_irecv
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[Any]:
        group = p2p_op_list[0].group if p2p_op_list else None
        if not isinstance(group, StrictGroup):
            return original(p2p_op_list)
        if any(op.group != group for op in p2p_op_list):
            raise ValueError("All ops need to use the same group.")
        return [group.batch(list(map(Message.of, p2p_op_list)))]

    c10d.batch_isend_irecv = dist.batch_isend_irecv = batch_isend_irecv


def _check(told: str, tensors: Iterable[Tensor], op: str = "SUM") -> None:
    if problem := problem_with(tensors, op):
        raise StrictError(f"{told}: {problem}")


dist.Backend.register_backend(NAME, StrictGroup, True, devices=["cpu"])


def run_program(path: str, *arguments: str) -> None:
    """Run a Python program as if alone; whichever backend it asks for, it gets this."""
    wrap_batches()
    first_group, later_group = c10d.init_process_group, c10d.new_group

    def init_process_group(backend: str | None = None, *args: Any, **options: Any):
        return first_group(NAME, *args, **options)

    def new_group(ranks=None, timeout=None, backend=None, *args: Any, **options: Any):
        over = NAME if backend == "nccl" else backend  # a group over gloo stays one
        return later_group(ranks, timeout, over, *args, **options)

    c10d.init_process_group = dist.init_process_group = init_process_group
    c10d.new_group = dist.new_group = new_group
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
