"""Floating-point formats: the meaning of their bits, and rounding to any of them.

    sign | exponent E, e bits | fraction F, f bits        bias = 2^(e-1) - 1

    E > 0    a normal number        (-1)^sign * (1 + F / 2^f) * 2^(E - bias)
    E = 0    a subnormal number     (-1)^sign * (0 + F / 2^f) * 2^(1 - bias)
    E all 1  inf (F = 0) or nan; e4m3fn has normal numbers there, and nan if F is all 1

So numbers with the same exponent are equally spaced, and the spacing doubles with every
power of two. More exponent bits give a larger range, more fraction bits finer spacing.

IEEE 754-2019, section 3; for 8 bits Micikevicius et al. 2022, "FP8 Formats for Deep
Learning", table 1. torch.finfo has the same numbers for PyTorch's types. Chapter 12.
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
        has_inf: whether the largest exponent is reserved for inf and nan. If not, this
            exponent has normal numbers, too, and only its last code is nan.
        dtype: PyTorch's type with this format; None if there is none.
    """

    name: str
    exponent: int
    fraction: int
    has_inf: bool = True
    dtype: torch.dtype | None = None

    @property
    def bits(self) -> int:
        """The number of bits, the sign included."""
        return 1 + self.exponent + self.fraction

    @property
    def bias(self) -> int:
        """The bias, which is subtracted from the exponent E."""
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
        """Return the distance between the format's numbers near `x`; float64."""
        _, exponent = torch.frexp(x.double().abs().clamp(min=self.tiny))
        return self.eps * 2.0 ** (exponent - 1).double()

    def round(self, x: Tensor) -> Tensor:
        """Return the number of this format nearest to each element of `x`; float64.

        A tie is rounded to the number with a last bit of 0. A value half a step or more
        above the largest number becomes inf; in a format without inf, the largest
        number, as in PyTorch 2.13 (2.12 returns nan; hardware can do either).
        """
        step = self.spacing(x)
        rounded = torch.round(x.double() / step) * step  # ties to even
        beyond = torch.inf if self.has_inf else self.max
        return torch.where(
            rounded.abs() > self.max, x.double().sign() * beyond, rounded
        )


FORMATS = MappingProxyType(
    {
        f.name: f
        for f in (
            Format("fp32", 8, 23, dtype=torch.float32),
            Format("tf32", 8, 10),  # only for inputs of products on tensor cores
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
    if math.isnan(value):  # PyTorch's quiet nan
        code = highest + (full // 2 if format.has_inf else full - 1)
    elif math.isinf(value):
        code = highest
    else:  # codes are ordered like the numbers, with `full` codes per spacing
        step = float(format.spacing(torch.tensor(value, dtype=torch.float64)))
        spacings = math.log2(step / format.smallest)
        code = round(spacings) * full + round(abs(value) / step)
    exponent, fraction = divmod(code, full)
    return f"{sign} {exponent:0{format.exponent}b} {fraction:0{format.fraction}b}"
