"""A figure of the memory recorded in a training step, by kind. Chapter 06."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddp_course.lab.draw.kinds import KIND_LOOKS, kinds_among
from ddp_course.lab.draw.plots import Drawn, canvas, plot
from ddp_course.lab.palette import INK, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# From the bottom: first the kinds that stay for the whole step.
STACK = (
    "parameters", "optimizer states", "gradients", "communication buffers", "other",
    "activations",
)  # fmt: skip
PHASES = ("forward", "backward", "step")
Moments = Sequence[tuple[float, Mapping[str, float], Any]]


@plot
def plot_memory(logs: Any, events: Any = ()) -> Drawn:
    """Draw the memory that was recorded in a step, by kind, and mark the peak.

    `logs` is a `measure.MemoryLog` or its `moments`, or up to three of either by name,
    which are drawn below each other with the same axes: against the number of the
    moment, not the time, so that the same step always gives the same picture. `events`
    are the `measure.Event`s of the step, or {name: events}: lines above the plot span
    the events named forward, backward and step. Raises ValueError if nothing was
    recorded, or for names that do not match. Chapter 06.
    """
    runs = _by_name(logs)
    spans = events if isinstance(events, Mapping) else dict.fromkeys(runs, events)
    spans = {name: list(getattr(of, "events", of)) for name, of in spans.items()}
    _check_runs(runs, spans)
    kinds = kinds_among(ledger for run in runs.values() for _, ledger, _ in run)
    kinds = [kind for kind in STACK if kind in kinds]
    top = max(total_of(ledger) for run in runs.values() for _, ledger, _ in run)
    unit, size = unit_of(top)
    alone = len(runs) == 1
    inches = (8.5, 3.8) if alone else (7.5, 0.8 + 2.9 * len(runs))
    figure, panels = canvas(inches, nrows=len(runs), sharey=True, squeeze=False)
    for axes, (name, run) in zip(panels[:, 0], runs.items(), strict=True):
        _draw_moments(axes, run, kinds, size)
        axes.set_xlim(0, max(1, len(run) - 1))
        _draw_peak(axes, run, unit, size)
        _mark_phases(axes, run, spans[name])
        if name:
            axes.set_title(name, fontsize=11, pad=22, fontweight="bold")
        axes.set_xlabel("moment recorded")
        axes.set_ylabel(f"memory [{unit}]")
        axes.set_ylim(0, 1.16 * top / size)
    place = "outside right upper" if alone else "outside lower center"
    figure.legend(*samples_of(kinds[::-1]), loc=place, ncols=1 if alone else 3)
    words = [_in_words(name, run, kinds, unit, size) for name, run in runs.items()]
    return figure, f"Memory by kind over a training step. {' '.join(words)}"


def _in_words(
    name: str, run: Moments, kinds: Sequence[str], unit: str, size: float
) -> str:
    """Return the alternative text: the bytes at the peak, by kind."""
    _, peak, _ = max(run, key=lambda moment: total_of(moment[1]))
    parts = [f"{k} {peak[k] / size:.3g}" for k in kinds if peak.get(k, 0)]
    head = f"{name}: at" if name else "At"
    return f"{head} most {total_of(peak) / size:.3g} {unit}: {', '.join(parts)}."


def _by_name(logs: Any) -> dict[str, Moments]:
    named = logs if isinstance(logs, Mapping) else {"": logs}
    return {
        name: list(getattr(log, "moments", log))  # a log, or its moments
        for name, log in named.items()
    }


def _check_runs(
    runs: Mapping[str, Moments], spans: Mapping[str, Sequence[Any]]
) -> None:
    if not 1 <= len(runs) <= 3:
        raise ValueError(f"there are {len(runs)} logs; 1 to 3 can be drawn")
    if set(spans) != set(runs):
        raise ValueError(
            f"logs have the names {sorted(runs)}, and events {sorted(spans)}; they "
            "must be the same"
        )
    for name, run in runs.items():
        if not any(total_of(ledger) for _, ledger, _ in run):
            raise ValueError(
                f"the log {name!r} has no moment with any memory; record a step"
            )


def total_of(ledger: Mapping[str, float]) -> float:
    """Return the bytes of all kinds."""
    return sum(ledger[kind] for kind in ledger)


def unit_of(nbytes: float) -> tuple[str, float]:
    """Return the binary unit that suits a number of bytes, and its size."""
    power = min(3, max(0, int(math.log2(max(nbytes, 1)) // 10)))
    return ("B", "KiB", "MiB", "GiB")[power], 1024.0**power


def _draw_moments(axes: Axes, run: Moments, kinds: Sequence[str], size: float) -> None:
    """Draw a stepped area for each kind: constant between two moments."""
    xs, low = range(len(run)), [0.0] * len(run)
    for kind in kinds:
        has = [ledger.get(kind, 0) / size for _, ledger, _ in run]
        high = [a + b for a, b in zip(low, has, strict=True)]
        axes.fill_between(
            xs, low, high, step="post", linewidth=0.6, **KIND_LOOKS[kind].bar
        )
        low = high
    axes.step(xs, low, where="post", color=INK, linewidth=1.2)
    axes.tick_params(labelleft=True)


def _draw_peak(axes: Axes, run: Moments, unit: str, size: float) -> None:
    """Draw a line at the highest total, with its number."""
    x = max(range(len(run)), key=lambda k: total_of(run[k][1]))
    peak = total_of(run[x][1]) / size
    axes.axhline(peak, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.plot([x], [peak], "v", color=INK, markersize=7, zorder=5)
    left, right = axes.get_xlim()
    far = x < (left + right) / 2  # write the number on the other side of the mark
    look = {"textcoords": "offset points", "ha": "right" if far else "left"}
    axes.annotate(f"peak {peak:.3g} {unit}", (right if far else left, peak),
                  xytext=(-4 if far else 4, 4), fontsize=10, fontweight="bold",
                  **look)  # fmt: skip


def _mark_phases(axes: Axes, run: Moments, events: Iterable[Any]) -> None:
    """Name the phases of the step above the picture, with thin lines between them.

    A phase spans its first to its last moment.
    """
    left, right = axes.get_xlim()
    for phase in PHASES:
        named = [event for event in events if event.op == phase]  # several microbatches
        if not named:
            continue
        start, end = min(e.start for e in named), max(e.end for e in named)
        inside = [k for k, (time, *_) in enumerate(run) if start <= time <= end]
        if len(inside) < 2:
            continue
        a, b = inside[0], inside[-1]
        for x in (a, b):
            axes.axvline(x, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
        across = axes.get_xaxis_transform()
        axes.plot([a, b], [1.02] * 2, color=INK, linewidth=2, transform=across,
                  clip_on=False)  # fmt: skip
        if (b - a) / (right - left) > 0.02 * len(phase):
            axes.annotate(phase, ((a + b) / 2, 1.02), xycoords=across, ha="center",
                          xytext=(0, 4), textcoords="offset points")  # fmt: skip


def samples_of(kinds: Iterable[str]) -> tuple[list[Any], list[str]]:
    """Return samples of kinds for a legend, and their names."""
    from matplotlib.patches import Patch

    kinds = list(kinds)
    return [Patch(linewidth=0.8, **KIND_LOOKS[kind].bar) for kind in kinds], kinds
