"""In which order gradients travel, as plain data; and what a step takes then.

A step is played from the first moment of backward to the last of the next forward.
There are two lanes, and each does one thing at a time:

    compute   backward, last layer first; then, first layer first, update and forward
    link      sends: a gradient as a whole, or piece by piece

A layer's gradient may be sent when its backward has ended, and its parameters may be
updated when all its pieces have been sent. Which piece is next, a *policy* says:

    WAIT_FOR_ALL       first come, first served; updates wait for everything: DDP
    FIFO               the same, and forward goes on layer by layer
    priority(piece)    what the first layers need goes first, in pieces

What was handed over to the link cannot be called back. So a policy has a *credit*: how
many pieces may be handed over and not yet sent. Without one, an urgent piece would find
everything handed over already, and priority is nothing but FIFO.

P3 (Jayarajan et al. 2019, arXiv:1905.03960) cuts and sends by priority, TicTac (Hashemi
et al. 2019, arXiv:1803.03288) fixes an order in advance, ByteScheduler (Peng et al.,
SOSP 2019) has pieces and a credit for any framework, and searches for their sizes.
Chapter 15.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Integral, Real
from typing import NamedTuple

from ddp_course.theory import Layer, ready_times

COLUMNS = 90  # the most that a line of text is divided into


class OrderError(ValueError):
    """An order cannot be carried out; the text says what is wrong first."""


class Piece(NamedTuple):
    """Piece number `index` of the gradient of layer `layer`."""

    layer: int
    index: int = 0

    def __str__(self) -> str:
        return f"{self.layer}.{self.index}"


@dataclass(frozen=True)
class Timed:
    """What was done when; a send is of one piece, all else of a layer (piece 0).

    `op` is "backward", "send", "update" or "forward"; `handed` is when a piece was
    handed over to the link.
    """

    op: str
    layer: int
    piece: int
    start: Real
    end: Real
    handed: Real | None = None

    @property
    def lane(self) -> str:
        """Where: "link" or "compute"."""
        return "link" if self.op == "send" else "compute"

    def __str__(self) -> str:
        what = Piece(self.layer, self.piece) if self.op == "send" else self.layer
        return f"{self.op} {what}"


@dataclass(frozen=True)
class Policy:
    """Which piece is to be handed over next, and who waits for what.

    Attributes:
        name: for people.
        priority: the first layers first; otherwise first come, first served.
        piece: how much of a gradient is sent at once, the last piece being shorter;
            None: all of it. In time on the link (on ranks: in bytes).
        credit: how many pieces may be handed over and not yet sent; None: any number.
            (ByteScheduler counts bytes.)
        wait_for_all: nothing is updated before everything has been sent.

    Raises ValueError for a piece that is not above 0, and a credit below 1.
    """

    name: str
    priority: bool = False
    piece: Real | None = None
    credit: int | None = None
    wait_for_all: bool = False

    def __post_init__(self) -> None:
        if self.piece is not None and not (
            isinstance(self.piece, Real) and 0 < self.piece < math.inf
        ):
            must = "it must be a finite number above 0, or None"
            raise ValueError(f"piece is {self.piece!r}; {must}")
        if self.credit is not None and not (
            isinstance(self.credit, Integral) and self.credit >= 1
        ):
            must = "it must be an integer of 1 or more, or None"
            raise ValueError(f"credit is {self.credit!r}; {must}")

    def choose(self, ready: Sequence[Piece]) -> Piece | None:
        """Return the next to be sent; None: nothing yet.

        `ready` has the next piece of each layer that is ready, the last layer first.
        """
        return min(ready) if self.priority else ready[0]


WAIT_FOR_ALL = Policy("wait for all", wait_for_all=True)
FIFO = Policy("fifo")


def priority(piece: Real | None = None, credit: int | None = 1) -> Policy:
    """Return the policy that sends the first layers first, in pieces.

    A credit above 1 hides what it takes to hand a piece over; None is too much.
    """
    return Policy("priority", True, piece, credit)


def pieces_of(layers: Sequence[Layer], piece: Real | None = None) -> dict[Piece, Real]:
    """Cut all gradients; return how long each piece is on the link, last layer first.

    What takes no time to be sent is one piece, too.
    """
    cut: dict[Piece, Real] = {}
    for number, layer in reversed([*enumerate(layers)]):
        whole, index = layer.send, 0
        while piece is not None and whole > piece:
            cut[Piece(number, index)] = piece
            whole, index = whole - piece, index + 1
        cut[Piece(number, index)] = whole
    return cut


# ---- played through ------------------------------------------------------------------


@dataclass(frozen=True)
class Played:
    """One step: from the first moment of backward to the last of the next forward.

    Attributes:
        layers: what was played.
        policy: by which rule.
        each: what every piece takes on the link beside its length.
        events: in the order of their starts.
    """

    layers: tuple[Layer, ...]
    policy: Policy
    each: Real
    events: tuple[Timed, ...]

    @property
    def step_time(self) -> Real:
        """How long a step takes: forwards end when everything has been sent."""
        return max(event.end for event in self.events)

    @property
    def idle(self) -> Real:
        """How long nothing is computed."""
        busy = (e.end - e.start for e in self.events if e.lane == "compute")
        return self.step_time - sum(busy)

    @property
    def order(self) -> tuple[Piece, ...]:
        """The pieces in the order in which they were sent."""
        sends = (event for event in self.events if event.op == "send")
        return tuple(Piece(event.layer, event.piece) for event in sends)

    def __str__(self) -> str:
        """A row of text for each lane, a column for each unit of time, if they fit."""
        unit = Fraction(
            1, math.lcm(*(Fraction(e.end).denominator for e in self.events))
        )
        head = f"{self.policy.name}: {self.step_time}, of which {self.idle} idle"
        if self.step_time / unit > COLUMNS:
            return head
        rows = []
        for lane in ("compute", "link"):
            cells = ["."] * int(self.step_time / unit)
            for event in (e for e in self.events if e.lane == lane):
                first, last = int(event.start / unit), int(event.end / unit)
                text = f"{'S' if lane == 'link' else event.op[0].upper()}{event.layer}"
                cells[first:last] = [text] * (last - first)
            width = max(map(len, cells))
            rows.append(f"{lane:<7} | " + " ".join(c.ljust(width) for c in cells))
        return "\n".join([head, *(row.rstrip() for row in rows)])


def simulate(
    layers: Sequence[Layer], policy: Policy, *, each: Real = 0, launch: Real = 0
) -> Played:
    """Return what happens when, if pieces are handed over as `policy` says.

    Args:
        layers: in the order of forward.
        policy: any.
        each: how long a piece is on the link beside its own length.
        launch: from handing a piece over to its start on the link; it passes while
            earlier pieces are sent, if the credit allows to hand over before they are.

    Raises OrderError for a policy that comes to no end: it leaves a piece for ever.
    """
    return _played(layers, policy, policy.choose, each, launch)


def follow(
    layers: Sequence[Layer],
    order: Sequence[Piece | int],
    policy: Policy = FIFO,
    *,
    each: Real = 0,
) -> Played:
    """Return what happens when, if pieces are sent exactly in the given order.

    Whoever is to be next is waited for, even if others are ready: that is what ranks
    do which have agreed on an order. `order` may have numbers of layers in the place of
    pieces, as often as the layer has pieces. Of `policy` only `piece` and
    `wait_for_all` count. Raises OrderError if a piece is left out, or not to be had.
    """
    wanted = list(_as_pieces(order))

    def choose(ready: Sequence[Piece]) -> Piece | None:
        return wanted.pop(0) if wanted and wanted[0] in ready else None

    free = replace(policy, name="in order", credit=None)
    return _played(layers, free, choose, each, 0)


def _as_pieces(order: Iterable[Piece | int]) -> Iterator[Piece]:
    sent: Counter[int] = Counter()
    for one in order:
        if isinstance(one, Piece):
            yield one
        else:
            yield Piece(one, sent[one])
            sent[one] += 1


def _played(
    layers: Sequence[Layer],
    policy: Policy,
    choose: Callable[[Sequence[Piece]], Piece | None],
    each: Real,
    launch: Real,
) -> Played:
    for name, time in (("each", each), ("launch", launch)):
        if not 0 <= time < math.inf:
            must = "it must be a finite number, 0 or more"
            raise ValueError(f"{name} is {time!r}; {must}")
    there = ready_times(layers)
    backward = [
        Timed("backward", number, 0, end - layers[number].backward, end)
        for number, end in reversed([*enumerate(there)])
    ]
    sends = list(_sends(layers, policy, choose, each, launch))
    sent = {send.layer: send.end for send in sends}  # of each layer the last
    forward = _forward(layers, [sent[k] for k in range(len(layers))], policy, there[0])
    events = sorted([*backward, *sends, *forward], key=lambda e: (e.start, e.end))
    return Played(tuple(layers), policy, each, tuple(events))


def _sends(
    layers: Sequence[Layer],
    policy: Policy,
    choose: Callable[[Sequence[Piece]], Piece | None],
    each: Real,
    launch: Real,
) -> Iterator[Timed]:
    """Hand over what is chosen, as long as there is credit; else let time pass."""
    there, now = ready_times(layers), 0
    waiting: dict[int, deque[tuple[Piece, Real]]] = {}  # by layer, the last one first
    for piece, length in pieces_of(layers, policy.piece).items():
        waiting.setdefault(piece.layer, deque()).append((piece, length))
    free = 0  # the link is free from then on
    under_way: list[Real] = []  # when that which was handed over will have been sent
    while waiting:
        under_way = [end for end in under_way if end > now]
        ready = [left[0][0] for k, left in waiting.items() if there[k] <= now]
        chosen = None
        if ready and (policy.credit is None or len(under_way) < policy.credit):
            chosen = choose(ready)
        if chosen is not None:
            _, length = waiting[chosen.layer].popleft()
            if not waiting[chosen.layer]:
                del waiting[chosen.layer]
            start = max(free, now + launch)
            free = start + each + length
            under_way.append(free)
            yield Timed("send", *chosen, start, free, handed=now)
            continue
        later = [*under_way, *(time for time in there if time > now)]
        if not later:
            raise OrderError(
                f"{policy.name}: after {now} nothing more is sent, and "
                f"{sum(map(len, waiting.values()))} pieces wait for ever, "
                f"{[*waiting.values()][0][0][0]} among them"
            )
        now = min(later)


def _forward(
    layers: Sequence[Layer], sent: Sequence[Real], policy: Policy, now: Real
) -> Iterator[Timed]:
    """Update and run each layer when its gradient has been sent, or all have."""
    if policy.wait_for_all:
        sent = [max(sent)] * len(layers)
    ops = [(op, k) for k in range(len(layers)) for op in ("update", "forward")]
    if policy.wait_for_all:  # all updates, then all forwards
        ops.sort(key=lambda one: one[0], reverse=True)
    for op, number in ops:
        start = max(now, sent[number])
        now = start + getattr(layers[number], op)
        yield Timed(op, number, 0, start, now)
