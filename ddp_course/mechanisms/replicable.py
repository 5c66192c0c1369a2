"""Which modules can be replicated, and what must be the same on all ranks.

`agreement` compares what `form_of` returns, before anything is sent. Chapter 04.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ddp_course.mechanisms.agreement import Form, kind_of, stepped_in_backward


def form_of(module: nn.Module, **options: Any) -> Form:
    """Return what must be the same on all ranks: name -> description.

    For a module that cannot be replicated (`check_module`), only the options.
    """
    form = {f"argument {name}": repr(value) for name, value in options.items()}
    if why_not_replicable(module):
        return form
    for name, p in module.named_parameters():
        strides = "" if p.is_contiguous() else f", strides {list(p.stride())}"
        where = f"on {p.device.type}, requires_grad={p.requires_grad}{strides}"
        form[name] = f"{kind_of(p)} {where}"
    for name, b in module.named_buffers():
        form[f"buffer {name}"] = f"{kind_of(b)} on {b.device.type}"
    return form


def why_not_replicable(module: Any) -> str | None:
    """Return why this module cannot be replicated, or None."""
    if not isinstance(module, nn.Module):
        return f"module is a {type(module).__name__}; it must be a torch.nn.Module"
    named = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in named:
        if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
            return f"{name} has no shape yet; run the module once before wrapping it"
        if tensor.is_meta:
            return f"{name} is on the meta device: it has no values to replicate"
        if is_expanded(tensor):
            return (
                f"{name} is expanded: several of its elements are one number in "
                "memory, which no message can fill. Give the module its .clone()"
            )
    for name, p in module.named_parameters():
        if problem := stepped_in_backward(name, p):
            return problem
    if not any(p.requires_grad for p in module.parameters()):
        return "the module has no parameter that requires a gradient; use it unwrapped"
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
            return f"{name} has sparse gradients; only dense ones can be bucketed"
        if isinstance(layer, nn.SyncBatchNorm):
            tensors = *layer.parameters(), *layer.buffers()  # weight may be None
            if not all(tensor.is_cuda for tensor in tensors):
                return f"{name} is a SyncBatchNorm, which PyTorch has on GPUs only"
    return None


def is_expanded(tensor: Tensor) -> bool:
    """Return whether elements of a tensor share memory, as after `expand`."""
    if tensor.layout != torch.strided or not tensor.numel():
        return False
    each = zip(tensor.shape, tensor.stride(), strict=True)
    return any(length > 1 and stride == 0 for length, stride in each)


def check_module(module: Any) -> None:
    """Raise ValueError if this module cannot be replicated."""
    if problem := why_not_replicable(module):
        raise ValueError(problem)
