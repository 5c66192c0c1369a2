"""Data parallelism by a schedule: `OrderedDataParallel`, with parts.

The order is made of what the first passes took (`plan`), and all ranks keep it
(`pieces` has why). Until then gradients go as they come, and forward waits for all.
Chapter 15.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ddp_course.collectives.meeting import quick_exchange
from ddp_course.communication_order.guards import (
    NotYet,
    SameStart,
    StatesFinish,
    StepFirst,
    Unchanged,
    beside,
)
from ddp_course.communication_order.ordered import OrderedDataParallel
from ddp_course.communication_order.plan import Planned
from ddp_course.communication_order.schedule import (
    Piece,
    Played,
    Policy,
    Timed,
    priority,
)
from ddp_course.mechanisms.frozen import KeepFrozen
from ddp_course.mechanisms.recovery import AgreeUnused, Recovery
from ddp_course.mechanisms.timeline import RecordBackward

if TYPE_CHECKING:
    from ddp_course.measure.events import Event

MIB = 1 << 20


class ScheduledDataParallel(OrderedDataParallel):
    """Runs `module` on this rank's part of the batch, and steps it layer by layer.

        model = ScheduledDataParallel(module, torch.optim.AdamW(module.parameters()))
        for x, y in batches:
            loss = model(x, y)
            loss.backward()
            model.step()  # in the place of optimizer.step() and zero_grad()

    After `finish()`, or when a state is saved or loaded, parameters are what
    DistributedDataParallel makes them, bit by bit if the collective adds in the same
    order wherever a gradient is cut (a ring of three ranks or more does not). Between
    `backward` and the next forward gradients are under way: who asks for one gets an
    error that says so. A layer is a module that has parameters of its own; small
    neighbours travel together, up to a piece, as every message has its price.
    Whoever uses a parameter before its layer does, such as a penalty in the loss, an
    average of weights or a change by hand, waits for its step.

    Made by all ranks together. Keep it as long as you train (its hooks go with it), and
    `finish()` before you let it go: the last step may still be due. On a GPU, where
    this was not run, moments are those of its stream.

    Args:
        module: the same on all ranks; rank 0's numbers are taken. Buffers stay each
            rank's own.
        optimizer: of `module.parameters()`; any that steps each parameter for itself.
        policy: by which the order is made; `piece` in bytes. One that waits for all
            lets the forward wait, too.
        process_group: the ranks that share a batch; None are all.
        all_reduce: any of this course, or PyTorch's.
        layers: modules that are one layer with all that is in them.

    Raises ReplicaError, on every rank, if the modules differ or the optimizer cannot
    step layers one by one; RuntimeError, when a step is taken, if a parameter was
    changed by a view of it while the step was due.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        policy: Policy = priority(MIB),  # noqa: B008  (it cannot be changed)
        process_group: dist.ProcessGroup | None = None,
        all_reduce: Callable[..., Any] = dist.all_reduce,
        layers: Sequence[nn.Module] = (),
    ) -> None:
        piece = policy.piece and max(16, int(policy.piece) // 16 * 16)  # whole numbers
        recovery = Recovery(process_group, quick_exchange(process_group))
        self.planner = Planned(replace(policy, piece=piece))
        parts = [
            SameStart(process_group, policy=policy),
            KeepFrozen(),
            recovery,
            AgreeUnused(recovery.show),
            RecordBackward(),
            StatesFinish(),
            self.planner,
            Unchanged(),
            NotYet(),
            StepFirst(),
        ]
        sending = beside(process_group)
        super().__init__(
            module, optimizer, piece, process_group, sending, all_reduce, layers, parts
        )

    @property
    def planned(self) -> Played | None:
        """The step that the order is made of; None before there are times for it."""
        return self.planner.played

    @property
    def order(self) -> tuple[Piece, ...] | None:
        """The order that all ranks keep; None before there is a plan."""
        return self.planner.order


def recorded(events: "Sequence[Event]", model: ScheduledDataParallel) -> Played:
    """Return what an `EventLog` has of backward, step and the next forward, as a step.

    In seconds from the begin of backward; sends are there if the collective is one of
    this course, and last from when it starts to when it has ended. Lay it beside
    `model.planned`. Raises ValueError before there is a plan.
    """
    planned, places = model.planned, model.planner.places
    if planned is None:
        raise ValueError("there is no plan yet; it is made in the third forward")
    computed = [e for e in events if e.lane == "compute" and "bucket" in e.detail]
    sends = [e for e in events if e.lane == "communication" and e.nbytes]
    start = min(event.start for event in computed)
    found = [(e, e.op, places[e.detail["bucket"]], 0) for e in computed]
    found += [(e, "send", *p) for e, p in zip(sends, model.order, strict=False)]
    timed = [Timed(op, *at, e.start - start, e.end - start) for e, op, *at in found]
    timed.sort(key=lambda event: (event.start, event.end))
    return Played(planned.layers, planned.policy, planned.each, tuple(timed))
