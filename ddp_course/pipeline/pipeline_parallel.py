"""PipelineParallel: a model whose stages are on several ranks, trained in microbatches.

    pipeline = PipelineParallel(build_gpt("1m"), "1f1b", num_microbatches=8)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        loss = pipeline.step(x, y)      # forward and backward, on all ranks
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()

It is `runtime.Pipeline`, and what one needs on top: any legal schedule, zero bubble
among them; a partition by cost; tied weights; ranks that agree before anything is sent;
messages ahead of time and events (`overlapped`); recomputation; the whole state
(`mechanisms.whole_state`). Whoever listens to its parameters' gradients, such as data
parallelism between several pipelines, is held until the last microbatch is through.
Chapters 10 and 11.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.collectives import communicator
from ddp_course.mechanisms.agreement import check_same, form_of, problem_with
from ddp_course.mechanisms.broadcast import broadcast_all
from ddp_course.mechanisms.guards import watch
from ddp_course.mechanisms.hooks import held
from ddp_course.mechanisms.placements import Stage, place
from ddp_course.mechanisms.tensor_words import described, kind_of
from ddp_course.mechanisms.weight_gradients import WeightGradStore
from ddp_course.mechanisms.whole_state import PlainModel, WholeState, groups_before
from ddp_course.model import GPTConfig, check_tokens, cross_entropy
from ddp_course.pipeline.checker import check
from ddp_course.pipeline.overlapped import OverlappedRuntime, PipelineError
from ddp_course.pipeline.partition import layer_costs, partition
from ddp_course.pipeline.program import Program, add_messages
from ddp_course.pipeline.runtime import Form, Pipeline
from ddp_course.pipeline.schedule import Schedule
from ddp_course.pipeline.schedules import SCHEDULES
from ddp_course.pipeline.shared_gradients import SharedGradients
from ddp_course.pipeline.split_backward import split_backward
from ddp_course.pipeline.stages import StagePlan, spine, stage_plan


class PipelineParallel(WholeState, Pipeline):
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
            `nn.Sequential`; on the CPU or on this rank's GPU. It may be one of which
            each rank has a part already, as tensor parallelism leaves it.
        schedule: a name in SCHEDULES, or any legal `Schedule` for as many ranks, as
            `interleaved(4, 8, stages_per_rank=3)`.
        num_microbatches: into how many parts a batch is cut; None are as many as ranks,
            or those of the schedule.
        group: the ranks of the pipeline, in order; None are all.
        sizes: for each stage its number of layers; None divides by cost (`partition`).
        loss_fn: from the last layer's output and the targets to a mean over rows (which
            is tried once, and refused if it is a sum); None is the model's own
            `loss_fn`, or else cross-entropy.
        recompute: keep only what enters a stage, and compute again in backward.
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
        sizes: Sequence[int] | None = None,
        loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
        recompute: bool = False,
        virtual_time: bool = False,
    ) -> None:
        wanted = schedule, num_microbatches
        options = {"recompute": recompute, "virtual_time": virtual_time}
        program, plan = agreed(model, group, wanted, sizes, **options)
        comm = communicator(group)
        broadcast_all([*model.parameters(), *model.buffers()], comm.ranks[0], group)
        bare = object.__new__(type(model))  # its methods, without keeping its layers
        bare.__dict__ = {**vars(model), "_modules": {}}
        own_loss = loss_fn in (None, cross_entropy)
        own = getattr(bare, "loss_fn", cross_entropy)
        loss_fn = own if loss_fn is None else MeanLoss(loss_fn)
        sizes = [len(layers) for layers in plan.layers]
        super().__init__(model, program.schedule, sizes, comm.group, loss_fn)
        self.comm = comm
        self.program, self.bare = program, [bare]  # in a list: it is no layer
        # What the model takes and its loss compares, if they are this course's own.
        config = getattr(model, "config", None)
        self.config = config if isinstance(config, GPTConfig) else None
        self.takes_targets = self.config is not None and own_loss
        self.plain = PlainModel.of(model)
        self.groups = (*groups_before(model), comm.group)
        watch()
        for name, parameter in self.parameters_by_name.items():
            place(parameter, comm.group, Stage(plan.holders[name]), name=name)
        self.shared = SharedGradients(self.parameters_by_name, plan.shared, comm.rank)
        self.recompute, self.virtual_time = recompute, virtual_time
        self.weight_grads = WeightGradStore()
        if any(action.op == "I" for row in program.schedule.ranks for action in row):
            split_backward(self.module, self.weight_grads)
        self.steps = 0
        self._loss_under_way: tuple[Any, Tensor] | None = None
        self._broken: str | None = None

    # ---- a step ----------------------------------------------------------------------

    def step(self, x: Tensor, y: Tensor, loss_scale: float = 1.0) -> Tensor:
        """Go forward and backward with a batch, and return its mean loss, in float32.

        Args:
            x: (B, T), on all ranks; it is used on the first stage's.
            y: (B, T), likewise; used on the last one's.
            loss_scale: gradients are those of the loss times this number.

        If B is no multiple of the number of microbatches, the first have one row more,
        and count as much more. Raises CollectiveError, on every rank, if the batches
        cannot be used or differ, or under `torch.no_grad`; PipelineError on the rank on
        which a layer fails. Then this pipeline cannot be used any more, as the ranks
        are no longer in time with each other.
        """
        wrong = "y is None; step needs targets" if y is None else None
        if self.schedule.num_microbatches > 1:
            wrong = wrong or self._of_the_batch()
        if not torch.is_grad_enabled():
            wrong = "gradients are switched off; step needs them, a plain call does not"
        self._agree("step", x, y, wrong)
        with held(self.parameters()):
            self.shared.begin()
            self.loss_scale = loss_scale
            runtime = self._run(self.program, x, y)
            self.shared.sum(self.port)
        return self._loss_of(runtime)

    @torch.no_grad()
    def forward(
        self, x: Tensor, y: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Go forward alone; for evaluation, no gradients are recorded.

        Returns the last layer's output, (B, T, V), on the last stage's rank, None on
        the others; or, given targets, None and the mean loss on all ranks.
        """
        self._agree("forward", x, y, None)
        runtime = self._run(self.forward_program, x, y)
        if y is not None:
            return None, self._loss_of(runtime)
        parts = [runtime.outputs[k] for k in sorted(runtime.outputs)]
        if not parts:
            return None, None
        gather = getattr(self.bare[0], "gather_logits", lambda logits: logits)
        return gather(torch.cat(parts)), None

    @cached_property
    def forward_program(self) -> Program:
        """The forwards of the schedule, in the same order."""
        s = self.schedule
        rows = [[action for action in row if action.op == "F"] for row in s.ranks]
        return add_messages(Schedule(s.name, s.num_stages, s.num_microbatches, rows))

    def _run(self, program: Program, x: Tensor, y: Tensor | None) -> OverlappedRuntime:
        self._broken = "an earlier step failed: this pipeline cannot be used any more"
        runtime = OverlappedRuntime(self, program, x, y)
        runtime.run()
        self.steps += 1
        self._broken = None
        return runtime

    def _loss_of(self, runtime: OverlappedRuntime) -> Tensor:
        """Tell all ranks the loss; the last stage's, which has it, does not wait."""
        if self._loss_under_way is not None:
            self._loss_under_way[0].wait()
        comm, last, loss = self.comm, self.plan.ranks[-1], self.own_loss(runtime)
        work = dist.broadcast(loss, comm.ranks[last], comm.group, async_op=True)
        if comm.rank == last:
            self._loss_under_way = work, loss
            return loss.clone()
        work.wait()
        return loss

    def forms_of(self, x: Tensor) -> dict[int, Form]:
        """As `Pipeline.forms_of`. Raises PipelineError on the rank where it fails."""
        try:
            return super().forms_of(x)
        except Exception as error:
            raise PipelineError(
                f"one row of x, {kind_of(x[:1])}, was sent through the stages to see "
                f"what they return; it failed: {type(error).__name__}: {error}"
            ) from error

    # ---- before a step ---------------------------------------------------------------

    def _agree(self, name: str, x: Any, y: Any, problem: str | None) -> None:
        """Compare what is to be done, with which batch, before anything is sent."""
        if self._broken:  # the others wait inside of that step, or have heard of it
            raise PipelineError(self._broken)
        problem = problem or self.newcomer() or self._problem_with(x, y)
        self.comm.agree_now(f"{name}(x {described(x)}, y {described(y)})", problem)
        if hasattr(self.bare[0], "check_tokens"):
            self.bare[0].check_tokens(x, y)

    def _of_the_batch(self) -> str | None:
        """Return which layer would need the whole batch and gets microbatches."""
        for name, layer in self.module.named_modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training:
                return (
                    f"{name} is a {type(layer).__name__} in training: its mean would "
                    "be a microbatch's, not the batch's; take another norm, or eval()"
                )
        return None

    def _problem_with(self, x: Any, y: Any) -> str | None:
        least = self.schedule.num_microbatches
        if not isinstance(x, Tensor) or x.dim() == 0 or len(x) < least:
            return (
                f"x is {kind_of(x)}; it must be a tensor with a row or more for each "
                f"of the {least} microbatches"
            )
        if y is not None and (not isinstance(y, Tensor) or y.shape[:1] != x.shape[:1]):
            return f"y is {kind_of(y)}; it must be a tensor of {len(x)} rows, as x is"
        try:
            if self.config is not None:
                check_tokens("x", x, self.config)
            if self.takes_targets and y is not None:
                check_tokens("y", y, self.config)
        except (TypeError, ValueError) as error:
            return str(error)
        if self.takes_targets and y is not None and y.shape != x.shape:
            return f"y is {kind_of(y)}; it must be {list(x.shape)}, as x is"
        return None

    def extra_repr(self) -> str:
        """Tell who has what, and who does what when."""
        return f"{self.plan}\n{self.schedule}"


class MeanLoss:
    """A loss that weighs every row alike, as its microbatches then can, too.

    At first it is called with all rows twice. Raises ValueError if that is not the same
    loss: that of a sum is twice as large.
    """

    def __init__(self, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.loss_fn, self.tried = loss_fn, False

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, a scalar."""
        loss = self.loss_fn(output, targets)
        if not self.tried:
            with torch.no_grad():
                twice = self.loss_fn(*(torch.cat([t, t]) for t in (output, targets)))
            if loss.dim() or not torch.allclose(twice, loss, 0.01, equal_nan=True):
                raise ValueError(
                    f"loss_fn returned {loss}, and {twice} for the same rows twice; it "
                    "must be a mean over the rows, so that microbatches can share it"
                )
            self.tried = True
        return loss


# ---- what is decided before anything is sent -----------------------------------------


def agreed(
    model: nn.Module,
    group: dist.ProcessGroup | None,
    wanted: tuple[str | Schedule, int | None],
    sizes: Sequence[int] | None,
    **options: Any,
) -> tuple[Program, StagePlan]:
    """Return who does what when, and who has what, if all ranks make the same of it.

    Every rank decides by itself, from its own arguments; then all compare. Raises
    ReplicaError, on all ranks. `wanted` are the arguments about the schedule, `options`
    need no more than to be equal.
    """
    form, decided, problem = {}, None, problem_with(model)
    if not problem:
        try:
            if options["virtual_time"] and next(model.parameters()).is_cuda:
                raise ValueError("virtual_time is True, but the model is on a GPU")
            program = check(_schedule(communicator(group).size, *wanted)).program
            plan = _stages(model, program.schedule, sizes)
        except (TypeError, ValueError) as error:
            problem = str(error)
        else:
            decided, form = (program, plan), form_of(model, **options)
            form |= {"the schedule": str(program.schedule), "the stages": str(plan)}
    check_same(form, problem, group)
    return decided


def _schedule(
    num_ranks: int, schedule: str | Schedule, num_microbatches: int | None
) -> Schedule:
    """Return the schedule that is meant. Raises ValueError if there is none such."""
    if not isinstance(schedule, Schedule):
        m = num_ranks if num_microbatches is None else num_microbatches
        if schedule not in SCHEDULES:
            known = ", ".join(SCHEDULES)
            raise ValueError(
                f"schedule is {schedule!r}; it can be {known}, or a Schedule"
            )
        return SCHEDULES[schedule](num_ranks, m)
    for name, given, its in (
        ("num_microbatches", num_microbatches, schedule.num_microbatches),
        ("the number of ranks of the group", num_ranks, schedule.num_ranks),
    ):
        if given not in (None, its):
            raise ValueError(
                f"{name} is {given!r}; the schedule {schedule.name} is for {its}"
            )
    return schedule


def _stages(
    model: nn.Module, schedule: Schedule, sizes: Sequence[int] | None
) -> StagePlan:
    """Return who has what. Raises ValueError or TypeError if it cannot be cut so."""
    if sizes is None:  # of the course's GPT multiply-adds, else one for each layer
        config, layers = getattr(model, "config", None), spine(model)
        known = isinstance(config, GPTConfig)
        costs = layer_costs(config) if known else [1] * len(layers)
        sizes = partition(costs, schedule.num_stages)
    return stage_plan(model, sizes, schedule.ranks_of_stages)
