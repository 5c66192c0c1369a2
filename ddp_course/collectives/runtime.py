"""The runtime: execute a plan on real ranks, with nothing but send and recv.

Read `step_by_step` first: it executes the plan one step after the other. `pipelined`
does the same with long chunks cut into pieces, so that it adds one piece while the next
is under way. Both take

    plan      which rank sends which chunks to which rank (`plan`)
    buffer    this rank's chunks
    endpoint  sends and receives this rank's messages (`endpoint`)

Explained in chapters 02 (step by step) and 03 (pieces).
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor

from ddp_course.collectives.endpoint import Endpoint
from ddp_course.collectives.plan import Plan, Transfer, bounds
from ddp_course.collectives.reduction import COMBINE, Op, ReduceOp, finish

PIECE = 4 << 20  # bytes; longer chunks are sent in pieces of this size
WINDOW = 2  # receives posted ahead


class Buffer:
    """A rank's memory in chunks: chunk c is the elements [bounds[c], bounds[c + 1]).

    `parts` are contiguous one-dimensional tensors of one type, whose elements are
    numbered one after the other; a chunk never spans two parts.
    """

    def __init__(self, bounds: Sequence[int], parts: Sequence[Tensor]) -> None:
        self.bounds = tuple(bounds)
        self.parts = parts
        self.starts = [0]
        for part in parts:
            self.starts.append(self.starts[-1] + part.numel())

    @classmethod
    def flat(cls, tensor: Tensor, chunks: int) -> Self:
        """Divide one contiguous tensor into `chunks` chunks of (nearly) equal size."""
        return cls(bounds(tensor.numel(), chunks), [tensor.view(-1)])

    @classmethod
    def pieces(cls, tensors: Sequence[Tensor | None]) -> Self:
        """Use `tensors[c]` as chunk c; None is a chunk that this rank never has."""
        here = next(t for t in tensors if t is not None)
        parts = [here.new_empty(0) if t is None else t.view(-1) for t in tensors]
        buffer = cls((), parts)
        buffer.bounds = tuple(buffer.starts)
        return buffer

    def of(self, t: Transfer) -> Tensor:
        """Return the chunks that a transfer sends or receives."""
        return self[self.bounds[t.first], self.bounds[t.last]]

    def chunk(self, c: int) -> Tensor:
        """Return chunk c."""
        return self[self.bounds[c], self.bounds[c + 1]]

    def __getitem__(self, place: tuple[int, int]) -> Tensor:
        """Return the elements [first, last)."""
        first, last = place
        if first == last:  # an empty chunk at the end is in no part
            return self.parts[0][:0]
        if len(self.parts) == 1:
            return self.parts[0][first:last]
        part = bisect_right(self.starts, first) - 1
        start = self.starts[part]
        return self.parts[part][first - start : last - start]


def step_by_step(
    plan: Plan, buffer: Buffer, endpoint: Endpoint, op: Op = ReduceOp.SUM
) -> None:
    """Execute `plan`: in each step exchange messages, then combine or copy them.

    The sends and receives of a step are one batch, as NCCL requires.
    """
    for step in range(plan.steps):
        sends = [t for t in plan.sent_by(endpoint.rank) if t.step == step]
        receives = [t for t in plan.received_by(endpoint.rank) if t.step == step]
        arrived = [torch.empty_like(buffer.of(t)) for t in receives]
        endpoint.exchange(
            [(buffer.of(t), t.dst) for t in sends],
            [(message, t.src) for message, t in zip(arrived, receives, strict=True)],
        )
        for message, t in zip(arrived, receives, strict=True):
            own = buffer.of(t)
            own.copy_(COMBINE[op](own, message) if t.reduce else message)
    finish_chunks(plan, buffer, endpoint, op)


def finish_chunks(plan: Plan, buffer: Buffer, endpoint: Endpoint, op: Op) -> None:
    """Divide the sums that `plan` has completed on this rank, if `op` is AVG."""
    if op == ReduceOp.AVG:
        for chunk in plan.end[endpoint.rank]:
            finish(buffer.chunk(chunk), op, plan.world_size)


@dataclass(frozen=True)
class TransferPiece:
    """A message of a transfer: the elements [first, last), to or from rank `peer`."""

    peer: int
    first: int
    last: int
    step: int
    reduce: bool = False
    after: int = 0  # sends only: receives that must be done first


@dataclass(frozen=True)
class RankPieces:
    """The messages of one rank: its receives and its sends, each in order."""

    receives: tuple[TransferPiece, ...]
    sends: tuple[TransferPiece, ...]
    longest: int  # elements of the longest message that has to be added


@lru_cache(maxsize=512)
def pieces_of(plan: Plan, rank: int, edges: tuple[int, ...], piece: int) -> RankPieces:
    """Cut the transfers of `rank` into messages of at most `piece` elements.

    `edges` are the bounds of the chunks. A message may be sent when the receives of
    earlier steps that change its elements are done: the first `after` receives.
    """
    receives = tuple(
        TransferPiece(t.src, first, last, t.step, t.reduce)
        for t in plan.received_by(rank)
        for first, last in _cut(edges[t.first], edges[t.last], piece)
    )
    sends, after = [], 0
    for t in plan.sent_by(rank):
        for first, last in _cut(edges[t.first], edges[t.last], piece):
            for count, r in enumerate(receives, 1):
                if r.step < t.step and r.first < last and first < r.last:
                    after = max(after, count)
            sends.append(TransferPiece(t.dst, first, last, t.step, after=after))
    longest = max((r.last - r.first for r in receives if r.reduce), default=0)
    return RankPieces(receives, tuple(sends), longest)


def _cut(first: int, last: int, piece: int) -> list[tuple[int, int]]:
    """Cut [first, last) into pieces; an empty range has none."""
    return [(at, min(at + piece, last)) for at in range(first, last, piece)]


def pipelined(
    plan: Plan,
    buffer: Buffer,
    endpoint: Endpoint,
    op: Op,
    scratch: Callable[[int], Tensor],
) -> None:
    """Execute `plan` in pieces: add one piece while the next ones are under way.

    `scratch(numel)` returns memory of the buffer's type for messages that have to be
    added. Receives are posted `WINDOW` ahead; each message is sent as soon as its
    elements are complete.
    """
    piece = max(1, PIECE // buffer.parts[0].element_size())
    todo = pieces_of(plan, endpoint.rank, buffer.bounds, piece)
    slots = scratch(WINDOW * todo.longest).split(max(1, todo.longest))
    arriving, sending = [], []

    def post(k: int) -> None:
        if k < len(todo.receives):
            r = todo.receives[k]
            slot = slots[k % WINDOW][: r.last - r.first] if r.reduce else None
            target = buffer[r.first, r.last] if slot is None else slot
            arriving.append((target, endpoint.receive(target, r.peer)))

    def send_what_is_ready(done: int) -> None:
        while len(sending) < len(todo.sends):
            s = todo.sends[len(sending)]
            if s.after > done:
                return
            sending.append(endpoint.send(buffer[s.first, s.last], s.peer))

    for k in range(WINDOW):
        post(k)
    send_what_is_ready(0)
    for k, r in enumerate(todo.receives):
        message, handle = arriving[k]
        handle.wait()
        if r.reduce:
            own = buffer[r.first, r.last]
            COMBINE[op](own, message, out=own)
        send_what_is_ready(k + 1)
        post(k + WINDOW)
    for handle in sending:
        handle.wait()
    finish_chunks(plan, buffer, endpoint, op)
