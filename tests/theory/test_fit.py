"""The fit finds the alpha and the beta that were planted, among noise and outliers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from ddp_course.launch import Link
from ddp_course.theory import Fit, fit

SIZES = [2**k for k in range(27)]  # 1 B to 64 MiB
ALPHA, BETA = 30e-6, 0.5e-9


def measure(seed, repetitions=5, noise=0.05, outliers=0.2, alpha=ALPHA, beta=BETA):
    """Times of a link, +-noise, some of them 2 to 20 times too long."""
    rng = np.random.default_rng(seed)
    sizes = np.repeat(SIZES, repetitions)
    seconds = (alpha + beta * sizes) * rng.uniform(1 - noise, 1 + noise, len(sizes))
    late = rng.permutation(len(sizes))[: round(outliers * len(sizes))]
    seconds[late] *= rng.uniform(2, 20, len(late))
    return sizes.tolist(), seconds.tolist()


def check_fit(fit, seeds=range(20), tolerance=0.1, **kwargs):
    """`fit` finds the planted alpha and beta to within the tolerance."""
    for seed in seeds:
        found = fit(*measure(seed, **kwargs))
        assert found.alpha == pytest.approx(ALPHA, rel=tolerance)
        assert found.beta == pytest.approx(BETA, rel=tolerance)


NOISY = {"outliers": 0, "tolerance": 0.05}


def test_noise_is_averaged_out_and_outliers_do_not_count():
    check_fit(fit, **NOISY)
    check_fit(fit)  # and one time in five is far too long
    check_fit(fit, repetitions=1, tolerance=0.2)
    check_fit(fit, repetitions=15, outliers=0.3)


def least_squares(sizes, seconds, weights):
    beta, alpha = np.polyfit(sizes, seconds, 1, w=weights)
    return Fit(float(alpha), float(beta), 0.0)


def unweighted(sizes, seconds):
    return least_squares(sizes, seconds, None)


def weighted_but_squared(sizes, seconds):
    """Right weights, but one long time at a small size moves alpha."""
    size = np.asarray(sizes, dtype=float)
    return least_squares(sizes, seconds, 1 / (ALPHA + BETA * size))


def means(sizes, seconds):
    """Means where there should be medians."""
    table = {x: [] for x in sizes}
    for x, t in zip(sizes, seconds, strict=True):
        table[x].append(t)
    return fit(list(table), [float(np.mean(times)) for times in table.values()])


def from_the_ends(sizes, seconds):
    """alpha from the first measurement, beta from the last."""
    return Fit(seconds[0], seconds[-1] / sizes[-1], 0.0)


@pytest.mark.parametrize(
    ("planted", "how"),
    [
        (unweighted, {}),
        (unweighted, NOISY),  # even without outliers
        (weighted_but_squared, {}),
        (means, {}),
        (from_the_ends, {}),
    ],
)
def test_wrong_fits_are_caught(planted, how):
    with pytest.raises(AssertionError):
        check_fit(planted, **how)


@given(
    alpha=st.floats(1e-7, 1),
    knee=st.floats(1e2, 1e7),  # the size at which bytes cost as much as the latency
    sizes=st.sets(st.integers(0, 2**26), min_size=2, max_size=12),
)
def test_exact_times_give_the_exact_line(alpha, knee, sizes):
    sizes = sorted(sizes)
    seconds = [alpha + alpha / knee * x for x in sizes]
    found = fit(sizes, seconds)
    assert [found.seconds(x) for x in sizes] == pytest.approx(seconds)
    assert found.residual < 1e-9


@given(
    points=st.lists(
        st.tuples(st.integers(0, 2**26), st.floats(1e-7, 10)), min_size=2, max_size=9
    ).filter(lambda points: len({x for x, _ in points}) > 1)
)
def test_no_line_nearby_is_better_and_none_is_negative(points):
    sizes, seconds = zip(*points, strict=True)
    found = fit(sizes, seconds)
    assert found.alpha >= 0
    assert found.beta >= 0
    table = {x: [t for y, t in points if y == x] for x in sizes}

    def error(alpha, beta):
        middles = {x: float(np.median(times)) for x, times in table.items()}
        return sum(abs(alpha + beta * x - t) / t for x, t in middles.items())

    best, top = error(found.alpha, found.beta), max(seconds)
    for up in (-0.3, -1e-3, 0, 1e-3, 0.3):
        for steeper in (-0.3, -1e-3, 0, 1e-3, 0.3):
            alpha = found.alpha * (1 + up) + max(up, 0) * top
            beta = found.beta * (1 + steeper) + max(steeper, 0) * top / 2**26
            assert error(alpha, beta) >= best * (1 - 1e-9) - 1e-12


def test_no_latency_and_no_bandwidth():
    no_latency = fit(SIZES, [1e-9 * x for x in SIZES])
    assert no_latency.alpha == pytest.approx(0, abs=1e-15)
    assert no_latency.beta == pytest.approx(1e-9)
    no_bandwidth = fit(SIZES, [1e-3] * len(SIZES))
    assert no_bandwidth.link == Link(1e-3, math.inf)
    assert no_bandwidth.residual == 0


def test_a_line_that_would_be_negative_is_clamped_and_refitted():
    # A straight line through these would start at -1 s: the best from 0 on is t = x.
    bent = fit([1, 2, 3], [1e-9, 1, 2])
    assert bent.alpha == 0
    assert bent.beta > 0
    # Larger messages are faster: the best that is not falling is level, at the middle.
    falling = fit([1, 2, 3], [3.0, 2.0, 1.9])
    assert (falling.alpha, falling.beta) == (2.0, 0.0)


def test_the_residual_is_the_median_relative_error():
    found = fit([1, 2, 3, 4, 5], [1, 2, 3, 4, 10])
    assert (found.alpha, found.beta, found.residual) == (0, 1, 0)
    spread = fit([1, 1, 1, 2, 2, 2], [0.5, 1, 4, 1, 2, 8])
    assert spread.residual == 0.75  # the middle of 0, 0, 3/4, 3/4, 1, 1
    noisy = fit(*measure(0, repetitions=9, noise=0.2, outliers=0))
    assert 0.05 < noisy.residual < 0.15  # half of 20 %, uniformly


def test_a_fit_is_a_link():
    found = Fit(alpha=0.5, beta=0.25, residual=0)
    assert found.link == Link(latency=0.5, bandwidth=4)
    assert found.seconds(10) == found.link.seconds(10) == 3
    with pytest.raises(ValueError, match="nbytes is -1; it must be"):
        found.seconds(-1)


test_bad_measurements_are_named = refused(
    (lambda: fit([], []), r"the different sizes are \[\]; a line needs at least two"),
    (lambda: fit([8, 8], [1, 2]), r"the different sizes are \[8.0\]; a line needs"),
    (lambda: fit([1, 2], [1, 2, 3]), "there are 2 sizes and 3 times"),
    (lambda: fit([1, 2], [1, 0]), r"seconds\[1\] is 0; it must be"),
    (lambda: fit([1, 2], [-1, 1]), r"seconds\[0\] is -1; it must be"),
    (lambda: fit([1, 2], [1, math.nan]), r"seconds\[1\] is nan; it must be"),
    (lambda: fit([1, -2], [1, 1]), r"sizes\[1\] is -2; it must be"),
)
