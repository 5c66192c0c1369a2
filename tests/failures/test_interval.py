"""The checkpoint interval: formulas beside their definition, tables and simulation."""

import inspect
import math
from random import Random

import pytest
from refusals import refused

from ddp_course.failures import interval, rates
from ddp_course.failures.interval import daly, expected_time, simulated_time, young

MINUTE, HOUR = 60.0, 3600.0


def by_trying(save, mean):
    """Return the best of very many intervals."""
    tried = (mean * k / 20_000 for k in range(1, 20_001))
    return min(tried, key=lambda work: expected_time(work, save, mean))


@pytest.mark.parametrize(
    ("mean", "minutes"), [(24 * HOUR, 116.7), (6 * HOUR, 56.7), (15 * MINUTE, 9.1)]
)
def test_daly_is_what_his_figures_say(mean, minutes):
    assert daly(5 * MINUTE, mean) / MINUTE == pytest.approx(minutes, abs=0.05)


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.1, 0.5, 1.0])
def test_daly_loses_as_little_as_the_best(share):
    best = by_trying(share, 1.0)
    lost, least = (expected_time(w, share, 1.0) - 1 for w in (daly(share, 1.0), best))
    assert 0.9999 < lost / least < 1.001
    assert daly(share, 1.0) == pytest.approx(best, rel=0.02)


def test_young_is_right_for_short_saves_alone():
    assert young(1e-5, 1.0) == pytest.approx(by_trying(1e-5, 1.0), rel=0.02)
    lost, least = (
        expected_time(work, 0.5, 1.0) - 1 for work in (young(0.5, 1.0), daly(0.5, 1.0))
    )
    assert lost / least > 1.05


def test_a_save_as_long_as_two_failures_leaves_daly_with_m():
    assert daly(2.0, 1.0) == daly(9.0, 1.0) == 1.0


@pytest.mark.parametrize("mean", [0.0, -1.0, math.nan])
def test_no_interval_is_best_without_time_between_failures(mean):
    for best in (young, daly):
        with pytest.raises(ValueError, match=f"mean {mean}; .* mean above 0"):
            best(60.0, mean)


def test_the_simple_loss_is_the_expected_one_to_first_order():
    save, mean = 1e-4, 1.0
    for work in (0.5 * young(save, mean), young(save, mean), 2 * young(save, mean)):
        simple = save / work + work / (2 * mean)
        exact = expected_time(work, save, mean) - 1
        assert simple == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(
    ("work", "save", "restart"), [(0.2, 0.02, 0.0), (0.5, 0.02, 0.1), (1.0, 0.3, 1.0)]
)
def test_a_simulation_takes_the_expected_time(work, save, restart):
    found = simulated_time(work, save, 1.0, restart, 20_000, dice=Random(1))
    assert found == pytest.approx(expected_time(work, save, 1.0, restart), rel=0.05)
    assert found > 1 + save / work


def test_a_restart_does_not_move_the_minimum():
    works = [0.01 * k for k in range(1, 200)]
    best = [
        min(works, key=lambda w: expected_time(w, 0.05, 1.0, restart))
        for restart in (0.0, 0.3, 2.0)
    ]
    assert best[0] == best[1] == best[2]


def test_llama_3_saves_every_8_to_19_minutes():
    mean = 54 * 24 * HOUR / 419
    found = {}
    for save in (10, 60):
        work = daly(save, mean)
        share = 1 / expected_time(work, save, mean, 5 * MINUTE)
        found[save] = round(work / MINUTE, 1), round(100 * share)
    assert found == {10: (7.8, 93), 60: (18.6, 88)}
    assert [round(young(s, mean) / MINUTE, 1) for s in found] == [7.9, 19.3]


def test_a_wrong_formula_is_noticed():
    mean, save = 1.0, 0.01
    for wrong in (math.sqrt(save * mean / 2), math.sqrt(4 * save * mean), save):
        least = expected_time(daly(save, mean), save, mean) - 1
        assert expected_time(wrong, save, mean) - 1 > 1.01 * least


@pytest.mark.parametrize("module", [rates, interval])
def test_rates_and_intervals_need_no_torch(module):
    assert "torch" not in inspect.getsource(module)


test_what_cannot_be_is_told = refused(
    (lambda: young(60, 0), "save is 60 and mean 0; save must be 0 or more, mean above"),
    (lambda: young(-1, 60), "save is -1 and mean 60; save must be 0 or more"),
)
