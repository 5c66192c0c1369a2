"""Parts that turn the readable stages 1 and 2 into ZeroRedundancyOptimizer.

    Guarded            leaves notes for the guards around PyTorch's tools
    Places             records which elements of which parameter each piece has
    ConsolidatedState  gathers the states of all pieces, and divides them again
    AddsUp             stage 1: adds up several backward passes until `zero_grad`
    PatientStep        keeps gloo's threads from interrupting a step

`optimizer_guards` has the parts that raise for mistakes. Chapter 07.
"""

import weakref
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from ddp_course.collectives.patience import patient, socket_threads
from ddp_course.mechanisms.agreement import agreed
from ddp_course.mechanisms.assembly import (
    full_optimizer_state,
    load_full_optimizer_state,
)
from ddp_course.mechanisms.buckets import LiveBucket, Slot
from ddp_course.mechanisms.engine import Engine
from ddp_course.mechanisms.hooks import while_alive
from ddp_course.mechanisms.parts import announce
from ddp_course.mechanisms.placements import (
    Flat,
    mark_part_averaged,
    place_piece,
    placed,
)
from ddp_course.zero.shards import ShardedBucket, copy_options, names_of


class Guarded:
    """A part that leaves notes on the parameters, for `mechanisms.guards`."""

    def row_made(
        self, optimizer: Any, bucket: ShardedBucket, parameters: dict[str, Tensor]
    ) -> None:
        """Record that `optimizer` holds these parameters' mean gradients in shards."""
        mark_part_averaged((parameters[name] for name in bucket.parameters), optimizer)


class Places:
    """A part that records each piece's place, for norms and states of the model."""

    def row_made(
        self, optimizer: Any, bucket: ShardedBucket, parameters: dict[str, Tensor]
    ) -> None:
        """Record the places of this rank's pieces of a row."""
        for piece in bucket.pieces(optimizer.rank_in(bucket)):
            parameter = parameters[piece.parameter]
            place_piece(
                optimizer.owned[parameter],
                optimizer.process_group,
                Flat(piece.first, piece.last),
                like=parameter,
                name=piece.parameter,
            )


class ConsolidatedState:
    """The whole state of a sharded optimizer, on one rank, until the next step.

    It has the format that one process would save, so one process, or any number of
    ranks, can load it.
    """

    def __init__(self) -> None:
        self.whole: dict[str, Any] | None = None

    def gradients_complete(self, optimizer: Any) -> None:
        """Drop the consolidated state: the step is about to change the states."""
        self.whole = None

    def consolidate(self, optimizer: Any, to: int) -> None:
        """Send all states to the group's rank `to`, which all ranks compare first."""

        def check() -> None:
            if to not in range(optimizer.world_size):
                last = optimizer.world_size - 1
                raise ValueError(f"to is {to!r}; it can be 0 to {last}")

        agreed(check, optimizer.process_group, **{"argument to": repr(to)})
        names, groups = plain_names(optimizer), [optimizer.process_group]
        whole = full_optimizer_state(optimizer.optim, names, groups, everywhere=to > 0)
        self.whole = whole if optimizer.rank == to else None

    def state_dict(self, optimizer: Any) -> dict[str, Any]:
        """Return the consolidated state; raise RuntimeError if this rank has none."""
        if self.whole is None:
            raise RuntimeError(
                f"each rank has its own part of the state: call "
                f"consolidate_state_dict(to={optimizer.rank}) on all ranks before "
                f"state_dict() on rank {optimizer.rank}"
            )
        copy_options(optimizer.param_groups, self.whole["param_groups"])
        return self.whole

    def load(self, optimizer: Any, state_dict: dict[str, Any], *layout: Any) -> None:
        """Load this rank's part of a whole state; `layout`: names, shapes, groups."""
        load_full_optimizer_state(optimizer.optim, state_dict, *layout)
        optimizer.state, self.whole = optimizer.optim.state, None
        copy_options(optimizer.optim.param_groups, optimizer.param_groups)


def plain_names(optimizer: Any) -> list[list[str]]:
    """Return, for each group, the parameters' names in the model before sharding."""
    names = names_of(optimizer.param_groups)
    names |= {p: way.name for p in names if (way := placed(p))}
    return [[names[p] for p in group["params"]] for group in optimizer.param_groups]


class AddsUp:
    """A part that adds up the mean gradients of several backward passes.

    After an averaged pass, the buckets hold means. Autograd would add the next pass's
    gradients to these means, and the reducer would average the sum. So before the first
    gradient of a pass, this part copies this rank's shards of the means and zeroes the
    buckets; when the new means have arrived, it adds the shards to them.
    """

    def __init__(self) -> None:
        self.has_means = False  # the buckets hold means, not this rank's gradients
        self.aside: dict[LiveBucket, Tensor] = {}  # this rank's shards of the means

    def bucket_added(self, engine: Engine, bucket: LiveBucket) -> None:
        """Register a hook that runs before autograd accumulates a gradient."""
        self.engine = weakref.proxy(engine)
        for slot in bucket.slots:
            while_alive(slot.parameter.register_hook, self.put_aside)

    def pass_begins(self, engine: Engine) -> None:
        """Move the means aside, also on a rank without any gradient in this pass."""
        self.put_aside()

    def put_aside(self) -> None:
        """Copy this rank's shards of the means, and zero the buckets."""
        if not self.has_means:
            return
        self.has_means = False
        for bucket in self.engine.buckets:
            zeroed = [s for s in bucket.slots if s.parameter.grad is not s.view]
            if len(zeroed) < len(bucket.slots):
                for slot in zeroed:
                    slot.view.zero_()
                self.aside[bucket] = self.engine.reducer.own(bucket).clone()
                announce(self.engine.parts, "shard_kept", self.aside[bucket])
                bucket.flat.zero_()

    def gradient_kept(self, bucket: LiveBucket, slot: Slot) -> None:
        """Move a gradient that is not averaged yet into its bucket."""
        if slot.parameter.grad is not slot.view:
            slot.parameter.grad = slot.view.copy_(slot.parameter.grad.detach())

    def bucket_arrived(self, bucket: LiveBucket) -> None:
        """Add the earlier mean to the new one."""
        if (before := self.aside.pop(bucket, None)) is not None:
            self.engine.reducer.own(bucket).add_(before)

    def after_backward(self, engine: Engine) -> None:
        """Record that the buckets hold means."""
        self.has_means = True

    def zeroed(self, optimizer: object, set_to_none: bool) -> None:
        """Drop the means of earlier passes."""
        self.aside.clear()


class PatientStep:
    """A part that keeps gloo's threads from interrupting other threads during a step.

    A step computes or waits for messages, never both at once (`collectives.patience`).
    """

    def __init__(self) -> None:
        self.threads, self.stack = socket_threads(), ExitStack()

    def gradients_complete(self, optimizer: Any) -> None:
        """Schedule gloo's threads so that they wait for a free core."""
        self.stack.enter_context(patient(self.threads))

    def after_step(self, optimizer: Any) -> None:
        """Restore the ordinary scheduling of gloo's threads."""
        self.stack.close()
