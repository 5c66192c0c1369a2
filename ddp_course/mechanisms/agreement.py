"""Compare the ranks' modules and arguments once, before anything is sent.

    agreed              compute a value on every rank and compare a form; all ranks
                        return, or all raise the same error
    kind_of, describe   a tensor as text, for comparison

`replicable.form_of` returns the form of a module.

Data parallelism rests on one promise: before every step all ranks have the same
parameters. The promise begins at construction. The ranks compare the form (names,
shapes, types, what is trained), since otherwise gradients of different shapes would be
added to each other, or the ranks would hang; rank 0 sends the numbers. Afterwards no
rank is special: equal parameters and equal gradients stay equal. Chapter 04.

The ranks compare through the job's store, not by a collective: another rank may be in
another collective, and the two would be mixed up; and a collective does not say which
rank is missing (`launch.deadlock`).
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.launch.deadlock import (
    DeadlockError,
    Watch,
    by_text,
    checked_group,
    default_store,
    exchange_by_store,
)

T = TypeVar("T")
SHOWN = 5  # the largest number of differences that an error lists

Form = dict[str, str]  # name -> description on one rank; their order is compared, too


class ReplicaError(ValueError):
    """The ranks' modules or arguments differ, or cannot be used; nothing was sent.

    Every rank of the group raises it, with the same text.
    """


def agreed(
    make: Callable[[], T],
    /,
    *groups: dist.ProcessGroup | None,
    error: type[Exception] = ReplicaError,
    **form: Any,
) -> T:
    """Return `make()` if it succeeds on every rank and all have the same `form`.

    Every rank of the groups calls it; no rank raises alone. Each rank calls `make`;
    then the ranks compare a digest of their `form`, along one group after the other.
    Only if the digests differ, the ranks exchange the forms themselves, to name the
    differences. Without a group (None is the group of all ranks), nothing is compared.

    Args:
        make: returns this rank's value, or raises this rank's error.
        groups: the groups of ranks that compare, such as one per axis of a mesh.
        error: the class of the error that all ranks raise.
        form: what must be the same on all ranks: name -> anything with a stable text,
            such as the entries of `form_of(module)`.

    Raises ReplicaError (or `error`), with the same text on every rank, if some rank's
    `make` has raised, or if the forms differ. Raises DeadlockError, which names the
    ranks, if some rank will never call `agreed`. Chapter 04.
    """
    problem, value = "", None
    try:
        value = make()
    except Exception as raised:
        known = isinstance(raised, (ValueError, TypeError, RuntimeError, OSError))
        problem = str(raised) if known else f"{type(raised).__name__}: {raised}"
    own = {} if problem else {name: str(entry) for name, entry in form.items()}
    digest = hashlib.sha256(repr(own).encode()).hexdigest()
    rank = dist.get_rank() if groups else 0
    try:
        found = _along(groups, {rank: (problem, digest)})
    except DeadlockError as lost:  # another rank waits in its own `make`
        raise (error(problem) if problem else lost) from None
    problems = [found[rank][0] for rank in found]
    text = problem
    if groups and any(problems):
        text = by_text(problems, list(found))
    elif len({digest for _, digest in found.values()}) > 1:
        forms = _along(groups, {rank: tuple(own.items())})
        text = differences([dict(pairs) for pairs in forms.values()], list(forms))
    if text:
        with suppress(RuntimeError):  # wait for all: the store ends with rank 0
            _along(groups, {rank: None})
        # An error of another `agreed` within `make` already has this sentence.
        whole = error is not ReplicaError or text.endswith("Nothing was sent.")
        raise error(text if whole else f"{text}. Nothing was sent.")
    return value


def _along(
    groups: Sequence[dist.ProcessGroup | None], own: dict[int, Any]
) -> dict[int, Any]:
    """Return the values of all ranks along the groups: {rank: value}."""
    known = own
    for group in groups:
        shown = _exchange(checked_group(group))(tuple(known.items()))
        known = dict(sorted(pair for pairs in shown for pair in pairs))
    return known


_exchanges: WeakKeyDictionary[dist.ProcessGroup, Callable] = WeakKeyDictionary()


def _exchange(group: dist.ProcessGroup) -> Callable[[Any], list]:
    """Return the function that all-gathers a value in a group; cached per group."""
    if group not in _exchanges:
        ranks = dist.get_process_group_ranks(group)
        watch = Watch(default_store(), ranks, dist.get_rank(), doing="agreed(...)")
        name = f"{group.group_name}/agreed"
        _exchanges[group] = exchange_by_store(name, watch)
    return _exchanges[group]


def differences(forms: Sequence[Form], ranks: Sequence[int]) -> str:
    """Return in words which entries differ between the ranks, and how."""
    names = list(dict.fromkeys(name for form in forms for name in form))
    found = []
    for name in names:
        entries = [form.get(name, "missing") for form in forms]
        if len(set(entries)) > 1:
            found.append(f"{name} is {by_text(entries, ranks, text_first=True)}")
    if not found:
        order = [" ".join(form) for form in forms]
        return f"the parameters are in another order: {by_text(order, ranks)}"
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"the ranks differ. {'; '.join(found[:SHOWN])}{more}"


# ---- tensors in words ---------------------------------------------------------------


def stepped_in_backward(name: str, parameter: Tensor) -> str | None:
    """Return an error text if an optimizer steps this parameter in backward."""
    return getattr(parameter, "_in_backward_optimizers", None) and (
        f"an optimizer steps {name} in backward, before its gradient is averaged: the "
        "replicas would diverge. Step after backward"
    )


def kind_of(value: Any) -> str:
    """Return type and shape of a tensor, "int64 [8, 64]"; else its type."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def describe(value: Any) -> str:
    """Return kind and digest: "int64 [8, 64] with digest 3f0c5be99a1d7c26".

    Ranks that share a model compare these texts of their batches, which must be equal.
    Different batches may have equal shapes, so the digest is needed. Chapters 09, 10.
    """
    if not isinstance(value, Tensor) or value.is_meta:
        return kind_of(value)
    return f"{kind_of(value)} with digest {digest(value)}"


def digest(tensor: Tensor) -> str:
    """Return 16 hexadecimal digits that differ, except by chance, if a number differs.

    A tensor on a GPU is copied to the host, which waits for the copy.
    """
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(flat.numpy(), digest_size=8).hexdigest()
