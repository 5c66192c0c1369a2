"""A part of `PipelineParallel`: is the loss a mean over rows, as microbatches need?

The gradient of the batch is the sum of the microbatches' gradients only if the batch's
loss is the mean of its rows' losses. Chapter 10.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class MeanLoss:
    """A loss function that is tried out at its first call.

    With all rows and, as twice as many, with the same rows halved: a sum is no mean of
    the two results, and neither is a square root of a mean. And in two parts: a mean
    that leaves out targets, or weighs them by class, is none over rows. Raises
    ValueError if so.
    """

    def __init__(self, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.loss_fn, self.tried = loss_fn, False

    @property
    def ignored(self) -> int:
        """The target that the loss leaves out, as `ignore_index` of cross-entropy."""
        options = getattr(self.loss_fn, "keywords", {})  # of a functools.partial
        named = getattr(self.loss_fn, "ignore_index", -100)
        return options.get("ignore_index", named)

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, a scalar."""
        loss = self.loss_fn(output, targets)
        if not self.tried:
            with torch.no_grad():
                self._try(output, targets, loss)
            self.tried = True
        return loss

    def _try(self, output: Tensor, targets: Tensor, loss: Tensor) -> None:
        if loss.dim():
            raise ValueError(f"loss_fn returned {loss}; it must be a scalar")
        n, half = len(output), output * 0.5
        both = torch.cat([output, half]), torch.cat([targets, targets])
        self._compare(loss, n, self.loss_fn(half, targets), n, self.loss_fn(*both))
        if n > 1 and not (targets == self.ignored).any():  # `batch_checks` counts them
            k = n // 2
            first = self.loss_fn(output[:k], targets[:k])
            rest = self.loss_fn(output[k:], targets[k:])
            self._compare(first, k, rest, n - k, loss)

    def _compare(
        self, first: Tensor, k: int, second: Tensor, n: int, whole: Tensor
    ) -> None:
        """Raise ValueError unless `whole` is the mean over the rows of both."""
        mean = (k * first + n * second) / (k + n)
        if not torch.allclose(whole, mean, 0.01, equal_nan=True):
            raise ValueError(
                f"loss_fn returned {first} for {k} rows, {second} for {n} others, and "
                f"{whole} for all of them; it must be a mean over the rows, so that "
                "microbatches can share it"
            )
