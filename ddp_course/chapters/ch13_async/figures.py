"""Timelines of four ways to train, and curves of measured losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.lanes import Block, Lane, Run, draw_runs
from ddp_course.lab.draw.plots import GRID, LOOKS, Drawn, canvas, plot
from ddp_course.parameter_server import (
    ASYNCHRONOUS,
    SYNCHRONOUS,
    Record,
    backup,
    bounded,
    simulate_run,
)

Points = Sequence[tuple[float, float]]
LEGEND = {"F": "computes a gradient", "W": "its gradient is dropped", "waits": "waits"}
WORKERS = 3  # ranks 1 to 3: rank 0 has the weights
LONG = 12  # length of the time axis, in gradients of a fast worker
MODES = {
    "synchronous": lambda slack: SYNCHRONOUS,
    "asynchronous": lambda slack: ASYNCHRONOUS,
    "bounded": bounded,
    "backup": backup,
}


def two_ways() -> Drawing:
    """Draw synchronous and asynchronous workers, one twice as slow. Chapter 13."""
    return _simulated(["synchronous", "asynchronous"], slow=2)


def waiting(mode: str = "bounded", slow: int = 4, slack: int = 1) -> Drawing:
    """Draw three workers; the last one takes `slow` times as long as the others.

    `mode` is "synchronous", "asynchronous", "bounded" (`slack` clocks ahead at most) or
    "backup" (`slack` gradients are not waited for). Chapter 13.
    """
    return _simulated([mode], slow, slack)


def _simulated(modes: Sequence[str], slow: int, slack: int = 1) -> Drawing:
    seconds = [1] * (WORKERS - 1) + [slow]
    records = {
        mode.capitalize(): simulate_run(MODES[mode](slack), seconds, 3 * LONG)
        for mode in modes
    }
    title = f"{WORKERS} workers; the last needs {slow} times as long as the others"
    title = title if slow > 1 else f"{WORKERS} workers, equally fast"
    label = "time [a gradient of a fast worker = 1]"
    return timelines(records, LONG, label, title=title)


def timelines(
    records: Mapping[str, Record],
    long: float,
    label: str = "time [ms]",
    *,
    unit: float = 1.0,
    title: str = "What each worker did",
) -> Drawing:
    """Draw the workers' events up to time `long`; `records` maps a title to a record.

    `unit` converts a record's seconds to the axis: 1000 for ms. A worker computes from
    a pull to the push that follows, and then waits until the next pull.
    """
    runs = []
    for name, record in records.items():
        steps = sum(step.seconds * unit <= long for step in record.select("step"))
        workers = sorted({event.worker for event in record.select("pull")})
        lanes = [_lane(record, worker, long, unit) for worker in workers]
        runs.append(Run(lanes, name, f"{steps} updates by {long:g}"))
    return draw_runs(title, runs, label, long, legend=LEGEND)


def _lane(record: Record, worker: int, long: float, unit: float) -> Lane:
    events = [event for event in record.events if event.worker == worker]
    start = record.select("pull")[0].seconds
    blocks, now, began = [], 0.0, 0.0
    for event in events:
        at = min((event.seconds - start) * unit, long)
        if event.kind == "pull":
            if at > now:
                blocks.append(Block(now, at, "waits", ("waits",)))
            began = at
        elif event.kind in ("push", "drop"):
            look = "F" if event.kind == "push" else "W"
            names = (f"{event.clock}",) if look == "F" else ("dropped",)
            blocks.append(Block(began, at, look, names))
            now = at
    return Lane(f"rank {worker}", worker, [b for b in blocks if b.start < long])


@plot
def twice(
    losses: Mapping[str, Sequence[tuple[int, float, float]]],
) -> Drawn:
    """Draw losses over updates, and the same losses over time beside them.

    Each run is a list of (updates so far, time so far, loss); the unit of time is a
    fast worker's gradient. Raises ValueError unless there are one to four runs.
    """
    if not 1 <= len(losses) <= len(LOOKS):
        raise ValueError(f"{len(losses)} runs; 1 to {len(LOOKS)} can be told apart")
    figure, both = canvas((7.2, 3.4), ncols=2, sharey=True)
    texts = []
    for look, (name, points) in zip(LOOKS, losses.items(), strict=False):
        updates, times, values = zip(*points, strict=True)
        for axes, x in zip(both, (updates, times), strict=True):
            axes.plot(x, values, label=name, **look)
        texts.append(
            f"{name}: {values[-1]:.2f} after {updates[-1]} updates, at {times[-1]:g}"
        )
    both[0].set(xlabel="updates of the weights", ylabel="loss [nats per character]")
    both[1].set(xlabel="time [a gradient of a fast worker = 1]")
    for axes in both:
        axes.grid(axis="y", **GRID)
    both[0].legend(handlelength=3)
    return figure, f"The loss over updates, and over time. {'; '.join(texts)}."


IMAGES = {"13_async.svg": two_ways}
