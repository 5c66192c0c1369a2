"""What the bits of a floating-point number mean, and rounding to any such format.

    sign | exponent E, e bits | fraction F, f bits        bias = 2^(e-1) - 1

    E > 0    a normal number        (-1)^sign * (1 + F / 2^f) * 2^(E - bias)
    E = 0    a subnormal number     (-1)^sign * (0 + F / 2^f) * 2^(1 - bias)
    E all 1  inf (F = 0), or nan; in e4m3fn numbers as well, and only F all 1 is nan

So numbers with the same exponent are equally far apart, and the distance doubles with
every power of two: more exponent bits reach further, more fraction bits lie closer.

IEEE 754-2019, section 3; for 8 bits Micikevicius et al. 2022, "FP8 Formats for Deep
Learning", table 1. PyTorch's numbers for the same: torch.finfo. Chapter 12.
"""

import math
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A format of floating-point numbers: a sign, and `exponent` and `fraction` bits.

    Attributes:
        has_inf: whether the largest exponent is kept for inf and nan; if not, it has
            numbers, too, and the largest of them all is nan.
        dtype: PyTorch's type of this format; None if tensors cannot have it.
    """

    name: str
    exponent: int
    fraction: int
    has_inf: bool = True
    dtype: torch.dtype | None = None

    @property
    def bits(self) -> int:
        """How many there are, the sign included."""
        return 1 + self.exponent + self.fraction

    @property
    def bias(self) -> int:
        """What is subtracted from E."""
        return 2 ** (self.exponent - 1) - 1

    @property
    def max(self) -> float:
        """The largest finite number."""
        top = 2.0 ** (2**self.exponent - 1 - self.has_inf - self.bias)
        return top * (2 - (1 if self.has_inf else 2) * self.eps)

    @property
    def tiny(self) -> float:
        """The smallest normal number."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        """The smallest number above 0, which is subnormal."""
        return self.tiny * self.eps

    @property
    def eps(self) -> float:
        """The distance from 1 to the next number."""
        return 2.0**-self.fraction

    def spacing(self, x: Tensor) -> Tensor:
        """Return how far apart the numbers are where `x` lies; float64, any shape."""
        _, exponent = torch.frexp(x.double().abs().clamp(min=self.tiny))
        return self.eps * 2.0 ** (exponent - 1).double()

    def round(self, x: Tensor) -> Tensor:
        """Return the number of this format next to each of `x`; float64, any shape.

        Of two that are equally near, the one whose last bit is 0. What is half a step
        and more beyond the largest is inf; in a format without inf the largest, as in
        PyTorch 2.13 (2.12 makes it nan, and so does the hardware if asked).
        """
        step = self.spacing(x)
        rounded = torch.round(x.double() / step) * step  # to even
        beyond = torch.inf if self.has_inf else self.max
        return torch.where(
            rounded.abs() > self.max, x.double().sign() * beyond, rounded
        )


FORMATS = MappingProxyType(
    {
        f.name: f
        for f in (
            Format("fp32", 8, 23, dtype=torch.float32),
            Format("tf32", 8, 10),  # of inputs of matrix products on tensor cores only
            Format("bf16", 8, 7, dtype=torch.bfloat16),
            Format("fp16", 5, 10, dtype=torch.float16),
            Format("fp8 e4m3fn", 4, 3, has_inf=False, dtype=torch.float8_e4m3fn),
            Format("fp8 e5m2", 5, 2, dtype=torch.float8_e5m2),
        )
    }
)


def bits_of(x: float, format: Format) -> str:
    """Return the bits of `x`, rounded to the format, as "sign exponent fraction"."""
    value = float(format.round(torch.tensor(x, dtype=torch.float64)))
    sign = int(math.copysign(1, value) < 0)
    full = 2**format.fraction
    highest = (2**format.exponent - 1) * full
    if math.isnan(value):  # a quiet one, as PyTorch makes it
        code = highest + (full // 2 if format.has_inf else full - 1)
    elif math.isinf(value):
        code = highest
    else:  # codes are in the order of numbers, `full` of them for each spacing
        step = float(format.spacing(torch.tensor(value, dtype=torch.float64)))
        spacings = math.log2(step / format.smallest)
        code = round(spacings) * full + round(abs(value) / step)
    exponent, fraction = divmod(code, full)
    return f"{sign} {exponent:0{format.exponent}b} {fraction:0{format.fraction}b}"
