"""Fit the alpha-beta line of a link to measured times.

    time = alpha + beta x bytes

An ordinary least-squares line would be wrong in two ways. It minimises absolute errors:
an error of 1 ms in the 30 ms of a message of 64 MiB outweighs all small messages, of
30 us each, so that alpha is arbitrary, and may be negative. And it minimises squares,
so that one interrupted measurement moves the line. So this module minimises *relative*
errors, and not their squares. Explained in chapter 02.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ddp_course.theory.checks import check_not_negative, check_positive

if TYPE_CHECKING:
    import numpy as np

    from ddp_course.launch import Link


@dataclass(frozen=True)
class Fit:
    """A fitted line: `alpha` in s, `beta` in s per byte, neither negative.

    `residual` is the median relative error of the line, over all measurements: 0.05
    means that half of the measured times differ from it by 5 % or less. Chapter 02.
    """

    alpha: float
    beta: float
    residual: float

    @property
    def link(self) -> Link:
        """The link with latency alpha and bandwidth 1/beta."""
        from ddp_course.launch import Link  # imports PyTorch

        return Link(self.alpha, 1 / self.beta if self.beta else math.inf)

    def seconds(self, nbytes: float) -> float:
        """Return the time in s of a message of `nbytes` bytes, on this line."""
        check_not_negative("nbytes", nbytes)
        return self.alpha + self.beta * nbytes


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Fit alpha and beta to messages of `sizes` bytes that took `seconds` s each.

    Measure every size several times: its median is used, since a few measurements are
    always too long. The line minimises the sum of |line - median| / median over the
    sizes (least absolute deviations, Boscovich 1757, of relative errors). A few sizes
    that are too slow throughout hardly move the line, unless all are at one end.

    Raises ValueError for unequal lengths, a negative size, a time that is not above 0,
    and fewer than two different sizes. Chapter 02.
    """
    import numpy as np  # here, so that the command line need not wait for it

    x, t = map(np.array, _medians(sizes, seconds))
    alpha, beta = _best_line(x, t)
    measured = np.asarray(seconds, dtype=float)
    line = alpha + beta * np.asarray(sizes, dtype=float)
    return Fit(alpha, beta, float(np.median(np.abs(line - measured) / measured)))


def _medians(
    sizes: Sequence[float], seconds: Sequence[float]
) -> tuple[list[float], list[float]]:
    if len(sizes) != len(seconds):
        raise ValueError(
            f"there are {len(sizes)} sizes and {len(seconds)} times; pass one time for "
            "each size"
        )
    times: dict[float, list[float]] = {}
    for i, (size, time) in enumerate(zip(sizes, seconds, strict=True)):
        check_not_negative(f"sizes[{i}]", size)
        check_positive(f"seconds[{i}]", time)
        times.setdefault(float(size), []).append(float(time))
    if len(times) < 2:
        raise ValueError(
            f"the different sizes are {sorted(times)}; a line needs at least two"
        )
    ordered = sorted(times)
    return ordered, [median(times[size]) for size in ordered]


def _best_line(x: np.ndarray, t: np.ndarray) -> tuple[float, float]:
    """Return the best (alpha, beta) with alpha >= 0 and beta >= 0.

    The minimum of a sum of absolute values is at a corner: the line passes through two
    of the points, or through one of them with alpha = 0 or beta = 0. A benchmark has
    few sizes, so that all corners can be tried.
    """
    import numpy as np

    best, line = math.inf, (0.0, 0.0)
    for i in range(len(x)):
        beta = (t[i + 1 :] - t[i]) / (x[i + 1 :] - x[i])  # with each point after i
        alpha = t[i] - beta * x[i]
        possible = (alpha >= 0) & (beta >= 0)
        level, steep = t[i], t[i] / x[i] if x[i] else 0.0
        alpha = np.concatenate([alpha[possible], [level, 0.0]])
        beta = np.concatenate([beta[possible], [0.0, steep]])
        error = np.abs((alpha[:, None] + beta[:, None] * x) / t - 1).sum(axis=1)
        if error.min() < best:
            best, k = error.min(), int(error.argmin())
            line = float(alpha[k]), float(beta[k])
    return line
