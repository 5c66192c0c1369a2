"""NCCL's rules on a laptop: a backend for tensors on the CPU, as strict as on GPUs.

gloo forgives much. It matches messages by their tags, lets both ranks send first, and
accepts counts that differ. On GPUs, over NCCL, the same program hangs, or finishes with
wrong numbers, and no message says why. This backend sends everything over gloo, but

* unbatched sends and receives between two ranks run one after the other; a send ends
  when it is received;
* messages match by their order alone (different tags are an error);
* a batch (`batch_isend_irecv`) is one call. It matches a batch of the peer, and never a
  message that is sent alone (over NCCL these use different communicators);
* batches and collectives of a process group run one after the other;
* tensors must be contiguous, and operations must be among those of NCCL.

Before each call, the ranks exchange notes that describe it. Where NCCL would hang or
mix up numbers, both ranks raise a `StrictError` that names both calls; ranks that wait
for each other in a circle raise a `DeadlockError`.

    spawn(program, world_size=2, backend="strict")
    torchrun --nproc-per-node 2 -m ddp_course.launch --strict program.py

The second line runs a program that does not use this course: the program gets this
backend, whichever backend it asks for. With STRICT_TAGS=ignored in the environment,
messages with different tags match, as over NCCL, and the program computes with the
wrong numbers.

Three things differ from GPUs. `wait` blocks the host, not a stream, so a program that
reads a result before its stream has computed it is not caught. Launching a kernel costs
nothing. A message from a rank to itself is refused, even in a batch, where NCCL would
copy it.

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
from pathlib import Path
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
    P2PMessage,
    batch_facts,
    counts_by_rank,
    explain_deadlock,
    facts_of,
    find_problem,
    in_words,
    pack_note,
    read_note,
    tensors_in,
)

NAME = "strict"
GROUP, PAIR = 0, 2  # gloo's tags of notes: in a group's stream, in a pair's stream
DATA = 1  # GROUP + DATA and PAIR + DATA are the tags of messages
MOMENT = 0.3  # seconds before a failing rank raises, so that its peers can raise, too


class StrictError(RuntimeError):
    """A call, or the calls of two ranks, that NCCL's rules do not allow."""


class StrictWork(dist._Work):
    """A call in a stream: compare `facts[peer]` with each peer, then run `action`.

    `isend`, `irecv` and `async_op=True` return it. `text` names the call in errors.
    """

    def __init__(
        self,
        stream: Stream,
        text: str,
        facts: dict[int, Facts],
        action: Callable[[], Any],
    ) -> None:
        super().__init__()
        self.stream, self.text, self.facts, self.action = stream, text, facts, action
        self.done = threading.Event()
        self.value: Any = None  # the result of `action`
        self.error: BaseException | None = None
        self.for_future = False  # whether a thread waits for this call's future
        self.late: list[int] = []  # the rank that this call waits for, if any

    def execute(self, broken: BaseException | None) -> BaseException | None:
        """Run the call unless an earlier one failed; return its error, or `broken`."""
        try:
            if broken is not None:
                raise broken
            self.stream.compare_notes(self)
            self.value = self.action()
        except BaseException as error:
            self.error = error
            if error is not broken and LOST.search(str(error)):
                time.sleep(MOMENT)
                ranks, me = self.stream.group.ranks, self.stream.group.me
                gone = f"rank {self.late[0]}" if self.late else "another rank"
                self.error = RuntimeError(
                    f"rank {ranks[me]} calls {self.text}, {gone} has ended: "
                    "connection closed by peer"
                )
        self.done.set()
        return self.error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for this call and all before it in its stream; raise its error."""
        group, start, watch = self.stream.group, time.monotonic(), None
        limit = timeout.total_seconds() if timeout else 0.0
        limit = limit if limit > 0 else group.timeout
        while not self.done.wait(min(SLICE, limit)):
            head = self.stream.head or self  # the call that the stream is running
            if time.monotonic() - start > limit:
                late = ", ".join(f"rank {rank}" for rank in head.late) or "its data"
                raise StrictError(
                    f"{head.text} has waited {limit:g} s for {late}, in the group of "
                    f"ranks {group.ranks}"
                )
            # One thread per rank reports to the watch: the main one, or one that waits
            # for a future and does nothing else.
            in_main = threading.current_thread() is threading.main_thread()
            if in_main or (self.for_future and head is self):
                watch = watch or group.watch()
                watch.doing = head.text
                waits_for = head.late
                try:
                    watch(waits_for)
                except DeadlockError as error:
                    if head.late != waits_for:
                        continue  # the rank has come, and returned, meanwhile
                    raise DeadlockError(
                        f"{error}{explain_deadlock(str(error))}"
                    ) from None
        if watch:
            watch.end_wait()
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Return whether the call has ended."""
        return self.done.is_set()

    def get_future(self) -> torch.futures.Future:
        """Return a future, which fails as `wait` does; DistributedDataParallel uses it.

        C++ crashes on an exception that was set as the future's error. An exception
        that a callback raises becomes an ordinary error in C++.
        """
        begun, self.for_future = torch.futures.Future(), True
        ended = begun.then(lambda _: self.wait() and self.value)
        threading.Thread(target=begun.set_result, args=[None], daemon=True).start()
        return ended


class Stream:
    """A queue of calls that a thread runs one after the other, like a CUDA stream."""

    def __init__(self, group: StrictGroup, tags: int) -> None:
        self.group, self.tags = group, tags
        self.calls: queue.SimpleQueue[StrictWork | None] = queue.SimpleQueue()
        self.head: StrictWork | None = None
        threading.Thread(target=self._run, daemon=True, name="strict stream").start()

    def _run(self) -> None:
        broken: BaseException | None = None  # after one error, all later calls fail
        while call := self.calls.get():
            self.head = call
            broken = call.execute(broken)

    def compare_notes(self, call: StrictWork) -> None:
        """Exchange notes with the call's peers; raise StrictError if they differ."""
        gloo, ranks = self.group.gloo, self.group.ranks
        notes = {
            peer: pack_note(facts, call.text) for peer, facts in call.facts.items()
        }
        sent = []
        for peer, own in notes.items():
            call.late = [ranks[peer]]
            sent.append(gloo.send([own], peer, self.tags))
        for peer, own in notes.items():
            call.late = [ranks[peer]]
            shown = torch.empty_like(own)
            gloo.recv([shown], peer, self.tags).wait()
            (own_facts, _), (peer_facts, text) = read_note(own), read_note(shown)
            wrong = [
                fact for fact in WHY if own_facts.get(fact) != peer_facts.get(fact)
            ]
            if wrong:
                time.sleep(MOMENT)
                # Lower ranks may have sent the same note as this rank: on each of them,
                # the error names the lowest rank.
                same = [p for p, n in notes.items() if p < peer and n.equal(own)]
                calls = {
                    min([self.group.me, *same]): call.text,
                    peer: text,
                }
                both = [f"rank {ranks[r]} calls {calls[r]}" for r in sorted(calls)]
                raise StrictError(f"{', '.join(both)}: {WHY[wrong[0]]}")
        call.late = []
        for work in sent:
            work.wait()


class StrictGroup(dist.ProcessGroup):
    """A process group under NCCL's rules, which sends everything over `self.gloo`."""

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
        self.streams: dict[int | None, Stream] = {}  # by peer; None: the whole group
        self.coalescing: list[P2PMessage] | None = None  # the messages of an open batch

    def getBackendName(self) -> str:
        """Return the backend's name; C++ calls this."""
        return NAME

    _get_backend_name = getBackendName

    def _set_group_name(self, name: str) -> None:
        self.named = name

    @property
    def group_name(self) -> str:
        """The name by which PyTorch knows the group; DeviceMesh reads it."""
        return self.named

    def shutdown(self) -> None:
        """End the streams after their last calls."""
        for stream in self.streams.values():
            stream.calls.put(None)

    def watch(self) -> Watch:
        """Return the deadlock detector for this rank's next wait."""
        return Watch(default_store(), self.ranks, self.ranks[self.me])

    def _call(self, text: str, facts: dict[int, Facts], action: Callable, pair=None):
        """Append a call to the group's stream, or to the stream with rank `pair`."""
        if pair not in self.streams:
            self.streams[pair] = Stream(self, GROUP if pair is None else PAIR)
        stream = self.streams[pair]
        work = StrictWork(stream, text, facts, action)
        stream.calls.put(work)
        return work

    # ---- messages --------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> StrictWork | None:
        """Send a tensor to rank `dst` of the group, alone or in a batch."""
        return self._message(P2PMessage("send", tensors[0], dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> StrictWork | None:
        """Receive a tensor from rank `src` of the group, alone or in a batch."""
        return self._message(P2PMessage("recv", tensors[0], src, tag))

    def recv_anysource(self, *_: Any) -> None:
        """Raise StrictError: NCCL must know the sender."""
        raise StrictError("recv without src: NCCL must know which rank sends; name it")

    def _message(self, message: P2PMessage) -> StrictWork | None:
        text, peer = self._checked(message), message.peer
        if self.coalescing is not None:
            self.coalescing.append(message)
            return None
        facts = {"call": "a message", **message.facts(self.me)}
        return self._call(
            text, {peer: facts}, lambda: self._carry([message], PAIR), peer
        )

    def _checked(self, message: P2PMessage) -> str:
        """Return the call's text; raise StrictError if NCCL's rules forbid it."""
        text = message.call_text(self.ranks)
        _check(text, [message.tensor])
        if message.peer == self.me:
            raise StrictError(f"{text} is from this rank to itself; copy the tensor")
        return text

    def batch(self, messages: list[P2PMessage]) -> StrictWork:
        """Append a batch to the group's stream; peers must call matching batches."""
        for message in messages:
            self._checked(message)
        peers = sorted({m.peer for m in messages})
        facts = {peer: batch_facts(messages, peer, self.me) for peer in peers}
        text = f"a batch of {', '.join(m.call_text(self.ranks) for m in messages)}"
        return self._call(text, facts, lambda: self._carry(messages, GROUP))

    def _carry(self, messages: list[P2PMessage], tags: int) -> None:
        """Start all messages over gloo, then wait for them."""
        move = {"send": self.gloo.send, "recv": self.gloo.recv}
        works = [move[m.kind]([m.tensor], m.peer, tags + DATA) for m in messages]
        for work in works:
            work.wait()

    def _start_coalescing(self, device: torch.device) -> None:
        self.coalescing = []

    def _end_coalescing(self, device: torch.device) -> StrictWork:
        messages, self.coalescing = self.coalescing or [], None
        return self.batch(messages)

    # ---- collectives -----------------------------------------------------------------

    def _collective(
        self, method: str, name: str, compared: int | None, *args: Any, **more: Any
    ) -> StrictWork:
        """Append a collective to the group's stream.

        `method` is its name in a process group, `name` its name in torch.distributed.
        The tensors of argument number `compared` must have the same types and counts on
        all ranks.
        """
        args = (*args, *more.values())
        tensors = [] if compared is None else list(tensors_in(args[compared]))
        options = args[-1]
        facts, words = {"call": name, **facts_of(tensors)}, [in_words(tensors)]
        if op := getattr(options, "reduceOp", None):
            facts["op"] = str(getattr(op, "op", op)).split(".")[-1]
            words.append(facts["op"])
        if name in ("broadcast", "reduce", "gather", "scatter"):
            facts["root"] = self.ranks[options.rootRank]
            words.append(f"root {facts['root']}")
        text = f"{name}({', '.join(filter(None, words))})"
        _check(text, tensors_in(args), facts.get("op", "SUM"))
        every = {peer: {**facts} for peer in range(len(self.ranks)) if peer != self.me}
        if name.startswith("all_to_all"):
            gets, gives = (counts_by_rank(args, k, len(self.ranks)) for k in (0, 1))
            for peer, fact in every.items():
                both = ([self.me, peer], gives[peer]), ([peer, self.me], gets[peer])
                fact["count"] = sorted(both)

        def action() -> Any:
            getattr(self.gloo, method)(*args).wait()
            return args[0] if args else None  # PyTorch's DDP reads this result

        return self._call(text, every, action)


for _name, (_alike, _methods) in COLLECTIVES.items():
    for _method in _methods.split():
        _way = partialmethod(StrictGroup._collective, _method, _name, _alike)
        setattr(StrictGroup, _method, _way)


def wrap_batches() -> None:
    """Let `batch_isend_irecv` pass its messages to a strict group as one batch.

    PyTorch does so for its own process groups only; for others it calls `isend` and
    `irecv` one by one. Each rank calls this before it imports the user's modules.
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
        return [group.batch(list(map(P2PMessage.of, p2p_op_list)))]

    c10d.batch_isend_irecv = dist.batch_isend_irecv = batch_isend_irecv


def _check(text: str, tensors: Iterable[Tensor], op: str = "SUM") -> None:
    if problem := find_problem(tensors, op):
        raise StrictError(f"{text}: {problem}")


dist.Backend.register_backend(NAME, StrictGroup, True, devices=["cpu"])


def run_program(path: str, *arguments: str) -> None:
    """Run a program as `__main__` with this backend, whichever backend it asks for."""
    wrap_batches()
    sys.path.insert(0, str(Path(path).resolve().parent))  # as `python program.py` does
    first_group, later_group = c10d.init_process_group, c10d.new_group

    def init_process_group(backend: str | None = None, *args: Any, **options: Any):
        return first_group(NAME, *args, **options)

    def new_group(ranks=None, timeout=None, backend=None, *args: Any, **options: Any):
        over = NAME if backend == "nccl" else backend  # gloo groups stay gloo
        return later_group(ranks, timeout, over, *args, **options)

    c10d.init_process_group = dist.init_process_group = init_process_group
    c10d.new_group = dist.new_group = new_group
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
