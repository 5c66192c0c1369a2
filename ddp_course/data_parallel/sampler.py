"""`DistributedSampler`, and its plan as plain data: which rank gets which sample.

DDP does not divide the data: it averages gradients, whatever they were computed from.
Ranks work on different samples only because each has a sampler with a different share.
No message is needed: all ranks compute the same plan, and each takes its own share.

    epoch_order    0, 1, 2, ..., or shuffled with seed + epoch; equal on all ranks
    pad, truncate  repeat samples, or leave some out, so that all ranks get equally many
    shares         deal the samples like cards: rank r gets places r, r + n, r + 2n, ...

PyTorch: torch/utils/data/distributed.py, which yields exactly the same indices.
Explained in chapter 05.
"""

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from itertools import cycle, islice
from math import inf
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler


@dataclass(frozen=True)
class Share:
    """The samples of one rank in one epoch: `indices` into the dataset, in order.

    The last `num_padded` indices are duplicates: another place in the plan has the same
    sample, and it is repeated only to make all shares equally long.
    """

    rank: int
    indices: list[int]
    num_padded: int = 0

    @property
    def originals(self) -> list[int]:
        """The indices without duplicates: those that an evaluation may count."""
        return self.indices[: len(self.indices) - self.num_padded]

    @property
    def padded(self) -> list[int]:
        """The duplicates at the end."""
        return self.indices[len(self.indices) - self.num_padded :]


def shares(
    length: int,
    num_replicas: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    epoch: int = 0,
    drop_last: bool = False,
) -> list[Share]:
    """Return the share of every rank, in rank order. Pure: needs no process group.

    `length` samples are dealt to `num_replicas` ranks. All ranks get the same number of
    samples, ceil(length / n), or floor(length / n) with `drop_last`. Raises ValueError
    for an argument out of its range. Chapter 05.
    """
    check_integer("length", length, least=0)
    check_integer("num_replicas", num_replicas, least=1)
    check_integer("seed", seed)
    check_integer("epoch", epoch)
    order = epoch_order(length, shuffle, seed, epoch)
    dealt = truncate(order, num_replicas) if drop_last else pad(order, num_replicas)
    return [_share(dealt, length, rank, num_replicas) for rank in range(num_replicas)]


def epoch_order(length: int, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """Return all indices in the order of this epoch, the same on every rank.

    Seed and epoch are added, as in PyTorch: seed 1 in epoch 0 gives the same order as
    seed 0 in epoch 1.
    """
    if not shuffle:
        return list(range(length))
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(length, generator=generator).tolist()


def pad(order: list[int], num_replicas: int) -> list[int]:
    """Repeat `order` from its start until its length is a multiple of num_replicas."""
    total_size = -(-len(order) // num_replicas) * num_replicas  # rounded up
    return list(islice(cycle(order), total_size))


def truncate(order: list[int], num_replicas: int) -> list[int]:
    """Truncate `order` to a multiple of num_replicas."""
    return order[: len(order) // num_replicas * num_replicas]


def _share(dealt: list[int], length: int, rank: int, num_replicas: int) -> Share:
    places = range(rank, len(dealt), num_replicas)
    num_padded = sum(place >= length for place in places)
    return Share(rank, dealt[rank::num_replicas], num_padded)


class DistributedSampler(Sampler[int]):
    """A sampler that gives a DataLoader this rank's share of each epoch.

        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size, sampler=sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)     # without it, all epochs have the same order

    In evaluation the duplicates count twice. `sampler.share.num_padded` is the number
    of duplicates at the end of this rank's share;
    `DataLoader(dataset, sampler=sampler.share.originals)` leaves them out, and then
    ranks may have unequal numbers of batches (`Join`).

    Args:
        dataset: anything that has a length.
        num_replicas: the number of ranks that share the dataset; None means all.
        rank: this rank's number; None asks the process group.
        shuffle: use a different order in every epoch, instead of 0, 1, 2, ...
        seed: seed of the orders; the same on all ranks.
        drop_last: leave out up to num_replicas - 1 samples instead of repeating some.

    Without a process group, pass num_replicas and rank. Raises ValueError for an
    argument out of its range, TypeError for a dataset without a length, and
    RuntimeError, when iterated, if the dataset's length has changed. Chapter 05.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise TypeError(
                f"dataset is a {type(dataset).__name__}, which has no length; it must "
                f"have a __len__ method"
            )
        if (num_replicas is None or rank is None) and not dist.is_initialized():
            missing = "num_replicas" if num_replicas is None else "rank"
            raise ValueError(
                f"{missing} is None, and there is no process group to ask; "
                f"pass num_replicas and rank, or construct the sampler on the ranks"
            )
        self.dataset = dataset
        if num_replicas is None:
            num_replicas = dist.get_world_size()
        self.num_replicas = num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.length = len(dataset)
        check_integer("num_replicas", num_replicas, least=1)
        check_integer("rank", self.rank, least=0, most=num_replicas - 1)
        check_integer("seed", seed)
        rounded = self.length if drop_last else self.length + num_replicas - 1
        self.num_samples = rounded // num_replicas
        self.total_size = self.num_samples * num_replicas

    @property
    def share(self) -> Share:
        """This rank's share of the current epoch."""
        if len(self.dataset) != self.length:
            raise RuntimeError(
                f"the dataset had {self.length} samples when the sampler was "
                f"constructed, and has {len(self.dataset)} now; construct a new "
                f"sampler on every rank"
            )
        order = epoch_order(self.length, self.shuffle, self.seed, self.epoch)
        dealt = (truncate if self.drop_last else pad)(order, self.num_replicas)
        return _share(dealt, self.length, self.rank, self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over this rank's indices in the current epoch."""
        return iter(self.share.indices)

    def __len__(self) -> int:
        """Return the number of samples that every rank gets."""
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Set the current epoch; call it before each epoch, on every rank."""
        check_integer("epoch", epoch)
        self.epoch = epoch


def check_integer(
    name: str, value: Any, least: float = -inf, most: float = inf
) -> None:
    """Raise ValueError unless `value` is an integer from `least` to `most`."""
    if not isinstance(value, Integral) or not least <= value <= most:
        upwards = f", {least} or more" if least > -inf else ""
        allowed = f" from {least} to {most}" if most < inf else upwards
        raise ValueError(f"{name} is {value!r}; it must be an integer{allowed}")
