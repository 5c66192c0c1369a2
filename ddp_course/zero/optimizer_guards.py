"""Parts that refuse what a sharded optimizer would do wrongly in silence.

Each raises RuntimeError and says what to do instead:

    Alone            another engine of this course averages the same gradients
    AveragedOnce     stage 1: PyTorch's DDP, or the training loop, averages them, too
    DenseGradients   a gradient is sparse
    Unmoved          a parameter does not lie in its row any more, or was thawed
    ShardsOnly       stage 2: a gradient beside the shards, or one of the last step

Chapter 07.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad_value_, get_total_norm

from ddp_course.collectives.communicator import communicator
from ddp_course.mechanisms.agreement import digest
from ddp_course.mechanisms.buckets import LiveBucket, Slot
from ddp_course.mechanisms.engine import Engine
from ddp_course.mechanisms.guards import AVERAGED, in_parts, put_inside
from ddp_course.mechanisms.hooks import listeners
from ddp_course.zero.shards import names_of

ADVICE = (
    "If DistributedDataParallel, or the training loop, averages them, take "
    "NaiveZeroRedundancyOptimizer with gradients='averaged'; an earlier optimizer of "
    "the same parameters must be gone (del) before training."
)


class Alone:
    """Refuses a second engine that averages the same gradients, in the first pass."""

    known = False

    def pass_begins(self, engine: Engine) -> None:
        """Raise RuntimeError if another engine of this course listens, too."""
        for slot in () if self.known else engine.slots:
            if len(listeners(slot.parameter)) > 1:
                who = f"the gradient of parameter {slot.name} is averaged by something"
                raise RuntimeError(f"{who} else, too. {ADVICE}")
        self.known = True


class AveragedOnce:
    """Refuses gradients that are equal on all ranks, in the first step.

    Whoever knows PyTorch's ZeroRedundancyOptimizer wraps the model into its
    DistributedDataParallel as well, or averages by hand. Then all ranks have the same
    gradients before the first step. Stage 1 alone leaves different ones: each rank has
    the mean in its own shard only.
    """

    known = False

    def gradients_complete(self, optimizer: Any) -> None:
        """Raise RuntimeError, on all ranks, if all of them have the same gradients."""
        if self.known or optimizer.world_size == 1:
            return
        grads = [slot.parameter.grad for slot in optimizer.engine.slots]
        present = [grad.flatten().double() for grad in grads if grad is not None]
        own = torch.cat(present) if present else torch.zeros(1)
        decides = bool(own.isfinite().all() and own.any())
        shown = communicator(optimizer.process_group).exchange((decides, digest(own)))
        self.known = all(decides for decides, _ in shown)
        if self.known and len({digest for _, digest in shown}) == 1:
            raise RuntimeError(
                "all ranks have the same gradients: something else has averaged them, "
                f"too. {ADVICE}"
            )


class DenseGradients:
    """Refuses sparse gradients."""

    def gradient_ready(self, bucket: LiveBucket, slot: Slot) -> None:
        """Raise RuntimeError for a gradient that cannot be cut into shards."""
        gradient = slot.parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of parameter {slot.name} is {gradient.layout}; only "
                "dense gradients can be cut into shards (Embedding: sparse=False)"
            )


class Unmoved:
    """Refuses parameters that do not lie in the rows (any more)."""

    def gradients_complete(self, optimizer: Any) -> None:
        """Raise RuntimeError if what is trained is not what lies in the rows."""
        places = {
            slot.parameter: optimizer.rows[bucket.index][slot.offset :].data_ptr()
            for bucket in optimizer.engine.buckets
            for slot in bucket.slots
        }
        for parameter, name in names_of(optimizer.param_groups).items():
            place = places.get(parameter)
            if place is None and parameter.grad is not None and parameter.numel():
                was = "was frozen when this optimizer was made, and has a gradient now"
                raise RuntimeError(f"parameter {name} {was}; make it anew")
            if place is not None and place != parameter.data_ptr():
                was = "has been moved, to another device or type"
                raise RuntimeError(f"parameter {name} {was}; make the optimizer anew")


@functools.cache
def watch_empty_clips() -> None:
    """Let PyTorch's clipping refuse to clip nothing while gradients are in shards."""
    put_inside(clip_grad_value_, lambda clip: _checked(clip, lambda p: p.grad))
    put_inside(get_total_norm, lambda norm: _checked(norm, lambda gradient: gradient))


def _checked(clip: Callable[..., Any], gradient_of: Callable[[Any], Any]) -> Any:
    def checked(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if any(map(in_parts, AVERAGED)) and all(
            gradient_of(t) is None for t in tensors
        ):
            raise RuntimeError(
                "no parameter has a gradient to clip: the optimizer has this rank's "
                "shards of the gradients. Clip by its clip_grad_norm_, or take "
                "ZeroRedundancyOptimizer (stage 1)"
            )
        return clip(tensors, *args, **kwargs)

    return checked


class ShardsOnly:
    """Refuses gradients beside stage 2's shards; and shards of the last step."""

    def row_made(self, optimizer: Any, *_: Any) -> None:
        """Watch PyTorch's clipping."""
        watch_empty_clips()

    stepped = False

    def pass_begins(self, engine: Engine) -> None:
        """Raise RuntimeError if the shards are those of the last step."""
        if self.stepped and engine.reducer.shards:
            raise RuntimeError(
                "the gradients of the last step are still there: call this optimizer's "
                "zero_grad() before backward; module.zero_grad() cannot reach a shard"
            )

    def gradients_complete(self, optimizer: Any) -> None:
        """Raise RuntimeError for a gradient that nobody would use."""
        for slot in optimizer.engine.slots:
            if slot.parameter.grad is not None:
                raise RuntimeError(
                    "something else has written the gradient of parameter "
                    f"{slot.name}, which this rank has in shards. {ADVICE}"
                )

    def after_step(self, optimizer: Any) -> None:
        """Note that the shards have been used."""
        self.stepped = True

    def zeroed(self, optimizer: Any, set_to_none: bool) -> None:
        """Note that the shards are zero, or freed."""
        self.stepped = False
