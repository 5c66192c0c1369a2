"""Compare values: an answer's with the solution's, and say how they differ.

Floating-point numbers may differ by rounding, unless they must be exact. A tuple may
stand for a list, and a number of NumPy for one of Python; but a tensor must have the
same shape and dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from ddp_course.lab.answers import one_line

# Added to one number, these do not survive rounding to a narrower type (for int64, not
# even to float64). For float32 the loss is larger than the tolerance below.
WIDE = {torch.float64: 1024 + 2**-20, torch.float32: 2048 + 2**-3, torch.int64: 2**59}
NARROW = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 4e-2,
    torch.float16: 4e-3,
}


def form_of(value: Any) -> str:
    """Return the form of a result in words: "a tensor of shape (2, 3), of float32"."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"a tensor of shape {tuple(value.shape)}, of {dtype}"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}: {one_line(value)}"
    if isinstance(value, Number):
        return f"{one_line(value)}, a Python {type(value).__name__}"
    return "nothing" if value is None else f"{one_line(value)}"


def fits(got: Any, wanted: Any) -> bool:
    """Return whether a result has the type, shape and dtype of `wanted`."""
    if isinstance(wanted, Tensor):
        alike = isinstance(got, Tensor) and got.shape == wanted.shape
        return alike and got.dtype == wanted.dtype
    if isinstance(wanted, (list, tuple)):
        alike = isinstance(got, (list, tuple)) and len(got) == len(wanted)
        return alike and all(map(fits, got, wanted))
    if isinstance(wanted, bool):
        return type(got).__name__ in ("bool", "bool_")
    if isinstance(wanted, Number):  # NumPy's numbers are right, too
        return isinstance(got, Number) and not isinstance(got, bool)
    return isinstance(got, type(wanted))


def equal_values(got: Any, wanted: Any, exact: bool = False) -> bool:
    """Return whether two values are equal; floating-point numbers may differ slightly.

    If `exact`, floating-point numbers must be equal, too. Lists and tuples with equal
    values are equal, as are numbers of Python and NumPy. Parameters must also have
    equal gradients, and be frozen or not alike.
    """
    if isinstance(wanted, Tensor):
        if not fits(got, wanted):
            return False
        if isinstance(wanted, nn.Parameter):
            same_grad = equal_values(got.grad, wanted.grad, exact)
            if not same_grad or got.requires_grad != wanted.requires_grad:
                return False
        near = TOLERANCE.get(wanted.dtype, 0)
        if exact or not near:
            nan = wanted != wanted
            return torch.equal(got != got, nan) and torch.equal(
                got.masked_fill(nan, 0), wanted.masked_fill(nan, 0)
            )
        a, b = got.detach().double(), wanted.detach().double()
        return torch.allclose(
            a, b, rtol=near, atol=_slack(b, wanted.dtype), equal_nan=True
        )
    if isinstance(wanted, (list, tuple)):
        alike = isinstance(got, (list, tuple)) and len(got) == len(wanted)
        pairs = zip(got, wanted, strict=True) if alike else ()
        return alike and all(equal_values(a, b, exact) for a, b in pairs)
    if isinstance(wanted, Mapping):
        alike = isinstance(got, Mapping) and got.keys() == wanted.keys()
        return alike and all(
            equal_values(got[key], wanted[key], exact) for key in wanted
        )
    if isinstance(wanted, float) and isinstance(got, Number) and not exact:
        both_nan = wanted != wanted and got != got
        return both_nan or math.isclose(got, wanted, rel_tol=1e-6, abs_tol=1e-12)
    if isinstance(wanted, float) and isinstance(got, Number):
        # 0.0 and -0.0 differ, nan equals nan, and an int is not a float.
        return not isinstance(got, int) and repr(float(got)) == repr(wanted)
    if wanted is None or got is None:
        return got is wanted
    return bool(got == wanted)


def _slack(wanted: Tensor, dtype: torch.dtype) -> float:
    """Return how far two sums may differ if they were added in different orders."""
    finite = wanted[wanted.isfinite()].abs()
    return TOLERANCE[dtype] * finite.amax().item() if finite.numel() else 0.0


def difference(got: Any, wanted: Any) -> str:
    """Return how two tensors of one form differ: by rounding, or at the first place.

    For small tensors the place is left out, since hints show their numbers. Returns ""
    if nothing helpful is known.
    """
    if not isinstance(wanted, Tensor) or not fits(got, wanted):
        return ""
    if torch.equal(got, wanted):  # two parameters may still differ in their gradients
        return ""
    if equal_values(got, wanted):
        return ""
    for dtype in NARROW if wanted.dtype in WIDE else ():
        if torch.equal(got, wanted.to(dtype).to(wanted.dtype)):
            name = str(dtype).removeprefix("torch.")
            return f": these are the numbers rounded to {name} on their way"
    if wanted.numel() <= 12:
        return ""
    same = (got == wanted) | (got != got) & (wanted != wanted)
    if near := TOLERANCE.get(wanted.dtype, 0):
        a, b = got.double(), wanted.double()
        same |= torch.isclose(a, b, near, _slack(b, wanted.dtype))
    where = tuple((~same).nonzero()[0].tolist())
    return f"; at {list(where)} it has {got[where].item()}, not {wanted[where].item()}"
