"""The bytes that a rank keeps now, by kind: an exact ledger.

    resident(model, optimizer)

It counts *storages*: the memory behind tensors. A storage counts once, with all its
bytes, however many tensors are views of it; it lives as long as the last such tensor.
Nothing here measures the process (`RSS` is mostly PyTorch itself) or asks an allocator,
so the same model gives the same number everywhere.

Memory that several processes share (`collectives.shared_memory.empty`) is one mapping
with the parts of all ranks. In a mapping, only bytes count that are covered by a
labelled tensor, a parameter, a gradient or a state: these are this rank's part.

A count of storages does not see: the temporary memory of an operation, memory that an
allocator caches or loses to fragments, the buffers of gloo and NCCL, and memory outside
of tensors. `memory_log` follows the same ledger through a step. Explained in chapter
06.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ddp_course.ledger import KINDS, Ledger
from ddp_course.measure.storages import (
    Part,
    is_mapping,
    labels,
    plain_tensors,
    span_of,
    uncovered,
)


def resident(*modules_and_optimizers: Any) -> Ledger:
    """Return the bytes that these modules and optimizers keep now, by kind.

    It counts their parameters, gradients, optimizer states and buffers ("other"), and
    every living storage with a label. Memory of two kinds counts as the first of: its
    label, parameters, gradients, optimizer states, other. A tensor that an optimizer
    steps is a parameter if it belongs to one of the modules, or if no module is passed;
    any other, such as a master copy in full precision, counts as optimizer state.

    An optimizer is an object with `param_groups` and `state`. Raises TypeError for an
    argument that is neither that nor an `nn.Module`. Chapter 06.
    """
    counts = dict.fromkeys(KINDS, 0)
    for parts in census(modules_and_optimizers).values():
        for part in parts:
            counts[part.kind] += part.nbytes
    return Ledger(counts)


def census(watched: Iterable[Any]) -> dict[torch.UntypedStorage, list[Part]]:
    """Return {storage: its parts by kind}, each byte in one part at most.

    The result keeps the storages alive: discard it soon.
    """
    found: dict[torch.UntypedStorage, list[Part]] = {}
    for storage, parts in list(labels.items()):
        if not is_mapping(storage):  # it may have been resized
            parts = [Part(0, storage.nbytes(), parts[0].kind)]
        found[storage] = [*parts]
    for tensor, kind in tensors_of(watched):
        for local in plain_tensors(tensor):
            parts = found.setdefault(local.untyped_storage(), [])
            parts += [Part(a, b, kind) for a, b in uncovered(parts, *span_of(local))]
    return found


def tensors_of(watched: Iterable[Any]) -> list[tuple[Tensor, str]]:
    """Return the tensors of modules and optimizers with their kinds, by precedence."""
    watched = list(watched)
    modules = [one for one in watched if isinstance(one, nn.Module)]
    steppers = [one for one in watched if not isinstance(one, nn.Module)]
    for one in steppers:
        if not hasattr(one, "param_groups") or not hasattr(one, "state"):
            raise TypeError(
                f"an object of type {type(one).__name__} is neither a module nor an "
                "optimizer: pass the model itself, or the optimizer"
            )
    parameters = [p for module in modules for p in module.parameters()]
    stepped = [p for one in steppers for g in one.param_groups for p in g["params"]]
    own = {id(p) for p in parameters} if modules else {id(p) for p in stepped}
    everything = [*parameters, *stepped]
    grads = [p.grad for p in everything if p.grad is not None]
    leaves = (pytree.tree_leaves(dict(one.state)) for one in steppers)
    states = [leaf for each in leaves for leaf in each if isinstance(leaf, Tensor)]
    return [
        *((p, "parameters") for p in everything if id(p) in own),
        *((grad, "gradients") for grad in grads),
        *((state, "optimizer states") for state in states),
        *((p, "optimizer states") for p in stepped if id(p) not in own),
        *((buffer, "other") for module in modules for buffer in module.buffers()),
    ]
