"""All-reduce in shared memory: each rank reduces one slice of all ranks' tensors.

Rank r combines slice r of rank 0, of rank 1, ..., in that order, and all ranks read the
result from it. So every element is reduced in the same order, with the same bits on all
ranks and in both classes:

    Staging          copies any tensor through slots in shared memory, in slabs
    SymmetricMemory  reduces tensors that are in shared memory already

Both take contiguous tensors of any type and shape. Each all-reduce begins with one
barrier, which may be the caller's own `meet` (such as a comparison of calls). If that
barrier raises, no tensor has been changed. Errors: those of `Barrier.wait` and of
`meet`. Chapter 03.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from ddp_course.collectives.allocator import LINE, PAGE, Exchange, allocate, round_up
from ddp_course.collectives.memory_barrier import Barrier
from ddp_course.collectives.reduction import COMBINE, Op, finish

Meet = Callable[[], object]

SLOT = 1 << 20  # bytes of a slab: longer tensors are copied in slabs of this size
ONE_SHOT = 64 << 10  # bytes; up to this size every rank reduces the whole tensor
BLOCK = 256 << 10  # bytes reduced at once: those of all ranks should fit in a cache
KEPT = 256  # the number of sizes and places for which views are cached


@lru_cache(maxsize=KEPT)
def cuts(numel: int, size: int, itemsize: int) -> tuple[int, ...]:
    """Return the bounds of the slices of `numel` elements.

    Slice r is [cuts[r], cuts[r + 1]). Slices begin at multiples of a cache line and are
    equally long, but the last ones may be shorter, or empty.
    """
    longest = round_up(-(-numel // size), max(1, LINE // itemsize))
    return tuple(min(r * longest, numel) for r in range(size + 1))


def combine(inputs: Sequence[Tensor], op: Op, out: Tensor) -> None:
    """Reduce `inputs`, one from each rank, into `out`, in rank order.

    `out` may be the first or second input, but none of the others: they are read after
    `out` has been written.
    """
    if len(inputs) == 1:
        out.copy_(inputs[0])
    else:
        function = COMBINE[op]
        function(inputs[0], inputs[1], out=out)
        for tensor in inputs[2:]:
            function(out, tensor, out=out)
    finish(out, op, len(inputs))


class Staging:
    """All-reduce of any contiguous tensors, through slots in shared memory.

    Each of two pages has a slot for every rank, and one for results. A rank writes to
    the page whose turn it is, and reads the other page, which all ranks have written.
    `slot` is the size of a slot in bytes, a multiple of 4096. All ranks construct it
    together. Raises OSError on all ranks if one cannot map the memory.
    """

    def __init__(self, barrier: Barrier, exchange: Exchange, slot: int = SLOT) -> None:
        self.barrier, self.slot = barrier, slot
        self.rank, self.size = barrier.rank, barrier.size
        slots = self.size + 1
        memory = allocate(2 * slots * slot, self.rank, exchange)
        self._memory = memory.view(2, slots, slot)
        self._views: dict[tuple, list[Tensor]] = {}

    def page(self, turn: int, like: Tensor) -> list[Tensor]:
        """Return a page's slots as flat tensors of the size and type of `like`.

        First come the ranks' slots, then the slot for results.
        """
        key = turn, like.numel(), like.dtype
        if key not in self._views:
            if len(self._views) >= KEPT:
                self._views.clear()
            rows = self._memory[turn, :, : like.nbytes]
            self._views[key] = [row.view(like.dtype) for row in rows]
        return self._views[key]

    def write(self, like: Tensor) -> list[Tensor]:
        """Return the page that may be written until the next barrier."""
        return self.page(self.barrier.turn, like)

    def read(self, like: Tensor) -> list[Tensor]:
        """Return the page that was written before the last barrier."""
        return self.page(1 - self.barrier.turn, like)

    def all_reduce(self, tensor: Tensor, op: Op, meet: Meet | None = None) -> None:
        """Reduce `tensor` over all ranks, in place.

        With a small tensor, every rank reads all copies. With a larger one, every rank
        reduces its slice of each slab, and reads the other ranks' results.
        """
        rank, size, flat = self.rank, self.size, tensor.view(-1)

        def show(part: Tensor) -> None:
            self.write(part)[rank].copy_(part)

        def reduce_all(part: Tensor) -> None:
            combine(self.read(part)[:size], op, part)

        def own(part: Tensor) -> tuple[int, int]:
            return cuts(part.numel(), size, part.element_size())[rank : rank + 2]

        def show_peers_slices(part: Tensor) -> None:
            (first, last), slot = own(part), self.write(part)[rank]
            slot[:first].copy_(part[:first])
            slot[last:].copy_(part[last:])

        def reduce_own(part: Tensor) -> None:
            first, last = own(part)
            inputs = [slot[first:last] for slot in self.read(part)[:size]]
            inputs[rank] = part[first:last]
            result = self.write(part)[size][first:last]
            combine(inputs, op, result)
            inputs[rank].copy_(result)

        def fetch_others_results(part: Tensor) -> None:
            (first, last), results = own(part), self.read(part)[size]
            part[:first].copy_(results[:first])
            part[last:].copy_(results[last:])

        if tensor.nbytes <= min(ONE_SHOT, self.slot):
            self._in_turns([flat], [show, reduce_all], meet)
        else:
            slabs = flat.split(self.slot // flat.element_size())
            stages = [show_peers_slices, reduce_own, fetch_others_results]
            self._in_turns(slabs, stages, meet)

    def _in_turns(
        self, parts: Sequence[Any], stages: Sequence[Callable], meet: Meet | None
    ) -> None:
        """Run the first stage of part i, the second of part i - 1, ...; then a barrier.

        There is one barrier per part, and one more for each stage after the second.
        """
        turns = len(parts) + len(stages) - 1
        for i in range(turns):
            with self.barrier as barrier:
                for k, stage in enumerate(stages):
                    if 0 <= i - k < len(parts):
                        stage(parts[i - k])
                if 0 < i < turns - 1:
                    barrier.wait()
            if i == 0:
                (meet or barrier.wait)()


class SymmetricMemory:
    """Memory of every rank that all ranks can read and write; `own` is this rank's.

    A view of `own` (`own[:4096].view(torch.float32)`) is reduced in place: rank r
    reduces slice r of all ranks' tensors, and writes it into all of them. The tensor
    must begin at the same place on all ranks. The memory is freed with the last tensor
    in it, on the last rank. All ranks construct it together, with `nbytes` bytes on
    each. Raises OSError on all ranks if one cannot map the memory.

    The name is that of PyTorch's counterpart for GPUs
    (`torch.distributed._symmetric_memory`). Chapter 03.
    """

    def __init__(self, barrier: Barrier, nbytes: int, exchange: Exchange) -> None:
        self.barrier = barrier
        rows, columns = barrier.size, round_up(max(nbytes, 1), PAGE)
        memory = allocate(rows * columns, barrier.rank, exchange)
        self._all = list(memory.view(rows, columns)[:, :nbytes])
        self.own = self._all[barrier.rank]
        self._kept: dict[tuple, list[list[Tensor]]] = {}

    def find(self, tensor: Tensor) -> int | None:
        """Return the byte of `own` at which a tensor begins; None if elsewhere."""
        offset = tensor.data_ptr() - self.own.data_ptr()
        return offset if 0 <= offset <= self.own.numel() - tensor.nbytes else None

    def peers(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor at the place of a contiguous `tensor`."""
        start = self.find(tensor) if tensor.numel() else 0
        if start is None:
            raise ValueError(
                f"the tensor of shape {[*tensor.shape]} is not in this shared memory"
            )
        return [
            memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for memory in self._all
        ]

    def all_reduce(self, tensor: Tensor, op: Op, meet: Meet | None = None) -> None:
        """Reduce `tensor` over all ranks, in place.

        Between two barriers only rank r reads and writes slice r of all tensors. Raises
        ValueError if `tensor` is not in this memory.
        """
        rank, size = self.barrier.rank, self.barrier.size
        edges = cuts(tensor.numel(), size, tensor.element_size())
        blocks = self._blocks(tensor, *edges[rank : rank + 2])
        (meet or self.barrier.wait)()
        with self.barrier as barrier:
            for block in blocks:
                result = block[0]  # rank 0's numbers are read first
                combine(block, op, result)
                for other in block[1:]:
                    other.copy_(result)
            barrier.wait()

    def _blocks(self, tensor: Tensor, first: int, last: int) -> list[list[Tensor]]:
        """Return elements [first, last) in blocks: for each, every rank's tensor."""
        key = tensor.data_ptr(), tensor.numel(), tensor.dtype, first, last
        if key not in self._kept:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            parts = [peer.view(-1)[first:last] for peer in self.peers(tensor)]
            parts = [part.split(BLOCK // tensor.element_size()) for part in parts]
            self._kept[key] = [[*b] for b in zip(*parts, strict=True) if b[0].numel()]
        return self._kept[key]
