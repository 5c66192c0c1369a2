"""The orders of `torch.distributed.pipelining`, built without any process."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from ddp_course.pipeline import Action, Schedule

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


def torch_schedule(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """Return PyTorch's order for p ranks, m microbatches and v stages on each rank.

    Raises ValueError where PyTorch does.
    """
    stages = [
        SimpleNamespace(
            num_stages=p * v,
            group_size=p,
            group_rank=0,
            stage_index=p * chunk,
            is_first=chunk == 0,
            is_last=p * chunk == p * v - 1,
            has_backward=True,
            submod=torch.nn.Identity(),
        )
        for chunk in range(v)
    ]
    if name in SINGLE:
        theirs = SINGLE[name](stages[0], m, loss_fn=torch.nn.functional.mse_loss)
    else:
        theirs = MULTI[name](stages, m, loss_fn=torch.nn.functional.mse_loss)
    rows = []
    for rank in range(p):
        order = [a for a in theirs.pipeline_order[rank] if a is not None]
        rows.append(
            [
                Action(op, action.stage_index, action.microbatch_index)
                for action in order
                if (op := action.computation_type.value) in "FBIW"
            ]
        )
    return Schedule(f"torch {name}", p * v, m, rows)
