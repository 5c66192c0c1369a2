"""A check of context parallelism: the ranks of a sequence must have the same tokens."""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives.meeting import meeting
from ddp_course.launch.deadlock import CollectiveError, by_text
from ddp_course.mechanisms.agreement import describe


class SameSequence:
    """A check that raises CollectiveError on every rank if the ranks' tokens differ.

    In data parallelism every rank has rows of its own. Ranks that share sequences must
    have the same rows: otherwise they would attend to each other's sequences, without
    any error. On a GPU the comparison copies the tokens to the host, which waits.

    Args:
        group: the ranks that share sequences; None means all.
        length: returns the T that the tokens must have, or None for any.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        length: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.meeting, self.length = meeting(group), length

    def __call__(self, tokens: Tensor) -> None:
        """Compare type, shape and numbers of (B, T) tokens before anything is sent."""
        length, problem = self.length(), None
        if length not in (None, tokens.shape[1]):
            shape = tuple(tokens.shape)
            problem = f"targets has shape {shape}; the logits are for T = {length}"
        texts = self.meeting.agree_now("forward", problem, describe(tokens))
        if len(set(texts)) > 1:
            raise CollectiveError(
                "the tokens differ between the ranks. "
                f"{by_text(texts, self.meeting.ranks)}. The ranks of a "
                "context-parallel group need the same batch. Nothing was sent."
            )
