"""PipelineParallel: a model whose stages are on several ranks, trained in microbatches.

    pipeline = PipelineParallel(build_gpt("1m"), "1f1b", num_microbatches=8)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        loss = pipeline.step(x, y)      # forward and backward, on all ranks
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()

It is `runtime.Pipeline` and a list of parts with methods for the moments of a step:

    SameBatch        raises unless all ranks have the same usable batch (`batch_checks`)
    PostedAhead      posts receives early (`overlapped`)
    Recomputed       optional: runs forward again before backward (`backward`)
    SplitBackward    adds the operations I and W, for zero bubble (`backward`)
    SharedGradients  sums the gradients of tied weights (`stage_plan`)

A recorder is one more part, which you pass. Hooks on the parameters' gradients, such as
those of data parallelism between several pipelines, are held back until the last
microbatch is through. Chapters 10 and 11.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_course.collectives.endpoint import Endpoint
from ddp_course.launch.deadlock import checked_group
from ddp_course.mechanisms.agreement import agreed
from ddp_course.mechanisms.divided import DividedModule, PlainModel, groups_before
from ddp_course.mechanisms.hooks import listeners
from ddp_course.mechanisms.parts import announce
from ddp_course.mechanisms.placements import OnRanks, place
from ddp_course.mechanisms.replicable import check_module, form_of
from ddp_course.pipeline.backward import Recomputed, SplitBackward
from ddp_course.pipeline.batch_checks import MeanLoss, SameBatch
from ddp_course.pipeline.forms import Forms, PipelineError
from ddp_course.pipeline.overlapped import PostedAhead
from ddp_course.pipeline.program import add_messages
from ddp_course.pipeline.runtime import Pipeline, Runtime
from ddp_course.pipeline.schedule import SCHEDULES, Schedule, check_complete
from ddp_course.pipeline.stage_plan import (
    SharedGradients,
    StagePlan,
    partition,
    stage_plan,
)
from ddp_course.pipeline.stages import spine

NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward to the inputs",
    "W": "gradients of the weights",
}


class PipelineParallel(DividedModule, Pipeline):
    """A pipeline that trains `model`, with some of the layers on each rank.

    `parameters()` are those of this rank's layers, for any optimizer that steps each
    parameter by itself (others are refused, `mechanisms.trial`). `step` adds to each
    `grad` the gradient of the mean loss of the whole batch, as one process would.
    `module` has this rank's layers under their names in the model.

    All ranks must construct it together, with equal models; all get the first rank's
    values. It uses the model's own layers: delete `model`, and the memory of the other
    ranks' layers is freed.

    Args:
        model: the course's GPT, another with embed, blocks and head, or an
            `nn.Sequential`; on the CPU or on this rank's GPU. Tensor parallelism may
            have divided it before.
        schedule: a name in SCHEDULES, or any legal `Schedule` for as many ranks, such
            as `interleaved(4, 8, stages_per_rank=3)`.
        num_microbatches: the number of parts of a batch; None means the schedule's
            number, or one for each rank.
        group: the ranks of the pipeline, in order; None means all.
        sizes: the number of layers of each stage; None divides by cost (`partition`).
        loss_fn: a function of the last layer's output and the targets that returns a
            mean over rows (its first calls test that); None means the model's own loss,
            or cross-entropy if it has none.
        recompute: store only the inputs of a stage, and recompute in backward.
        recorder: a part that records each step: `PipelineRecorder()` writes events into
            the open logs, `VirtualTime()` does so for ranks that share cores. None
            records nothing.

    Raises ReplicaError, on every rank, if models or arguments differ or cannot be used,
    or, with the checker's words, if the schedule is not legal.

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
        sizes: Sequence[int] | None = None,
        loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
        recompute: bool = False,
        recorder: Any = None,
    ) -> None:
        group, m = checked_group(group), num_microbatches
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        form = form_of(model, num_microbatches=m, sizes=sizes, recompute=recompute)
        form |= {"recorder": type(recorder).__name__, "the schedule": schedule}
        choose = partial(choose_plan, model, size, schedule, m, sizes, loss_fn)
        schedule, plan = agreed(choose, group, **form)
        for tensor in (*model.parameters(), *model.buffers()):
            numbers = tensor.detach().contiguous()
            dist.broadcast(numbers, group=group, group_src=0)
            tensor.data.copy_(numbers)
        ends = getattr(model, "ends", model)  # tensor parallelism adds this attribute
        own = getattr(ends, "loss_fn", cross_entropy_of_all)
        self.gather_logits = getattr(ends, "gather_logits", None)
        check_more = getattr(ends, "check_tokens", None)
        mean_loss = own if loss_fn is None else MeanLoss(loss_fn)
        counts = [len(layers) for layers in plan.layers]
        super().__init__(model, schedule, counts, None, mean_loss, group)
        self.rank, self.plan, self.plain = rank, plan, PlainModel.of(model)
        self.groups = (*groups_before(model), group)
        pairs, users = model.named_parameters(), plan.holders
        self.parameters_by_name = {n: p for n, p in pairs if rank in users[n]}
        for name, parameter in self.parameters_by_name.items():
            place(parameter, group, OnRanks(plan.holders[name]), name=name)
        several = schedule.num_microbatches > 1
        self.forms = Forms(self.stages, plan.ranks, group, several)
        ignored = getattr(mean_loss, "ignored", -100)
        check_tokens = getattr(model, "token_check", None)  # the course's GPT has one
        takes_targets = check_tokens is not None and loss_fn is None
        self.parts += [
            SameBatch(group, check_more, check_tokens, takes_targets, ignored),
            PostedAhead(),
            SharedGradients(self.parameters_by_name, plan.shared, rank),
            *getattr(model, "pipeline_parts", ()),
        ]
        if recorder is not None:
            self.parts.append(recorder)
        if recompute:
            self.parts.append(Recomputed())
        if any(action.op == "I" for row in schedule.ranks for action in row):
            self.parts.append(SplitBackward(self.module))
        self._loss_under_way: tuple[Any, Tensor] | None = None
        self._broken: str | None = None

    def step(self, x: Tensor, y: Tensor, loss_scale: float = 1.0) -> Tensor:
        """Run forward and backward with a batch, and return its mean loss, in float32.

        Args:
            x: (B, T), on all ranks; the first stage uses it.
            y: (B, T), on all ranks; the last stage uses it.
            loss_scale: gradients are those of the loss times this number.

        If B is no multiple of the number of microbatches, the first microbatches have
        one row more, and a larger weight. Raises CollectiveError, on every rank, if the
        batches cannot be used or differ, or under `torch.no_grad`; PipelineError on the
        rank on which a layer fails. After an error this pipeline cannot be used any
        more, as the ranks have reached different places of the schedule.
        """
        self._check_usable()
        announce(self.parts, "before_step", self, x, y)
        with defer_averaging(self.parameters()):
            runtime = self._run(self.schedule, x, y, loss_scale)
        announce(self.parts, "after_step", self)
        return self._loss_of(runtime)

    def forward(
        self, x: Tensor, y: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Evaluate: go forward without recording gradients. To train, call `step`.

        Without targets, returns (output of the last layer, None) on the last stage's
        rank, with an output of (B, T, V), and (None, None) on the others. With targets,
        returns (None, mean loss) on all ranks; needs `eval()` or `torch.no_grad`.
        """
        self._check_usable()
        announce(self.parts, "before_forward", self, x, y)
        with torch.no_grad():
            runtime = self._run(self.forward_schedule, x, y)
        if y is not None:
            return None, self._loss_of(runtime)
        outputs = [runtime.outputs[k] for k in sorted(runtime.outputs)]
        if not outputs:
            return None, None
        logits = torch.cat(outputs)
        gather = self.gather_logits
        return logits if gather is None else gather(logits), None

    @cached_property
    def forward_schedule(self) -> Schedule:
        """The schedule without its backwards, in the same order."""
        s = self.schedule
        rows = [[action for action in row if action.op == "F"] for row in s.ranks]
        return Schedule(s.name, s.num_stages, s.num_microbatches, rows)

    def _check_usable(self) -> None:
        if self._broken:
            raise PipelineError(self._broken)

    def _run(
        self, schedule: Schedule, x: Tensor, y: Tensor | None, loss_scale: float = 1.0
    ) -> Runtime:
        self._broken = "an earlier step failed: construct a new pipeline on all ranks"
        x, y = x.to(self.device), None if y is None else y.to(self.device)
        endpoint, forms = Endpoint(self.group), self.forms.of(x, self.training)
        runtime = Runtime(self.stages, schedule, endpoint, forms, x, y, self.parts)
        runtime.loss_scale = loss_scale
        try:
            runtime.run()
        except Exception as error:
            action = runtime.computing
            if action is None:  # a message failed, not a layer
                raise
            raise PipelineError(
                f"{action} failed ({NAMES[action.op]} of stage {action.stage}, "
                f"microbatch {action.microbatch}): {type(error).__name__}: {error}"
            ) from error
        self._broken = None
        return runtime

    def _loss_of(self, runtime: Runtime) -> Tensor:
        """Broadcast the loss from the last stage's rank, which does not wait."""
        if self._loss_under_way is not None:
            self._loss_under_way[0].wait()
        last, loss = self.plan.ranks[-1], runtime.loss
        work = dist.broadcast(loss, group=self.group, group_src=last, async_op=True)
        if self.rank == last:
            self._loss_under_way = work, loss
            return loss.clone()
        work.wait()
        return loss


@contextmanager
def defer_averaging(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let gradients accumulate in this block, and average the sums at its end.

    For code that runs backward several times for one step. The objects that average
    these gradients do so as if they had come in one pass; an inner block leaves that to
    the outer one. After an error nothing is averaged. Chapter 10.
    """
    averagers = dict.fromkeys(one for p in parameters for one in listeners(p))
    with ExitStack() as stack:
        for one in averagers:
            stack.enter_context(one.defer())
        yield
    for one in averagers:
        if not one.deferrals:
            one.average()


# ---- plan, before anything is sent ---------------------------------------------------


def choose_plan(
    model: nn.Module,
    num_ranks: int,
    schedule: str | Schedule,
    num_microbatches: int | None,
    sizes: Sequence[int] | None,
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None,
) -> tuple[Schedule, StagePlan]:
    """Return the schedule and the stages; raise ValueError or TypeError if unusable."""
    check_module(model)
    if loss_fn is not None and hasattr(model, "ends"):
        raise ValueError(
            "tensor parallelism has cut the model, so loss_fn would get a part of the "
            "logits: leave loss_fn out, and the model's own loss is used"
        )
    schedule = _schedule(num_ranks, schedule, num_microbatches)
    check_complete(schedule)
    add_messages(schedule)  # raises ScheduleError if ranks would wait for ever
    return schedule, _stages(model, schedule, sizes)


def _schedule(
    num_ranks: int, schedule: str | Schedule, num_microbatches: int | None
) -> Schedule:
    """Return the schedule of this name; raise ValueError if it does not fit."""
    if not isinstance(schedule, Schedule):
        m = num_ranks if num_microbatches is None else num_microbatches
        if schedule not in SCHEDULES:
            known = ", ".join(SCHEDULES)
            raise ValueError(
                f"schedule is {schedule!r}; it can be {known}, or a Schedule"
            )
        return SCHEDULES[schedule](num_ranks, m)
    for name, value, required in (
        ("num_microbatches", num_microbatches, schedule.num_microbatches),
        ("the number of ranks of the group", num_ranks, schedule.num_ranks),
    ):
        if value not in (None, required):
            raise ValueError(
                f"{name} is {value!r}; the schedule {schedule.name} is for {required}"
            )
    return schedule


def _stages(
    model: nn.Module, schedule: Schedule, sizes: Sequence[int] | None
) -> StagePlan:
    """Return the plan of the stages; raise ValueError or TypeError if none fits."""
    if sizes is None:  # cut by the layers' costs, if the model has them
        config, layers = getattr(model, "config", None), spine(model)
        costs = getattr(config, "layer_costs", [1] * len(layers))
        sizes = partition(costs, schedule.num_stages)
    return stage_plan(model, sizes, schedule.ranks_of_stages)


def cross_entropy_of_all(output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of (..., V) logits and (...) targets."""
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())
