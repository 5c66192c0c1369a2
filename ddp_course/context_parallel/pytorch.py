"""PyTorch's own ring attention, run on the CPU: a reference for tests and benches.

`torch.distributed.tensor.experimental.context_parallel` has no rule for the attention
kernel of the CPU, and raises NotImplementedError for causal attention. It is built on a
private ring that accepts any kernel, which PyTorch's users cannot call on a CPU; here
that ring runs the CPU's kernel. Tried with PyTorch 2.13. Chapter 16.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.experimental._context_parallel._attention as private
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor.experimental._attention import set_rotate_method

kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class PyTorchRing(Function):
    """Causal attention by PyTorch's ring; each rank has its zigzag positions."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        """Run PyTorch's forward template; all of q, k, v are (B, H, T/N, D)."""
        out, lse = private._templated_ring_attention(
            group, 2, kernel, q, k, v, is_causal=True
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Run PyTorch's backward template."""
        gradients = private._templated_ring_attention_backward(
            *(ctx.group, 2, kernel_backward, dout, "grad_out", *ctx.saved_tensors),
            is_causal=True,
            dropout_p=0.0,
        )
        return *gradients[:3], None


def pytorch_ring(q: Tensor, k: Tensor, v: Tensor, rotate: str = "alltoall") -> Tensor:
    """Return causal attention for this rank's zigzag positions, among all ranks.

    `rotate` is PyTorch's `set_rotate_method`: "alltoall" passes keys and values on,
    "allgather", its default, gathers all of them at once.
    """
    set_rotate_method(rotate)
    return PyTorchRing.apply(q, k, v, dist.group.WORLD)
