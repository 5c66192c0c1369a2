"""Autocast: every operation computes in the type that a table says.

    LOWER     products of matrices, in 16 bits: they take most of the time, and their
              kernels add up in float32
    FULL      sums of many numbers, and exponentials, in float32
    others    in the type of their inputs; if types are mixed, in the widest, as
              everywhere in PyTorch

The table lists operations, not layers or ranks, and is the same in every step. Autocast
casts an operation's inputs: parameters stay in float32, and so do their gradients,
since autograd differentiates the cast like any other operation. The table for GPUs is
longer, since some kernels there do not use float32 inside as the CPU's do.

This class is a TorchFunctionMode, which intercepts the functions that a program calls.
PyTorch's own autocast works one level below, in the dispatcher:
aten/src/ATen/autocast_mode.h. Chapter 12.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

LOWER = frozenset(
    (
        *("linear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm"),
        *("conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("einsum", "inner", "tensordot", "linalg_multi_dot", "conv_tbc"),
        *("lstm", "rnn_tanh", "rnn_relu", "multi_head_attention_forward"),
    )
)
FULL = frozenset(
    (
        *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss"),
        *("huber_loss", "kl_div", "binary_cross_entropy", "cosine_embedding_loss"),
        *("binary_cross_entropy_with_logits", "prod"),
    )
)
FULL_ON_GPUS = FULL | {
    *("softmax", "log_softmax", "layer_norm", "group_norm", "exp", "log", "pow"),
    *("sum", "cumsum", "norm", "cosine_similarity", "softplus"),
}

_active = threading.local()  # each thread has its own stack of modes


class Autocast(TorchFunctionMode):
    """A context manager in which operations compute in the types of the table.

        with Autocast(torch.bfloat16):
            _, loss = model(x, y)
        loss.backward()  # outside: backward computes in the types of forward

    Args:
        dtype: torch.bfloat16 or torch.float16, for the operations in LOWER.
        enabled: False for an inner block in which nothing is cast.

    A parameter is cast once, however often it is used, and the result is cached until
    the end of the block; so do not change parameters in the block. Raises ValueError
    for another type. Does what torch.autocast does with the functions of the table;
    PyTorch's tables are longer. torch.utils.checkpoint raises in the block, because it
    would recompute outside of the block. `mechanisms.recompute` works.
    """

    def __init__(
        self, dtype: torch.dtype = torch.bfloat16, enabled: bool = True
    ) -> None:
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"dtype is {dtype!r}; it can be torch.bfloat16 or torch.float16"
            )
        super().__init__()
        self.dtype, self.enabled = dtype, enabled
        self.casts: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __enter__(self) -> Autocast:
        """Start to cast, in this thread."""
        _watch_checkpoint()
        _active.modes = [*getattr(_active, "modes", ()), self]
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        """Stop casting, and drop the cached casts of parameters."""
        super().__exit__(*error)
        _active.modes = _active.modes[:-1]
        self.casts.clear()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of PyTorch, with its arguments cast as the table says."""
        kwargs = kwargs or {}
        wanted = self._type_for(function, args, kwargs)
        # In nested blocks, only the innermost one casts.
        decides = self.enabled and _active.modes[-1] is self
        if wanted and decides and kwargs.get("out") is None:
            args = self._cast(args, wanted)
            kwargs = {name: self._cast(v, wanted) for name, v in kwargs.items()}
        return function(*args, **kwargs)

    def _type_for(self, function: Any, args: Any, kwargs: Any) -> torch.dtype | None:
        """Return the type of the function's inputs; None if they are not cast."""
        name = getattr(function, "__name__", "").strip("_")
        if name in LOWER or name == "rmatmul":
            return self.dtype
        inputs = (*args, *kwargs.values()) if name in FULL_ON_GPUS else ()
        on_gpu = any(getattr(value, "is_cuda", False) for value in inputs)
        return torch.float32 if on_gpu or name in FULL else None

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Cast a tensor, or all tensors in a list; return other values unchanged."""
        if isinstance(value, (list, tuple)):
            return [self._cast(each, dtype) for each in value]
        if not _can_be_cast(value) or value.dtype is dtype:
            return value
        if not (value.is_leaf and value.requires_grad and torch.is_grad_enabled()):
            return value.to(dtype)
        key = id(value), dtype
        if key not in self.casts:
            self.casts[key] = value, value.to(dtype)
        return self.casts[key][1]


@functools.cache
def _watch_checkpoint() -> None:
    """Patch torch.utils.checkpoint so that it raises RuntimeError in a block."""
    name = "_get_autocast_kwargs"  # reads torch.autocast's state for checkpoint
    inner = getattr(checkpoint, name, None)

    def checked(*args: Any, **kwargs: Any) -> Any:
        modes = getattr(_active, "modes", ())
        if modes and modes[-1].enabled:
            raise RuntimeError(
                "torch.utils.checkpoint knows only torch.autocast: it would recompute "
                "without this Autocast. Use torch.autocast, or recompute_blocks of "
                "ddp_course.mechanisms.recompute"
            )
        return inner(*args, **kwargs)

    if inner is not None:  # other versions of PyTorch may not have it
        setattr(checkpoint, name, checked)


def _can_be_cast(value: Any) -> bool:
    """Return whether a value is a floating-point tensor, and not of float64."""
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return floating and value.dtype is not torch.float64
