"""Training that does not wait: how fast, how stale, and how small steps must be then.

N workers, worker k needs t_k seconds for a gradient, always; messages take no time:

                  gradients per second in steps     staleness
    synchronous   N / max t                         0
    backup of b   (N - b) / t of the b-th slowest   0
                  but one
    asynchronous  sum of 1 / t_k                    N - 1 on average, whoever is slow:
                                                    t_k sum over others of 1 / t_j for
                                                    worker k
    bounded       N / max t in the end: who is      at most that
                  ahead by the bound must wait

A mean staleness of N - 1 is nothing but counting: at any time N - 1 other gradients are
under way, and each of them becomes a step. Chapter 13.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddp_course.theory.checks import check_choice

WAYS = ("synchronous", "backup", "asynchronous", "bounded")


def gradients_per_second(way: str, seconds: Sequence[float], spare: int = 0) -> float:
    """Return how many gradients are taken in a second, in the long run.

    Args:
        way: one of WAYS.
        seconds: of each worker for one gradient.
        spare: how many a step with backup workers does not wait for.

    Raises ValueError for a value outside of this. Chapter 13.
    """
    check_choice("way", way, WAYS)
    n = len(seconds)
    if way == "asynchronous":
        return sum(1 / each for each in seconds)
    if spare not in range(n) or (spare and way != "backup"):
        raise ValueError(f"spare is {spare!r}; {way} with {n} workers has no such")
    return (n - spare) / sorted(seconds)[n - 1 - spare]


def stable_lr(curvature: float, staleness: int = 0) -> float:
    """Return the learning rate below which delayed gradient descent converges.

    On a quadratic of this curvature, w <- w - lr * curvature * (w of `staleness` steps
    ago) is stable up to 2 sin(pi / (4 staleness + 2)) / curvature: 2 / curvature, as
    everybody knows it, without delay, about pi / (2 staleness + 1) / curvature with
    much. There a root of z^(s+1) - z^s + lr * curvature leaves the unit circle.
    Chapter 13.
    """
    return 2 * math.sin(math.pi / (4 * staleness + 2)) / curvature


def implicit_momentum(workers: int) -> float:
    """Return the momentum that asynchrony adds by itself: 1 - 1/N.

    In expectation, if each next gradient is any worker's with the same probability, and
    its staleness tells nothing about the weights. Source: Mitliagkas et
    al. 2016, arXiv:1605.09774, theorem 3. Chapter 13.
    """
    return 1 - 1 / workers


def server_bytes(workers: int, nbytes: int) -> int:
    """Return what passes the link of a central server while each worker works once.

    `nbytes` of weights to each and as much of gradients from each: 2 N S, where a ring
    sends 2 (N - 1) / N S from every rank. Chapter 13.
    """
    return 2 * workers * nbytes
