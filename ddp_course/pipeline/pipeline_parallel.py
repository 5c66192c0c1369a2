"""PipelineParallel: a model whose stages are on several ranks, trained in microbatches.

    pipeline = PipelineParallel(build_gpt("1m"), "1f1b", num_microbatches=8)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        loss = pipeline.step(x, y)      # forward and backward, on all ranks
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()

Read with it:

    stages          how the model is cut: plain data, and a rank's slices
    schedule, program
                    who computes and sends what, and when: plain data
    runtime         how a rank carries it out
    messages, split_backward, gradients, full_state, clocks
                    its tools

Chapters 10 and 11.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.measure import active_logs
from ddp_course.model import cross_entropy
from ddp_course.pipeline import gradients
from ddp_course.pipeline.clocks import VirtualClock, WallClock
from ddp_course.pipeline.messages import Messages
from ddp_course.pipeline.program import Program, program
from ddp_course.pipeline.runtime import Record, Run
from ddp_course.pipeline.schedule import Schedule
from ddp_course.pipeline.split_backward import Later, split_backward
from ddp_course.pipeline.staged_module import StagedModule
from ddp_course.pipeline.stages import microbatches


class PipelineParallel(StagedModule):
    """Trains `model`, of which every rank of the group has some layers.

    `parameters()` are those of this rank's layers, for any optimizer; after `step` each
    has as `grad` what it would have in one process after a backward of the mean loss of
    the whole batch, added to what was there. `module` has the layers under their names
    in the model.

    Made by all ranks together, with equal models, of which the first rank's numbers are
    sent to all. It uses the model's own layers; let go of `model`, and the memory of
    the other ranks' layers is free.

    Args:
        model: the course's GPT, another with embed, blocks and head, or an
            `nn.Sequential`; on the CPU or on this rank's GPU.
        schedule: a name in SCHEDULES, or any legal `Schedule` for as many ranks.
        num_microbatches: into how many parts a batch is cut; None are as many as ranks,
            or those of the schedule.
        group: the ranks of the pipeline, in order; None are all.
        stages_per_rank: for the schedule "interleaved".
        sizes: for each stage its number of layers; None cuts by cost (`cut`).
        loss_fn: from the last layer's output and the targets to a mean over rows.
        recompute: keep only what enters a stage, and compute again in backward.
        dp_group: the ranks with the same stages in other pipelines, over which the
            gradients are averaged.
        virtual_time: record events on a virtual clock (`clocks`); CPU only, and each
            message is followed by one of 8 bytes.

    Raises ReplicaError, on every rank, if models or arguments differ or cannot be used;
    among others, with the checker's words, for a schedule that is not legal.

    torch/distributed/pipelining; Huang et al. 2019, "GPipe", arXiv:1811.06965;
    Narayanan et al. 2021, arXiv:2104.04473. Chapters 10 and 11.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: str | Schedule = "1f1b",
        num_microbatches: int | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        stages_per_rank: int = 2,
        sizes: Sequence[int] | None = None,
        loss_fn: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
        recompute: bool = False,
        dp_group: dist.ProcessGroup | None = None,
        virtual_time: bool = False,
    ) -> None:
        super().__init__(
            model,
            group,
            dp_group,
            loss_fn,
            schedule=schedule,
            num_microbatches=num_microbatches,
            stages_per_rank=stages_per_rank,
            sizes=sizes,
            recompute=recompute,
            virtual_time=virtual_time,
        )
        self.recompute, self.virtual_time = recompute, virtual_time
        self.later = Later()
        if any(action.op == "I" for row in self.schedule.ranks for action in row):
            split_backward(self.module, self.later)
        self._loss_under_way: tuple[Any, Tensor] | None = None
        self._broken: str | None = None

    # ---- a step ----------------------------------------------------------------------

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Go forward and backward with a batch, and return its mean loss.

        Args:
            x: (B, T), on all ranks; it is used on the first stage's.
            y: (B, T), likewise; used on the last one's.

        If B is no multiple of the number of microbatches, the first have one row more,
        and count as much more. Raises CollectiveError, on every rank, if the batches
        cannot be used or differ, or under `torch.no_grad`; PipelineError on the rank on
        which a layer fails. Then this pipeline cannot be used any more, as the ranks
        are no longer in time with each other.
        """
        wrong = "y is None; step needs targets" if y is None else None
        if not torch.is_grad_enabled():
            wrong = "gradients are switched off; step needs them, a plain call does not"
        self.agree_on("step", x, y, wrong or self._broken)
        self.shared.begin()
        run = self._run(self.program, x, y)
        self.shared.sum(self.port)
        if self.dp_group is not None:
            gradients.average(self.parameters(), self.dp_group)
        return self._loss_of(run)

    @torch.no_grad()
    def forward(
        self, x: Tensor, y: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Go forward alone; for evaluation, no gradients are recorded.

        Returns the last layer's output, (B, T, V), on the last stage's rank, None on
        the others; or, given targets, None and the mean loss on all ranks.
        """
        self.agree_on("forward", x, y, self._broken)
        run = self._run(program(_forward_only(self.schedule)), x, y)
        if y is not None:
            return None, self._loss_of(run)
        parts = [run.outputs[k] for k in sorted(run.outputs)]
        return (torch.cat(parts) if parts else None), None

    def _run(self, plan: Program, x: Tensor, y: Tensor | None) -> Run:
        """Carry out this rank's row of a program."""
        groups = plan.ranks[self.comm.rank]
        m = self.schedule.num_microbatches
        parts = [part.to(self.device) for part in microbatches(x, m)]
        targets = [None] * m if y is None else microbatches(y.to(self.device), m)
        clock = VirtualClock() if self.virtual_time else WallClock()
        record = Record(active_logs(), clock, self.steps)
        self._broken = "an earlier step failed: this pipeline cannot be used any more"
        messages = Messages(
            groups,
            self.port,
            self.device,
            [len(part) for part in parts],
            self.forms_of(x),
            clock,
            record,
        )
        run = Run(
            self.stages,
            self.schedule.num_stages,
            parts,
            targets,
            messages,
            self.later,
            self.recompute,
            clock,
            record,
        )
        run(groups)
        self.steps += 1
        self._broken = None
        return run

    def _loss_of(self, run: Run) -> Tensor:
        """Tell all ranks the loss; the last stage's, which has it, does not wait."""
        if self._loss_under_way is not None:
            self._loss_under_way[0].wait()
        last = self.plan.ranks[-1]
        loss = torch.zeros((), device=self.device)
        for k in sorted(run.losses):
            loss += run.losses[k]
        work = dist.broadcast(
            loss, self.comm.ranks[last], self.comm.group, async_op=True
        )
        if self.comm.rank == last:
            self._loss_under_way = work, loss
            return loss.clone()
        work.wait()
        return loss


def _forward_only(schedule: Schedule) -> Schedule:
    """Return the forwards of a schedule, in the same order."""
    rows = tuple(tuple(a for a in row if a.op == "F") for row in schedule.ranks)
    name = f"{schedule.name}, forward"
    return Schedule(name, schedule.num_stages, schedule.num_microbatches, rows)
