"""A drawing of a pipeline's simulated schedule. Chapters 10 and 11."""

from __future__ import annotations

from fractions import Fraction

from ddp_course import spec, theory
from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.lanes import draw_runs
from ddp_course.lab.draw.pipeline_timeline import (
    idle_share,
    legend_of,
    run_of,
    works_of,
)
from ddp_course.lab.draw.steps import count
from ddp_course.pipeline import SCHEDULES
from ddp_course.pipeline.schedule import Schedule
from ddp_course.pipeline.simulate import Costs, SimulatedSchedule, simulate_schedule

MOST_RANKS, MOST_MICROBATCHES, MOST_STAGES = 8, 16, 4


def schedule_view(
    schedule: Schedule | str = "1f1b",
    ranks: int = 4,
    microbatches: int = 8,
    stages_per_rank: int = 2,
) -> Drawing:
    """Draw when each rank of a pipeline computes what, its bubble and its peak memory.

    `schedule` is a name in `pipeline.SCHEDULES`, with `ranks`, `microbatches` and, for
    "interleaved", `stages_per_rank`; or a `Schedule`, which has its own numbers. F, I
    and W of all stages of a rank take 1 each, so that schedules with different numbers
    of stages are comparable. Raises ValueError for unknown names and numbers that are
    too small or too large to draw, and ScheduleError for a schedule that cannot be
    executed. Chapters 10 and 11.
    """
    formula = ""
    if not isinstance(schedule, Schedule):
        numbers = ranks, microbatches, stages_per_rank
        schedule = named(schedule, *numbers)
        if schedule.name in theory.PIPELINES:
            formula = f" (formula: {formula_of(schedule):.1%})"
    simulated = simulate_schedule(schedule, equal_costs(schedule))
    works, long = works_of(simulated.events), float(simulated.makespan)
    notes = {
        rank: f"waits {idle_share(works, rank):.1%}, keeps {float(peak):.3g}"
        for rank, peak in enumerate(simulated.peak_activations)
    }
    return draw_runs(
        title_of(schedule),
        [run_of(works, long, notes=notes)],
        "time [one microbatch forward on one rank = 1]",
        long,
        legend=legend_of(works),
        says=in_words(simulated, formula),
    )


def named(
    name: str, ranks: int, microbatches: int, stages_per_rank: int = 2
) -> Schedule:
    """Return the schedule with this name. Raises ValueError if it cannot be drawn."""
    if name not in SCHEDULES:
        raise ValueError(
            f"schedule is {name!r}; it can be {', '.join(map(repr, SCHEDULES))}, or a "
            "Schedule"
        )
    count("ranks", ranks, 1, MOST_RANKS)
    count("microbatches", microbatches, 1, MOST_MICROBATCHES)
    count("stages_per_rank", stages_per_rank, 1, MOST_STAGES)
    by_default = spec.SCHEDULES[name].stages_per_rank
    more = {"stages_per_rank": stages_per_rank} if by_default > 1 else {}
    return SCHEDULES[name](ranks, microbatches, **more)


def equal_costs(schedule: Schedule) -> Costs:
    """Return costs with which F, I and W of all stages of a rank take 1 each."""
    each = Fraction(schedule.num_ranks, schedule.num_stages)
    return Costs(F=each, I=each, W=each)


def title_of(schedule: Schedule) -> str:
    """Return the schedule's name, with its numbers of ranks, stages, microbatches."""
    known = spec.SCHEDULES.get(schedule.name)
    name = known.title if known else schedule.name
    p, s, m = schedule.num_ranks, schedule.num_stages, schedule.num_microbatches
    says = f"{p} rank{'s' * (p > 1)}"
    if s != p:
        says += f", {s} stages"
    return f"{name}: {says}, {m} microbatch{'es' * (m > 1)}"


def formula_of(schedule: Schedule) -> float:
    """Return the bubble by the formula of `theory.PIPELINES`, with F = I = W."""
    p, s, m = schedule.num_ranks, schedule.num_stages, schedule.num_microbatches
    return float(theory.pipeline_bubble(schedule.name, p, m, s // p))


def in_words(simulated: SimulatedSchedule, formula: str = "") -> str:
    """Return the simulated time, the bubble and the peak memory in words."""
    most = float(max(simulated.peak_activations))
    return (
        f"takes {float(simulated.makespan):.4g}; bubble {float(simulated.bubble):.1%}"
        f"{formula}; a rank keeps at most {most:.4g} microbatch{'es' * (most != 1)}"
    )
