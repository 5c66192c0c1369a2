"""Autocast: every operation computes in the type that is good for it, by a table.

    LOWER     products of matrices: most of the time, and their sums are kept in float32
              inside; computed in 16 bits
    FULL      what adds up many numbers, or takes exponentials: computed in float32
    others    as they come, whatever that is; tensors that are joined take the widest
              type among them, as everywhere in PyTorch

The table is about operations, not about layers or ranks, and it is the same in every
step. What is cast is what an operation is given: parameters stay float32, and so do
their gradients, as the cast is an operation of autograd like any other. On GPUs the
table is longer, as what the CPU computes inside in float32 has no kernel there.

Here a TorchFunctionMode casts, which sees the functions that a program calls. PyTorch's
casts one floor below, in its dispatcher: aten/src/ATen/autocast_mode.h. Chapter 12.
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

_here = threading.local()  # a mode is a thread's own


class Autocast(TorchFunctionMode):
    """A block in which operations compute in the types of the table.

        with Autocast(torch.bfloat16):
            _, loss = model(x, y)
        loss.backward()  # outside: backward computes in the types of forward

    Args:
        dtype: torch.bfloat16 or torch.float16, for LOWER.
        enabled: False for a block, inside of another, in which nothing is cast.

    A parameter is cast once, however often it is used, and its casts are dropped at the
    end of the block, so do not change one inside. Raises ValueError for another type.
    As torch.autocast, but torch.utils.checkpoint is refused inside: it would compute
    again without the block. `mechanisms.recompute` does not.
    """

    def __init__(
        self, dtype: torch.dtype = torch.bfloat16, enabled: bool = True
    ) -> None:
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"dtype is {dtype}; it can be torch.bfloat16 or torch.float16"
            )
        super().__init__()
        self.dtype, self.enabled = dtype, enabled
        self.casts: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __enter__(self) -> Autocast:
        """Cast from now on, in this thread."""
        _watch_checkpoint()
        _here.modes = [*getattr(_here, "modes", ()), self]
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        """Cast no more, and drop the parameters' casts."""
        super().__exit__(*error)
        _here.modes = _here.modes[:-1]
        self.casts.clear()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Any function of PyTorch that is called in the block comes here."""
        kwargs = kwargs or {}
        wanted = self._type_for(function, args, kwargs)
        # Of blocks inside of each other, the innermost decides.
        decides = self.enabled and _here.modes[-1] is self
        if wanted and decides and kwargs.get("out") is None:
            args = self._cast(args, wanted)
            kwargs = {name: self._cast(v, wanted) for name, v in kwargs.items()}
        return function(*args, **kwargs)

    def _type_for(self, function: Any, args: Any, kwargs: Any) -> torch.dtype | None:
        """Look the function up; None if it takes things as they come."""
        name = getattr(function, "__name__", "").strip("_")
        if name in LOWER or name == "rmatmul":
            return self.dtype
        given = (*args, *kwargs.values()) if name in FULL_ON_GPUS else ()
        on_gpu = any(getattr(value, "is_cuda", False) for value in given)
        return torch.float32 if on_gpu or name in FULL else None

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Cast a tensor, or all tensors in a list; what is none stays as it is."""
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
    """Let torch.utils.checkpoint raise RuntimeError in a block."""
    name = "_get_autocast_kwargs"  # it asks so which types to compute with again
    inner = getattr(checkpoint, name, None)

    def checked(*args: Any, **kwargs: Any) -> Any:
        modes = getattr(_here, "modes", ())
        if modes and modes[-1].enabled:
            raise RuntimeError(
                "torch.utils.checkpoint knows torch.autocast alone: it would compute "
                "again without this Autocast. Use torch.autocast, or recompute_blocks "
                "of ddp_course.mechanisms.recompute"
            )
        return inner(*args, **kwargs)

    if inner is not None:  # another PyTorch may have another one
        setattr(checkpoint, name, checked)


def _can_be_cast(value: Any) -> bool:
    """Tell whether it is a tensor of floating point, but not one of float64."""
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return floating and value.dtype is not torch.float64
