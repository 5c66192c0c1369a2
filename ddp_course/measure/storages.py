"""Storages, the memory behind tensors, and labels on them.

A storage and its label live as long as the last tensor that uses the storage. Explained
in chapter 06.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ddp_course.ledger import check_kind
from ddp_course.measure.blocks import OpenBlocks


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with a storage that make up `tensor`.

    For a plain tensor, that is the tensor itself; for a DTensor, its local shard; for a
    sparse tensor, its indices and values. Meta tensors and other layouts yield none.
    """
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, Tensor):  # torch 2.13 lists a DTensor's mesh, too
                yield from plain_tensors(part)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout is torch.strided and not tensor.is_meta:
        storage = tensor.untyped_storage()
        if storage.device.type != "meta":  # a FakeTensor's own device is not "meta"
            yield tensor


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Return the range of bytes of its storage that a tensor keeps: (start, stop).

    That is the whole storage; in memory that processes share, only the bytes from the
    tensor's first element to its last.
    """
    storage = tensor.untyped_storage()
    if not is_mapping(storage):
        return 0, storage.nbytes()
    if not tensor.numel():
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((length - 1) * stride for length, stride in steps)
    first, item = tensor.storage_offset(), tensor.element_size()
    return first * item, min((first + last + 1) * item, storage.nbytes())


def is_mapping(storage: torch.UntypedStorage) -> bool:
    """Return whether several processes share the storage's memory."""
    return storage.device.type == "cpu" and storage.is_shared()


@dataclass(eq=False)
class Part:
    """The bytes [start, stop) of one storage, and their kind."""

    start: int
    stop: int
    kind: str

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.stop - self.start


def uncovered(parts: Iterable[Part], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the ranges of bytes in [start, stop) that `parts` do not cover."""
    left = [(start, stop)] if stop > start else []
    for part in parts:
        pieces = [
            piece
            for a, b in left
            for piece in ((a, min(b, part.start)), (max(a, part.stop), b))
        ]
        left = [(a, b) for a, b in pieces if a < b]
    return left


# Storage -> its parts. An entry is removed with the last tensor that uses the storage.
# The dictionary belongs to the process, as memory does.
labels: WeakKeyDictionary[torch.UntypedStorage, list[Part]] = WeakKeyDictionary()
open_logs: OpenBlocks[Any] = OpenBlocks()  # the memory logs, which record new labels


def label(tensor: Tensor, kind: str) -> Tensor:
    """Count the storage of `tensor` as `kind` from now on, and return `tensor`.

    For facts that only a strategy knows: that a tensor is a gathered block, or waits to
    be sent. A label overrides the kind that a ledger would choose, and a later label
    overrides an earlier one; a label is removed with the storage. Raises ValueError for
    an unknown kind. Chapter 06.
    """
    check_kind(kind)
    for part in plain_tensors(tensor):
        storage = part.untyped_storage()
        start, stop = span_of(part)
        earlier = labels.get(storage, []) if is_mapping(storage) else []
        kept = [
            Part(a, b, old.kind)
            for old in earlier
            for a, b in uncovered([Part(start, stop, kind)], old.start, old.stop)
        ]
        labels[storage] = [*kept, Part(start, stop, kind)]
        for log in open_logs.blocks:
            log.record_label(part, kind)
    return tensor
