"""All-reduce of tensors that lie in shared memory already: nothing is copied in or out.

Rank r reduces slice r of all ranks' tensors, where they are, and writes it into all of
them. Explained in chapter 03.
"""

from __future__ import annotations

from torch import Tensor

from ddp_course.collectives import slices
from ddp_course.collectives.mapping import PAGE, Exchange, round_up, shared_memory
from ddp_course.collectives.segment import Segment
from ddp_course.collectives.slices import KEPT, Meet, Op

BLOCK = 256 << 10  # bytes reduced at once: those of all ranks should fit in a cache


class SymmetricMemory:
    """Memory of every rank that all ranks can read and write: `own`, on this rank.

    A tensor made of `own` (`own[:4096].view(torch.float32)`) is reduced where it is.
    It must begin at the same place on all ranks. The memory is freed when the last
    tensor in it is gone, on the last rank. Made by all ranks together, of `nbytes`
    bytes on each; OSError on all of them if one cannot have it.

    The name is that of PyTorch's counterpart for GPUs
    (`torch.distributed._symmetric_memory`). Chapter 03.
    """

    def __init__(self, segment: Segment, nbytes: int, exchange: Exchange) -> None:
        self.segment = segment
        rows, columns = segment.size, round_up(max(nbytes, 1), PAGE)
        memory = shared_memory(rows * columns, segment.rank, exchange)
        self._all = list(memory.view(rows, columns)[:, :nbytes])
        self.own = self._all[segment.rank]
        self._blocks: dict[tuple, list[list[Tensor]]] = {}

    def find(self, tensor: Tensor) -> int | None:
        """Return at which byte of `own` a contiguous tensor begins; None: elsewhere."""
        offset = tensor.data_ptr() - self.own.data_ptr()
        return offset if 0 <= offset <= self.own.numel() - tensor.nbytes else None

    def all_reduce(self, tensor: Tensor, op: Op, meet: Meet | None = None) -> None:
        """Reduce `tensor` over all ranks, in place.

        Between two barriers slice r is touched by rank r only, on all ranks. Errors:
        ValueError if it lies elsewhere; as `Segment.barrier`; what `meet` raises.
        """
        edges = slices.cuts(tensor.numel(), self.segment.size, tensor.element_size())
        first, last = edges[self.segment.rank : self.segment.rank + 2]
        blocks = self._divide(tensor, first, last)
        self.segment.meet(meet)
        with self.segment as segment:
            for block in blocks:
                result = block[0]  # rank 0's own numbers are the first to be used up
                slices.combine(block, op, result)
                for other in block[1:]:
                    other.copy_(result)
            segment.barrier()

    def reduce_scatter(
        self, output: Tensor, input: Tensor, op: Op, meet: Meet | None = None
    ) -> None:
        """Reduce chunk r of every rank's `input` into rank r's `output`.

        `input` lies in this memory; `output` anywhere, or is the own chunk of `input`.
        Errors: as `all_reduce`.
        """
        rank, n = self.segment.rank, output.numel()
        blocks = self._divide(input, rank * n, (rank + 1) * n)
        outputs = output.view(-1).split(_per_block(output)) if n else ()
        self.segment.meet(meet)
        with self.segment as segment:
            for block, out in zip(blocks, outputs, strict=True):
                slices.combine(slices.with_own(block, rank, block[rank], out), op, out)
            segment.barrier()

    def all_gather(
        self, output: Tensor, input: Tensor, meet: Meet | None = None
    ) -> None:
        """Copy the `input` of every rank r into chunk r of all ranks' `output`.

        `input` lies in this memory, at the same place on all ranks, and `output`
        anywhere; or `output` does, and `input` is this rank's own chunk of it. Errors:
        as `all_reduce`.
        """
        rank, size, n = self.segment.rank, self.segment.size, input.numel()
        chunks = output.view(size, n)
        if n and chunks[rank].data_ptr() == input.data_ptr():
            start, step = self._place(output), input.nbytes
        else:
            start, step = self._place(input), 0
        sources = [
            memory[start + q * step :][: input.nbytes].view(input.dtype)
            for q, memory in enumerate(self._all)
        ]
        self.segment.meet(meet)
        with self.segment as segment:
            for q in range(rank, rank + size):  # not all at the same one
                chunks[q % size].copy_(sources[q % size])
            segment.barrier()

    def peers(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor at the place of a contiguous `tensor` in here."""
        start = self._place(tensor)
        return [
            memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for memory in self._all
        ]

    def _place(self, tensor: Tensor) -> int:
        offset = self.find(tensor) if tensor.numel() else 0
        if offset is None:
            raise ValueError(f"the tensor of shape {[*tensor.shape]} is not in here")
        return offset

    def _divide(self, tensor: Tensor, first: int, last: int) -> list[list[Tensor]]:
        """Return elements [first, last) in blocks, each as it is on every rank."""
        dtype, offset = tensor.dtype, self._place(tensor)
        key = offset + first * dtype.itemsize, offset + last * dtype.itemsize, dtype
        if key not in self._blocks:
            if len(self._blocks) >= KEPT:
                self._blocks.clear()
            whole = [memory[key[0] : key[1]].view(dtype) for memory in self._all]
            parts = [rank.split(_per_block(tensor)) for rank in whole if last > first]
            self._blocks[key] = [[*block] for block in zip(*parts, strict=True)]
        return self._blocks[key]


def _per_block(tensor: Tensor) -> int:
    return BLOCK // tensor.element_size()
