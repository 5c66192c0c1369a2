"""What is decided before anything is sent: who has what, and who does what when.

Every rank decides by itself, from its own arguments; then all compare what they have
decided. If they differ, or if it cannot be done, every rank raises the same error.
Chapter 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from ddp_course.collectives import communicator
from ddp_course.mechanisms.agreement import (
    ReplicaError,
    check_same,
    form_of,
    problem_with,
)
from ddp_course.model import GPTConfig
from ddp_course.pipeline.checker import check
from ddp_course.pipeline.cut import cut, layer_costs
from ddp_course.pipeline.program import Program
from ddp_course.pipeline.schedule import Schedule
from ddp_course.pipeline.schedules import SCHEDULES
from ddp_course.pipeline.stages import StagePlan, spine, stage_plan


def agreed(
    model: nn.Module,
    group: dist.ProcessGroup | None,
    dp_group: dist.ProcessGroup | None,
    schedule: str | Schedule,
    num_microbatches: int | None,
    stages_per_rank: int,
    sizes: Sequence[int] | None,
    **options: Any,
) -> tuple[Program, StagePlan]:
    """Return program and cut, if all ranks make the same of it; else raise, on all.

    Raises ReplicaError. `options` are arguments that need no more than to be equal.
    """
    form, plans, problem = {}, None, problem_with(model)
    if not problem:
        try:
            size = communicator(group).size
            chosen = _schedule(schedule, size, num_microbatches, stages_per_rank)
            plans = _plans(model, size, chosen, sizes, **options)
        except (TypeError, ValueError) as error:
            problem = str(error)
    if plans is not None:
        form = form_of(model, **options)
        form |= {"the schedule": str(plans[0].schedule), "the stages": str(plans[1])}
    wrong = None
    try:
        check_same(form, problem, group)
    except ReplicaError as error:
        if dp_group is None:
            raise
        wrong = str(error)  # and the other pipelines are to know it, too
    if dp_group is not None:
        own = {"the rank in its pipeline": str(communicator(group).rank)}
        check_same(form | own, wrong, dp_group)
    return plans


def _plans(
    model: nn.Module,
    num_ranks: int,
    schedule: Schedule,
    sizes: Sequence[int] | None,
    virtual_time: bool = False,
    **options: Any,
) -> tuple[Program, StagePlan]:
    """Return who does what when, and who has what. Raises ValueError or TypeError."""
    if virtual_time and next(model.parameters()).is_cuda:
        raise ValueError("virtual_time is True, but the model is on a GPU: CPU only")
    if schedule.num_ranks != num_ranks:
        raise ValueError(
            f"the schedule {schedule.name} is for {schedule.num_ranks} ranks; the "
            f"group has {num_ranks}"
        )
    proof = check(schedule)
    ranks = [schedule.rank_of(stage) for stage in range(schedule.num_stages)]
    if sizes is None:
        cuts = cut(_costs(model), schedule.num_stages)
        sizes = [one.stop - one.start for one in cuts]
    return proof.program, stage_plan(model, sizes, ranks)


def _costs(model: nn.Module) -> list[int]:
    """Return what each layer costs: of the course's GPT multiply-adds, else one."""
    config = getattr(model, "config", None)
    if isinstance(config, GPTConfig):
        return layer_costs(config)
    return [1] * len(spine(model))


def _schedule(
    schedule: str | Schedule,
    num_ranks: int,
    num_microbatches: int | None,
    stages_per_rank: int,
) -> Schedule:
    """Return the schedule that is meant. Raises ValueError if there is none such."""
    if isinstance(schedule, Schedule):
        if num_microbatches not in (None, schedule.num_microbatches):
            raise ValueError(
                f"num_microbatches is {num_microbatches!r}; the schedule "
                f"{schedule.name} has {schedule.num_microbatches}"
            )
        return schedule
    if schedule not in SCHEDULES:
        raise ValueError(
            f"schedule is {schedule!r}; it can be {', '.join(SCHEDULES)}, or a Schedule"
        )
    m = num_ranks if num_microbatches is None else num_microbatches
    more = (stages_per_rank,) if schedule == "interleaved" else ()
    return SCHEDULES[schedule](num_ranks, m, *more)
