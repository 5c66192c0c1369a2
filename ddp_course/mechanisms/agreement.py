"""Do all ranks mean the same? Compared once, at the boundary, before anything is sent.

    agreed          make a value on every rank; compare a form; all return or all raise
    form_of         what must be the same of a module
    problem_with    why a module cannot be replicated
    on_any_rank     flags: which are set on one rank at least
    shown_by_all    the same flags, rank by rank; and who went on after an error

`check_same`, `check_along` and `attempt` are older forms of `agreed`; they go with
their last caller.

Data parallelism rests on one promise: before every step all ranks have the same
parameters. It is made at construction. The form (names, shapes, types, what is
trained) is compared, since gradients of different shapes would be added to each other,
or hang; the numbers are sent by rank 0. Afterwards nobody is special: equal parameters
and equal gradients stay equal. Chapter 04.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.collectives import CollectiveError, communicator
from ddp_course.collectives.communicator import by_text

T = TypeVar("T")
SHOWN = 5  # of more differences only the number is told

Form = dict[str, str]  # what -> how it is on one rank; in order


class ReplicaError(ValueError):
    """The ranks' modules or arguments differ, or cannot be used; nothing was sent.

    Every rank of the group raises it, with the same text.
    """


def agreed(
    make: Callable[[], T], /, *groups: dist.ProcessGroup | None, **form: Any
) -> T:
    """Return `make()` if every rank could make its value and all have the same `form`.

    Every rank of the groups calls it; none of them raises alone. First a rank makes its
    value; then the ranks compare one digest of their `form`, along all `groups`, one
    after the other. Only if it differs, the forms themselves are sent, to be compared
    in words. Without a group (None is the group of all ranks) this is the only process.

    Args:
        make: makes this rank's value, or raises what is wrong on this rank.
        groups: the ranks; those along several axes of a mesh compare along each.
        form: what must be the same on all ranks: name -> anything with a stable text,
            such as the entries of `form_of(module)`.

    Raises ReplicaError, with the same text on every rank, if some rank's `make` has
    raised, or if the forms differ. Chapter 04.
    """
    problem, value = "", None
    try:
        value = make()
    except Exception as error:
        known = isinstance(error, (ValueError, TypeError, RuntimeError))
        problem = str(error) if known else f"{type(error).__name__}: {error}"
    own = {} if problem else {name: str(entry) for name, entry in form.items()}
    digest = hashlib.sha256(repr(own).encode()).hexdigest()
    rank = dist.get_rank() if groups else 0
    found = _along(groups, {rank: (problem, digest)})
    problems = [found[rank][0] for rank in found]
    text = problem
    if groups and any(problems):
        text = by_text(problems, list(found))
    elif len({digest for _, digest in found.values()}) > 1:
        forms = _along(groups, {rank: tuple(own.items())})
        text = differences([dict(pairs) for pairs in forms.values()], list(forms))
    if text:  # of an `agreed` inside of `make`, perhaps: then it is a whole sentence
        end = "" if text.endswith("Nothing was sent.") else ". Nothing was sent."
        raise ReplicaError(f"{text}{end}")
    return value


def _along(
    groups: Sequence[dist.ProcessGroup | None], own: dict[int, Any]
) -> dict[int, Any]:
    """Return what all ranks along the groups have, by rank."""
    known = own
    for group in groups:
        shown = communicator(group).exchange(tuple(known.items()))
        known = dict(sorted(pair for pairs in shown for pair in pairs))
    return known


def form_of(module: nn.Module, **options: Any) -> Form:
    """Return what must be the same on all ranks, in words: name -> description.

    Of a module that cannot be replicated only the options: `check_module` refuses it.
    """
    form = {f"argument {name}": repr(value) for name, value in options.items()}
    if problem_with(module):
        return form
    for name, p in module.named_parameters():
        strides = "" if p.is_contiguous() else f", strides {list(p.stride())}"
        form[name] = f"{_told(p)}, requires_grad={p.requires_grad}{strides}"
    return form | {f"buffer {name}": _told(b) for name, b in module.named_buffers()}


def _told(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)} on {tensor.device.type}"


def problem_with(module: Any) -> str | None:
    """Return why this module cannot be replicated, or None."""
    if not isinstance(module, nn.Module):
        return f"module is a {type(module).__name__}; it must be a torch.nn.Module"
    named = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in named:
        if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
            return f"{name} has no shape yet; run the module once before wrapping it"
        if tensor.is_meta:
            return f"{name} is on the meta device: it has no numbers to be replicated"
    if not any(p.requires_grad for p in module.parameters()):
        return "the module has no parameter that requires a gradient: nothing to do"
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
            return f"{name} has sparse gradients; only dense ones can be bucketed"
        if isinstance(layer, nn.SyncBatchNorm) and not layer.weight.is_cuda:
            return f"{name} is a SyncBatchNorm, which PyTorch has on GPUs only"
    return None


def check_module(module: Any) -> None:
    """Raise ValueError if this module cannot be replicated."""
    if problem := problem_with(module):
        raise ValueError(problem)


def check_same(
    form: Form, problem: str | None, group: dist.ProcessGroup | None
) -> None:
    """Compare the forms of all ranks; a collective call, which sends no tensor.

    Raises ReplicaError, with the same text on every rank, if a rank has a `problem` or
    if the forms differ.
    """
    comm = communicator(group)
    digest = hashlib.sha256(repr(form).encode()).hexdigest()
    problems, digests = zip(*comm.exchange((problem or "", digest)), strict=True)
    if any(problems):
        raise ReplicaError(f"{by_text(problems, comm.ranks)}. Nothing was sent.")
    if len(set(digests)) > 1:
        forms = [dict(pairs) for pairs in comm.exchange(tuple(form.items()))]
        raise ReplicaError(f"{differences(forms, comm.ranks)}. Nothing was sent.")


def check_along(
    groups: Sequence[dist.ProcessGroup],
    problem: str | None,
    error: type[Exception] | None = None,
) -> None:
    """Raise `error`, a ReplicaError unless told, on all ranks along several groups.

    If there is a problem on any of them; who hears of it from one group tells the next,
    so all raise the same text. Without groups this is the only process.
    """
    text = f"{problem}{'' if error else '. Nothing was sent.'}" if problem else ""
    if text and groups:
        text = f"rank {dist.get_rank()}: {text}"
    for group in groups:
        texts = communicator(group).exchange(text)
        text = min((text for text in texts if text), default="")
    if text:
        raise (error or ReplicaError)(text)


def differences(forms: Sequence[Form], ranks: Sequence[int]) -> str:
    """Say which entries differ between the ranks, and how. Pure."""
    names = list(dict.fromkeys(name for form in forms for name in form))
    found = []
    for name in names:
        told = [form.get(name, "missing") for form in forms]
        if len(set(told)) > 1:
            found.append(f"{name} is {by_text(told, ranks, text_first=True)}")
    if not found:
        order = [" ".join(form) for form in forms]
        return f"the parameters are in another order: {by_text(order, ranks)}"
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"the ranks differ. {'; '.join(found[:SHOWN])}{more}"


def attempt(
    work: Callable[[], Any], errors: Any = (ValueError, TypeError)
) -> tuple[str, Any]:
    """Do `work`; return why it failed, or "", and what it returned.

    A rank that failed must still talk, or the others would wait for it.
    """
    try:
        return "", work()
    except errors as error:
        return str(error), None


# ---- flags ---------------------------------------------------------------------------


def shown_by_all(
    flags: Sequence[bool],
    group: dist.ProcessGroup | None,
    failed: int = 0,
) -> list[str]:
    """Return what each rank of the group shows: a "1" or "0" for each of its flags.

    Call it on all ranks, equally often. The flags travel as notes do on which ranks
    agree before they send: in shared memory on one machine, within microseconds.

    `failed` is how many passes have ended in an error that the caller has caught. Who
    goes on after one alone is a step ahead of the others, and averages another batch:
    raises CollectiveError, on every rank, if these numbers differ.
    """
    own = "".join("01"[bool(flag)] for flag in flags)
    comm = communicator(group)
    shown, counts = zip(*comm.agree_now("flags", show=(own, failed)), strict=True)
    if len(set(counts)) > 1:
        told = by_text([*map(str, counts)], comm.ranks, text_first=True)
        raise CollectiveError(
            f"forwards and backwards that ended in an error: {told}. The gradients are "
            "of different steps: let all ranks skip a batch, or none"
        )
    return list(shown)


def on_any_rank(
    flags: Sequence[bool], group: dist.ProcessGroup | None, failed: int = 0
) -> list[bool]:
    """Return which flags are set on one rank at least, by what `shown_by_all` says."""
    notes = shown_by_all(flags, group, failed)
    return ["1" in column for column in zip(*notes, strict=True)]
