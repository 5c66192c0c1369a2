"""What PyTorch calls a communication hook: a function that says how a bucket travels.

    hook(state, bucket) -> a torch.futures.Future of the mean of all ranks' gradients

`bucket` has this rank's own gradients, not divided by anything. The engine's reducer
launches the hook where it would launch an all-reduce, and when the future is waited
for, what it holds is written into the bucket. Chapter 14; in PyTorch: `GradBucket` and
torch/distributed/algorithms/ddp_comm_hooks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_course.mechanisms.buckets import LiveBucket

Hook = Callable[[Any, Any], torch.futures.Future]


class GradBucket:
    """A bucket as a hook sees it; the names are those of PyTorch's class.

    Args:
        index: its number, the same on all ranks and in every step.
        flat: its numbers, in one dimension.
        parameters: whose gradients lie in it, one after the other.
        views: these gradients, in the shapes of their parameters.
        last: whether it is the last one of a backward pass.
    """

    def __init__(
        self, index: int, flat: Tensor, parameters: list, views: list, last: bool
    ) -> None:
        self._index, self._flat, self._last = index, flat, last
        self._parameters, self._views = parameters, views

    def index(self) -> int:
        """Return the bucket's number."""
        return self._index

    def buffer(self) -> Tensor:
        """Return all its numbers, [numel]; what is written there is sent."""
        return self._flat

    def gradients(self) -> list[Tensor]:
        """Return the gradients, each in its parameter's shape, as views of `buffer`."""
        return self._views

    def parameters(self) -> list[Tensor]:
        """Return the parameters whose gradients these are."""
        return self._parameters

    def is_last(self) -> bool:
        """Tell whether no other bucket follows in this backward pass."""
        return self._last

    def set_buffer(self, tensor: Tensor) -> None:
        """Let `buffer` return another tensor; `gradients` still shows the first one."""
        self._flat = tensor


class Answer:
    """A hook's future: once it is waited for, its tensor is in the bucket."""

    def __init__(self, future: torch.futures.Future, flat: Tensor, name: str) -> None:
        self.future, self.flat, self.name = future, flat, name

    def wait(self) -> None:
        """Wait, and write the mean into the bucket.

        Raises ValueError if the hook made anything but as many numbers.
        """
        mean = self.future.wait()
        if isinstance(mean, (list, tuple)) and len(mean) == 1:
            mean = mean[0]  # what the futures of PyTorch's collectives hold
        if not isinstance(mean, Tensor) or mean.numel() != self.flat.numel():
            got = list(mean.shape) if isinstance(mean, Tensor) else type(mean).__name__
            raise ValueError(
                f"the future of {self.name} holds {got}; it must hold a tensor of "
                f"{self.flat.numel()} numbers, as the bucket has"
            )
        if mean.data_ptr() != self.flat.data_ptr() or mean.dtype != self.flat.dtype:
            self.flat.copy_(mean.view(-1))


class CommHook:
    """`hook` with its `state`, as something that a reducer launches."""

    def __init__(self, state: Any, hook: Hook, buckets: Sequence[LiveBucket]) -> None:
        self.state, self.hook, self.buckets = state, hook, buckets

    def __call__(self, bucket: LiveBucket) -> Answer:
        """Hand a full bucket to the hook; return what is to be waited for."""
        flat = bucket.flat[: bucket.plan.numel]
        parameters = [slot.parameter for slot in bucket.slots]
        views = [slot.view for slot in bucket.slots]
        last = bucket is self.buckets[-1]
        shown = GradBucket(bucket.index, flat, parameters, views, last)
        future = self.hook(self.state, shown)
        if not isinstance(future, torch._C.Future):  # the base of torch.futures.Future
            raise TypeError(
                f"{name_of(self.hook)} returned {type(future).__name__}; a hook must "
                "return a torch.futures.Future of a tensor"
            )
        return Answer(future, flat, name_of(self.hook))


def name_of(hook: Any) -> str:
    """Return what to call a hook in a sentence."""
    return getattr(hook, "__qualname__", None) or repr(hook)
