"""Checks that a batch and its loss can be divided into microbatches.

    SameBatch   a part of `PipelineParallel` that compares the ranks' batches before
                anything is sent
    MeanLoss    a loss function that is tested in its first calls: microbatches'
                gradients add up to the batch's only if the loss is a mean over rows

Chapter 10.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.launch.deadlock import CollectiveError
from ddp_course.mechanisms.agreement import agreed, describe, kind_of
from ddp_course.mechanisms.placements import device_of

BATCH_NORM = nn.modules.batchnorm._BatchNorm


class SameBatch:
    """A part that raises CollectiveError, on every rank, for an unusable batch.

    Args:
        group: the ranks of the pipeline.
        check_more: a tensor-parallel model's function that compares tokens across its
            ranks, or None.
        check_tokens: the `token_check` of the course's GPT, or None.
        takes_targets: whether y has tokens, too, in the shape of x.
        ignored: the target that the loss function leaves out.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        check_more: Callable[..., None] | None,
        check_tokens: Callable[[str, Tensor], None] | None,
        takes_targets: bool,
        ignored: int,
    ) -> None:
        self.group, self.check_more = group, check_more
        self.check_tokens = check_tokens
        self.takes_targets, self.ignored = takes_targets, ignored

    def before_step(self, pipeline: Any, x: Any, y: Any) -> None:
        """Check the batch of a step."""
        problem = "y is None; step needs targets" if y is None else None
        if (m := pipeline.schedule.num_microbatches) > 1:
            problem = problem or needs_whole_batch(pipeline.module)
            problem = problem or self._weight_problem(m, y)
        if not torch.is_grad_enabled():
            problem = "gradients are switched off; call step outside torch.no_grad()"
        self._agree("step", pipeline, x, y, problem)

    def before_forward(self, pipeline: Any, x: Any, y: Any) -> None:
        """Check the batch of an evaluation."""
        trains = y is not None and pipeline.training and torch.is_grad_enabled()
        problem = "the loss of a call has no gradients: to train, call step(x, y); to "
        problem += "evaluate, call eval() first, or use torch.no_grad()"
        self._agree("forward", pipeline, x, y, problem if trains else None)

    def _agree(
        self, name: str, pipeline: Any, x: Any, y: Any, problem: str | None
    ) -> None:
        m = pipeline.schedule.num_microbatches
        problem = problem or pipeline.find_unplaced() or self._batch_problem(x, y, m)
        call = {"the call": name, "training": str(pipeline.training)}
        call |= {"x": describe(x), "y": describe(y)}
        same = self._all_have(f"{call} {problem}")
        if problem or not same:
            agreed(partial(refuse, problem), self.group, error=CollectiveError, **call)
        if self.check_more is not None:
            self.check_more(x, y)

    def _all_have(self, text: str) -> bool:
        """Return whether all ranks have this text, by one small collective."""
        digest = hashlib.sha256(text.encode()).digest()
        own = torch.tensor(list(digest), device=device_of(self.group))
        others = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(others, own, self.group)
        return all(torch.equal(own, other) for other in others)

    def _batch_problem(self, x: Any, y: Any, m: int) -> str | None:
        """Return why x and y cannot be used, or None."""
        if not isinstance(x, Tensor) or x.dim() == 0 or len(x) < m:
            return (
                f"x is {kind_of(x)}; it must be a tensor with a row or more for each "
                f"of the {m} microbatches"
            )
        if y is not None and (not isinstance(y, Tensor) or y.shape[:1] != x.shape[:1]):
            return f"y is {kind_of(y)}; it must be a tensor of {len(x)} rows, as x is"
        try:
            if self.check_tokens is not None:
                self.check_tokens("x", x)
            if self.takes_targets and y is not None:
                self.check_tokens("y", y)
        except (TypeError, ValueError) as error:
            return str(error)
        if self.takes_targets and y is not None and y.shape != x.shape:
            return f"y is {kind_of(y)}; it must be {list(x.shape)}, as x is"
        return None

    def _weight_problem(self, m: int, y: Any) -> str | None:
        """Return why microbatches cannot be weighted by their rows, or None."""
        if not isinstance(y, Tensor) or y.dtype != torch.int64 or len(y) < m:
            return None
        left_out = {
            (part == self.ignored).double().mean().item() for part in y.tensor_split(m)
        }
        if len(left_out) == 1:
            return None
        return (
            f"the loss leaves out targets of {self.ignored} (ignore_index), and the "
            "microbatches have different shares of them. As microbatches are weighted "
            "by their rows, the sum would not be the batch's mean. Use a loss that "
            "divides a sum by a fixed number, or num_microbatches 1"
        )


def refuse(problem: str | None) -> None:
    """Raise ValueError if there is a problem."""
    if problem:
        raise ValueError(problem)


def needs_whole_batch(module: nn.Module) -> str | None:
    """Return which layer needs the whole batch, and why, or None."""
    for name, layer in module.named_modules():
        if isinstance(layer, BATCH_NORM) and layer.training:
            return (
                f"{name} is a {type(layer).__name__} in training: its mean would "
                "be a microbatch's, not the batch's; use another norm, or call eval()"
            )
    return None


# ---- the loss ------------------------------------------------------------------------


class MeanLoss:
    """A loss function that is tested in its first calls: is it a mean over the rows?

    The loss of two sets of rows is compared with that of both together: rows and the
    same rows halved, which detects a sum or a square root; rows and those of the
    previous call, which detects weighted targets. Raises ValueError for another loss.
    """

    def __init__(self, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
        if isinstance(loss_fn, type) or not callable(loss_fn):
            raise ValueError(f"loss_fn is {loss_fn}; pass a function or nn.MSELoss()")
        self.loss_fn, self.tests = loss_fn, 8  # some targets come in later rows only
        self.before: tuple[Tensor, Tensor] | None = None

    @property
    def ignored(self) -> int:
        """The target that the loss leaves out, as `ignore_index` of cross-entropy."""
        options = getattr(self.loss_fn, "keywords", {})  # if it is a functools.partial
        default = getattr(self.loss_fn, "ignore_index", -100)
        return options.get("ignore_index", default)

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, a scalar."""
        loss = self.loss_fn(output, targets)
        usable = isinstance(loss, Tensor) and not loss.dim()
        if not usable or output.requires_grad and not loss.requires_grad:
            raise ValueError(f"loss_fn returned {loss}; return a scalar, not detached")
        if self.tests:
            self.tests -= 1
            with torch.no_grad():
                self._test(output.detach(), targets, loss.detach())
        return loss

    def _test(self, output: Tensor, targets: Tensor, loss: Tensor) -> None:
        others = [(output * 0.5, targets)]
        counted = not (targets == self.ignored).any()  # else `SameBatch` checks
        if counted and self.before and self.before[0].shape[1:] == output.shape[1:]:
            others.append(self.before)
        for other, y in others:
            whole = self.loss_fn(torch.cat([output, other]), torch.cat([targets, y]))
            self._compare(loss, len(output), self.loss_fn(other, y), len(other), whole)
        self.before = (output, targets) if counted and self.tests else None

    def _compare(self, a: Tensor, k: int, b: Tensor, n: int, whole: Tensor) -> None:
        mean = (k * a + n * b) / (k + n)
        tolerance = 1e-4 if whole.dtype in (torch.float32, torch.float64) else 1e-2
        if not torch.allclose(whole, mean, tolerance, equal_nan=True):
            raise ValueError(
                f"loss_fn returned {a} for {k} rows, {b} for {n} others, and {whole} "
                "for all; it must be a mean over the rows, so that microbatches add up"
            )
