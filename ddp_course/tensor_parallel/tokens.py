"""Ranks that share a model work on the same batch: have they been given the same?

In data parallelism every rank has tokens of its own, and a `DistributedSampler` sees to
it. Used here, it would make every sum over the ranks one of different sentences: no
shape is wrong, the loss even falls, and nobody notices. Chapter 09.
"""

from __future__ import annotations

from torch import Tensor

from ddp_course.collectives.communicator import Communicator
from ddp_course.mechanisms.agreement import described
from ddp_course.model import GPTConfig, check_tokens


def same_tokens(
    comm: Communicator,
    config: GPTConfig,
    idx: Tensor,
    targets: Tensor | None,
    cut_sequence: bool = False,
) -> None:
    """Return if all ranks of `comm` have the same tokens, and they fit; else raise.

    They are compared by shape and a digest of 8 bytes each. With `cut_sequence`, T must
    be a multiple of the number of ranks. Raises CollectiveError, on every rank, with
    the same text.
    """
    given = {"idx": idx} if targets is None else {"idx": idx, "targets": targets}
    problem = None
    try:
        for name, tokens in given.items():
            check_tokens(name, tokens, config)
        shape, of_last = idx.shape, list(given.values())[-1].shape
        if of_last != shape:
            problem = (
                f"targets has shape {tuple(of_last)}; the logits are for {tuple(shape)}"
            )
        elif cut_sequence and shape[1] % comm.size:
            problem = (
                f"T is {shape[1]}, which {comm.size} ranks cannot share equally; with "
                f"sequence_parallel it must be a multiple of {comm.size}"
            )
    except (ValueError, TypeError, AttributeError) as error:
        problem = str(error)
    words = f"forward({', '.join(f'{n} {described(t)}' for n, t in given.items())})"
    comm.agree_now(words, problem)
