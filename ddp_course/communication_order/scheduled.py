"""Data parallelism by a schedule: `OrderedDataParallel`, with parts.

The order is derived from the times of the first passes (`plan`), and all ranks follow
it (`pieces` explains why). Until then gradients are sent as they become ready, and
forward waits for all of them. Chapter 15.
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
    second_group,
)
from ddp_course.communication_order.ordered import OrderedDataParallel
from ddp_course.communication_order.plan import Planned
from ddp_course.communication_order.schedule import (
    GradientPiece,
    Policy,
    StepEvent,
    TimedStep,
    check_policy,
    priority,
)
from ddp_course.mechanisms.frozen import KeepFrozen
from ddp_course.mechanisms.recovery import AgreeUnused, Recovery
from ddp_course.mechanisms.timeline import RecordBackward

if TYPE_CHECKING:
    from ddp_course.measure.events import Event

MIB = 1 << 20


class ScheduledDataParallel(OrderedDataParallel):
    """A wrapper that averages gradients by a schedule, and steps layer by layer.

        model = ScheduledDataParallel(module, torch.optim.AdamW(module.parameters()))
        for x, y in batches:
            loss = model(x, y)
            loss.backward()
            model.step()  # instead of optimizer.step() and zero_grad()

    After `finish()`, or when a state is saved or loaded, parameters equal those of
    DistributedDataParallel, bit by bit if the collective adds in the same order
    wherever a gradient is cut (a ring of three ranks or more does not). From `backward`
    until the next forward, gradients are being sent, and using one raises an error.
    A layer is a module that has parameters of its own; small neighbours are sent
    together, up to a piece, as every message costs time. Any other use of a parameter
    before its layer runs, such as a penalty in the loss, an average of weights or a
    change by hand, first takes the parameter's step.

    All ranks must construct it together. Keep it as long as you train (its hooks are
    removed with it), and call `finish()` at the end: the last step may still be due. On
    a GPU, where this class was never run, backward is timed on the GPU's stream, but
    forwards and updates on the host, which only launches them.

    Args:
        module: the same on all ranks; all get rank 0's values. Each rank keeps its
            own buffers.
        optimizer: any optimizer of `module.parameters()` that can step each parameter
            without the others.
        policy: chooses the order; its `piece` is in bytes. With `wait_for_all`, forward
            waits for all gradients.
        process_group: the ranks that share a batch; None means all.
        all_reduce: any all-reduce of this course, or PyTorch's.
        layers: modules that count as one layer with all their submodules.

    Raises ValueError for a policy that is not a Policy; ReplicaError, on every rank, if
    the modules differ or the optimizer cannot step layers one by one; RuntimeError,
    when a step is taken, if a parameter was changed through a view while the step was
    due.
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
        check_policy(policy)
        # A multiple of 16 bytes, so that no element of any type is cut.
        piece = policy.piece and max(16, int(policy.piece) // 16 * 16)
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
        sending = second_group(process_group)
        super().__init__(
            module, optimizer, piece, process_group, sending, all_reduce, layers, parts
        )

    @property
    def planned(self) -> TimedStep | None:
        """The simulated step that defines the order; None before there is a plan."""
        return self.planner.planned

    @property
    def order(self) -> tuple[GradientPiece, ...] | None:
        """The order that all ranks follow; None before there is a plan."""
        return self.planner.order


def recorded(events: "Sequence[Event]", model: ScheduledDataParallel) -> TimedStep:
    """Return recorded events of backward, step and the next forward as a TimedStep.

    Times are seconds from the start of backward. Sends are included if the collective
    is one of this course. Compare the result with `model.planned`. Raises ValueError
    before there is a plan.
    """
    planned, places = model.planned, model.planner.places
    if planned is None:
        raise ValueError(
            "there is no plan yet; the third forward makes it: train two steps first"
        )
    computed = [e for e in events if e.lane == "compute" and "bucket" in e.detail]
    sends = [e for e in events if e.lane == "communication" and e.nbytes]
    start = min(event.start for event in computed)
    rows = [(e, e.op, places[e.detail["bucket"]], 0) for e in computed]
    rows += [(e, "send", *p) for e, p in zip(sends, model.order, strict=False)]
    timed = [StepEvent(op, *at, e.start - start, e.end - start) for e, op, *at in rows]
    timed.sort(key=lambda event: (event.start, event.end))
    return TimedStep(planned.layers, planned.policy, planned.each, tuple(timed))
