"""Numbers that are wrong if each rank computes its own: means, learning rate, seeds.

    MeanOverRanks    mean loss and metrics over batches of unequal size
    loss_weight      a factor that makes DDP's gradients the mean over all samples
    scaled_lr        the learning rate for a batch that is world_size times larger
    seed_for         a seed: equal on all ranks for weights, different for dropout

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
    """The mean over all samples of all ranks and, for comparison, the mean of means.

    `mean` is the sum over all samples divided by `count`, the number of samples.
    `mean_of_means` averages the batches of each rank, then the ranks: a sample in a
    small batch, or on a rank with few batches, counts more than others. Both means are
    equal if all batches have the same size and all ranks the same number of batches.
    """

    mean: float
    count: int
    mean_of_means: float


class MeanOverRanks:
    """A sum of batch means, from which `compute` gets the mean over all ranks.

        losses = MeanOverRanks()
        for x, y in loader:
            losses.update(loss(model(x), y), n=len(x))
        losses.compute().mean           # on every rank; sends 32 bytes

    Only `compute` sends anything or waits for the GPU. Without a process group the
    result is the mean of this process.

    Args:
        group: the ranks to average over; None means all.

    Chapter 05.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group, self.device = group, device_of_rank()
        self.reset()

    def reset(self) -> None:
        """Drop all batches."""
        # sum over samples, number of samples, sum of batch means, number of batches
        self.sums = torch.zeros(4, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def update(self, value: Tensor | float, n: int) -> None:
        """Add a batch: the mean `value`, one number, of `n` samples.

        For a mean over tokens or pixels, `n` is their number. If `n` is 0, there is no
        mean, and `value` is ignored. Raises ValueError unless `n` is an integer of 0 or
        more and `value` is one number.
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
        """Return the mean over all ranks.

        All ranks must call it, because it runs an all-reduce. Raises ValueError, on
        every rank, if no rank has a sample.
        """
        total, count, means, batches = self.sums
        rank_mean = means / batches.clamp(min=1)  # without batches, not 0 / 0
        sums = torch.stack([total, count, rank_mean, batches.clamp(max=1)])
        total, count, rank_means, ranks = _sum_over_ranks(sums, self.group).tolist()
        if count == 0:
            raise ValueError(
                "no rank has a sample, so there is no mean; call update with a batch "
                "on at least one rank before compute"
            )
        return Average(total / count, int(count), rank_means / ranks)


def loss_weight(n: int, group: dist.ProcessGroup | None = None) -> float:
    """Return the factor for this rank's mean loss, to be applied before `backward`.

    DDP divides the sum of the gradients by the number of ranks. That is the mean over
    all samples only if all ranks have equally many; otherwise it is a mean of means.
    With the weight n * world_size / (sum of n over all ranks), each sample counts the
    same. `n` is this rank's number of samples (of tokens, for a mean over tokens), 0 or
    more. Costs one all-reduce of 8 bytes, which all ranks must call.

    Raises ValueError, on every rank, if no rank has a sample or one rank's `n` is not
    an integer of 0 or more. Chapter 05.
    """
    usable = isinstance(n, Integral) and n >= 0
    samples = torch.tensor([n if usable else inf], dtype=torch.float64)
    total = _sum_over_ranks(samples.to(device_of_rank()), group).item()
    if not 0 < total < inf:
        raise ValueError(
            f"n is {n!r} on this rank, and the sum over all ranks is {total:g}; n must "
            f"be the number of samples, an integer of 0 or more, and not 0 on all ranks"
        )
    ranks = communicator(group).size if dist.is_initialized() else 1
    return n * ranks / total


def _sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All-reduce `tensor` in place, if there is a process group; return it."""
    if dist.is_initialized():
        dist.all_reduce(tensor, group=communicator(group).group)
    return tensor


RULES = {"linear": 1.0, "sqrt": 0.5}  # rule -> exponent of world_size


def scaled_lr(
    base_lr: float,
    world_size: int,
    *,
    rule: str = "linear",
    step: int | None = None,
    warmup_steps: int = 0,
) -> float:
    """Return the learning rate for a batch `world_size` times that of `base_lr`.

    Each of n ranks keeps its batch size, so a step sees n times as many samples and an
    epoch has n times fewer steps. With "linear", for SGD, one step goes as far as n
    steps at `base_lr`. Early in training the weights change too fast for such steps, so
    the rate begins at `base_lr` and grows by equal amounts for `warmup_steps` steps
    (Goyal et al. 2017, "Accurate, Large Minibatch SGD", sections 2.1 and 2.2: linear, 5
    epochs). Linear scaling is a rule of thumb; it fails above some batch size (8192 in
    that paper).

    For Adam, use "sqrt", because Adam's step does not grow with the gradient (Malladi
    et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms"; the
    full rule changes beta1, beta2 and epsilon, too).

    `step` counts from 0; None returns the rate after the warm-up. As a schedule, for an
    optimizer constructed with `base_lr`:

        LambdaLR(optimizer, lambda step: scaled_lr(1.0, 8, step=step, warmup_steps=500))

    Raises ValueError for an argument out of its range. Chapter 05.
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
    "weights": "same",  # replicas must begin equal
    "shuffle": "same",  # the sampler divides one order among the ranks
    "dropout": "own",  # different samples need different masks
    "augmentation": "own",
}


def seed_for(rank: int, seed: int, purpose: str) -> int:
    """Return the seed for one purpose on one data-parallel rank: 0 to 2**32 - 1.

    "weights" and "shuffle" have the same seed on all ranks. "dropout" and
    "augmentation" have a different one on each rank: with equal seeds, all ranks would
    drop the same neurons, row by row, and the larger batch would see fewer masks.

        torch.manual_seed(seed_for(rank, 0, "weights"))
        model = DistributedDataParallel(Model())
        torch.manual_seed(seed_for(rank, 0, "dropout"))

    `seed + rank` does not suffice: rank 1 with seed 0 would draw the same numbers as
    rank 0 with seed 1. So the result is a hash of the seed, plus the rank: two ranks
    never have the same seed, and two experiments only by chance. NumPy's generators
    accept it, too.

    Raises ValueError for another purpose, or a rank below 0. Chapter 05.
    """
    if purpose not in PURPOSES:
        raise ValueError(f"purpose is {purpose!r}; it can be {', '.join(PURPOSES)}")
    check_integer("rank", rank, 0)
    check_integer("seed", seed)
    digest = hashlib.sha256(f"{int(seed)} {purpose}".encode()).digest()
    own = rank if PURPOSES[purpose] == "own" else 0
    return (int.from_bytes(digest[:4], "big") + own) % 2**32
