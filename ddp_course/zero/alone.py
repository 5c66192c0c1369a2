"""Does anything else average these gradients, too?

Whoever is used to PyTorch's ZeroRedundancyOptimizer wraps the model into its
DistributedDataParallel as well. Then two would write into the same gradients at the
same time, and no number would be right, but training would go on. So in the first
backward pass it is looked whether somebody else is at work. Chapter 07.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

from torch import Tensor
from torch.autograd import Variable

from ddp_course.mechanisms import hooks
from ddp_course.zero.slots import LiveBucket, Slot

ADVICE = (
    "If DistributedDataParallel averages them, say gradients='averaged' (stage 1); an "
    "earlier optimizer of the same parameters must be gone (del) before training."
)


def check_alone(slots: Iterable[Slot]) -> None:
    """Raise RuntimeError if somebody else of this course listens for gradients."""
    slots = list(slots)
    if any(_listeners(slot.parameter) > 1 for slot in slots):
        gc.collect()  # it may be one that is only waiting to be collected
    for slot in slots:
        if _listeners(slot.parameter) > 1:
            raise RuntimeError(
                f"the gradient of parameter {slot.name} is averaged by something "
                f"else, too. {ADVICE}"
            )


def check_alone_later(buckets: Iterable[LiveBucket]) -> None:
    """Raise RuntimeError, when backward ends, if somebody has written gradients.

    PyTorch's DDP leaves no trace on a parameter, but it writes its means when all
    its buckets are there, which is after this was called and before what is
    queued here.
    """
    seen = [(bucket, bucket.flat._version) for bucket in buckets]
    grads = [(s, s.parameter.grad) for b, _ in seen for s in b.slots]

    def check() -> None:
        for bucket, version in seen:
            if bucket.flat._version != version:
                raise RuntimeError(_written(bucket.slots[0]))
        for slot, before in grads:
            if slot.parameter.grad is not before:
                raise RuntimeError(_written(slot))

    Variable._execution_engine.queue_callback(check)


def _listeners(parameter: Tensor) -> int:
    """Return how many `on_gradient` hooks a parameter has."""
    registered = parameter._post_accumulate_grad_hooks or {}
    return sum(hook.__module__ == hooks.__name__ for hook in registered.values())


def _written(slot: Slot) -> str:
    return (
        f"something else has written the gradient of parameter {slot.name} at the end "
        f"of backward. {ADVICE}"
    )
