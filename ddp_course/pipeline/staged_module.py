"""A model of which each rank has some layers: all but how it makes a step.

How it comes to that, what an optimizer sees of it, its whole state and its gradients'
norm. The step is in `pipeline_parallel`. Chapter 10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.collectives import communicator
from ddp_course.collectives.port import Port
from ddp_course.mechanisms.agreement import broadcast_all, described, kind_of
from ddp_course.mechanisms.whole import HasWholeState
from ddp_course.model import GPTConfig, check_tokens, cross_entropy
from ddp_course.pipeline import full_state, gradients
from ddp_course.pipeline.agreed import agreed
from ddp_course.pipeline.messages import Form, rehearse
from ddp_course.pipeline.runtime import PipelineError
from ddp_course.pipeline.schedule import Schedule
from ddp_course.pipeline.stages import build_stages, merged


class StagedModule(HasWholeState, nn.Module):
    """Holds this rank's layers of `model`: `parameters()` are theirs.

    `module` has the layers under the names that they have in the model, `stages` has
    them stage by stage. Made by all ranks together; the first rank's numbers are sent
    to all.
    """

    GATHERING = full_state

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        dp_group: dist.ProcessGroup | None,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        **options: Any,
    ) -> None:
        super().__init__()
        self.program, self.plan = agreed(model, group, dp_group, **options)
        self.group, self.comm, self.dp_group = group, communicator(group), dp_group
        rank = self.comm.rank
        for ranks in (group, dp_group) if dp_group is not None else (group,):
            states = [*model.parameters(), *model.buffers()]
            broadcast_all(states, communicator(ranks).ranks[0], ranks)
        # What the model takes and its loss compares, if they are this course's own.
        config, own_loss = getattr(model, "config", None), loss_fn is cross_entropy
        self.config = config if isinstance(config, GPTConfig) else None
        self.takes_targets = self.config is not None and own_loss
        self.stages = build_stages(model, self.plan, rank, loss_fn)
        self.module = merged(self.stages.values(), self.plan)
        self.shapes = {key: value.shape for key, value in model.state_dict().items()}
        whole, holders = dict(model.named_parameters()), self.plan.holders
        self.parameters_by_name = {n: whole[n] for n in holders if rank in holders[n]}
        self.shared = gradients.SharedGradients(
            self.parameters_by_name, self.plan.shared, rank
        )
        self.device = next(model.parameters()).device
        self.steps = 0
        self._forms: dict[Any, dict[int, Form]] = {}

    @property
    def schedule(self) -> Schedule:
        """What the ranks carry out in a step."""
        return self.program.schedule

    @property
    def port(self) -> Port:
        """How messages leave and arrive, counted by the meters that are open now."""
        return Port(self.comm.group)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters, by their names in the plain model."""
        for name, parameter in self.parameters_by_name.items():
            yield prefix + ("." if prefix else "") + name, parameter

    def agree_on(self, name: str, x: Any, y: Any, problem: str | None = None) -> None:
        """Compare what is to be done, with which batch, before anything is sent.

        Raises CollectiveError, on all ranks, if it differs or one rank has a problem.
        """
        problem = problem or self._problem_with(x, y)
        words = f"{name}(x {described(x)}, y {described(y)})"
        self.comm.agree_now(words, problem)

    def forms_of(self, x: Tensor) -> dict[int, Form]:
        """Return the forms of activations for batches such as x; called by all ranks.

        For a kind of batch that is new, one row of it goes through all stages. Raises
        PipelineError on the rank on which that fails.
        """
        kind = x.dtype, x.shape[1:]
        if kind not in self._forms:
            row, homes = x[:1].to(self.device), self.plan.ranks
            try:
                self._forms[kind] = rehearse(self.stages, homes, row, self.port)
            except Exception as error:
                raise PipelineError(
                    f"one row of x, {kind_of(row)}, was sent through the stages to see "
                    f"what they return; it failed: {type(error).__name__}: {error}"
                ) from error
        return self._forms[kind]

    def _problem_with(self, x: Any, y: Any) -> str | None:
        """Return why this batch cannot be used, or None."""
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

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return it.

        The norm is that of the whole model's gradient, as it was before; called by all
        ranks. Raises ValueError for a `norm_type` that is not above 0. As
        torch.nn.utils.clip_grad_norm_.
        """
        holders, by_name = self.plan.holders, self.parameters_by_name
        owned = [p for n, p in by_name.items() if holders[n][0] == self.comm.rank]
        return gradients.clip(
            by_name.values(), owned, max_norm, norm_type, self.group, self.device
        )

    def extra_repr(self) -> str:
        """Tell who has what, and who does what when."""
        return f"{self.plan}\n{self.schedule}"
