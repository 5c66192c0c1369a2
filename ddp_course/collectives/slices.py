"""All-reduce in shared memory: each rank reduces one slice of all ranks' tensors.

Rank r is in charge of slice r. It combines slice r of rank 0, of rank 1, ..., in that
order, and then all ranks have the result from it. So every element is reduced in the
same order, however it gets there: the same bits on all ranks and in both of

    Staging                    any tensor goes through slots in a `Segment`, in slabs
    symmetric.SymmetricMemory  tensors that lie in shared memory already

Each call begins with one barrier of the segment, which may be the caller's own `meet`
(a `Meeting`, say). If that raises, no tensor has been changed. Chapter 03.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives.mapping import LINE, round_up
from ddp_course.collectives.reduction import COMBINE, finish
from ddp_course.collectives.segment import Segment

Op = dist.ReduceOp.RedOpType
Meet = Callable[[], object]

SLOT = 1 << 20  # bytes of a slab: longer tensors go through in slabs of this size
ONE_SHOT = 64 << 10  # bytes up to which every rank reduces everything itself
KEPT = 256  # views are kept for as many different sizes and places


@lru_cache(maxsize=KEPT)
def cuts(numel: int, size: int, itemsize: int) -> tuple[int, ...]:
    """Return where the slices of `numel` elements begin and end.

    Slice r is [cuts[r], cuts[r + 1]). They are equally long, but begin at multiples of
    a cache line; so the last ones may be shorter, or empty.
    """
    longest = round_up(-(-numel // size), max(1, LINE // itemsize))
    return tuple(min(r * longest, numel) for r in range(size + 1))


def combine(inputs: Sequence[Tensor], op: Op, out: Tensor) -> None:
    """Reduce `inputs`, one of each rank, into `out`, in the order of the ranks.

    `out` may be the first or the second of them, but none of the others: what is in
    those is still needed when the first two have been combined.
    """
    if len(inputs) == 1:
        out.copy_(inputs[0])
    else:
        function = COMBINE[op]
        function(inputs[0], inputs[1], out=out)
        for tensor in inputs[2:]:
            function(out, tensor, out=out)
    finish(out, op, len(inputs))


def with_own(inputs: list[Tensor], rank: int, own: Tensor, out: Tensor) -> list:
    """Put the calling rank's own numbers among the inputs, out of the way of `out`."""
    inputs = inputs.copy()
    in_the_way = rank >= 2 and out.data_ptr() == own.data_ptr()
    inputs[rank] = own.clone() if in_the_way else own
    return inputs


class _Page(NamedTuple):
    """One rank's views of a page, for slabs of one length and dtype."""

    slots: list[Tensor]  # every rank's slot: all of the slab
    slices: list[Tensor]  # every rank's slot: the slice of this rank
    shown: list[Tensor]  # this rank's slot: the slices of the others, before and after
    result: Tensor  # the results: the slice of this rank
    results: list[Tensor]  # the results: the slices of the others, before and after


class Staging:
    """Collectives of any contiguous tensors, through slots in a segment.

    Each of the segment's two pages has a slot for every rank, and one for results. A
    rank writes on the page whose turn it is; it reads the other one, which all ranks
    have finished. `offset` and `slot` (its size, a multiple of 4096) are in bytes.

    Chapter 03.
    """

    def __init__(self, segment: Segment, offset: int = 0, slot: int = SLOT) -> None:
        self.segment = segment
        self.slot = slot
        self._memory = segment.view(offset, (2, segment.size + 1, slot), torch.uint8)
        self._pages: dict[tuple, _Page] = {}

    @staticmethod
    def nbytes(size: int, slot: int = SLOT) -> int:
        """Return how many bytes of a segment the slots of `size` ranks need."""
        return 2 * (size + 1) * slot

    def all_reduce(self, tensor: Tensor, op: Op, meet: Meet | None = None) -> None:
        """Reduce `tensor` (contiguous, any shape and dtype) over all ranks, in place.

        Errors: as `Segment.barrier`, and what `meet` raises.
        """
        flat = tensor.view(-1)
        if tensor.nbytes <= min(ONE_SHOT, self.slot):
            self._one_shot(flat, op, meet)
        else:
            self._in_slabs(flat, op, meet)

    def _one_shot(self, flat: Tensor, op: Op, meet: Meet | None) -> None:
        """Copy in, meet; then every rank reduces everything itself."""
        with self.segment as segment:
            edges = cuts(flat.numel(), segment.size, flat.element_size())
            slots = self._page(segment.turn, edges, flat.dtype).slots
            slots[segment.rank].copy_(flat)
        segment.meet(meet)
        with segment:
            combine(slots, op, flat)

    def _in_slabs(self, flat: Tensor, op: Op, meet: Meet | None) -> None:
        """Every rank reduces its slice of each slab, and reads the others' results.

        Between two barriers it copies in slab i, reduces its slice of slab i - 1, and
        copies out slab i - 2: one barrier for each slab, and one more.
        """
        parts = flat.split(self.slot // flat.element_size())
        with self.segment as segment:
            slabs = [self._copy_in(parts[0])]
        segment.meet(meet)
        with segment:
            for i in range(1, len(parts) + 2):
                if i < len(parts):
                    slabs.append(self._copy_in(parts[i]))
                if i <= len(parts):
                    self._reduce(*slabs[i - 1], op)
                if i >= 2:
                    self._copy_out(*slabs[i - 2])
                if i <= len(parts):
                    segment.barrier()

    def _copy_in(self, part: Tensor) -> tuple[tuple[int, ...], Tensor, list[Tensor]]:
        """Show the other ranks their slices; return the cuts, the own slice, theirs."""
        edges = cuts(part.numel(), self.segment.size, part.element_size())
        own, others = self._divide(part, edges)
        page = self._page(self.segment.turn, edges, part.dtype)
        for there, here in zip(page.shown, others, strict=True):
            there.copy_(here)
        return edges, own, others

    def _reduce(self, edges: tuple, own: Tensor, _: list[Tensor], op: Op) -> None:
        """Reduce the own slice, for the other ranks and for this one."""
        write, read = self.segment.turn, 1 - self.segment.turn
        inputs = self._page(read, edges, own.dtype).slices.copy()
        inputs[self.segment.rank] = own
        result = self._page(write, edges, own.dtype).result
        combine(inputs, op, result)
        own.copy_(result)

    def _copy_out(self, edges: tuple, own: Tensor, others: list[Tensor]) -> None:
        """Fetch what the other ranks have reduced."""
        page = self._page(1 - self.segment.turn, edges, own.dtype)
        for here, there in zip(others, page.results, strict=True):
            here.copy_(there)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, op: Op, meet: Meet | None = None
    ) -> None:
        """Reduce chunk r of every rank's `input` into rank r's `output`.

        `input` is contiguous and has `size` chunks as long as `output`, which may be
        this rank's own chunk of it. Errors: as `all_reduce`.
        """
        rank, size, n = self.segment.rank, self.segment.size, output.numel()
        chunks, output = input.view(size, n), output.view(-1)
        width = self.slot // size // LINE * LINE // output.element_size()
        columns = [(at, min(at + width, n)) for at in range(0, max(n, 1), width)]

        def copy_in(column: tuple[int, int]) -> None:
            first, last = column
            others = [chunks[:rank, first:last], chunks[rank + 1 :, first:last]]
            shown = page(self.segment.turn, last - first).shown
            others = [part for part in others if part.numel()]
            for there, here in zip(shown, others, strict=True):
                there.view_as(here).copy_(here)

        def reduce(column: tuple[int, int]) -> None:
            first, last = column
            inputs = page(1 - self.segment.turn, last - first).slices
            own, out = chunks[rank, first:last], output[first:last]
            combine(with_own(inputs, rank, own, out), op, out)

        def page(turn: int, width: int) -> _Page:
            edges = tuple(q * width for q in range(size + 1))
            return self._page(turn, edges, output.dtype)

        self._in_turns(columns, copy_in, reduce, meet)

    def all_gather(
        self, output: Tensor, input: Tensor, meet: Meet | None = None
    ) -> None:
        """Copy the `input` of every rank r into chunk r of all ranks' `output`.

        `output` is contiguous and has `size` chunks as long as `input`, which may be
        this rank's own chunk of it. Errors: as `all_reduce`.
        """
        rank, size, n = self.segment.rank, self.segment.size, input.numel()
        chunks, input = output.view(size, n), input.view(-1)
        width = self.slot // input.element_size()
        columns = [(at, min(at + width, n)) for at in range(0, max(n, 1), width)]

        def copy_in(column: tuple[int, int]) -> None:
            first, last = column
            slots(self.segment.turn, last - first)[rank].copy_(input[first:last])

        def copy_out(column: tuple[int, int]) -> None:
            first, last = column
            sources = slots(1 - self.segment.turn, last - first).copy()
            sources[rank] = input[first:last]
            for chunk, source in zip(chunks, sources, strict=True):
                chunk[first:last].copy_(source)

        def slots(turn: int, numel: int) -> list[Tensor]:
            edges = cuts(numel, size, input.element_size())
            return self._page(turn, edges, input.dtype).slots

        self._in_turns(columns, copy_in, copy_out, meet)

    def _in_turns(
        self,
        parts: Sequence[Any],
        write: Callable[[Any], None],
        read: Callable[[Any], None],
        meet: Meet | None,
    ) -> None:
        """Write part i of the own numbers, then read part i - 1 of everyone's."""
        with self.segment as segment:
            write(parts[0])
        segment.meet(meet)
        with segment:
            for done, following in zip(parts, parts[1:], strict=False):
                write(following)
                read(done)
                segment.barrier()
            read(parts[-1])

    def _divide(self, tensor: Tensor, edges: tuple) -> tuple[Tensor, list[Tensor]]:
        """Return the own slice, and all that is before it and after it."""
        first, last = edges[self.segment.rank : self.segment.rank + 2]
        others = [tensor[:first], tensor[last:]]
        return tensor[first:last], [part for part in others if part.numel()]

    def _page(self, turn: int, edges: tuple, dtype: torch.dtype) -> _Page:
        """Return the views of page `turn` for slabs that are cut at `edges`."""
        key = turn, edges, dtype
        if key not in self._pages:
            if len(self._pages) >= KEPT:
                self._pages.clear()
            memory = self._memory[turn, :, : edges[-1] * dtype.itemsize]
            *slots, results = [row.view(dtype) for row in memory]
            slices = [self._divide(slot, edges)[0] for slot in slots]
            shown = self._divide(slots[self.segment.rank], edges)[1]
            views = _Page(slots, slices, shown, *self._divide(results, edges))
            self._pages[key] = views
        return self._pages[key]
