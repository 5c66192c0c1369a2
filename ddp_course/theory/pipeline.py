"""What a pipeline costs: time, bubble, activations and bytes, as closed forms.

Symbols: p ranks, m microbatches, v stages on each rank; F, I and W are the times that a
rank needs for one microbatch, for forward and for the gradients of the inputs and of
the weights, and B = I + W. All ranks are alike and messages take no time.

    schedule     time                                  activations on rank r
    naive        m p (F+B)                             1
    gpipe        (m+p-1) (F+B)                         m
    1f1b         (m+p-1) (F+B)                         min(m, p-r)
    interleaved  (m + (p-1)/v) (F+B)                   min(m, ((v-1)p+2(p-1-r)+1)/v)
    zero_bubble  m (F+B) + (p-1) (F+I-W)               p-r, and what W needs of r more

Work takes m (F+B) of the time on each rank; the rest is the bubble. The last two rows
are for m >= p, the activations of interleaved for m a multiple of p, and zero_bubble
is written for v = 1; see the functions for the rest. Explained in chapters 10 and 11.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational, Real

from ddp_course.spec import SCHEDULES
from ddp_course.theory.checks import check_choice

# A new schedule needs no closed form, as `simulate_schedule` counts.
PIPELINES = tuple(name for name, each in SCHEDULES.items() if each.closed_form)
STAGES_PER_RANK = {  # the others always have one
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
    """Return how long a step takes, from the first action to the last.

    Exact, but for zero_bubble with W above F or I: then it is a lower bound. (The
    matrices of a transformer take equally long in F, I and W, and attention none in W.)
    With fewer microbatches than ranks, interleaved takes (p + (m-1)/v) (F+B), and
    zero_bubble (m+p-1) (F+I) + W if v = 1; if v > 1, only simulation tells.

    Args:
        schedule: one of PIPELINES.
        num_ranks: p.
        num_microbatches: m.
        stages_per_rank: v, of interleaved (by default 2) and zero_bubble (1) only.
        F: forward of one microbatch, all stages of a rank together; in any unit.
        I: the gradient of the inputs; add F if activations are computed a second time.
        W: the gradients of the weights.

    Raises ValueError for a value outside of this. Sources: Huang et al. 2019 (GPipe);
    Narayanan et al. 2021, arXiv:2104.04473, section 2.2; Qi et al. 2024,
    arXiv:2401.10241, section 2; each checked by simulation. Chapters 10 and 11.
    """
    p, m = num_ranks, num_microbatches
    v = _checked(schedule, p, m, stages_per_rank)
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
                f"num_microbatches is {m}; with {v} stages on each of {p} ranks there "
                f"is a formula from {p} on; use ddp_course.pipeline.simulate"
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

    (p-1)/p for naive, (p-1)/(m+p-1) for gpipe and 1f1b, (p-1)/v / (m + (p-1)/v) for
    interleaved, whatever F, I and W are: they matter for zero_bubble alone. The same on
    all ranks. Arguments and errors as `pipeline_time`, and ValueError if all three
    times are 0. Chapters 10 and 11.
    """
    m = num_microbatches
    whole = pipeline_time(schedule, num_ranks, m, stages_per_rank, **times)
    if not whole:
        raise ValueError("F, I and W are all 0; one at least must take time")
    idle = whole - pipeline_time("naive", 1, m, **times)  # who is alone never waits
    return Fraction(idle) / whole if isinstance(whole, Rational) else idle / whole


def pipeline_activations(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    rank: int = 0,
    stages_per_rank: int | None = None,
) -> Fraction:
    """Return the most activations that `rank` keeps at a time, in microbatches.

    One microbatch is all that the stages of the rank keep for it, in zero_bubble until
    W has used it. Interleaved microbatches go in groups of p, or of up to 2p - 1 if p
    does not divide m: the largest group counts.

    Raises ValueError as `pipeline_time`, and for another rank. Sources: Korthikanti et
    al. 2022, arXiv:2205.05198, section 4.2.3; Qi et al. 2024, section 2. Chapter 11.
    """
    p, m = num_ranks, num_microbatches
    v = _checked(schedule, p, m, stages_per_rank)
    if rank not in range(p):
        raise ValueError(f"rank is {rank!r}; it can be 0 to {p - 1}")
    if schedule == "naive":
        return Fraction(1)
    if schedule == "gpipe":
        return Fraction(m)
    if schedule == "1f1b":
        return Fraction(min(m, p - rank))
    group = -(-m // max(1, m // p))  # the largest: rounded up
    hops = 2 * (p - 1 - rank) if schedule == "interleaved" else p - 1 - rank
    in_flight = min(m * v, (v - 1) * group + hops + 1)  # of single stages
    if schedule == "interleaved":
        return Fraction(in_flight, v)
    behind = min(m * v - in_flight, rank)
    return Fraction(in_flight + behind, v)


@dataclass(frozen=True)
class PipelineVolume:
    """What passes all boundaries between stages in one step, on all ranks together.

    Attributes:
        messages: of both kinds.
        activations: bytes, forward.
        gradients: bytes, backward.
    """

    messages: int
    activations: int
    gradients: int

    @property
    def total(self) -> int:
        """Bytes of both kinds."""
        return self.activations + self.gradients


def pipeline_volume(
    num_stages: int,
    num_microbatches: int,
    batch: int,
    sequence: int,
    hidden: int,
    itemsize: int = 4,
) -> PipelineVolume:
    """Return what `num_stages` stages, neighbours on different ranks, send in one step.

    At each of the boundaries, num_stages - 1, an activation of `batch` rows in all, of
    `sequence` tokens and `hidden` channels of `itemsize` bytes, and its gradient, both
    in `num_microbatches` messages: more microbatches are more messages, but no more
    bytes. Two stages on each of p ranks instead of one: (2p-1)/(p-1) times as many of
    both. Raises ValueError for more microbatches than rows. Source:
    Narayanan et al. 2021, arXiv:2104.04473, section 2.2. Chapter 10.
    """
    if num_microbatches > batch:
        raise ValueError(
            f"num_microbatches is {num_microbatches}; batch is {batch}, and each "
            "microbatch needs a row"
        )
    boundaries = num_stages - 1
    nbytes = boundaries * batch * sequence * hidden * itemsize
    return PipelineVolume(2 * boundaries * num_microbatches, nbytes, nbytes)


def _checked(schedule: str, p: int, m: int, v: int | None) -> int:
    """Check what all formulas ask for; return v."""
    check_choice("schedule", schedule, PIPELINES)
    if v is None:
        return STAGES_PER_RANK.get(schedule, 1)
    if v > 1 and schedule not in STAGES_PER_RANK:
        raise ValueError(
            f"stages_per_rank is {v}; with schedule {schedule!r} each rank has 1 stage"
        )
    return v
