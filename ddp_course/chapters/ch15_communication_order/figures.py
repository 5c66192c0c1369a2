"""A step in two lanes, in any order of communication; gains over the link's speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from ddp_course.communication_order import (
    FIFO,
    WAIT_FOR_ALL,
    StepEvent,
    TimedStep,
    critical_path,
    priority,
    simulate_step,
)
from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.lanes import Block, Lane, Run, draw_runs
from ddp_course.theory import Layer

LAYERS = (Layer(forward=1, backward=2, send=3),) * 4  # the example of the chapter
LOOKS = {"forward": "F", "backward": "B", "update": "W", "send": "sent"}
LEGEND = {"F": "forward", "B": "backward", "W": "update", "sent": "sends a gradient"}
LANES = {"compute": "computes", "link": "sends", "path": "longest"}
POLICIES = ("wait for all", "forward layer by layer", "priority")


def steps(
    simulated: Mapping[str, TimedStep],
    label: str = "time [any unit]",
    *,
    unit: float = 1.0,
    path: bool = False,
    title: str = "One step: backward, and the next forward",
) -> Drawing:
    """Draw the computing and the sends of steps, below each other on one time axis.

    Numbers are layers. `unit` converts the steps' times to the axis: 1000 for seconds
    to ms. With `path` a third lane shows the critical path. Raises ValueError if
    `simulated` is empty.
    """
    if not simulated:
        raise ValueError("there are no steps; at least one must be drawn")
    runs = []
    for name, one in simulated.items():
        events = {"compute": [], "link": []}
        for event in one.events:
            events[event.lane].append(event)
        if path:
            events["path"] = critical_path(one)
        lanes = [Lane(LANES[lane], 0, _blocks(its, unit), boxed=False)
                 for lane, its in events.items()]  # fmt: skip
        runs.append(Run(lanes, name, f"{float(one.step_time * unit):.4g} in all"))
    long = float(max(one.step_time for one in simulated.values()) * unit)
    return draw_runs(title, runs, label, long, legend=LEGEND, foot="Numbers: layers.")


def _blocks(events: Sequence[StepEvent], unit: float) -> list[Block]:
    """Return a block for each event; join neighbours with the same layer and look."""
    blocks: list[Block] = []
    for event in events:
        start, end = float(event.start * unit), float(event.end * unit)
        if start == end:
            continue
        look, name = LOOKS[event.op], str(event.layer)
        last = blocks[-1] if blocks else None
        if last and (last.look, last.names, last.end) == (look, (name,), start):
            start = blocks.pop().start
        blocks.append(Block(start, end, look, (name,), f"{event.op} {name}"))
    return blocks


def step(
    policy: str = "priority", send: int = 3, piece: int = 1, credit: int = 1
) -> Drawing:
    """Draw a step of four layers that take 1 forward, 2 backward, `send` on the link.

    `policy` is one of POLICIES; "priority" uses `piece` and `credit`. Chapter 15.
    """
    ways = (WAIT_FOR_ALL, FIFO, priority(piece, credit))
    layers = [Layer(1, 2, send)] * len(LAYERS)
    way = dict(zip(POLICIES, ways, strict=True))[policy]
    label = "time [a layer's forward = 1]"
    return steps({policy.capitalize(): simulate_step(layers, way)}, label)


def two_orders() -> Drawing:
    """Draw the order of backward above the best order, without numbers. Chapter 15."""
    layers = [Layer(Fraction(3, 2), 2, 3)] * 3
    two = {
        "As they come, and all waited for": WAIT_FOR_ALL,
        "What is needed first goes first": priority(Fraction(1, 2)),
    }
    simulated = {name: simulate_step(layers, policy) for name, policy in two.items()}
    return steps(simulated, title="One step of three layers, in two orders")


IMAGES = {"15_communication_order.svg": two_orders}
