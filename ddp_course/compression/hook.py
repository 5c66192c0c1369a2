"""A compressor: a state that has `mean`; and the one hook for all compressors.

Chapter 14.
"""

# No `from __future__ import annotations`: PyTorch's DDP reads those of its hooks.
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.compression.exchange import Exchange
from ddp_course.compression.feedback import ErrorFeedback


class Compressor:
    """Averages buckets over all ranks, in fewer bytes.

    Args:
        feedback: keep what is left out, and add it to the next gradient.
        exchange: the collectives, and their group; None: torch.distributed's, among all
            ranks. A `CourseExchange` sends while backward goes on, and is metered.

    Every rank makes its own, with the same arguments. With feedback it keeps as much
    memory as the gradients, and belongs to one model.
    """

    def __init__(
        self, feedback: bool = False, exchange: Exchange | None = None
    ) -> None:
        self.feedback = ErrorFeedback(feedback)
        self.exchange = Exchange() if exchange is None else exchange
        self.members: dict[int, list[int]] = {}  # bucket -> ids of its parameters

    def forget_if_rebuilt(self, bucket: dist.GradBucket) -> None:
        """Forget a bucket's memory if the bucket has other gradients than before.

        After its first step PyTorch's DDP rebuilds its buckets, in the order in which
        gradients became ready.
        """
        members = [id(parameter) for parameter in bucket.parameters()]
        if self.members.setdefault(bucket.index(), members) != members:
            self.members[bucket.index()] = members
            self.forget(bucket.index())

    def forget_if_infinite(self, index: int, mean: Tensor) -> None:
        """Forget a bucket's memory if its mean has an inf or a nan.

        A loss scaler skips such a step. All ranks have the same mean, so all forget;
        otherwise the inf would stay in the memory, and in every later mean.
        """
        if self.remembers(index) and not mean.isfinite().all():
            self.forget(index)

    def remembers(self, index: int) -> bool:
        """Return whether the next mean of this bucket depends on the last one."""
        return index in self.feedback.memory

    def forget(self, index: int) -> None:
        """Begin anew with this bucket."""
        self.feedback.memory.pop(index, None)

    def mean(self, bucket: Any) -> Tensor:
        """Return (nearly) the mean over the ranks of `bucket.buffer()`, [numel].

        Called by all ranks, for the same buckets in the same order; on all of them the
        result has the same bits.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must have to go on: its errors, by bucket."""
        return {"errors": {i: e.clone() for i, e in self.feedback.memory.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave on this rank."""
        self.feedback.memory = {i: e.clone() for i, e in state["errors"].items()}


def compress(
    state: Compressor, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Average a bucket as `state` does: `ddp.register_comm_hook(state, compress)`.

    Raises TypeError, on every rank, at the first backward if gradients are complex.
    """
    if (kind := bucket.buffer().dtype).is_complex:
        raise TypeError(f"gradients are {kind}; compressors are for real numbers only")

    def average() -> Tensor:
        mean = state.mean(bucket)
        state.forget_if_infinite(bucket.index(), mean)
        return mean

    state.forget_if_rebuilt(bucket)
    return state.exchange.meanwhile(average)


class Gathered(Compressor):
    """Sends what no all-reduce can add: every rank gets all, and takes the mean itself.

    A subclass says how numbers become bytes and bytes numbers. A rank sends its bytes
    N - 1 times (around a ring), so this pays while they are less than 2 / N of the
    gradient's.
    """

    def encode(self, v: Tensor, index: int) -> Tensor:
        """Return numbers [numel] as bytes, uint8; all ranks make as many."""
        raise NotImplementedError

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        """Return what those bytes stand for, in the shape and type of `like`."""
        raise NotImplementedError

    def mean(self, bucket: Any) -> Tensor:
        """Encode, gather, decode all in the order of the ranks, and take the mean."""
        index = bucket.index()
        v = self.feedback.add(index, bucket.buffer())
        sent = self.encode(v, index)
        total = torch.zeros_like(v)
        self.feedback.keep(index, v, self.decode(sent, v))
        for everyones in self.exchange.gather(sent):
            total += self.decode(everyones, v)
        return total / self.exchange.size


def as_bytes(*tensors: Tensor) -> Tensor:
    """Return the bytes of tensors, one after the other."""
    return torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in tensors])
