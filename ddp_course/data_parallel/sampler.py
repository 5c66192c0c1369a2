"""Who gets which sample: `DistributedSampler`, and its decision as plain data.

DDP does not divide the data: it averages gradients, whatever they were computed from.
Ranks work on different samples only because the sampler of each gives it a share of its
own. No message is needed: all compute the same plan, and each takes its line of it.

    epoch_order    0, 1, 2, ...; or shuffled, with seed + epoch: on all ranks alike
    filled, cut    as many samples for every rank: some twice, or some left out
    shares         dealt like cards: rank r gets the places r, r + n, r + 2n, ...

PyTorch: torch/utils/data/distributed.py; the indices are the same, one by one.
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
    """What one rank gets in one epoch: `indices` into the dataset, in their order.

    The last `num_padded` of them are duplicates: somebody has the same sample already,
    and it was given out once more only to make all shares equally long.
    """

    rank: int
    indices: list[int]
    num_padded: int = 0

    @property
    def originals(self) -> list[int]:
        """The indices that nobody else has: those that an evaluation may count."""
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
    """Return the share of every rank, in rank order. Pure: no rank is needed for it.

    `length` samples are dealt to `num_replicas` ranks. All ranks get the same number of
    samples, ceil(length / n), or floor(length / n) with `drop_last`. Raises ValueError
    for a number that cannot be. Chapter 05.
    """
    check_integer("length", length, least=0)
    check_integer("num_replicas", num_replicas, least=1)
    check_integer("seed", seed)
    check_integer("epoch", epoch)
    order = epoch_order(length, shuffle, seed, epoch)
    dealt = cut(order, num_replicas) if drop_last else filled(order, num_replicas)
    return [_share(dealt, length, rank, num_replicas) for rank in range(num_replicas)]


def epoch_order(length: int, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """Return all indices in the order of this epoch, the same on every rank.

    Seed and epoch are added, as in PyTorch: seed 1 in epoch 0 is seed 0 in epoch 1.
    """
    if not shuffle:
        return list(range(length))
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(length, generator=generator).tolist()


def filled(order: list[int], num_replicas: int) -> list[int]:
    """Start `order` again at its end, as often as needed, until it divides."""
    total_size = -(-len(order) // num_replicas) * num_replicas  # rounded up
    return list(islice(cycle(order), total_size))


def cut(order: list[int], num_replicas: int) -> list[int]:
    """Leave out the end of `order`, so that it divides."""
    return order[: len(order) // num_replicas * num_replicas]


def _share(dealt: list[int], length: int, rank: int, num_replicas: int) -> Share:
    places = range(rank, len(dealt), num_replicas)
    num_padded = sum(place >= length for place in places)
    return Share(rank, dealt[rank::num_replicas], num_padded)


class DistributedSampler(Sampler[int]):
    """Gives a DataLoader the indices of this rank's share, anew in every epoch.

        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size, sampler=sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)        # without it, every epoch has one order

    In evaluation the duplicates count twice. `sampler.share.num_padded` says how many
    this rank has at the end; `DataLoader(dataset, sampler=sampler.share.originals)`
    leaves them out, and then ranks may have unequal numbers of batches (`Join`).

    Args:
        dataset: anything that has a length.
        num_replicas: the number of ranks that share it; None are all.
        rank: which of them this is; None asks the process group.
        shuffle: another order in every epoch, or always 0, 1, 2, ...
        seed: of the orders; the same on all ranks.
        drop_last: leave out up to num_replicas - 1 samples in place of repeating some.

    Without a process group, give num_replicas and rank. Raises ValueError for a number
    that cannot be, TypeError for a dataset without a length, and RuntimeError when the
    dataset has changed its length since. Chapter 05.
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
            raise TypeError(f"dataset is a {type(dataset).__name__}: it has no length")
        if (num_replicas is None or rank is None) and not dist.is_initialized():
            missing = "num_replicas" if num_replicas is None else "rank"
            raise ValueError(
                f"{missing} is None, and there is no process group to ask; "
                f"give num_replicas and rank, or make the sampler on the ranks"
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
        """This rank's share of the epoch that is set."""
        if len(self.dataset) != self.length:
            raise RuntimeError(
                f"the dataset had {self.length} samples when the sampler was made, and "
                f"has {len(self.dataset)} now; make a new sampler on every rank"
            )
        order = epoch_order(self.length, self.shuffle, self.seed, self.epoch)
        dealt = (cut if self.drop_last else filled)(order, self.num_replicas)
        return _share(dealt, self.length, self.rank, self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        """Begin with this rank's indices in the epoch that is set."""
        return iter(self.share.indices)

    def __len__(self) -> int:
        """Return how many samples every rank gets."""
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next; before each epoch, on every rank."""
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
