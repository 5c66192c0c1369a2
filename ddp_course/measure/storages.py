"""The memory that tensors look at: storages, what lies in them, and labels on them.

A storage lives as long as the last tensor that looks at it, and so does its label.
Explained in chapter 06.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ddp_course.measure.blocks import OpenBlocks

KINDS = (
    "parameters",
    "gradients",
    "optimizer states",
    "activations",
    "communication buffers",
    "other",
)


def check_kind(kind: str) -> None:
    """Raise ValueError unless `kind` is one of `KINDS`."""
    if kind not in KINDS:
        known = ", ".join(repr(known) for known in KINDS)
        raise ValueError(f"kind is {kind!r}; it can be {known}")


def plain(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with a storage of which `tensor` is made.

    That is the tensor itself; the local shard of a DTensor; indices and values of a
    sparse one. Meta tensors have no memory, nor are other layouts known to have any.
    """
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, Tensor):  # of a DTensor torch 2.13 names its mesh, too
                yield from plain(part)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout is torch.strided and not tensor.is_meta:
        storage = tensor.untyped_storage()
        if storage.device.type != "meta":  # a FakeTensor only says that it is not
            yield tensor


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of its storage for which a tensor stands, and the end.

    All bytes of the storage, for a tensor keeps all of them; of memory that processes
    share only those from its first element to its last.
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
    """Tell whether it is a mapping of memory that several processes can see."""
    return storage.device.type == "cpu" and storage.is_shared()


@dataclass(eq=False)
class Part:
    """Bytes `start` to `stop` of one storage, and what they hold."""

    start: int
    stop: int
    kind: str

    @property
    def nbytes(self) -> int:
        """How many bytes these are."""
        return self.stop - self.start


def uncovered(parts: Iterable[Part], start: int, stop: int) -> list[tuple[int, int]]:
    """Return what is left of the bytes `start` to `stop` without those of `parts`."""
    left = [(start, stop)] if stop > start else []
    for part in parts:
        pieces = [
            piece
            for a, b in left
            for piece in ((a, min(b, part.start)), (max(a, part.stop), b))
        ]
        left = [(a, b) for a, b in pieces if a < b]
    return left


# By storage, for as long as it lives: an entry goes with the last tensor that looks at
# it. It belongs to the process, as memory does.
labels: WeakKeyDictionary[torch.UntypedStorage, list[Part]] = WeakKeyDictionary()
open_logs: OpenBlocks[Any] = OpenBlocks()  # those that want to know of new labels


def label(tensor: Tensor, kind: str) -> Tensor:
    """Count the storage of `tensor` as `kind` from now on, and return `tensor`.

    For what only a strategy knows: that a tensor is a gathered block, or waits to be
    sent. A label wins over what a ledger would think of the storage, a later label over
    an earlier one, and it is gone with the storage. Raises ValueError for an unknown
    kind. Chapter 06.
    """
    check_kind(kind)
    for part in plain(tensor):
        storage = part.untyped_storage()
        start, stop = span_of(part)
        earlier = labels.get(storage, []) if is_mapping(storage) else []
        kept = [
            Part(a, b, old.kind)
            for old in earlier
            for a, b in uncovered([Part(start, stop, kind)], old.start, old.stop)
        ]
        labels[storage] = [*kept, Part(start, stop, kind)]
        for log in open_logs.now:
            log.labelled(part, kind)
    return tensor
