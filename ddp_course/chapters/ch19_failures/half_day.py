"""The opening picture: half a day of one training run, saved at three intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.palette import INK, MUTED, WHOLE

HOURS = 12
DEVICE_HOURS = 50_700  # H100 hours from one interruption of Llama 3 to the next
RESTART = 10.0  # minutes from a failure until work goes on
LEFT, WIDTH, BAR, ROW = 104, 540, 30, 52
Piece = tuple[str, float, float]  # kind; start and end, in minutes


def failures(gpus: int, seed: int) -> list[float]:
    """Sample the minutes at which one of the GPUs fails, at a constant rate."""
    dice, clock, found = Random(seed), 0.0, []
    while (clock := clock + dice.expovariate(gpus / (60 * DEVICE_HOURS))) < 60 * HOURS:
        found.append(clock)
    return found


def pieces(every: float, save: float, failed: Sequence[float]) -> Iterator[Piece]:
    """Yield the pieces of a training run: work kept, saves, work lost, and restarts.

    Work counts as kept if the save after it is completed, or if no failure follows it.
    """
    clock = 0.0
    for end in (*failed, 60.0 * HOURS):
        while clock + every + save <= end:
            yield "kept", clock, clock + every
            yield "save", clock + every, clock + every + save
            clock += every + save
        if end > clock:  # otherwise a GPU fails again during the restart
            yield ("kept" if end == 60 * HOURS else "lost"), clock, end
        clock = min(end + RESTART, 60.0 * HOURS)
        yield "restart", end, clock


def half_day(
    gpus: int = 8192,
    save: float = 4.0,
    every: Sequence[float] = (10, 40, 160),
    seed: int = 9,
) -> Drawing:
    """Draw 12 hours of a training run that is saved after every `every` minutes.

    A save stops all GPUs for `save` minutes. All rows have the same failures. Chapter
    19.
    """
    failed = failures(gpus, seed)
    several = len(failed) != 1
    rows = {minutes: list(pieces(minutes, save, failed)) for minutes in every}
    kept = {m: sum(b - a for kind, a, b in row if kind == "kept") / (60 * HOURS)
            for m, row in rows.items()}  # fmt: skip
    words = "; ".join(f"{m:g} min: {share:.0%} kept" for m, share in kept.items())
    d = Drawing(
        LEFT + WIDTH + 66,
        90 + ROW * len(rows),
        title=f"12 hours of {gpus:,} GPUs, {len(failed)} failure{'s' * several}",
        description=f"Kept work, saves, lost work, restarts. Saved every {words}.",
    )
    d.text(12, 24, d.title, size=15, bold=True, anchor="start")
    d.text(
        12, 46, "grey: work that is kept, black: saves, hatched: work that is lost, "
        "white: restarts", size=12, anchor="start", fill=MUTED,
    )  # fmt: skip
    scale = WIDTH / (60 * HOURS)
    for k, (minutes, row) in enumerate(rows.items()):
        y = 64 + k * ROW
        d.text(LEFT - 10, y + 20, f"every {minutes:g} min", size=12, anchor="end")
        d.rect(LEFT, y, WIDTH, BAR, fill="#FFFFFF", stroke=INK)
        for kind, start, end in row:
            box = LEFT + start * scale, y, (end - start) * scale, BAR
            if kind == "lost":
                d.hatch(*box)
            elif kind != "restart":
                d.rect(*box, fill=WHOLE if kind == "kept" else INK, stroke="none")
        d.text(LEFT + WIDTH + 10, y + 20, f"{kept[minutes]:.0%}", anchor="start")
    bottom = 64 + ROW * len(rows)
    for minute in failed:
        x = LEFT + minute * scale
        d.line((x, 58), (x, bottom - 12), stroke_width=2)
    for hour in range(0, HOURS + 1, 3):
        x = LEFT + 60 * hour * scale
        d.text(x, bottom + 8, f"{hour} h", size=12, fill=MUTED)
    return d
