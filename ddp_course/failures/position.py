"""The position in the data: samples of an epoch that all ranks together have used.

A rank's own count of batches is useless on another number of ranks. But if all ranks
divide the same order, global batch after global batch, the used samples are the
beginning of that order, and their number is the position. Any number of ranks can go on
from there.

    epoch_order      all samples in the order of an epoch, the same on every rank
    share_of         a rank's part of one global batch
    PositionSampler  the batch sampler of a DataLoader; its state is the position
    SharedStream     the same for a source of rows that can only be read in order

Chapter 19.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler, get_worker_info


def epoch_order(length: int, seed: int, epoch: int) -> list[int]:
    """Return 0 to length - 1, shuffled with seed + epoch; the same on every rank."""
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(length, generator=generator).tolist()


def share_of(batch: Sequence[Any], rank: int, ranks: int) -> Sequence[Any]:
    """Return this rank's len(batch) // ranks rows; rank 0 has the first ones."""
    rows = len(batch) // ranks
    return batch[rank * rows : (rank + 1) * rows]


class PositionSampler(Sampler[list[int]]):
    """A batch sampler that yields this rank's part of each unused global batch.

        sampler = PositionSampler(len(dataset), batch_size=64, rank=rank, ranks=ranks)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
        while sampler.epoch < epochs:
            for rows in loader:
                ...                      # forward, backward, optimizer.step()
                sampler.advance()

    `advance` is called after each step, because a loader with workers draws batches
    that training has not used yet. Rows at the end of an epoch that fill no global
    batch are left out.

    Args:
        length: the number of samples.
        batch_size: the rows of a global batch, a multiple of `ranks`.
        rank: this rank.
        ranks: the number of ranks that share a batch.
        seed: the seed of the orders; the same on all ranks.
    """

    def __init__(
        self, length: int, batch_size: int, rank: int = 0, ranks: int = 1, seed: int = 0
    ) -> None:
        _check(batch_size, rank, ranks)
        if batch_size > length:
            raise ValueError(
                f"batch_size is {batch_size}; it must be at most {length}, the length"
            )
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.rank, self.ranks = rank, ranks
        self.epoch = self.used = 0

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's part of each batch of the epoch that is not used yet."""
        order = epoch_order(self.length, self.seed, self.epoch)
        for start in self._starts():
            batch = order[start : start + self.batch_size]
            yield share_of(batch, self.rank, self.ranks)

    def __len__(self) -> int:
        """Return the number of batches that are left in this epoch."""
        return len(self._starts())

    def _starts(self) -> range:
        end = self.length - self.batch_size + 1
        return range(self.used, end, self.batch_size)

    def advance(self) -> None:
        """Count one global batch as used; after the last one, begin the next epoch."""
        self.used += self.batch_size
        if not self._starts():
            self.epoch, self.used = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position, which is the same on every rank."""
        return {n: getattr(self, n) for n in ("length", "seed", "epoch", "used")}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load a position, which another number of ranks may have saved.

        Raises ValueError if its length or seed differs from this sampler's.
        """
        for name in ("length", "seed"):
            if state[name] != (here := getattr(self, name)):
                raise ValueError(
                    f"{name} is {state[name]} in the saved position and {here} here; "
                    f"use the same data and the same {name}"
                )
        self.epoch, self.used = state["epoch"], state["used"]
        if not self._starts():  # a larger batch than before: too few are left
            self.epoch, self.used = self.epoch + 1, 0


class SharedStream(IterableDataset):
    """A stream of this rank's rows, from a source that must be read in order.

    A DataLoader takes batches from its workers in turn, so worker w yields this rank's
    part of the global batches w, w + workers, ...; then the order of rows does not
    depend on the number of ranks or workers. Every worker reads the whole source. Pass
    the stream to `DataLoader(stream, batch_size=batch_size // ranks)`.

    Args:
        source: the rows; each new iteration begins with the first row.
        batch_size: the rows of a global batch, a multiple of `ranks`.
        rank: this rank.
        ranks: the number of ranks that share a batch.
        used: the number of rows to skip, because all ranks together have used them.
    """

    def __init__(
        self,
        source: Iterable[Any],
        batch_size: int,
        rank: int = 0,
        ranks: int = 1,
        used: int = 0,
    ) -> None:
        _check(batch_size, rank, ranks)
        self.source, self.batch_size, self.used = source, batch_size, used
        self.rank, self.ranks = rank, ranks

    def __iter__(self) -> Iterator[Any]:
        """Yield those of this rank's rows that this DataLoader worker must load."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        rows = islice(self.source, self.used, None)
        for number in count():
            batch = list(islice(rows, self.batch_size))
            if len(batch) < self.batch_size:
                return
            if number % workers == worker:
                yield from share_of(batch, self.rank, self.ranks)


def _check(batch_size: int, rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank}; it must be from 0 to {ranks - 1}")
    if batch_size < 1 or batch_size % ranks:
        raise ValueError(
            f"batch_size is {batch_size}; it must be a multiple of {ranks}, the number "
            "of ranks"
        )
