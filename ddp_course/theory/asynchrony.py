"""Asynchronous training: speed, staleness, and the largest stable learning rate.

Each of N workers always needs the same time for a gradient, t_k seconds for worker k.
Messages take no time.

                  gradients used per second         staleness
    synchronous   N / max t                         0
    b backups     (N - b) / t of the slowest        0
                  worker that is waited for
    asynchronous  sum of 1 / t_k                    N - 1 on average; for worker k, t_k
                                                    times the others' sum of 1 / t_j
    bounded       N / max t in the long run, as     at most the bound
                  fast workers must wait

The mean staleness is always N - 1: at any time N - 1 other gradients are under way, and
each of them becomes a step. Chapter 13.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddp_course.theory.checks import check_choice

WAYS = ("synchronous", "backup", "asynchronous", "bounded")


def gradients_per_second(way: str, seconds: Sequence[float], spare: int = 0) -> float:
    """Return how many gradients are used per second, in the long run.

    Args:
        way: one of WAYS.
        seconds: the seconds that each worker takes for one gradient.
        spare: b, the number of workers that a step with backups does not wait for.

    Raises ValueError for a value that is not allowed here. Chapter 13.
    """
    check_choice("way", way, WAYS)
    if spare and way != "backup":
        raise ValueError(
            f"spare is {spare!r}; only 'backup' has spare workers: leave it out for "
            f"{way!r}"
        )
    n = len(seconds)
    if way == "asynchronous":
        return sum(1 / each for each in seconds)
    if spare not in range(n):
        raise ValueError(
            f"spare is {spare!r}; for {way} with {n} workers it can be 0 to {n - 1}"
        )
    return (n - spare) / sorted(seconds)[n - 1 - spare]


def stable_lr(curvature: float, staleness: int = 0) -> float:
    """Return the learning rate below which delayed gradient descent converges.

    On a quadratic of this curvature, w <- w - lr * curvature * (w of `staleness` steps
    ago) is stable up to 2 sin(pi / (4 staleness + 2)) / curvature. Without delay that
    is the well-known 2 / curvature; with a long delay it is about
    pi / (2 staleness + 1) / curvature. At that learning rate a root of
    z^(s+1) - z^s + lr * curvature leaves the unit circle. Chapter 13.
    """
    return 2 * math.sin(math.pi / (4 * staleness + 2)) / curvature


def implicit_momentum(workers: int) -> float:
    """Return the momentum that asynchrony itself adds, in expectation: 1 - 1/N.

    Assumes that the next gradient is equally likely to come from each worker, and that
    staleness is independent of the weights. Source: Mitliagkas et al. 2016,
    arXiv:1605.09774, theorem 3. Chapter 13.
    """
    return 1 - 1 / workers


def server_bytes(workers: int, nbytes: int) -> int:
    """Return the bytes over a central server's link for one gradient of each worker.

    The server sends S = `nbytes` of weights to each worker, and receives as many bytes
    of gradients: 2 N S. In a ring, every rank sends only 2 (N - 1) / N S. Chapter 13.
    """
    return 2 * workers * nbytes
