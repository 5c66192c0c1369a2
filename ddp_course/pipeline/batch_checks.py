"""A part of `PipelineParallel`: may this batch be used, and have all ranks the same?

Asked before a step or an evaluation, before anything is sent. Chapter 10.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ddp_course.collectives.communicator import Communicator
from ddp_course.mechanisms.agreement import described, kind_of
from ddp_course.model import GPTConfig, check_tokens

BATCH_NORM = nn.modules.batchnorm._BatchNorm


class SameBatch:
    """Raises CollectiveError, on every rank, if the ranks' batches cannot be used.

    Args:
        comm: the ranks of the pipeline.
        check_more: of a tensor-parallel model, compares tokens across its ranks.
        config: of the course's GPT, or None; `takes_targets`: its loss compares y.
        ignored: the target that the loss function leaves out.
    """

    def __init__(
        self,
        comm: Communicator,
        check_more: Callable[..., None] | None,
        config: GPTConfig | None,
        takes_targets: bool,
        ignored: int,
    ) -> None:
        self.comm, self.check_more, self.config = comm, check_more, config
        self.takes_targets, self.ignored = takes_targets, ignored

    def before_step(self, pipeline: Any, x: Any, y: Any) -> None:
        """Check the batch of a step."""
        problem = "y is None; step needs targets" if y is None else None
        if pipeline.schedule.num_microbatches > 1:
            problem = problem or needs_whole_batch(pipeline.module)
            problem = problem or self._ignores(pipeline.schedule.num_microbatches, y)
        if not torch.is_grad_enabled():
            problem = (
                "gradients are switched off; step needs them, a plain call does not"
            )
        self._agree("step", pipeline, x, y, problem)

    def before_forward(self, pipeline: Any, x: Any, y: Any) -> None:
        """Check the batch of an evaluation."""
        self._agree("forward", pipeline, x, y, None)

    def _agree(
        self, name: str, pipeline: Any, x: Any, y: Any, problem: str | None
    ) -> None:
        m = pipeline.schedule.num_microbatches
        problem = problem or pipeline.newcomer() or self._problem_with(x, y, m)
        self.comm.agree_now(f"{name}(x {described(x)}, y {described(y)})", problem)
        if self.check_more is not None:
            self.check_more(x, y)

    def _problem_with(self, x: Any, y: Any, m: int) -> str | None:
        if not isinstance(x, Tensor) or x.dim() == 0 or len(x) < m:
            return (
                f"x is {kind_of(x)}; it must be a tensor with a row or more for each "
                f"of the {m} microbatches"
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

    def _ignores(self, m: int, y: Any) -> str | None:
        """Return why microbatches cannot be weighed by their rows, or None."""
        if not isinstance(y, Tensor) or y.dtype != torch.int64 or len(y) < m:
            return None
        left_out = {
            (part == self.ignored).double().mean().item() for part in y.tensor_split(m)
        }
        if len(left_out) == 1:
            return None
        return (
            f"the loss leaves out targets of {self.ignored} (ignore_index), and the "
            "microbatches have different shares of them, but count by their rows: the "
            "sum would not be the batch's mean. Divide a sum by a number that is the "
            "same for all batches, or take num_microbatches 1"
        )


def needs_whole_batch(module: nn.Module) -> str | None:
    """Return which layer would need the whole batch and gets microbatches, or None."""
    for name, layer in module.named_modules():
        if isinstance(layer, BATCH_NORM) and layer.training:
            return (
                f"{name} is a {type(layer).__name__} in training: its mean would "
                "be a microbatch's, not the batch's; take another norm, or eval()"
            )
    return None
