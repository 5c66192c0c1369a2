"""Judge a step: is it legal, what is its critical path, and is there a better order?

`check` uses only the events, whether they are simulated or written by hand. (A step
recorded on ranks is not legal: its events take other times than the plan's layers.)
`critical_path` goes back from the end of the step, from each event to the event that it
waited for. `best_order` tries all orders. Chapter 15.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from numbers import Real

from ddp_course.communication_order.schedule import (
    FIFO,
    GradientPiece,
    OrderError,
    Policy,
    StepEvent,
    TimedStep,
    check_policy,
    pieces_of,
    simulate_step,
)
from ddp_course.theory import Layer

MOST = 9  # the most pieces for which all orders are tried


def check(step: TimedStep) -> str:
    """Return a sentence that explains why the step is legal.

    A step is legal if

    1. every layer has one backward, one update and one forward, and every piece of its
       gradient one send, and all of these take their right times;
    2. each lane does one thing at a time, backward goes from the last layer to the
       first, and forward from the first to the last;
    3. no piece is sent before the layer's backward has ended, no layer is updated
       before all its pieces were sent (all pieces of all layers, if the policy waits
       for all), and no layer runs forward before it was updated;
    4. at no time are more pieces handed over but not yet sent than the credit allows.

    A piece that is never sent breaks condition 1. Raises OrderError, which names the
    first problem.
    """
    for find in (_not_once, _two_at_once, _too_early, _beyond_credit):
        for problem in find(step):
            raise OrderError(f"{step.policy.name}: {problem}")
    sends = len(step.order)
    return (
        f"{step.policy.name} is legal: {sends} pieces of {len(step.layers)} layers "
        f"are sent once each, and no layer runs before its parameters are updated"
    )


def _not_once(step: TimedStep) -> Iterator[str]:
    """Yield a message for each event that is missing, repeated, or of wrong length."""
    lengths: dict[tuple, Real] = {}
    for number, layer in enumerate(step.layers):
        for op in ("backward", "update", "forward"):
            lengths[op, number, 0] = getattr(layer, op)
    for piece, length in pieces_of(step.layers, step.policy.piece).items():
        lengths["send", *piece] = step.each + length
    keys: set[tuple] = set()
    for event in step.events:
        key = event.op, event.layer, event.piece
        if key in keys:
            yield f"{event} is done twice"
        elif key not in lengths:
            yield f"{event} is not part of these layers"
        elif event.end - event.start != lengths[key]:
            took = event.end - event.start
            yield f"{event} takes {took}; it must take {lengths[key]}"
        keys.add(key)
    for op, layer, piece in lengths:
        if (op, layer, piece) not in keys:
            yield f"{StepEvent(op, layer, piece, 0, 0)} is never done"


def _two_at_once(step: TimedStep) -> Iterator[str]:
    """Yield a message for events that overlap in a lane, and layers out of turn."""
    for lane in ("compute", "link"):
        events = [event for event in step.events if event.lane == lane]
        events.sort(key=lambda event: (event.start, event.end))
        for one, other in pairwise(events):
            if other.start < one.end:
                yield f"{other} begins at {other.start}, {one} ends at {one.end}"
    for op, sign in (("backward", -1), ("forward", 1)):
        layers = [event.layer for event in step.events if event.op == op]
        if layers != sorted(layers, key=lambda layer: sign * layer):
            yield f"{op} goes through layers {', '.join(map(str, layers))}"


def _too_early(step: TimedStep) -> Iterator[str]:
    """Yield a message for each event that starts before its dependency ends."""
    for event in step.events:
        for needed in needs(step, event):
            if event.start < needed.end:
                yield (
                    f"{event} begins at {event.start}; it needs {needed}, which ends "
                    f"at {needed.end}"
                )


def _beyond_credit(step: TimedStep) -> Iterator[str]:
    """Yield a message for each piece that is handed over without credit."""
    under_way: list[StepEvent] = []
    for send in (event for event in step.events if event.op == "send"):
        now = send.start if send.handed is None else send.handed
        under_way = [one for one in under_way if one.end > now] + [send]
        credit = step.policy.credit
        if credit is not None and len(under_way) > credit:
            yield f"{send} is handed over at {now}, with {len(under_way) - 1} under way"


def needs(step: TimedStep, event: StepEvent) -> list[StepEvent]:
    """Return the events of other kinds that must end before this event starts."""
    before = {"send": "backward", "update": "send", "forward": "update"}.get(event.op)
    everywhere = event.op == "update" and step.policy.wait_for_all
    return [
        other
        for other in step.events
        if other.op == before and (everywhere or other.layer == event.layer)
    ]


def critical_path(step: TimedStep) -> tuple[StepEvent, ...]:
    """Return the critical path: events that would delay the end, the first one first.

    It is found backwards, from the last event, by going from each event to the one that
    it waited for: the previous event of its lane, or one that it needs, whichever ended
    later (the needed one, if both ended together). Events that take no time are left
    out.
    """
    path = [max(step.events, key=lambda event: event.end)]
    while True:
        event = path[-1]
        at = step.events.index(event)
        lane = [e for e in step.events[:at] if e.lane == event.lane]
        before = [*needs(step, event), *lane[-1:]]
        if not before:
            break
        path.append(max(before, key=lambda other: other.end))
    return tuple(event for event in reversed(path) if event.end > event.start)


def best_order(layers: Sequence[Layer], policy: Policy = FIFO) -> TimedStep:
    """Try all orders of all pieces; return the step with the shortest time.

    Pieces of one layer are equal, so they keep their order. Only `piece` and
    `wait_for_all` of `policy` are used. Raises ValueError for more than 9 pieces.
    """
    check_policy(policy)
    pieces = pieces_of(layers, policy.piece)
    if len(pieces) > MOST:
        orders = math.factorial(len(pieces))
        raise ValueError(
            f"{len(pieces)} pieces have up to {orders:,} orders; use {MOST} or fewer"
        )
    how = {"piece": policy.piece, "wait_for_all": policy.wait_for_all}
    of_layers = [piece.layer for piece in pieces]
    steps = (
        simulate_step(layers, InOrder(**how, left=list(order)))
        for order in _orders(of_layers)
    )
    best = min(steps, key=lambda step: step.step_time)
    return replace(best, policy=Policy("in order", **how))  # its list is used up


@dataclass(frozen=True)
class InOrder(Policy):
    """A policy that sends pieces in one order, as on ranks that have agreed on it.

    The link waits for the next piece of the order even if others are ready. `left` has
    the number of a layer for each of its pieces; a simulation uses the list up.
    """

    name: str = "in order"
    left: list[int] = field(default_factory=list)

    def choose(self, ready: Sequence[GradientPiece]) -> GradientPiece | None:
        """Return the next piece of the order, if it is ready."""
        for piece in ready:
            if piece.layer == self.left[0]:
                del self.left[0]
                return piece
        return None


def _orders(of_layers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the different orders of numbers, some of which may be equal."""
    if not of_layers:
        yield ()
    for first in dict.fromkeys(of_layers):
        rest = list(of_layers)
        rest.remove(first)
        for others in _orders(rest):
            yield (first, *others)
