"""Whether a GPT can be cut, and all ranks have asked for the same. Chapter 09."""

from typing import Any

import torch.distributed as dist

from ddp_course.collectives import communicator
from ddp_course.mechanisms.agreement import check_same, form_of, problem_with
from ddp_course.mechanisms.memory_exchange import memory_problem
from ddp_course.mechanisms.tensor_words import digest
from ddp_course.mechanisms.whole_state import WholeState
from ddp_course.model import GPT, GPTConfig


def check_model(
    model: Any,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    all_reduce: Any,
    in_shared_memory: bool,
) -> None:
    """Raise ReplicaError, on every rank, unless the ranks of `group` can share `model`.

    They must have the same model, in every number, and the same options
    (`tensor_parallel`).
    """
    problem, form = _problem_with(model, group, all_reduce, in_shared_memory), {}
    if not problem:
        form = form_of(
            model,
            config=model.config,
            sequence_parallel=bool(sequence_parallel),
            all_reduce=getattr(all_reduce, "__module__", None),
            in_shared_memory=bool(in_shared_memory),
        )
        form |= {f"numbers of {n}": digest(p) for n, p in model.named_parameters()}
    check_same(form, problem, group)


def _problem_with(
    model: Any, group: dist.ProcessGroup | None, all_reduce: Any, in_shared_memory: bool
) -> str | None:
    if not isinstance(model, GPT) or isinstance(model, WholeState):  # a part already
        return f"model is a {type(model).__name__}; it must be a plain GPT"
    size = communicator(group).size
    if wrong := problem_with(model) or indivisible(model.config, size):
        return wrong
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        on = ", ".join(sorted(devices))
        return f"the model is on {on}; it must be on one device"
    if in_shared_memory and all_reduce is not None:
        return "all_reduce and in_shared_memory are both given; it can be one of them"
    return memory_problem(group, devices) if in_shared_memory else None


def indivisible(config: GPTConfig, tp_size: int) -> str | None:
    """Return why so many ranks cannot share a GPT of these sizes, or None."""
    sizes = {
        "n_head": config.n_head,
        "vocab_size": config.vocab_size,
        "4 * d_model": 4 * config.d_model,
    }
    each = range(1, config.n_head + 1)
    fits = [n for n in each if not any(size % n for size in sizes.values())]
    for name, size in sizes.items():
        if size % tp_size:
            return (
                f"{name} is {size}, which {tp_size} ranks cannot share equally; this "
                f"model can be cut for {', '.join(map(str, fits))} ranks"
            )
    return None
