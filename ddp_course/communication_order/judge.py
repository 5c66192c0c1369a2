"""Is an order legal, what holds it up, and is there a better one?

`check` looks at events alone, wherever they come from: simulated, written by hand, or
recorded on ranks. `critical_path` goes back from the end of the step through whatever
was waited for. `best_order` tries all orders. Chapter 15.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from numbers import Real

from ddp_course.communication_order.schedule import (
    FIFO,
    OrderError,
    Played,
    Policy,
    Timed,
    follow,
    pieces_of,
)
from ddp_course.theory import Layer

MOST = 9  # pieces whose orders are all tried


def check(played: Played) -> str:
    """Return a sentence that says why the step is legal.

    It is, if

    1. every layer has one backward, one update and one forward, and every piece of its
       gradient one send, each as long as it must be;
    2. each lane does one thing at a time, backward goes from the last layer to the
       first, and forward from the first to the last;
    3. no piece is sent before the layer's backward has ended, no layer is updated
       before all its pieces were sent (all pieces of all layers, if the policy waits
       for all), and none runs forward before it was updated;
    4. no more pieces are handed over, and not yet sent, than the credit allows.

    What is never sent, since others always come first, breaks point 1. Raises
    OrderError, which names the first thing that is wrong.
    """
    for look in (_not_once, _two_at_once, _too_early, _beyond_credit):
        for wrong in look(played):
            raise OrderError(f"{played.policy.name}: {wrong}")
    sends = len(played.order)
    return (
        f"{played.policy.name} is legal: {sends} pieces of {len(played.layers)} layers "
        f"are sent once each, and no layer runs before its parameters are there"
    )


def _not_once(played: Played) -> Iterator[str]:
    """Say what is missing, there twice, or of another length than it must be."""
    lengths: dict[tuple, Real] = {}
    for number, layer in enumerate(played.layers):
        for op in ("backward", "update", "forward"):
            lengths[op, number, 0] = getattr(layer, op)
    for piece, length in pieces_of(played.layers, played.policy.piece).items():
        lengths["send", *piece] = played.each + length
    seen: set[tuple] = set()
    for event in played.events:
        key = event.op, event.layer, event.piece
        if key in seen:
            yield f"{event} is done twice"
        elif key not in lengths:
            yield f"{event} is no part of these layers"
        elif event.end - event.start != lengths[key]:
            took = event.end - event.start
            yield f"{event} takes {took}; it must take {lengths[key]}"
        seen.add(key)
    for op, layer, piece in lengths.keys() - seen:
        yield f"{Timed(op, layer, piece, 0, 0)} is never done"


def _two_at_once(played: Played) -> Iterator[str]:
    """Say what overlaps in its lane, and which layer is out of turn."""
    for lane in ("compute", "link"):
        events = [event for event in played.events if event.lane == lane]
        events.sort(key=lambda event: (event.start, event.end))
        for one, other in pairwise(events):
            if other.start < one.end:
                yield f"{other} begins at {other.start}, {one} ends at {one.end}"
    for op, sign in (("backward", -1), ("forward", 1)):
        layers = [event.layer for event in played.events if event.op == op]
        if layers != sorted(layers, key=lambda layer: sign * layer):
            yield f"{op} goes through layers {', '.join(map(str, layers))}"


def _too_early(played: Played) -> Iterator[str]:
    """Say what begins before that which it needs has ended."""
    for event in played.events:
        for needed in needs(played, event):
            if event.start < needed.end:
                yield (
                    f"{event} begins at {event.start}; it needs {needed}, which ends "
                    f"at {needed.end}"
                )


def _beyond_credit(played: Played) -> Iterator[str]:
    """Say which piece is handed over although there is no credit left."""
    under_way: list[Timed] = []
    for send in (event for event in played.events if event.op == "send"):
        now = send.start if send.handed is None else send.handed
        under_way = [one for one in under_way if one.end > now] + [send]
        credit = played.policy.credit
        if credit is not None and len(under_way) > credit:
            yield f"{send} is handed over at {now}, with {len(under_way) - 1} under way"


def needs(played: Played, event: Timed) -> list[Timed]:
    """Return the events without which this one cannot begin, but for its lane's."""
    before = {"send": "backward", "update": "send", "forward": "update"}.get(event.op)
    everywhere = event.op == "update" and played.policy.wait_for_all
    return [
        other
        for other in played.events
        if other.op == before and (everywhere or other.layer == event.layer)
    ]


def critical_path(played: Played) -> tuple[Timed, ...]:
    """Return the events whose delay delays the end, the first one first.

    From the last event back, to what each was waiting for: the event of its lane before
    it, or one that it needs, whichever ended last. (If both did, what it needs.) Events
    that take no time are left out.
    """
    path = [max(played.events, key=lambda event: event.end)]
    while True:
        event = path[-1]
        at = played.events.index(event)
        lane = [e for e in played.events[:at] if e.lane == event.lane]
        before = [*needs(played, event), *lane[-1:]]
        if not before:
            break
        path.append(max(before, key=lambda other: other.end))
    return tuple(event for event in reversed(path) if event.end > event.start)


def best_order(layers: Sequence[Layer], policy: Policy = FIFO) -> Played:
    """Try all orders of all pieces; return the step with the shortest time.

    Pieces of one layer are alike, so they keep their order. Of `policy` only `piece`
    and `wait_for_all` count. Raises ValueError for more than 9 pieces.
    """
    pieces = pieces_of(layers, policy.piece)
    if len(pieces) > MOST:
        orders = math.factorial(len(pieces))
        raise ValueError(f"{len(pieces)} pieces have up to {orders:,} orders; cut less")
    of_layers = [piece.layer for piece in pieces]
    tried = (follow(layers, order, policy) for order in _orders(of_layers))
    return min(tried, key=lambda played: played.step_time)


def _orders(of_layers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the different orders of numbers, some of which may be equal."""
    if not of_layers:
        yield ()
    for first in dict.fromkeys(of_layers):
        rest = list(of_layers)
        rest.remove(first)
        for others in _orders(rest):
            yield (first, *others)
