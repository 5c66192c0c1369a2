"""The course's GPT over a divided sequence: every rank computes some positions.

    model = context_parallel(build_gpt("1m"))     # on all ranks: the same seed
    _, loss = model(x, y)                         # the same x and y on all ranks
    loss.backward()                               # then average gradients, see below

Only three places of the model know that the sequence is divided:

    embed              gets whole rows, and selects this rank's positions
    attention          "ring", "gathered" (`naive`) or "ulysses"
    loss               the mean over the positions of all ranks

A sequence that cannot be divided equally is padded at its end: no real position attends
to the padding, and the loss leaves it out. The ranks have equal parameters and
different gradients, as in data parallelism, so gradients must be averaged over these
ranks, too.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from ddp_course.context_parallel.assignment import Positions, assign, padded_length
from ddp_course.context_parallel.checks import SameSequence
from ddp_course.context_parallel.naive import GatherSequence, gathered_attention
from ddp_course.context_parallel.ring import Ring
from ddp_course.context_parallel.ulysses import ulysses_attention
from ddp_course.mechanisms.agreement import agreed

Group = dist.ProcessGroup | None  # None: all ranks


class Division:
    """The division of a sequence among ranks, and the attention over it.

    Args:
        group: the ranks; None means all.
        attention: a name in ATTENTIONS. Positions are zigzag; Ulysses needs contiguous
            ones.
    """

    def __init__(self, group: Group, attention: str) -> None:
        self.group, self.attention = group, attention
        self.assignment = "contiguous" if attention == "ulysses" else "zigzag"
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.length: int | None = None  # length of the last embedded sequences

    def assigned(self, length: int) -> list[Positions]:
        """Return the positions of all ranks; some may be `length` or more: padding."""
        padded = padded_length(length, self.size, self.assignment)
        return assign(padded, self.size, self.assignment)

    def positions(self, length: int, like: Tensor) -> list[Tensor]:
        """Return the positions of all ranks, each (T/N,) int64, on the device."""
        return [
            torch.tensor([p for some in ranges for p in some], device=like.device)
            for ranges in self.assigned(length)
        ]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of this rank's queries; all are (B, H, T/N, D)."""
        return ATTENTIONS[self.attention](self, q, k, v)


def by_ring(division: Division, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention to keys and values that pass around a ring."""
    length = q.shape[2] * division.size
    return Ring(division.assigned(length), division.group)(q, k, v)


def by_gathering(division: Division, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention to the gathered keys and values of all ranks."""
    positions = division.positions(q.shape[2] * division.size, q)
    return gathered_attention(q, k, v, positions, division.group)


def by_heads(division: Division, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention over whole sequences, with some of the heads."""
    return ulysses_attention(q, k, v, division.group)


ATTENTIONS = {"ring": by_ring, "gathered": by_gathering, "ulysses": by_heads}


class DividedEmbedding(nn.Module):
    """An embedding of this rank's positions: (B, T) -> (B, T/N, C)."""

    def __init__(
        self, embed: nn.Module, division: Division, check: SameSequence
    ) -> None:
        super().__init__()
        self.tokens, self.positions = embed.tokens, embed.positions
        self.division, self.check = division, check

    def forward(self, idx: Tensor) -> Tensor:
        """Add the embeddings of this rank's tokens and positions."""
        self.check(idx)
        self.division.length = length = idx.shape[1]
        own = self.division.positions(length, idx)[self.division.rank]
        own = own.clamp(max=length - 1)  # padding repeats the last token
        return self.tokens(idx[:, own]) + self.positions(own)


class DividedLoss:
    """The mean loss over the positions of all ranks, from this rank's logits."""

    def __init__(
        self,
        mean_loss: Callable[[Tensor, Tensor], Tensor],
        division: Division,
        check: SameSequence,
    ) -> None:
        self.mean_loss, self.division, self.check = mean_loss, division, check

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, on all ranks, of logits (B, T/N, V) and targets (B, T).

        Each rank's mean is weighted by N times its share of the positions: then the
        mean of the ranks' gradients is the gradient of the mean loss.
        """
        self.check(targets)
        length, division = targets.shape[1], self.division
        own = division.positions(length, targets)[division.rank]
        real = own < length
        share = int(real.sum()) * division.size / length
        if share:
            loss = self.mean_loss(logits[:, real], targets[:, own[real]]) * share
        else:  # this rank has only padding, but must take part in backward
            loss = logits.sum() * 0.0
        return AverageLoss.apply(loss, division.group)


class AverageLoss(Function):
    """The mean of the ranks' numbers; in backward each rank keeps its own gradient."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, group: Group) -> Tensor:
        """Return the mean of all ranks' numbers."""
        total = number.detach().clone()
        dist.all_reduce(total, group=group)
        return total / dist.get_world_size(group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient unchanged."""
        return gradient, None


class GatheredLogits:
    """The logits of all positions, gathered from the ranks, in the sequence's order."""

    def __init__(self, gather: Callable[[Tensor], Tensor], division: Division) -> None:
        self.gather, self.division = gather, division

    def __call__(self, logits: Tensor) -> Tensor:
        """Return all logits, (B, T, V), on every rank, from each rank's (B, T/N, V).

        A rank that has not embedded the tokens, as in a later stage of a pipeline, does
        not know T, and returns the logits of the padding, too.
        """
        logits, division = self.gather(logits).unsqueeze(1), self.division
        whole = GatherSequence.apply(logits, division.group).squeeze(1)  # along dim 2
        padded = whole.shape[1]
        order = torch.cat(division.positions(padded, logits)).argsort()
        return whole[:, order[: division.length or padded]]


def context_parallel(
    model: nn.Module, group: Group = None, *, attention: str = "ring"
) -> nn.Module:
    """Divide the sequence of a GPT among the ranks of `group`; return the same model.

    All ranks call it together, and keep equal parameters. After each backward they
    average their gradients, as in data parallelism: for example, by
    `DistributedDataParallel` over a group that contains these ranks. Ranks that share a
    sequence pass the same rows.

    Args:
        model: a GPT of this course, or one that `tensor_parallel` has cut.
        group: the ranks that share each sequence; None means all.
        attention: "ring", "gathered" keys and values, or "ulysses".

    Raises ValueError for a model or an argument that cannot be used, and ReplicaError,
    on every rank, if `attention` differs. PyTorch's counterpart,
    torch.distributed.tensor.experimental.context_parallel, is for GPUs.
    """
    if attention not in ATTENTIONS:
        known = ", ".join(ATTENTIONS)
        raise ValueError(f"attention is {attention!r}; it can be {known}")
    if not all(hasattr(model, name) for name in ("embed", "blocks", "loss_fn")):
        raise ValueError(
            f"the model is a {type(model).__name__}; context_parallel takes a GPT of "
            "this course, as its embedding, attention and loss must know the positions"
        )
    if any(getattr(layer, "whole_sequences", False) for layer in model.modules()):
        raise ValueError(
            "a layer of the model needs whole sequences: experts with a capacity, or a "
            "balance loss; build the model with capacity None and balance 0"
        )
    check, division = SameSequence(group), Division(group, attention)
    check_targets = SameSequence(group, lambda: division.length)
    if isinstance(model.embed, DividedEmbedding):
        raise ValueError("the model is context parallel already; divide it only once")
    if getattr(model, "sequence_parallel", False):
        raise ValueError(
            "the model is tensor parallel with sequence_parallel=True, which divides "
            "the sequence already; leave sequence_parallel out"
        )
    agreed(lambda: None, group, attention=attention)
    model.embed = DividedEmbedding(model.embed, division, check)
    for block in model.blocks:
        block.attn.attend = division.attend
    ends = getattr(model, "ends", model)  # a tensor-parallel GPT has both in `ends`
    ends.loss_fn = DividedLoss(ends.loss_fn, division, check_targets)
    ends.gather_logits = GatheredLogits(ends.gather_logits, division)
    return model
