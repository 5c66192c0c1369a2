"""A cut vocabulary: an embedding, and a loss from logits that are never gathered.

The first and the last matrix of a language model have a row for each of V tokens. Each
rank has V/tp of them. The head is a `ColumnParallelLinear`, which leaves the logits cut
along the vocabulary, (B, T, V/tp): with V = 50,257 and a few thousand tokens they are
the largest tensor of a step. For each row cross-entropy needs only three numbers from
all ranks together: the largest logit, the sum of the exponentials, and the logit of the
target. Chapter 09.
"""

from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from ddp_course.mechanisms.exchange import Group, MessageExchange, exchange_of
from ddp_course.mechanisms.frozen import check_first_order
from ddp_course.tensor_parallel.layers import ParallelLayer, reduce_from_group
from ddp_course.tensor_parallel.ops import scatter_sequence


class VocabParallelEmbedding(ParallelLayer):
    """An embedding with some of the rows on each rank: (B, T) -> (B, T, C).

    Every rank looks up its own tokens, and has zeros for the others; the sum over the
    ranks has every token's row. In backward each rank gets the gradients of its own
    rows, without a message.

    Args:
        full: the `nn.Embedding` of V tokens.
        group: the ranks that share it.
        sequence_parallel: whether to return this rank's part, (B, T/tp, C).

    Raises ValueError for an embedding with options (padding_idx, max_norm, ...).
    """

    CUTS = MappingProxyType({"weight": 0})

    def __init__(
        self,
        full: nn.Embedding,
        group: Group = None,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        if not isinstance(full, nn.Embedding):
            raise ValueError(f"full is {full!r}; it must be an nn.Embedding")
        numbers = full.padding_idx, full.max_norm
        if numbers != (None, None) or full.sparse or full.scale_grad_by_freq:
            raise ValueError(f"{full} has options; only a plain embedding can be cut")
        super().__init__(full, group)
        self.sequence_parallel = sequence_parallel
        self.first = self.group.rank * self.weight.shape[0]  # this rank's first token

    def forward(self, idx: Tensor) -> Tensor:
        """Embed this rank's tokens, and sum over the ranks."""
        row = idx - self.first
        elsewhere = (row < 0) | (row >= self.weight.shape[0])
        found = F.embedding(row.masked_fill(elsewhere, 0), self.weight)  # (B, T, C)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        add_up = scatter_sequence if self.sequence_parallel else reduce_from_group
        return add_up(found, self.group)


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, group: Group = None, *, ignore_index: int = -100
) -> Tensor:
    """Return the mean of -log p(target) over the targets that count: a scalar.

    Args:
        logits: (..., V/tp), this rank's part; the r-th rank of the group has the logits
            of the tokens from r V/tp on.
        targets: (...), int64, the same on all ranks.
        group: the ranks that share the vocabulary.
        ignore_index: targets with this value do not count; the mean of none is nan.

    Two all-reduces of 4 and 8 bytes for each target, and none in backward. Raises
    ValueError if the shapes do not match, or for a target that is no token. Like
    F.cross_entropy and megatron/core/tensor_parallel/cross_entropy.py. Chapter 09.
    """
    exchange = exchange_of(group)
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}; the logits are for "
            f"{tuple(logits.shape[:-1])}"
        )
    rows = logits.reshape(-1, logits.shape[-1])  # (R, V/tp)
    targets = targets.flatten()  # (R,)
    counts = targets != ignore_index  # (R,)
    chosen = targets[counts]
    vocabulary = rows.shape[1] * exchange.size
    if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < vocabulary:
        raise ValueError(
            f"targets are from {int(chosen.min())} to {int(chosen.max())}; tokens are "
            f"0 to {vocabulary - 1}; {ignore_index} is ignored"
        )
    losses = VocabParallelCrossEntropy.apply(rows, targets, counts, exchange)  # (R,)
    return losses.sum() / counts.sum()


class VocabParallelCrossEntropy(Function):
    """-log softmax(logits)[target] for each row, or 0 where the target does not count.

    Computed in float32 if the logits have fewer bits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        counts: Tensor,
        group: MessageExchange,
    ) -> Tensor:
        """Return the losses: all-reduce the maximum, then sums and targets' logits."""
        like = logits if logits.dtype == torch.float64 else logits.float()
        largest = group.buffer(targets.shape, like)
        torch.amax(like, 1, out=largest)
        largest = group.all_reduce(largest, dist.ReduceOp.MAX)  # (R,)
        shifted = like - largest.unsqueeze(1)  # (R, V/tp): no exponential is too large
        column = targets - group.rank * logits.shape[1]
        mine = counts & (column >= 0) & (column < logits.shape[1])
        column = column.masked_fill(~mine, 0).unsqueeze(1)  # (R, 1)
        summands = group.buffer((2, len(targets)), like)
        target = shifted.gather(1, column).squeeze(1)
        summands[1].copy_(target.masked_fill(~mine, 0.0))
        exponentials = shifted.exp_()
        torch.sum(exponentials, 1, out=summands[0])
        sums, target = group.all_reduce(summands)  # (R,) each
        softmax = exponentials.div_(sums.unsqueeze(1))
        ctx.save_for_backward(softmax, column, mine, counts)
        ctx.dtype = logits.dtype
        return (sums.log() - target).masked_fill(~counts, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return softmax - onehot(target), for this rank's part of the vocabulary."""
        check_first_order()
        softmax, column, mine, counts = ctx.saved_tensors
        weight = gradient.masked_fill(~counts, 0.0).unsqueeze(1)  # (R, 1)
        logits = softmax * weight
        logits.scatter_add_(1, column, -weight.masked_fill(~mine.unsqueeze(1), 0.0))
        return logits.to(ctx.dtype), None, None, None
