"""PyTorch's communication hooks: functions of a user that average a bucket.

    hook(state, bucket) -> a torch.futures.Future of the mean of all ranks' gradients

`bucket` has this rank's own gradients, not divided by anything. The engine's reducer
calls the hook instead of launching an all-reduce. Waiting for the future copies its
tensor into the bucket. Chapter 14; in PyTorch: `GradBucket` and
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
        index: the bucket's number, the same on all ranks and in every step.
        flat: its gradients, [numel].
        parameters: the parameters of these gradients, in order.
        views: the gradients as views of `flat`, in their parameters' shapes.
        last: whether it is the last bucket of a backward pass.
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
        """Return the gradients, [numel]; a hook may write into them."""
        return self._flat

    def gradients(self) -> list[Tensor]:
        """Return the gradients, each in its parameter's shape, as views of `buffer`."""
        return self._views

    def parameters(self) -> list[Tensor]:
        """Return the parameters of these gradients."""
        return self._parameters

    def is_last(self) -> bool:
        """Return whether this is the last bucket of a backward pass."""
        return self._last

    def set_buffer(self, tensor: Tensor) -> None:
        """Let `buffer` return another tensor; `gradients` still views the first one."""
        self._flat = tensor


class HookFuture:
    """A hook's future; waiting for it copies its tensor into the bucket."""

    def __init__(self, future: torch.futures.Future, flat: Tensor, name: str) -> None:
        self.future, self.flat, self.name = future, flat, name

    def wait(self) -> None:
        """Wait, and copy the mean into the bucket.

        Raises ValueError if the future's value is no tensor of the bucket's size.
        """
        mean = self.future.wait()
        if isinstance(mean, (list, tuple)) and len(mean) == 1:
            mean = mean[0]  # the futures of PyTorch's collectives hold a list
        if not isinstance(mean, Tensor) or mean.numel() != self.flat.numel():
            got = list(mean.shape) if isinstance(mean, Tensor) else type(mean).__name__
            raise ValueError(
                f"the future of {self.name} holds {got}; it must hold a tensor of "
                f"{self.flat.numel()} numbers, as the bucket has"
            )
        if mean.data_ptr() != self.flat.data_ptr() or mean.dtype != self.flat.dtype:
            self.flat.copy_(mean.reshape(-1))


class CommHook:
    """A launch function for reducers that calls `hook` with its `state`."""

    def __init__(self, state: Any, hook: Hook, buckets: Sequence[LiveBucket]) -> None:
        self.state, self.hook, self.buckets = state, hook, buckets

    def __call__(self, bucket: LiveBucket) -> HookFuture:
        """Call the hook with a full bucket; return a handle to wait for."""
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
        return HookFuture(future, flat, name_of(self.hook))


def name_of(hook: Any) -> str:
    """Return a hook's name for error messages."""
    return getattr(hook, "__qualname__", None) or repr(hook)
