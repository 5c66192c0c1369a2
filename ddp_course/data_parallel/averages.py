"""What must be computed over all ranks, and how it goes wrong when each does its own.

    MeanOverRanks    loss and metrics over batches of unequal size: sum and count
    loss_weight      the same for gradients, since DDP takes the mean of means
    scaled_lr        the learning rate for a batch that is world_size times larger
    seed_for         which random numbers must be equal on all ranks, and which not

Explained in chapter 05.
"""

import hashlib
from dataclasses import dataclass
from math import inf
from numbers import Integral, Real

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives import communicator
from ddp_course.data_parallel.sampler import check_integer
from ddp_course.launch import device as device_of_rank


@dataclass(frozen=True)
class Average:
    """The mean over all samples of all ranks, and what it is often mistaken for.

    `mean` is the sum over all samples divided by `count`, their number. `mean_of_means`
    is the mean over the ranks of the mean over each one's batches: a sample in a small
    batch, or on a rank with few of them, counts more than others. The two are equal if
    all batches are equally large and all ranks have equally many.
    """

    mean: float
    count: int
    mean_of_means: float


class MeanOverRanks:
    """Collects a mean per batch, and gives the mean over all batches of all ranks.

        losses = MeanOverRanks()
        for x, y in loader:
            losses.update(loss(model(x), y), n=len(x))
        losses.compute().mean           # on every rank; sends 32 bytes

    Nothing is sent, and no GPU is waited for, until `compute`. Without a process group
    it is the mean of this process.

    Args:
        group: the ranks; None are all.
        device: where the sums are; None takes the rank's own device.

    Chapter 05.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.group = group
        self.device = torch.device(device or device_of_rank())
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        # sum over samples, samples, sum of the batches' means, batches
        self.sums = torch.zeros(4, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def update(self, value: Tensor | float, n: int) -> None:
        """Add a batch: the mean `value`, one number, of `n` samples.

        For a mean over tokens or pixels, `n` is their number. A batch without samples
        has no mean: its `value` is not looked at. Raises ValueError for anything else.
        """
        if not isinstance(n, Integral) or n < 0:
            raise ValueError(f"n is {n!r}; it must be the number of samples, 0 or more")
        if n == 0:
            return
        value = torch.as_tensor(value, dtype=torch.float64, device=self.device)
        if value.numel() != 1:
            raise ValueError(
                f"value has shape {list(value.shape)}; it must be one number, the mean "
                f"over the batch"
            )
        batch = torch.ones_like(self.sums)
        batch[0::2], batch[1] = value, n
        batch[0] *= n
        self.sums += batch

    @torch.no_grad()
    def compute(self) -> Average:
        """Return the mean over all ranks: one all-reduce, which all must call.

        Raises ValueError, on every rank, if no rank has a sample.
        """
        total, count, means, batches = self.sums
        of_rank = means / batches.clamp(min=1)  # a rank without batches has no mean
        told = torch.stack([total, count, of_rank, batches.clamp(max=1)])
        total, count, of_ranks, ranks = _sum_over_ranks(told, self.group).tolist()
        if count == 0:
            raise ValueError("no rank has a sample: there is nothing to average")
        return Average(total / count, int(count), of_ranks / ranks)


def loss_weight(n: int, group: dist.ProcessGroup | None = None) -> float:
    """Return what to multiply this rank's mean loss by, before `backward`.

    DDP divides the sum of the gradients by the number of ranks: right if all ranks have
    equally many samples, else a mean of means. With n * world_size / (all ranks' n) as
    weight, each sample counts the same, and the result is the gradient of the mean over
    the whole batch. `n` is the number of samples (for a mean over tokens: of tokens)
    on this rank, 0 or more. One all-reduce of 8 bytes, which all ranks must call.

    Raises ValueError, on every rank, if no rank has a sample. Chapter 05.
    """
    usable = isinstance(n, Integral) and n >= 0
    told = torch.tensor([n if usable else inf], dtype=torch.float64)
    total = _sum_over_ranks(told.to(device_of_rank()), group).item()
    if not 0 < total < inf:
        raise ValueError(
            f"n is {n!r} on this rank, and {total:g} on all together; it must be the "
            f"number of samples, an integer of 0 or more, and not 0 on all ranks"
        )
    ranks = communicator(group).size if dist.is_initialized() else 1
    return n * ranks / total


def _sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All-reduce `tensor` in place and return it; without a process group, as it is."""
    if dist.is_initialized():
        dist.all_reduce(tensor, group=communicator(group).group)
    return tensor


RULES = {"linear": 1.0, "sqrt": 0.5}  # the power of world_size


def scaled_lr(
    base_lr: float,
    world_size: int,
    *,
    rule: str = "linear",
    step: int | None = None,
    warmup_steps: int = 0,
) -> float:
    """Return the learning rate for `world_size` times the batch that `base_lr` is for.

    Each of n ranks keeps its batch, so a step sees n times as many samples and an epoch
    has n times fewer steps: with "linear", for SGD, one step goes as far as n small
    ones did. The weights move too fast for that at first; so the rate begins at
    `base_lr` and grows by equal amounts for `warmup_steps` steps (Goyal et al. 2017,
    "Accurate, Large Minibatch SGD", sections 2.1 and 2.2: linear, 5 epochs). It is a
    rule of thumb, and beyond some batch size (8192 in their case) it fails.

    For Adam, whose step does not grow with the gradient, "sqrt" is the rule (Malladi et
    al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms"; in full
    it changes beta1, beta2 and epsilon, too).

    `step` counts from 0; None is the rate after the warm-up. As a schedule, for an
    optimizer made with `base_lr`:

        LambdaLR(optimizer, lambda step: scaled_lr(1.0, 8, step=step, warmup_steps=500))

    Raises ValueError for a number that cannot be. Chapter 05.
    """
    if not isinstance(base_lr, Real) or not 0 <= base_lr < inf:
        raise ValueError(f"base_lr is {base_lr!r}; it must be a number of 0 or more")
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}; it can be {' or '.join(RULES)}")
    check_integer("world_size", world_size, 1)
    check_integer("warmup_steps", warmup_steps, 0)
    factor = world_size ** RULES[rule]
    if step is None:
        return base_lr * factor
    check_integer("step", step, 0)
    warmed = min(1.0, step / warmup_steps) if warmup_steps else 1.0
    return base_lr * (1 + (factor - 1) * warmed)


PURPOSES = {
    "weights": "same",  # replicas begin alike
    "shuffle": "same",  # all ranks deal the same order: sampler
    "dropout": "own",  # other samples, other masks
    "augmentation": "own",
}


def seed_for(rank: int, seed: int, purpose: str) -> int:
    """Return the seed for one purpose on one data-parallel rank: 0 to 2**32 - 1.

    "weights" and "shuffle" have the same seed on all ranks. "dropout" and
    "augmentation" have another one on each: with the same, all ranks would drop the
    same neurons, row by row, and the larger batch would see fewer masks.

        torch.manual_seed(seed_for(rank, 0, "weights"))
        model = DistributedDataParallel(Model())
        torch.manual_seed(seed_for(rank, 0, "dropout"))

    `seed + rank` will not do: rank 1 with seed 0 would be rank 0 with seed 1. So the
    seed is a hash, plus the rank: no two ranks ever have the same, and two experiments
    have only by chance. It fits NumPy's generators, too.

    Raises ValueError for another purpose, or a rank below 0. Chapter 05.
    """
    if purpose not in PURPOSES:
        raise ValueError(f"purpose is {purpose!r}; it can be {', '.join(PURPOSES)}")
    check_integer("rank", rank, 0)
    check_integer("seed", seed)
    digest = hashlib.sha256(f"{int(seed)} {purpose}".encode()).digest()
    own = rank if PURPOSES[purpose] == "own" else 0
    return (int.from_bytes(digest[:4], "big") + own) % 2**32
