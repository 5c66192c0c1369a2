"""Closed forms for a pipeline's time, bubble, activations and bytes.

Symbols: p ranks, m microbatches, v stages on each rank. For one microbatch a rank needs
the time F for forward, I for the gradients of the inputs and W for those of the
weights; B = I + W. All ranks are equally fast, and messages take no time.

    schedule     time                                  activations on rank r
    naive        m p (F+B)                             1
    gpipe        (m+p-1) (F+B)                         m
    1f1b         (m+p-1) (F+B)                         min(m, p-r)
    interleaved  (m + (p-1)/v) (F+B)                   min(m, ((v-1)p+2(p-1-r)+1)/v)
    zero_bubble  m (F+B) + (p-1) (F+I-W)               p-r, and r more that wait for W

Each rank works for m (F+B); the rest of the time is the bubble. The last two rows are
for m >= p, the activations of interleaved for m a multiple of p, and zero_bubble is for
v = 1; the functions cover the other cases. Explained in chapters 10 and 11.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational, Real

from ddp_course.spec import SCHEDULES
from ddp_course.theory.checks import check_choice

# A new schedule needs no closed form; `simulate_schedule` handles any.
PIPELINES = tuple(name for name, each in SCHEDULES.items() if each.closed_form)
STAGES_PER_RANK = {  # by default; other schedules always have one
    name: each.stages_per_rank for name, each in SCHEDULES.items() if each.any_stages
}


def pipeline_time(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    *,
    F: Real = 1,
    I: Real = 1,  # noqa: E741
    W: Real = 1,
) -> Real:
    """Return the time of a step, from the first action to the last.

    It is exact, except for zero_bubble with W above F or I, where it is a lower bound.
    (The matrices of a transformer take equally long in F, I and W; attention takes no
    time in W.) With fewer microbatches than ranks, interleaved takes
    (p + (m-1)/v) (F+B), and zero_bubble (m+p-1) (F+I) + W if v = 1; for v > 1 there is
    no formula.

    Args:
        schedule: one of PIPELINES.
        num_ranks: p.
        num_microbatches: m.
        stages_per_rank: v, of interleaved (by default 2) and zero_bubble (1) only.
        F: forward of one microbatch, all stages of a rank together; in any unit.
        I: the gradient of the inputs; add F if activations are computed a second time.
        W: the gradients of the weights.

    Raises ValueError for a value that is not allowed here. Sources: Huang et al. 2019
    (GPipe); Narayanan et al. 2021, arXiv:2104.04473, section 2.2; Qi et al. 2024,
    arXiv:2401.10241, section 2; each checked by simulation. Chapters 10 and 11.
    """
    p, m = num_ranks, num_microbatches
    v = _stages(schedule, stages_per_rank)
    whole = F + I + W
    if schedule == "naive":
        return m * p * whole
    if schedule == "interleaved":
        filled = m + Fraction(p - 1, v) if m >= p else p + Fraction(m - 1, v)
        return filled * whole
    if schedule == "zero_bubble":
        if m >= p:
            return m * whole + Fraction(p - 1, v) * (F + I - W)
        if v > 1:
            raise ValueError(
                f"num_microbatches is {m}; with {v} stages on each of {p} ranks the "
                f"formula needs {p} or more; use ddp_course.pipeline.simulate_schedule"
            )
        return (m + p - 1) * (F + I) + W
    return (m + p - 1) * whole


def pipeline_bubble(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    **times: Real,
) -> Real:
    """Return the share of the time in which a rank waits: 1 - m (F+B) / time.

    (p-1)/p for naive, (p-1)/(m+p-1) for gpipe and 1f1b, and (p-1)/v / (m + (p-1)/v) for
    interleaved, for any F, I and W; only zero_bubble depends on them. The share is the
    same on all ranks. Arguments and errors are those of `pipeline_time`; also raises
    ValueError if all three times are 0. Chapters 10 and 11.
    """
    m = num_microbatches
    whole = pipeline_time(schedule, num_ranks, m, stages_per_rank, **times)
    if not whole:
        raise ValueError("F, I and W are all 0; at least one must be above 0")
    idle = whole - pipeline_time("naive", 1, m, **times)  # a single rank never waits
    return Fraction(idle) / whole if isinstance(whole, Rational) else idle / whole


def pipeline_activations(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    rank: int = 0,
    stages_per_rank: int | None = None,
) -> Fraction:
    """Return the most activations that `rank` keeps at a time, in microbatches.

    The unit is the activations of one microbatch in all stages of the rank, which
    zero_bubble keeps until W. Interleaved microbatches are processed in groups of p, or
    of up to 2p - 1 if p does not divide m; the largest group determines the peak.

    Raises ValueError as `pipeline_time`, and for a rank outside 0 to p - 1. Sources:
    Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.3; Qi et al. 2024, section 2.
    Chapter 11.
    """
    p, m = num_ranks, num_microbatches
    v = _stages(schedule, stages_per_rank)
    if rank not in range(p):
        raise ValueError(f"rank is {rank!r}; it can be 0 to {p - 1}")
    if schedule == "naive":
        return Fraction(1)
    if schedule == "gpipe":
        return Fraction(m)
    if schedule == "1f1b":
        return Fraction(min(m, p - rank))
    group = -(-m // max(1, m // p))  # the largest group
    hops = 2 * (p - 1 - rank) if schedule == "interleaved" else p - 1 - rank
    in_flight = min(m * v, (v - 1) * group + hops + 1)  # counted per stage
    if schedule == "interleaved":
        return Fraction(in_flight, v)
    behind = min(m * v - in_flight, rank)
    return Fraction(in_flight + behind, v)


@dataclass(frozen=True)
class PipelineVolume:
    """The messages over all boundaries between stages in one step, from all ranks.

    Attributes:
        messages: the number of messages, forward and backward.
        activations: bytes that forward sends.
        gradients: bytes that backward sends.
    """

    messages: int
    activations: int
    gradients: int

    @property
    def total(self) -> int:
        """The bytes of activations and gradients."""
        return self.activations + self.gradients


def pipeline_volume(
    num_stages: int,
    num_microbatches: int,
    batch: int,
    sequence: int,
    hidden: int,
    itemsize: int = 4,
) -> PipelineVolume:
    """Return the messages of one step between `num_stages` stages.

    Neighbouring stages must be on different ranks. Over each of the num_stages - 1
    boundaries, an activation of `batch` rows, `sequence` tokens and `hidden` channels
    of `itemsize` bytes is sent, and its gradient, each in `num_microbatches` messages.
    More microbatches are more messages, but not more bytes. Two stages on each of p
    ranks instead of one send (2p-1)/(p-1) times as many of both. Raises ValueError for
    more microbatches than rows. Source: Narayanan et al. 2021, arXiv:2104.04473,
    section 2.2. Chapter 10.
    """
    if num_microbatches > batch:
        raise ValueError(
            f"num_microbatches is {num_microbatches} and batch {batch}; each "
            f"microbatch needs a row, so it can be at most {batch}"
        )
    boundaries = num_stages - 1
    nbytes = boundaries * batch * sequence * hidden * itemsize
    return PipelineVolume(2 * boundaries * num_microbatches, nbytes, nbytes)


def _stages(schedule: str, v: int | None) -> int:
    """Check the schedule and v; return v, or the schedule's default."""
    check_choice("schedule", schedule, PIPELINES)
    if v is None:
        return STAGES_PER_RANK.get(schedule, 1)
    if v > 1 and schedule not in STAGES_PER_RANK:
        raise ValueError(
            f"stages_per_rank is {v}; with schedule {schedule!r} it must be 1"
        )
    return v
