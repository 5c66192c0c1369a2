"""The order in which gradients are sent, as plain data, and the time of a step.

A simulated step lasts from the start of backward to the end of the next forward. It has
two lanes, and each does one thing at a time:

    compute   backward, last layer first; then, first layer first, update and forward
    link      sends: a gradient as a whole, or piece by piece

A layer's gradient may be sent when its backward has ended, and its parameters may be
updated when all its pieces have been sent. A *policy* chooses the next piece:

    WAIT_FOR_ALL       first come, first served; updates wait for everything: DDP
    FIFO               first come, first served; forward goes on layer by layer
    priority(piece)    the first layers' gradients first, in pieces

A piece that was handed over to the link cannot be called back. So a policy has a
*credit*: how many pieces may be handed over and not yet sent. Without a credit, all
other pieces would be handed over before an urgent one, and priority would equal FIFO.

P3 (Jayarajan et al. 2019, arXiv:1905.03960) cuts and sends by priority, TicTac (Hashemi
et al. 2019, arXiv:1803.03288) fixes an order in advance, ByteScheduler (Peng et al.,
SOSP 2019) has pieces and a credit for any framework, and searches for their sizes.
Chapter 15.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from typing import NamedTuple

from ddp_course.theory import Layer, ready_times

COLUMNS = 90  # the most columns of a printed chart


class OrderError(ValueError):
    """An error: the order cannot be carried out. The text names the first problem."""


class GradientPiece(NamedTuple):
    """Piece number `index` of the gradient of layer `layer`."""

    layer: int
    index: int = 0

    def __str__(self) -> str:
        return f"{self.layer}.{self.index}"


@dataclass(frozen=True)
class StepEvent:
    """An event of a step: the send of a piece, or a layer's op (with piece 0).

    `op` is "backward", "send", "update" or "forward"; `handed` is the time at which a
    piece was handed over to the link.
    """

    op: str
    layer: int
    piece: int
    start: Real
    end: Real
    handed: Real | None = None

    @property
    def lane(self) -> str:
        """The lane: "link" or "compute"."""
        return "link" if self.op == "send" else "compute"

    def __str__(self) -> str:
        what = (
            GradientPiece(self.layer, self.piece) if self.op == "send" else self.layer
        )
        return f"{self.op} {what}"


@dataclass(frozen=True)
class Policy:
    """A rule for the next piece to hand over, and for when layers are updated.

    Attributes:
        name: the name that tables and figures show.
        priority: whether the first layers go first; otherwise first come, first served.
        piece: length of a piece (the last one may be shorter), as time on the link, or
            on ranks in bytes; None sends gradients whole.
        credit: how many pieces may be handed over and not yet sent; None means any
            number. (ByteScheduler counts bytes.)
        wait_for_all: whether updates wait until all gradients have been sent.

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

    def choose(self, ready: Sequence[GradientPiece]) -> GradientPiece | None:
        """Return the piece to send next; None means to wait.

        `ready` has the next piece of each layer that is ready, the last layer first.
        """
        return min(ready) if self.priority else ready[0]


WAIT_FOR_ALL = Policy("wait for all", wait_for_all=True)
FIFO = Policy("fifo")


def priority(piece: Real | None = None, credit: int | None = 1) -> Policy:
    """Return the policy that sends the first layers first, in pieces.

    A credit above 1 hides the time of handing a piece over; None makes it FIFO.
    """
    return Policy("priority", True, piece, credit)


def pieces_of(
    layers: Sequence[Layer], piece: Real | None = None
) -> dict[GradientPiece, Real]:
    """Cut all gradients; return each piece's time on the link, last layer first.

    A gradient that takes no time is one piece, too.
    """
    cut: dict[GradientPiece, Real] = {}
    for number, layer in reversed([*enumerate(layers)]):
        whole, index = layer.send, 0
        while piece is not None and whole > piece:
            cut[GradientPiece(number, index)] = piece
            whole, index = whole - piece, index + 1
        cut[GradientPiece(number, index)] = whole
    return cut


# ---- simulate ------------------------------------------------------------------------


@dataclass(frozen=True)
class TimedStep:
    """A step, simulated or recorded, from backward to the end of the next forward.

    Attributes:
        layers: the layers with their times.
        policy: the rule that chose the pieces.
        each: time on the link that every piece takes in addition to its length.
        events: the events, in the order of their starts.
    """

    layers: tuple[Layer, ...]
    policy: Policy
    each: Real
    events: tuple[StepEvent, ...]

    @property
    def step_time(self) -> Real:
        """The time of the step, which ends with the last forward."""
        return max(event.end for event in self.events)

    @property
    def idle(self) -> Real:
        """The time in which nothing is computed."""
        busy = (e.end - e.start for e in self.events if e.lane == "compute")
        return self.step_time - sum(busy)

    @property
    def order(self) -> tuple[GradientPiece, ...]:
        """The pieces in the order in which they were sent."""
        sends = (event for event in self.events if event.op == "send")
        return tuple(GradientPiece(event.layer, event.piece) for event in sends)

    def __str__(self) -> str:
        """Return a row of text for each lane, with a column for each unit of time."""
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
            width = max(map(len, cells), default=0)  # 0 if no layer takes time
            rows.append(f"{lane:<7} | " + " ".join(c.ljust(width) for c in cells))
        return "\n".join([head, *(row.rstrip() for row in rows)])


def simulate_step(
    layers: Sequence[Layer], policy: Policy, *, each: Real = 0, launch: Real = 0
) -> TimedStep:
    """Return the simulated step in which `policy` chooses the pieces.

    Args:
        layers: the layers in the order of forward.
        policy: the rule that chooses pieces.
        each: time on the link that every piece takes in addition to its length.
        launch: time from handing a piece over to its start on the link; with a credit
            above 1 it overlaps with the sends of earlier pieces.

    Raises OrderError for a policy that never sends one of the pieces.
    """
    check_policy(policy)
    for name, time in (("each", each), ("launch", launch)):
        if not 0 <= time < math.inf:
            must = "it must be a finite number, 0 or more"
            raise ValueError(f"{name} is {time!r}; {must}")
    if not layers:
        raise ValueError("layers is empty; a step needs one Layer or more")
    ready_at = ready_times(layers)
    backward = [
        StepEvent("backward", number, 0, end - layers[number].backward, end)
        for number, end in reversed([*enumerate(ready_at)])
    ]
    sends = list(_sends(layers, policy, each, launch))
    sent = {send.layer: send.end for send in sends}  # layer -> end of its last piece
    forward = _forward(
        layers, [sent[k] for k in range(len(layers))], policy, ready_at[0]
    )
    events = sorted([*backward, *sends, *forward], key=lambda e: (e.start, e.end))
    return TimedStep(tuple(layers), policy, each, tuple(events))


def check_policy(policy: Policy) -> None:
    """Raise ValueError unless `policy` is a Policy."""
    if not isinstance(policy, Policy):
        must = "it must be a Policy, such as priority(), FIFO or WAIT_FOR_ALL"
        raise ValueError(f"policy is {policy!r}; {must}")


def _sends(
    layers: Sequence[Layer],
    policy: Policy,
    each: Real,
    launch: Real,
) -> Iterator[StepEvent]:
    """Yield the sends: hand the chosen piece over if the credit allows; else wait."""
    ready_at, now = ready_times(layers), 0
    waiting: dict[int, deque[tuple[GradientPiece, Real]]] = {}  # layer -> its pieces
    for piece, length in pieces_of(layers, policy.piece).items():
        waiting.setdefault(piece.layer, deque()).append((piece, length))
    free = 0  # time at which the link becomes free
    under_way: list[Real] = []  # end times of pieces that were handed over
    while waiting:
        under_way = [end for end in under_way if end > now]
        ready = [left[0][0] for k, left in waiting.items() if ready_at[k] <= now]
        chosen = None
        if ready and (policy.credit is None or len(under_way) < policy.credit):
            chosen = policy.choose(ready)
        if chosen is not None:
            _, length = waiting[chosen.layer].popleft()
            if not waiting[chosen.layer]:
                del waiting[chosen.layer]
            start = max(free, now + launch)
            free = start + each + length
            under_way.append(free)
            yield StepEvent("send", *chosen, start, free, handed=now)
            continue
        later = [*under_way, *(time for time in ready_at if time > now)]
        if not later:
            count = sum(map(len, waiting.values()))
            others = f", as do {count - 1} more" if count > 1 else ""
            first = next(iter(waiting.values()))[0][0]
            raise OrderError(
                f"{policy.name}: after time {now} nothing is sent; piece {first.index} "
                f"of layer {first.layer} waits for ever{others}"
            )
        now = min(later)


def _forward(
    layers: Sequence[Layer], sent: Sequence[Real], policy: Policy, now: Real
) -> Iterator[StepEvent]:
    """Yield updates and forwards: a layer waits for its gradient, or for all."""
    if policy.wait_for_all:
        sent = [max(sent)] * len(layers)
    ops = [(op, k) for k in range(len(layers)) for op in ("update", "forward")]
    if policy.wait_for_all:  # all updates, then all forwards
        ops.sort(key=lambda one: one[0], reverse=True)
    for op, number in ops:
        start = max(now, sent[number])
        now = start + getattr(layers[number], op)
        yield StepEvent(op, number, 0, start, now)
