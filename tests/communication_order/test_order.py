"""Orders as data: closed forms, all orders of small models, and wrong orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from operator import attrgetter
from random import Random

import pytest

from ddp_course.communication_order import (
    FIFO,
    WAIT_FOR_ALL,
    GradientPiece,
    OrderError,
    Policy,
    StepEvent,
    TimedStep,
    best_order,
    check,
    critical_path,
    pieces_of,
    priority,
    simulate_step,
)
from ddp_course.communication_order.judge import InOrder
from ddp_course.theory import (
    Layer,
    binding_layer,
    least_step_time,
    wait_for_all_time,
)
from ddp_course.theory.ordering import paths

START = attrgetter("start")
THREE = (Layer(2, 4, 2), Layer(2, 2, 5), Layer(1, 2, 4))


def small_models(count: int) -> list[tuple[Layer, ...]]:
    """Draw models that have at most 8 pieces of length 1."""
    draw = Random(15)
    models = []
    for _ in range(count):
        numbers = range(draw.randint(1, 4))
        most = 2 if len(numbers) > 2 else 4
        times = [[draw.randint(0, top) for top in (3, 3, most, 1)] for _ in numbers]
        models.append(tuple(Layer(*own) for own in times))
    return models


def test_formulas_priority_and_all_orders_agree():
    beaten = helped = 0
    for layers in small_models(120):
        waits, fifo = simulate_step(layers, WAIT_FOR_ALL), simulate_step(layers, FIFO)
        pieces, whole = (
            simulate_step(layers, priority(1)),
            simulate_step(layers, priority()),
        )
        assert waits.step_time == wait_for_all_time(layers)
        best = best_order(layers, priority(1))
        assert best.step_time == pieces.step_time == least_step_time(layers)
        assert simulate_step(layers, best.policy).layers == best.layers
        assert best.step_time <= best_order(layers).step_time <= whole.step_time
        assert pieces.step_time <= fifo.step_time <= waits.step_time
        if all(layer.backward for layer in layers):  # then no two are ready at once
            assert simulate_step(layers, priority(1, None)).step_time == fifo.step_time
        for one in (waits, fifo, pieces, whole, best):
            check(one)
        check(simulate_step(layers, priority(1, 2), each=Fraction(1, 3), launch=1))
        beaten += whole.step_time > best_order(layers).step_time
        helped += pieces.step_time < fifo.step_time
    assert beaten > 5  # of whole layers, the first ready one is not always the best
    assert helped > 20


def test_three_layers_by_hand():
    waits, best = simulate_step(THREE, WAIT_FOR_ALL), simulate_step(THREE, priority(1))
    assert str(waits).splitlines() == [
        "wait for all: 18, of which 5 idle",
        "compute | B2 B2 B1 B1 B0 B0 B0 B0 .  .  .  .  .  F0 F0 F1 F1 F2",
        "link    | .  .  S2 S2 S2 S2 S1 S1 S1 S1 S1 S0 S0 .  .  .  .  .",
    ]
    assert str(best).splitlines() == [
        "priority: 15, of which 2 idle",
        "compute | B2 B2 B1 B1 B0 B0 B0 B0 .  .  F0 F0 F1 F1 F2",
        "link    | .  .  S2 S2 S1 S1 S1 S1 S0 S0 S1 S2 S2 .  .",
    ]
    assert paths(THREE) == [15, 14, 14] and binding_layer(THREE) == 0
    assert simulate_step(THREE, FIFO).step_time == 18  # layer 0 is the last to be sent
    long = (Layer(1, 1, 1), Layer(1, 1, 20), Layer(1, 1, 1))  # for any order too long
    assert binding_layer(long) == 1 and least_step_time(long) == 25
    assert best_order(long).step_time == 26


def test_what_is_critical_delays_the_end():
    little = Fraction(1, 100)
    for layers in (THREE, *small_models(20)):
        step = simulate_step(layers, priority())
        path = critical_path(step)
        assert sum(event.end - event.start for event in path) == step.step_time
        for op, number in {(event.op, event.layer) for event in path}:
            longer = getattr(layers[number], op) + little
            slower = [*layers]
            slower[number] = replace(layers[number], **{op: longer})
            order = InOrder(left=[piece.layer for piece in step.order])
            longer_step = simulate_step(slower, order)
            assert longer_step.step_time == step.step_time + little


# ---- what is wrong -------------------------------------------------------------------


@dataclass(frozen=True)
class Choosing(Policy):
    chooses: Callable[[Sequence[GradientPiece]], GradientPiece | None] = min

    def choose(self, ready):
        return self.chooses(ready)


def test_a_policy_that_starves_or_deadlocks_is_refused():
    starves = Choosing("starves", chooses=lambda r: min(r) if min(r)[0] < 2 else None)
    with pytest.raises(OrderError, match="; piece 0 of layer 2 waits for ever$"):
        simulate_step(THREE, starves)
    empty = Policy("no credit", credit=1)
    object.__setattr__(empty, "credit", 0)
    with pytest.raises(OrderError, match="after time 8 nothing is .* as do 2 more"):
        simulate_step(THREE, empty)
    with pytest.raises(ValueError, match="credit is 0; it must be an integer of 1"):
        priority(1, 0)
    with pytest.raises(ValueError, match="piece is 0; it must be"):
        priority(0)
    for of_layers in (partial(simulate_step, policy=FIFO), wait_for_all_time):
        with pytest.raises(ValueError, match="layers.1. is .1, 2, 3.; it must be a La"):
            of_layers([THREE[0], (1, 2, 3)])
    for takes_policy in (simulate_step, best_order):
        with pytest.raises(ValueError, match="^policy is 'fifo'; it must be a Policy"):
            takes_policy(THREE, policy="fifo")
    with pytest.raises(ValueError, match="11 pieces have up to 39,916,800 orders"):
        best_order(THREE, priority(1))


def test_a_step_without_layers_is_refused_and_one_without_time_is_printed():
    with pytest.raises(ValueError, match="layers is empty; a step needs one Layer"):
        simulate_step([], FIFO)
    rows = str(simulate_step([Layer(0, 0, 0)], FIFO)).splitlines()
    assert rows == ["fifo: 0, of which 0 idle", "compute |", "link    |"]


def changed(step: TimedStep, op: str, layer: int, to: dict) -> TimedStep:
    """Return the step with one event changed, or left out, if `to` is empty."""
    events = []
    for event in step.events:
        mine = (event.op, event.layer, event.piece) == (op, layer, 0)
        events += [replace(event, **to)] if mine and to else [] if mine else [event]
    return replace(step, events=tuple(events))


@pytest.mark.parametrize(
    ("op", "layer", "to", "message"),
    [
        ("send", 1, {}, "send 1.0 is never done"),
        ("send", 1, {"layer": 2}, "send 2.0 is done twice"),
        ("send", 1, {"end": 12}, "send 1.0 takes 6; it must take 5"),
        ("send", 1, {"piece": 1}, "send 1.1 is not part of these layers"),
        ("send", 1, {"start": 5, "end": 10}, "1.0 begins at 5, send 2.0 ends at 6"),
        ("send", 2, {"start": 1, "end": 5}, "needs backward 2, which ends at 2"),
        ("update", 0, {"start": 15, "end": 15}, "forward 0 begins at 13; it needs upd"),
        ("update", 0, {"start": 11, "end": 11}, "update 0 .* needs send 0.0"),
        ("send", 1, {"handed": 4}, "send 1.0 is handed over at 4, with 1 under way"),
    ],
)
def test_what_is_wrong_is_named(op, layer, to, message):
    right = simulate_step(THREE, Policy("one by one", credit=1))
    assert "3 pieces of 3 layers" in check(right)
    with pytest.raises(OrderError, match=message):
        check(changed(right, op, layer, to))


def test_of_several_missing_events_the_first_is_named():
    """In each process, however its strings are hashed."""
    step = simulate_step([Layer(1, 1, 1)] * 30, FIFO)
    with pytest.raises(OrderError, match="^fifo: backward 0 is never done$"):
        check(replace(step, events=()))


def test_wait_for_all_is_judged_by_its_own_rule():
    layer_by_layer = simulate_step((Layer(1, 1, 1), Layer(1, 1, 3)), priority(1))
    check(layer_by_layer)
    with pytest.raises(OrderError, match="update 0 begins at .* needs send"):
        check(replace(layer_by_layer, policy=replace(priority(1), wait_for_all=True)))
    late = simulate_step(THREE, WAIT_FOR_ALL)
    late = changed(late, "forward", 0, {"start": 15, "end": 17})
    events = sorted(
        changed(late, "forward", 1, {"start": 13, "end": 15}).events, key=START
    )
    with pytest.raises(OrderError, match="forward goes through layers 1, 0, 2"):
        check(replace(late, events=tuple(events)))
    assert sum(pieces_of(THREE, Fraction(3, 2)).values()) == 11
    assert str(StepEvent("send", 1, 2, 0, 1)) == "send 1.2"
