"""Find the forms (types and shapes) of the activations between stages.

Every stage receives one row and reports the form of its output. The runtime needs the
forms to allocate memory for messages. The same run detects layers that count or average
over their inputs in a buffer: microbatches would change the buffer differently than
the batch does. Chapter 10.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from ddp_course.launch.deadlock import CollectiveError
from ddp_course.mechanisms.agreement import agreed, kind_of
from ddp_course.pipeline.batch_checks import refuse
from ddp_course.pipeline.runtime import Form
from ddp_course.pipeline.stages import Stage


class PipelineError(RuntimeError):
    """An error of an action on this rank; `__cause__` is the layer's own error."""


class Forms:
    """The forms at all boundaries between stages, for each kind of batch so far.

    Args:
        stages: stage number -> stage, for this rank's stages.
        ranks: the rank of each stage, counted in the group.
        group: the ranks of the pipeline.
        several: whether a batch is cut into several microbatches.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        ranks: Sequence[int],
        group: dist.ProcessGroup,
        several: bool,
    ) -> None:
        self.stages, self.ranks = stages, ranks
        self.group, self.several = group, several
        self.known: dict[tuple, list[Form]] = {}

    @torch.no_grad()
    def of(self, x: Tensor, training: bool) -> list[Form]:
        """Return the forms for a batch like `x`; all ranks must call it.

        They are found once for training and once for evaluation, as only training may
        change a buffer.

        Raises PipelineError on the rank where a stage fails, and CollectiveError, on
        all ranks, for a layer whose buffers change in a training forward.
        """
        one = torch.empty(1, 1, device=x.device)
        dtype = (one @ one).dtype  # autocast's type, if it is on
        kind = x.dtype, x.shape[1:], dtype, training
        if kind not in self.known:
            self.known[kind] = self._find(x[:1])
        return self.known[kind]

    def _find(self, row: Tensor) -> list[Form]:
        """Pass a row of x through the first stage, rows of zeros through the others."""
        forms: list[Form] = []
        problem = None
        for stage, home in enumerate(self.ranks):
            form = [None]
            if stage in self.stages:
                form = [self._form(stage, row)]
                problem = problem or self._buffer_problem(self.stages[stage], row)
            if stage == len(self.ranks) - 1:
                break
            dist.broadcast_object_list(form, group=self.group, group_src=home)
            dtype, shape = form[0]
            forms.append(form[0])
            row = torch.zeros((1, *shape), dtype=dtype, device=row.device)
        agreed(partial(refuse, problem), self.group, error=CollectiveError)
        return forms

    def _form(self, stage: int, row: Tensor) -> Form:
        try:
            with evaluating(self.stages[stage]) as module:
                output = functional_call(module, copies_of_buffers(module), row)
            if not isinstance(output, Tensor):
                raise TypeError(
                    f"stage {stage} returned a {type(output).__name__}; each layer of "
                    "a pipeline must return one tensor"
                )
            if stage < len(self.ranks) - 1 and output.shape[:1] != row.shape[:1]:
                raise TypeError(
                    f"stage {stage} returned {list(output.shape)}; the first dimension "
                    "must be the rows of the batch, here 1"
                )
        except Exception as error:
            raise PipelineError(
                f"one row of x, {kind_of(row)}, was sent through the stages to find "
                f"the form of their outputs, and stage {stage} raised "
                f"{type(error).__name__}: {error}"
            ) from error
        return output.dtype, tuple(output.shape[1:])

    def _buffer_problem(self, module: Stage, row: Tensor) -> str | None:
        """Return a message if a training forward changes a buffer, else None."""
        if not self.several:
            return None
        copies = copies_of_buffers(module)
        gpus = [row.device] if row.is_cuda else []
        with torch.random.fork_rng(devices=gpus):
            try:
                functional_call(module, copies, row)
            except Exception:  # some layers cannot train on one row
                return None
        for name, copy in copies.items():
            if copy._version:  # written to, perhaps with the same values
                layer = module.get_submodule(name.rpartition(".")[0])
                return (
                    f"the buffer {name.rpartition('.')[2]} of a {type(layer).__name__} "
                    "changes in each forward: it would see microbatches, not the "
                    "batch; use num_microbatches 1 or another layer, or call eval()"
                )
        return None


def copies_of_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers, by name, which a forward may change."""
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


@contextmanager
def evaluating(module: nn.Module) -> Iterator[nn.Module]:
    """Set `module` to evaluation mode inside the block."""
    training = {one: one.training for one in module.modules()}
    try:
        yield module.eval()
    finally:
        for one, was in training.items():
            one.training = was
