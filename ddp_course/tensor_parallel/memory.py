"""Summands in memory that all ranks see: nothing is sent, each reads the others'.

An all-reduce of `collectives.shared_memory` takes any tensor. Here is known beforehand
what is going to be summed: so it is computed where the others can read it, and what is
left of the all-reduce is to meet, and to add:

    room    a page of this rank's shared memory: the product is written into it
    meet    all ranks have written theirs
    add     every rank adds all of them, into memory of its own

There are two pages, written in turn. A page is written again after the next meeting, to
which every rank comes when it has read the page: so one meeting is enough. Chapter 09.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives import ReduceOp, shared_memory
from ddp_course.collectives.mapping import PAGE, round_up
from ddp_course.collectives.slices import combine, cuts, with_own
from ddp_course.measure import active_logs, active_meters, label
from ddp_course.tensor_parallel.exchange import Messages

ONE_SHOT = 256 << 10  # bytes that each of more than two ranks adds up for itself
KEPT = 256  # views are kept for as many shapes


@dataclass(frozen=True, eq=False)
class Room:
    """The summands of one shape on one page: of every rank."""

    words: str
    ranks: list[Tensor]


class SharedMemory(Messages):
    """The ranks of a group that share memory, on one machine, and exchange through it.

    Args:
        group: the ranks that share a layer; None are all.

    The pages grow to the largest summand, which all ranks need at the same time; they
    take twice its bytes on every rank. On the CPU only.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._pages: list[Tensor] = []  # uint8
        self._rooms: dict[tuple, Room] = {}
        self._turn = 0
        self._written: Room | None = None

    def room(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return this rank's part of the page whose turn it is, for one summand."""
        if self.size == 1:
            return super().room(shape, like)
        self._turn = 1 - self._turn
        key = self._turn, tuple(shape), like.dtype
        if key not in self._rooms:
            self._rooms[key] = self._make(*key)
        self._written = self._rooms[key]
        return self._written.ranks[self.rank]

    def total(
        self,
        summand: Tensor,
        op: dist.ReduceOp.RedOpType = ReduceOp.SUM,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """Return the sum over the ranks; `summand`, from `room`, is used up.

        `meanwhile` is called before they meet: who comes last waits for nobody.
        """
        if meanwhile is not None:
            meanwhile()
        if self.size == 1:
            return summand
        start, room = time.perf_counter(), self._meet("all_reduce", summand)
        out = torch.empty_like(summand)
        if self.size == 2 or summand.nbytes <= ONE_SHOT:
            combine(room.ranks, op, out)
            self._tell("all_reduce", start, [summand.nbytes] * self.size)
            return out
        edges = cuts(summand.numel(), self.size, summand.element_size())
        flat = [tensor.view(-1) for tensor in room.ranks]
        own = slice(*edges[self.rank : self.rank + 2])
        inputs = [tensor[own] for tensor in flat]  # nobody else reads these
        mine = inputs[self.rank]
        combine(with_own(inputs, self.rank, mine, mine), op, mine)
        self._meet("all_reduce, the other half", summand)
        ends = list(zip(edges, edges[1:], strict=False))
        sums = [tensor[a:b] for tensor, (a, b) in zip(flat, ends, strict=True)]
        torch.cat(sums, out=out.view(-1))
        nbytes = [part.nbytes + mine.nbytes for part in sums]
        self._tell("all_reduce", start, nbytes)
        return out

    def scatter_total(self, summand: Tensor, dim: int) -> Tensor:
        """Return this rank's part, along `dim`, of the sum over the ranks."""
        if self.size == 1:
            return summand
        self.parts(summand, dim)  # ValueError if they cannot be equal
        start, room = time.perf_counter(), self._meet("reduce_scatter", summand)
        inputs = [self.parts(tensor, dim)[self.rank] for tensor in room.ranks]
        out = torch.empty(inputs[0].shape, dtype=summand.dtype)
        combine(inputs, ReduceOp.SUM, out)
        self._tell("reduce_scatter", start, [out.nbytes] * self.size)
        return out

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the `x` of all ranks, one after the other along `dim`."""
        if self.size == 1:
            return x
        start = time.perf_counter()
        room = self._meet("all_gather", self.room(x.shape, x).copy_(x))
        out = torch.cat(room.ranks, dim)
        self._tell("all_gather", start, [x.nbytes] * self.size)
        return out

    def _meet(self, what: str, summand: Tensor) -> Room:
        """Wait until all ranks have written theirs; the same, and on the same page."""
        room = self._written
        if room is None or summand.data_ptr() != room.ranks[self.rank].data_ptr():
            raise RuntimeError("a summand is to be written into `room`, then be summed")
        self.comm.agree_now(f"{what} {room.words}")
        return room

    def _make(self, turn: int, shape: tuple[int, ...], dtype: torch.dtype) -> Room:
        """Divide a page of every rank; make larger ones if need be, on all ranks."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not self._pages or nbytes > self._pages[0].numel():
            for page in self._pages:
                shared_memory.free(page, self.group)
            how = {"dtype": torch.uint8, "group": self.group}
            length = round_up(max(nbytes, 1), PAGE)
            pages = [shared_memory.empty(length, **how) for _ in range(2)]
            self._pages = [label(page, "communication buffers") for page in pages]
        if len(self._rooms) >= KEPT or not self._fit():
            self._rooms.clear()
        ranks = shared_memory.peers(self._pages[turn][:nbytes], self.group)
        views = [rank.view(dtype).view(shape) for rank in ranks]
        return Room(f"of {dtype} {list(shape)} on page {turn}", views)

    def _fit(self) -> bool:
        """Tell whether the rooms that are kept lie on the pages that there are."""
        own = [page.data_ptr() for page in self._pages]
        return all(
            room.ranks[self.rank].data_ptr() in own for room in self._rooms.values()
        )

    def _tell(self, what: str, start: float, nbytes: list[int]) -> None:
        """Tell meters what went from rank to rank, and logs when."""
        ranks = self.comm.ranks
        peers = [(q, n) for q, n in enumerate(nbytes) if q != self.rank]
        for meter in active_meters():
            for peer, n in peers:
                meter.count_sent(ranks[peer], n)
                meter.count_received(ranks[peer], n)
        for log in active_logs():
            sent = sum(n for _, n in peers)
            log.add(what, start, time.perf_counter(), sent, lane="communication")
