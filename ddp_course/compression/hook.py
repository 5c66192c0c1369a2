"""`Compressor`, the base class of compressors, and the DDP hook that calls it.

Chapter 14.
"""

# No `from __future__ import annotations`: PyTorch's DDP checks its hooks' annotations.
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.compression.exchange import Exchange
from ddp_course.compression.feedback import ErrorFeedback


class Compressor:
    """A compressor: averages buckets over all ranks, in fewer bytes.

    Args:
        feedback: store the errors, and add them to the next gradients.
        exchange: the collectives and their group; None means torch.distributed's, among
            all ranks. A `CourseExchange` is metered, and sends while backward goes on.

    Every rank constructs its own compressor, with the same arguments. With feedback it
    belongs to one model, and stores as many bytes as the gradients have.
    """

    def __init__(
        self, feedback: bool = False, exchange: Exchange | None = None
    ) -> None:
        self.feedback = ErrorFeedback(feedback)
        self.exchange = Exchange() if exchange is None else exchange
        self.members: dict[int, list[int]] = {}  # bucket -> ids of its parameters

    def forget_if_rebuilt(self, bucket: dist.GradBucket) -> None:
        """Drop a bucket's memory if the bucket has other gradients than before.

        After its first step PyTorch's DDP rebuilds its buckets, in the order in which
        gradients became ready.
        """
        members = [id(parameter) for parameter in bucket.parameters()]
        if self.members.setdefault(bucket.index(), members) != members:
            self.members[bucket.index()] = members
            self.forget(bucket.index())

    def forget_if_infinite(self, index: int, mean: Tensor) -> None:
        """Drop a bucket's memory if its mean has an inf or a nan.

        A loss scaler skips such a step. Otherwise the inf would stay in the memory, and
        in every later mean. All ranks have the same mean, so all drop their memory.
        """
        if self.remembers(index) and not mean.isfinite().all():
            self.forget(index)

    def remembers(self, index: int) -> bool:
        """Return whether the next mean of this bucket depends on the last one."""
        return index in self.feedback.memory

    def forget(self, index: int) -> None:
        """Drop the memory of this bucket."""
        self.feedback.memory.pop(index, None)

    def mean(self, bucket: Any) -> Tensor:
        """Return approximately the mean over the ranks of `bucket.buffer()`, [numel].

        All ranks call it, for the same buckets in the same order; the result has the
        same bits on all of them.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: its errors, by bucket."""
        return {"errors": {i: e.clone() for i, e in self.feedback.memory.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict` of this rank, of the same buckets.

        PyTorch's DDP has other buckets in its first step, and the second one forgets
        their errors: there, load the state after two steps.
        """
        self.feedback.memory = {i: e.clone() for i, e in state["errors"].items()}


def compress(
    state: Compressor, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Average a bucket by the compressor `state`; pass both to `register_comm_hook`.

    At the first backward it raises, on every rank, TypeError if gradients are complex,
    and ValueError if `state` is a class or no `Compressor`.
    """
    if isinstance(state, type):
        name = state.__name__
        raise ValueError(
            f"state is the class {name}; pass an object of this class, {name}(...), to "
            "register_comm_hook"
        )
    if not isinstance(state, Compressor):
        got = "None" if state is None else f"a {type(state).__name__}"
        raise ValueError(
            f"state is {got}; it must be a compressor: register_comm_hook(TopK(0.01), "
            "compress)"
        )
    if (kind := bucket.buffer().dtype).is_complex:
        raise TypeError(f"gradients are {kind}; compressors are for real numbers only")

    def average() -> Tensor:
        mean = state.mean(bucket)
        state.forget_if_infinite(bucket.index(), mean)
        return mean

    state.forget_if_rebuilt(bucket)
    return state.exchange.run_async(average)


class Gathered(Compressor):
    """A compressor whose bytes no all-reduce can add: ranks gather and average them.

    A subclass defines `encode` and `decode`. A rank sends its bytes to N - 1 others, so
    this saves bytes only if they are fewer than 2 / N of the gradient's.
    """

    def encode(self, v: Tensor, index: int) -> Tensor:
        """Return numbers [numel] as uint8; all ranks return equally many bytes."""
        raise NotImplementedError

    def decode(self, data: Tensor, like: Tensor) -> Tensor:
        """Return the numbers of these bytes, in the shape and type of `like`."""
        raise NotImplementedError

    def mean(self, bucket: Any) -> Tensor:
        """Encode, gather, decode in the order of the ranks, and average."""
        index = bucket.index()
        v = self.feedback.add(index, bucket.buffer())
        own = self.encode(v, index)
        total = torch.zeros_like(v)
        self.feedback.keep(index, v, self.decode(own, v))
        for data in self.exchange.gather(own):
            total += self.decode(data, v)
        return total / self.exchange.size


def as_bytes(*tensors: Tensor) -> Tensor:
    """Return the bytes of tensors, one after the other."""
    return torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in tensors])
