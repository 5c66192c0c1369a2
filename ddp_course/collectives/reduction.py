"""The reduce operations, and the types that they accept."""

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

ReduceOp = dist.ReduceOp
Op = dist.ReduceOp.RedOpType

# op -> function(a, b, out=a), which combines two tensors of one shape. For bool, torch
# defines a sum as "or" and a product as "and", as gloo and NCCL do.
COMBINE: dict[Op, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,  # `finish` divides
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.PRODUCT: torch.mul,
}
NAMES = {op: f"op {str(op).rpartition('.')[2]}" for op in COMBINE}  # "op SUM"


@lru_cache(typed=True)
def check_op(op: Op, dtype: torch.dtype, device: str = "cpu") -> str | None:
    """Return why tensors of `dtype` on `device` cannot be reduced by `op`, or None."""
    if op not in COMBINE or isinstance(op, int):  # 0 equals ReduceOp.SUM
        allowed = ", ".join(name.replace("op ", "ReduceOp.") for name in NAMES.values())
        return f"op is {op!r}; it can be {allowed}"
    if op == ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex):
        return f"op is AVG, but {dtype} cannot represent a mean; use SUM and divide"
    if dtype.is_complex and op in (ReduceOp.MAX, ReduceOp.MIN):
        return f"op is {op!r}, but complex numbers have no order"
    try:
        one = torch.empty(1, dtype=dtype, device=device)
        COMBINE[op](one, one, out=one)
    except RuntimeError:  # such as uint16 and float8
        return f"op is {op!r}, which PyTorch cannot compute for {dtype} on {device}"
    return None


def finish(tensor: Tensor, op: Op, world_size: int) -> None:
    """Divide a complete sum by `world_size`, in place, if `op` is AVG."""
    if op == ReduceOp.AVG and tensor.numel():
        tensor.div_(world_size)
