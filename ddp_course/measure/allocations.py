"""Report operations, resizes, gradients and optimizer steps to a memory log.

Explained in chapter 06.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_course.measure.memory import tensors_of
from ddp_course.measure.storages import open_logs, plain_tensors


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the plain tensors in the arguments or results of an operation."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield from plain_tensors(leaf)


class Operations(TorchDispatchMode):
    """A mode that reports every operation of its thread to a memory log."""

    def __init__(self, log: Any) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # A DTensor or another wrapper calls this again with its inner tensors.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        # torch.tensor passes its new tensor through this operation.
        is_new = func is torch.ops.aten.lift_fresh.default
        self.log.record_operation(str(func), () if is_new else (args, kwargs), result)
        return result


_lock = threading.Lock()
_watchers = 0


@contextmanager
def report_resizes() -> Iterator[None]:
    """Report every `UntypedStorage.resize_` in this block to all open logs.

    A dispatch mode does not see this call.
    """
    global _watchers
    with _lock:
        _watchers += 1
        if _watchers == 1:
            torch.UntypedStorage.resize_ = _resize_and_report
    try:
        yield
    finally:
        with _lock:
            _watchers -= 1
            if not _watchers:
                del torch.UntypedStorage.resize_  # the base class has the original


def _resize_and_report(storage: torch.UntypedStorage, nbytes: int) -> Any:
    result = torch._C.StorageBase.resize_(storage, nbytes)
    for log in open_logs.blocks:
        log.record_resize(storage)
    return result


@contextmanager
def report_to(log: Any, watched: Iterable[Any]) -> Iterator[None]:
    """Report forwards, gradients and optimizer steps in this block to a log."""

    def record_watched(*_: Any) -> None:
        log.record_watched()

    watched = list(watched)
    handles = [
        register_optimizer_step_pre_hook(record_watched),
        register_optimizer_step_post_hook(record_watched),
    ]
    for module in (one for one in watched if isinstance(one, nn.Module)):
        begins, ends = (lambda *_, b=b: log.record_forward(b) for b in (True, False))
        handles.append(module.register_forward_pre_hook(begins))
        handles.append(module.register_forward_hook(ends, always_call=True))
    for tensor in {id(t): t for t, _ in tensors_of(watched)}.values():
        if tensor.requires_grad and tensor.is_leaf:
            handles.append(
                tensor.register_post_accumulate_grad_hook(log.record_gradient)
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
