"""Guards: parts that raise where a sharded optimizer would silently compute nonsense.

At construction the ranks check and compare their arguments (`agreed_groups`): with
different parameters, the reduce-scatter would add unrelated gradients, or hang. Later
these parts raise RuntimeError, with advice, if

    Alone            another engine of this course averages the same gradients
    AveragedOnce     stage 1: PyTorch's DDP, or the training loop, averages them, too
    DenseGradients   a gradient is sparse
    Unmoved          a parameter is no view of its row any more, or was unfrozen

Chapter 07.
"""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ddp_course.collectives.meeting import quick_exchange
from ddp_course.mechanisms.agreement import agreed, digest, kind_of, stepped_in_backward
from ddp_course.mechanisms.buckets import LiveBucket, Slot, bucket_plan
from ddp_course.mechanisms.elementwise import check_elementwise
from ddp_course.mechanisms.engine import Engine
from ddp_course.mechanisms.hooks import listeners
from ddp_course.zero.shards import copy_options, names_of

Groups = list[dict[str, Any]]  # parameter groups, as PyTorch keeps them

ADVICE = (
    "If DistributedDataParallel, or the training loop, averages the gradients, use "
    "NaiveZeroRedundancyOptimizer with gradients='averaged'; delete (del) an earlier "
    "optimizer of the same parameters before training."
)


class Alone:
    """A guard that refuses a second engine that averages the same gradients."""

    known = False  # whether the check was done: once is enough

    def pass_begins(self, engine: Engine) -> None:
        """Raise RuntimeError if another engine of this course averages, too."""
        for slot in () if self.known else engine.slots:
            if len(listeners(slot.parameter)) > 1:
                other = f"another wrapper or optimizer averages parameter {slot.name}"
                raise RuntimeError(f"{other}'s gradient, too. {ADVICE}")
        self.known = True


class AveragedOnce:
    """A guard that refuses gradients which are equal on all ranks in the first step.

    Users of PyTorch's ZeroRedundancyOptimizer wrap the model in
    DistributedDataParallel, too, or average by hand. Then all ranks have the same
    gradients before the first step. Stage 1 alone leaves different ones: each rank has
    the mean in its own shard only.
    """

    known = False  # whether a step with finite, nonzero gradients was checked

    def gradients_complete(self, optimizer: Any) -> None:
        """Raise RuntimeError, on all ranks, if all of them have the same gradients."""
        if self.known or optimizer.world_size == 1:
            return
        grads = [slot.parameter.grad for slot in optimizer.engine.slots]
        grads = [grad for grad in grads if grad is not None]  # copied one by one
        finite = all(bool(grad.isfinite().all()) for grad in grads)
        decides = finite and any(bool(grad.any()) for grad in grads)
        digests = " ".join(map(digest, grads))
        note = f"{decides:d}{hashlib.sha256(digests.encode()).hexdigest()[:16]}"
        notes = quick_exchange(optimizer.process_group)(note)
        self.known = all(note[0] == "1" for note in notes)
        if self.known and len(set(notes)) == 1:
            raise RuntimeError(
                "all ranks have the same gradients, so they were averaged before this "
                f"optimizer could do it. {ADVICE}"
            )


class DenseGradients:
    """A guard that refuses sparse gradients."""

    def gradient_ready(self, bucket: LiveBucket, slot: Slot) -> None:
        """Raise RuntimeError for a gradient that cannot be cut into shards."""
        gradient = slot.parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of parameter {slot.name} is {gradient.layout}; only "
                "dense gradients can be cut into shards (Embedding: sparse=False)"
            )


class Unmoved:
    """A guard that refuses trained parameters which are not views of the rows."""

    def gradients_complete(self, optimizer: Any) -> None:
        """Raise RuntimeError if a parameter with a gradient is no view of its row."""
        places = {
            slot.parameter: optimizer.rows[bucket.index][slot.offset :].data_ptr()
            for bucket in optimizer.engine.buckets
            for slot in bucket.slots
        }
        for parameter, name in names_of(optimizer.param_groups).items():
            place = places.get(parameter)
            if place is None and parameter.grad is not None and parameter.numel():
                was = "was frozen at first, and has a gradient now"
            elif place is not None and place != parameter.data_ptr():
                was = "has been moved to another device or type"
            else:
                continue
            raise RuntimeError(f"parameter {name} {was}; construct the optimizer anew")


# ---- arguments ----------------------------------------------------------------------


def agreed_groups(
    params: Iterable[Any],
    optimizer_class: Callable[..., Optimizer],
    defaults: dict[str, Any],
    process_group: dist.ProcessGroup | None,
    bucket_cap_mb: float,
    **options: Any,
) -> Groups:
    """Return the parameter groups with all options, after comparing them on all ranks.

    A collective call, which sends no tensor. The arguments are those of
    `ZeroRedundancyOptimizer`; `options` are further ones that must be the same on all
    ranks. Raises ReplicaError, with the same text on every rank. Chapter 07.
    """

    def checked() -> Groups:
        bucket_plan((), bucket_cap_mb)  # raises if the cap is wrong
        if isinstance(params, torch.nn.Module):
            name = type(params).__name__
            raise ValueError(f"params is a {name}; pass model.parameters()")
        groups = Optimizer(params, {}).param_groups  # and if the parameters are
        check_parameters(groups)
        for group in groups:
            if group["params"]:
                device = group["params"][0].device
                own_options: Groups = [{}]
                copy_options([group], own_options)
                check_elementwise(optimizer_class, own_options[0], defaults, device)
        return fill_in_options(groups, optimizer_class, defaults)

    options = {"bucket_cap_mb": bucket_cap_mb, **options}
    form = {f"argument {name}": repr(value) for name, value in options.items()}
    groups = agreed(checked, process_group, **form)
    return agreed(lambda: groups, process_group, **form_of_groups(groups))


def fill_in_options(
    groups: Groups, optimizer_class: Callable[..., Optimizer], defaults: dict[str, Any]
) -> Groups:
    """Fill in default options of every group, from an optimizer without parameters."""
    stand_ins: Groups = [{"params": []} for _ in groups]
    copy_options(groups, stand_ins)
    empty_optimizer = optimizer_class(stand_ins, **defaults)
    copy_options(empty_optimizer.param_groups, groups)
    return groups


def form_of_groups(groups: Groups) -> dict[str, str]:
    """Return what must be the same on all ranks: parameters and their options."""
    form = {}
    for number, group in enumerate(groups):
        options: Groups = [{}]
        copy_options([group], options)
        form[f"group {number}"] = repr(options[0])
    for parameter, name in names_of(groups).items():
        trained = f"requires_grad={parameter.requires_grad}"
        form[name] = f"{kind_of(parameter)} on {parameter.device.type}, {trained}"
    return form


def check_parameters(groups: Groups) -> None:
    """Raise ValueError if these parameters cannot be moved into rows and cut."""
    names = names_of(groups)
    if not any(p.requires_grad and p.numel() for p in names):
        raise ValueError("no parameter requires a gradient; at least one must")
    end, before = 0, ""
    for parameter, name in sorted(names.items(), key=lambda item: item[0].data_ptr()):
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name} is on the meta device: initialize it first"
            )
        if problem := stepped_in_backward(f"parameter {name}", parameter):
            raise ValueError(problem)
        if parameter.layout is not torch.strided:
            raise ValueError(
                f"parameter {name} is {parameter.layout}; only dense ones can be cut"
            )
        if parameter.numel() and parameter.data_ptr() < end:
            raise ValueError(
                f"parameters {before} and {name} are two objects that share memory; to "
                "tie them, use one parameter twice"
            )
        if parameter.numel():
            end, before = parameter.data_ptr() + parameter.nbytes, name
