"""NCCL's rules on a laptop: a backend for tensors on the CPU, as strict as on GPUs.

gloo forgives much. It tells messages apart by their tags, lets both ranks send first,
takes counts that differ. On GPUs, over NCCL, the same program hangs, or finishes with
wrong numbers, and nothing says why. This backend carries everything over gloo, but

* unbatched sends and receives of two ranks run one after the other; a send lasts until
  it is received;
* messages match by their order alone, whatever their tags;
* a batch (`batch_isend_irecv`) is one group, which meets the same group on the peer;
* batches and collectives of a process group run one after the other;
* tensors are contiguous, operations those that NCCL has.

Before anything is sent, the ranks show each other what they are about to do. Where NCCL
would hang or mix up numbers, both raise a `StrictError` that names both calls; a circle
of ranks that wait for each other raises a `DeadlockError`.

    spawn(program, world_size=2, backend="strict")
    torchrun --nproc-per-node 2 -m ddp_course.launch --strict program.py

The second line runs a program that knows nothing of this course: whichever backend it
asks for, it gets this one. Not modelled: streams (here the host waits, too), what
kernels cost. With STRICT_TAGS=ignored in the environment, messages whose tags differ
pass as over NCCL, and one is taken for another. Sources: NVIDIA/nccl issues 479, 584,
783, 1279; torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp. Chapters 01, 02 and 10.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ddp_course.launch.deadlock import SLICE, Watch

NAME = "strict"
ROOM = 2048  # bytes of a note: what one rank shows another before a call
GROUP, PAIR = 0, 2  # gloo's tags for the stream of a group, or of two ranks: of notes,
DATA = 1  # and that much more of messages
MOMENT = 0.3  # seconds that a rank which found a mistake leaves the others to see it
BATCH = dist.batch_isend_irecv.__code__
OPERATIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "PREMUL_SUM")
# A process group's method: what it is called in torch.distributed; the argument whose
# tensors must have the same types and counts on all ranks.
COLLECTIVES = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 0),
    "allgather_coalesced": ("all_gather", 0),
    "all_gather_single": ("all_gather_single", 1),
    "all_gather_single_coalesced": ("all_gather_single", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter_single", 0),
    "reduce_scatter_single_coalesced": ("reduce_scatter_single", 0),
    "alltoall": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all_single", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "barrier": ("barrier", None),
    # what some were called before torch 2.13
    "_allgather_base": ("all_gather_single", 1),
    "allgather_into_tensor_coalesced": ("all_gather_single", 1),
    "_reduce_scatter_base": ("reduce_scatter_single", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_single", 0),
    "alltoall_base": ("all_to_all_single", 1),
}
WHY = {  # in what two calls differ -> what becomes of it over NCCL
    "call": "all ranks of a group must make the same calls in the same order. NCCL "
    "would hang, or take the numbers of one for those of the other",
    "way": "the calls of two ranks run one after the other, so each waits for the "
    "other, for ever. Swap with batch_isend_irecv, or in opposite orders",
    "messages": "in a batch, each send to a rank must meet its receive in that rank's "
    "batch, in the same order. NCCL would hang, or mix up the messages",
    "dtype": "NCCL does not compare types. It would give wrong numbers, or hang",
    "count": "NCCL does not compare counts. It would give wrong numbers, or hang",
    "op": "NCCL does not compare operations. It would give wrong numbers",
    "root": "NCCL does not compare roots. It would hang, or give wrong numbers",
    "tag": "NCCL has no tags. Messages match by their order, so it would take one "
    "message for another",
}
Facts = dict[str, Any]  # of a call: what both ranks must mean alike


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
        self.future: torch.futures.Future = torch.futures.Future()
        self.error: BaseException | None = None
        self.late: list[int] = []  # a rank that it waits for

    def carry_out(self, broken: BaseException | None) -> BaseException | None:
        """Do it, unless something is broken; let go of whoever waits."""
        try:
            if broken is not None:
                raise broken
            self.stream.meet(self)
            self.future.set_result(self.do())
        except BaseException as error:
            self.error = error
            self.future.set_exception(error)
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
            if threading.current_thread() is threading.main_thread():
                watch = watch or group.watch()
                watch.doing = head.told
                watch(head.late)
        if watch:
            watch.over()
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Tell whether it is done."""
        return self.done.is_set()

    def get_future(self) -> torch.futures.Future:
        """Return what C++ waits for (DistributedDataParallel)."""
        return self.future


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
        notes = {peer: _note(facts, call.told) for peer, facts in call.facts.items()}
        sent = [gloo.send([note], peer, self.tags) for peer, note in notes.items()]
        for peer, note in notes.items():
            call.late = [ranks[peer]]
            shown = torch.empty_like(note)
            gloo.recv([shown], peer, self.tags).wait()
            (mine, _), (theirs, told) = _read(note), _read(shown)
            wrong = [fact for fact in WHY if mine.get(fact) != theirs.get(fact)]
            if wrong:
                time.sleep(MOMENT)
                # The lowest rank speaks for all that are known to mean the same.
                same = [p for p, n in notes.items() if p < peer and n.equal(note)]
                calls = {min([self.group.me, *same]): call.told, peer: told}
                both = [f"rank {ranks[r]} calls {calls[r]}" for r in sorted(calls)]
                raise StrictError(f"{', '.join(both)}: {WHY[wrong[0]]}")
        call.late = []
        for work in sent:
            work.wait()


@dataclass
class Message:
    """One send or receive, to or from `peer` (its number in the group)."""

    kind: str
    tensor: Tensor
    peer: int
    tag: int

    def facts(self, me: int) -> Facts:
        """Return what the peer must mean alike."""
        way = [me, self.peer] if self.kind == "send" else [self.peer, me]
        return {"way": way, **_facts([self.tensor]), "tag": self.tag}

    def told(self, ranks: list[int]) -> str:
        """Return it as it was called."""
        to, tag = "dst" if self.kind == "send" else "src", f", tag={self.tag}"
        form, tag = _form([self.tensor]), tag if self.tag else ""
        return f"{self.kind}({form}, {to}={ranks[self.peer]}{tag})"


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
        store = c10d._get_default_store()
        return Watch(store, self.ranks, self.ranks[self.me])

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
        told, peer = message.told(self.ranks), message.peer
        _check(told, message.tensor)
        if peer == self.me:
            raise StrictError(f"{told} is to itself")
        if self.together is not None:
            self.together.append(message)
            return None
        if batch := _batch_of_the_caller():
            ops, this = batch  # the last one brings them all
            return self._batch(list(map(_part, ops))) if this is ops[-1] else None
        facts = {"call": "a message", **message.facts(self.me)}
        return self._call(
            told, {peer: facts}, lambda: self._carry([message], PAIR), peer
        )

    def _batch(self, messages: list[Message]) -> StrictWork:
        """Begin a batch, behind the collectives. Each peer must have its other half."""
        facts: dict[int, Facts] = {}
        for peer in sorted({m.peer for m in messages}):
            each = [m.facts(self.me) for m in messages if m.peer == peer]
            each.sort(key=lambda fact: fact["way"])  # of one way: in their order
            tags = [fact.pop("tag") for fact in each]
            facts[peer] = {"call": "a batch", "messages": each, "tag": tags}
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
        return self._batch(messages)

    # ---- collectives -----------------------------------------------------------------

    def _collective(
        self, method: str, name: str, alike: int | None, *args: Any, **more: Any
    ) -> StrictWork:
        """Begin a collective: `method` of gloo, called `name` by the reader."""
        args = (*args, *more.values())
        tensors = [] if alike is None else list(_tensors(args[alike]))
        options = args[-1]
        facts, words = {"call": name, **_facts(tensors)}, [_form(tensors)]
        if op := getattr(options, "reduceOp", None):
            facts["op"] = str(getattr(op, "op", op)).split(".")[-1]
            words.append(facts["op"])
        if name in ("broadcast", "reduce", "gather", "scatter"):
            facts["root"] = self.ranks[options.rootRank]
            words.append(f"root {facts['root']}")
        told = f"{name}({', '.join(filter(None, words))})"
        _check(told, *_tensors(args))
        if facts.get("op", "SUM") not in OPERATIONS:
            raise StrictError(f"{told}: NCCL has no {facts['op']}")
        every = {peer: {**facts} for peer in range(len(self.ranks)) if peer != self.me}
        if name.startswith("all_to_all"):
            gets, gives = (self._counts(args, which) for which in (0, 1))
            for peer, fact in every.items():
                both = ([self.me, peer], gives[peer]), ([peer, self.me], gets[peer])
                fact["count"] = sorted(both)

        def do() -> Any:
            getattr(self.gloo, method)(*args).wait()
            return args[0] if args else None  # DistributedDataParallel looks at it

        return self._call(told, every, do)

    def _counts(self, args: tuple, which: int) -> list[int]:
        """Return how many elements of an all-to-all's argument belong to each rank."""
        given, size = args[which], len(self.ranks)
        if not isinstance(given, Tensor):
            return [t.numel() for t in given]
        rows = args[2 + which] or [len(given) // size] * size
        return [n * (given.numel() // max(1, len(given))) for n in rows]


for _method, _names in COLLECTIVES.items():
    setattr(
        StrictGroup, _method, partialmethod(StrictGroup._collective, _method, *_names)
    )


def _batch_of_the_caller() -> tuple[list[dist.P2POp], dist.P2POp] | None:
    """Return the batch of which this message is a part, and the part; None if alone.

    `batch_isend_irecv` makes groups for PyTorch's own process groups; for others it
    calls `isend` and `irecv` one by one. So we look who calls.
    """
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code is BATCH:
            return frame.f_locals["p2p_op_list"], frame.f_locals["p2p_op"]
        frame = frame.f_back
    return None


def _part(op: dist.P2POp) -> Message:
    tensor = torch.view_as_real(op.tensor) if op.tensor.is_complex() else op.tensor
    kind = "send" if op.op is dist.isend else "recv"
    return Message(kind, tensor, op.group_peer, op.tag)


def _check(told: str, *tensors: Tensor) -> None:
    """Refuse tensors that NCCL refuses."""
    for t in tensors:
        if t.device.type != "cpu" or t.layout != torch.strided:
            raise StrictError(f"{told}: a tensor is {t.layout} on {t.device}")
        last = torch.channels_last if t.dim() == 4 else torch.contiguous_format
        if not t.is_contiguous() and not t.is_contiguous(memory_format=last):
            raise StrictError(
                f"{told}: tensors must be contiguous; one has shape {list(t.shape)} "
                f"and stride {list(t.stride())}. Give its .contiguous()"
            )


def _tensors(given: Any) -> Iterator[Tensor]:
    """Yield all tensors in lists of lists."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for each in given:
            yield from _tensors(each)


def _facts(tensors: list[Tensor]) -> Facts:
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in tensors})
    return {"dtype": dtypes, "count": [t.numel() for t in tensors]}


def _form(tensors: list[Tensor]) -> str:
    """Return "float32 [2, 3]", of several tensors with the first one's shape."""
    several = f"{len(tensors)} x " if len(tensors) > 1 else ""
    first = [f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in tensors[:1]]
    return several + "".join(first)


def _note(facts: Facts, told: str) -> Tensor:
    """Return what a rank shows a peer, in ROOM bytes; the hash of what is too long."""
    texts = {name: json.dumps(fact) for name, fact in facts.items()}
    for name, text in texts.items():
        if len(text) > 100:
            texts[name] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    if os.environ.get("STRICT_TAGS") == "ignored":
        texts.pop("tag", None)
    words = json.dumps([texts, told if len(told) < 400 else f"{told[:400]} ..."])
    return torch.frombuffer(bytearray(words.encode().ljust(ROOM)), dtype=torch.uint8)


def _read(note: Tensor) -> tuple[Facts, str]:
    facts, told = json.loads(bytes(note.tolist()))
    return facts, told


dist.Backend.register_backend(NAME, StrictGroup, True, devices=["cpu"])


def run_program(path: str, *arguments: str) -> None:
    """Run a Python program as if alone; whichever backend it asks for, it gets this."""
    theirs = c10d.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **options: Any):
        return theirs(NAME, *args, **options)

    c10d.init_process_group = dist.init_process_group = init_process_group
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
