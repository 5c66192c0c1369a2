"""What the picture of all ways is drawn from: stored curves, and what follows."""

from __future__ import annotations

from math import inf
from statistics import fmean

import pytest

from ddp_course.chapters.ch14_fewer_bytes import race
from ddp_course.model import GPTConfig
from ddp_course.train import train

TINY = GPTConfig(block_size=8, n_layer=1, n_head=2, d_model=16)


def test_played_data_parallelism_is_one_process_with_all_rows():
    alone = train(4, race.ROWS, TINY, race.LR).losses
    assert race.losses("ddp", 0, 4, TINY) == pytest.approx(alone, abs=1e-5)
    near = race.losses("fp16", 0, 4, TINY)
    assert near != alone and near == pytest.approx(alone, abs=1e-2)
    assert race.losses("diloco", 0, 4, TINY) != pytest.approx(alone, abs=1e-3)


@pytest.mark.skipif(
    race.stored()["text"] != race.text(),
    reason="the text is Python's own source, and another version's",
)
@pytest.mark.parametrize("method", race.METHODS)
def test_the_stored_curves_are_of_this_code(method):
    first = race.stored()["methods"][method]["losses"]["0"][:2]
    assert race.losses(method, 0, 2) == pytest.approx(first, abs=2e-3)


def test_all_is_stored_and_bytes_are_those_of_the_formulas():
    rows = race.stored()["methods"]
    assert [*rows] == [*race.METHODS]
    seeds = rows["ddp"]["losses"].keys()
    for name, row in rows.items():
        assert row["losses"].keys() == seeds
        assert {len(curve) for curve in row["losses"].values()} == {race.STEPS}
        assert row["bytes"] == race.step_bytes(name)
    # Steps that are sent in full are no measurement of the compressor.
    late, same = rows["powersgd:1, start=2"]["encode"], rows["powersgd:1"]["encode"]
    assert 0.8 < late / same < 1.25
    share = {name: row["bytes"] / rows["ddp"]["bytes"] for name, row in rows.items()}
    assert share["fp16"] == 1 / 2 and share["diloco"] == 1 / 8


def test_a_compressor_is_timed_when_it_compresses(monkeypatch):
    clock, rounds = [0.0], []

    def play(ranks, gradients):
        rounds.append(ranks)
        clock[0] += 1.0 if len(rounds) <= 2 else 5.0  # the first two are sent in full

    monkeypatch.setattr(race, "play", play)
    monkeypatch.setattr(race.time, "process_time", lambda: clock[0])
    took = race.cpu_seconds("powersgd:1, start=2", TINY, turns=3)
    assert took["encode"] == 5.0 / race.RANKS


def test_the_training_table():
    table = race.table()
    for name in ("fp16", "int8"):
        assert abs(fmean(table[name])) < 0.01, name  # the bar
    for seed in range(len(table["ddp"])):
        assert table["ddp"][seed] == 0
        assert table["powersgd:1"][seed] > table["powersgd:4"][seed] > 0.01


def test_what_follows_for_a_link():
    ddp = race.Way([3.0] * 10 + [2.0] * 10, bytes=800, compute=1, encode=0)
    half = race.Way(ddp.losses, bytes=400, compute=1, encode=0.5)
    assert (ddp.seconds(100), half.seconds(100)) == (9, 5.5)
    assert half.pays_below(ddp) == 800
    assert half.seconds(800) == ddp.seconds(800)
    assert half.seconds(1600) > ddp.seconds(1600)
    assert race.Way([], 100, 1, 0).pays_below(ddp) == inf
    assert [ddp.loss_at(step) for step in (10, 15, 20)] == [3.0, 2.5, 2.0]
