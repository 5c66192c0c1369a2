"""Where gradients lie on their way to the reduce-scatter: buckets and their slots.

Explained in chapter 07.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ddp_course.zero.flat import shard_of, view_of
from ddp_course.zero.shards import ShardedBucket


@dataclass(eq=False)
class Slot:
    """A parameter's place in a bucket.

    Its gradient is to be written into `view`, of which `own` lies in this rank's shard
    and `others` do not. `here` tells that it need not be waited for in the present
    pass, `reduced` that what lies in `own` is a mean, and not this rank's addend.
    """

    name: str
    parameter: Tensor
    offset: int
    view: Tensor = field(init=False)
    own: Tensor = field(init=False)
    others: tuple[Tensor, Tensor] = field(init=False)
    here: bool = False
    reduced: bool = False


@dataclass(eq=False)
class LiveBucket:
    """Bucket number `index`, whose memory is `flat`, of which `own` is this rank's."""

    index: int
    plan: ShardedBucket
    rank: int
    slots: list[Slot]
    flat: Tensor = field(init=False)
    own: Tensor = field(init=False)
    missing: int = 0  # gradients that have not come in this pass
    work: Any = None

    @classmethod
    def of(
        cls,
        index: int,
        plan: ShardedBucket,
        rank: int,
        parameters: Mapping[str, Tensor],
    ) -> LiveBucket:
        """Return a bucket without memory; `parameters` has all names of the plan."""
        bucket = plan.bucket
        slots = [
            Slot(name, parameters[name], offset)
            for name, offset in zip(bucket.parameters, bucket.offsets, strict=True)
        ]
        return cls(index, plan, rank, slots)

    def lie_in(self, flat: Tensor) -> None:
        """Take `flat`, of `plan.numel` elements, for the bucket's memory."""
        self.flat, self.own = flat, shard_of(flat, self.rank, self.plan)
        begin = self.rank * self.plan.shard_numel
        for slot in self.slots:
            first, last = slot.offset, slot.offset + slot.parameter.numel()
            mine = min(max(begin, first), last)
            after = min(max(begin + self.plan.shard_numel, first), last)
            slot.view = view_of(flat, first, slot.parameter)
            slot.own = flat[mine:after]
            slot.others = flat[first:mine], flat[after:last]


def before_gradient(parameter: Tensor, method: Callable[..., None], *args: Any) -> None:
    """Call the bound `method(*args)` whenever a gradient is about to be accumulated.

    Held weakly, as in `mechanisms.hooks.on_gradient`.
    """
    weak = weakref.WeakMethod(method, lambda _: handle.remove())

    def hook(_: Tensor) -> None:
        alive = weak()
        if alive is not None:
            alive(*args)

    handle = parameter.register_hook(hook)
