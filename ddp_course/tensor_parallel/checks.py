"""Checks of `tensor_parallel`: the model, each batch, and passes that fail.

    check_model   raise unless all ranks have the same model, and can cut it
    SameTokens    a part: raise unless all ranks have the same tokens in a forward
    FailedPasses  a part: report a pass that failed here, in which others still wait

Chapter 09.
"""

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from ddp_course.collectives.meeting import Meeting, meeting
from ddp_course.launch.deadlock import CollectiveError, by_text
from ddp_course.mechanisms.agreement import agreed, describe, digest, kind_of
from ddp_course.mechanisms.frozen import check_first_order
from ddp_course.mechanisms.replicable import form_of, why_not_replicable
from ddp_course.model import GPT, check_tokens

SHARED = ("n_head", "vocab_size")  # must be multiples of the number of ranks
# With sequence_parallel, the gradients of these layers' parameters are summed
SUMMED = (nn.Linear, nn.Embedding, nn.LayerNorm)


def check_model(
    model: Any,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    all_reduce: Any,
) -> None:
    """Raise ReplicaError, on every rank, unless the ranks of `group` can share `model`.

    They must have the same model, in every number, and the same options
    (`tensor_parallel`).
    """
    problem, form = _problem_with(model, meeting(group).size, sequence_parallel), {}
    if all_reduce is not None and not callable(all_reduce):
        problem = f"all_reduce is {all_reduce!r}; it must be a function or None"
    if not problem:
        form = form_of(
            model,
            config=model.config,
            sequence_parallel=bool(sequence_parallel),
            all_reduce=getattr(all_reduce, "__module__", None),
        )
        form |= {f"numbers of {n}": digest(p) for n, p in model.named_parameters()}

    def check() -> None:
        if problem:
            raise ValueError(problem)

    agreed(check, group, **form)


def _problem_with(model: Any, size: int, sequence_parallel: bool) -> str | None:
    if not isinstance(model, GPT):
        return f"model is a {type(model).__name__}; it must be a plain GPT"
    if wrong := why_not_replicable(model) or model.config.indivisible(SHARED, size):
        return wrong
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        on = ", ".join(sorted(devices))
        return f"the model is on {on}; it must be on one device"
    for name, p in model.named_parameters():
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            return (
                f"{name} has a hook, which this rank's part of it would not have: "
                "register hooks on parameters() of what tensor_parallel returns"
            )
    for name, layer in model.named_modules() if sequence_parallel else ():
        trained = any(p.requires_grad for p in layer.parameters(recurse=False))
        if trained and not isinstance(layer, SUMMED):
            return (
                f"{name} is a {type(layer).__name__}; with sequence_parallel each rank "
                "would train it with its own tokens alone: leave sequence_parallel out"
            )
    return None


class SameTokens:
    """A part that raises CollectiveError, on every rank, unless tokens are equal.

    In data parallelism a `DistributedSampler` gives every rank tokens of its own. With
    such tokens here, every sum over the ranks would mix different sentences: no shape
    is wrong, and the loss even falls.
    """

    def __init__(self, group_meeting: Meeting) -> None:
        self.meeting = group_meeting

    def before_forward(
        self, ends: Any, idx: Tensor, targets: Tensor | None, problem: str | None
    ) -> None:
        """Compare the digests of the ranks' tokens; raise a rank's `problem` on all."""
        tokens = {"idx": idx} if targets is None else {"idx": idx, "targets": targets}
        size = self.meeting.size
        try:
            for name, tensor in tokens.items():
                check_tokens(name, tensor, ends.config)
            shape, last = tuple(idx.shape), tuple([*tokens.values()][-1].shape)
            if last != shape:
                problem = f"targets has shape {last}; the logits are for {shape}"
            elif ends.sequence_parallel and shape[1] % size:
                problem = (
                    f"T is {shape[1]}, which {size} ranks cannot share equally; with "
                    f"sequence_parallel it must be a multiple of {size}"
                )
        except (ValueError, TypeError, AttributeError) as error:
            problem = str(error)
        words = ", ".join(f"{name} {kind_of(t)}" for name, t in tokens.items())
        shown = [describe(t) for t in tokens.values()]
        of_ranks = self.meeting.agree_now(f"forward({words})", problem, shown)
        for name, texts in zip(tokens, zip(*of_ranks, strict=True), strict=True):
            if len(set(texts)) > 1:
                raise CollectiveError(
                    f"{name} differs between the ranks. "
                    f"{by_text(texts, self.meeting.ranks)}. The ranks of a "
                    "tensor-parallel group need the same batch. Nothing was sent."
                )


class FailedPasses:
    """A part that reports a failed pass to other ranks, which may still wait in it."""

    def __init__(self, group_meeting: Meeting) -> None:
        self.watch = group_meeting.watch

    def forward_failed(self, model: Any, error: Exception) -> None:
        """Record the error for the report to the other ranks."""
        self.watch.failed = f"a forward failed here ({type(error).__name__}: {error})"

    def after_forward(self, model: Any, logits: Tensor) -> None:
        """Register hooks that record when backward begins and ends on this rank."""
        if logits.requires_grad:
            logits.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: Tensor) -> None:
        check_first_order()
        self.watch.failed = "a backward has not ended here"
        end = partial(setattr, self.watch, "failed", "")
        Variable._execution_engine.queue_callback(end)
