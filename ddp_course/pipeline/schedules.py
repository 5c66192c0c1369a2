"""More schedules: several stages on each rank, backward in two halves, your own.

They follow the same rule as those in `schedule`, with v stages on each rank: rank r has
stages r, r + p, r + 2p, ... For m a multiple of p, and for zero_bubble with equal times
of F, I and W and v = 1,

    schedule     limit on rank r          bubble / whole time          activations kept
    interleaved  (v-1)p + 2(p-1-r) + 1    (p-1)/v / (m + (p-1)/v)      min(m, limit/v)
    zero_bubble  p-r, W later             (p-1)/3 / (m + (p-1)/3)      p, or less

To add a schedule, write a function here and an entry in `SCHEDULES`, its title in
`spec.py`, its order in `tests/pipeline/test_schedules.py`, and a cell in chapter 11.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from ddp_course.pipeline.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    at_most,
    check_counts,
)


def interleaved(
    num_ranks: int, num_microbatches: int, stages_per_rank: int = 2
) -> Schedule:
    """Return 1F1B with v smaller stages on each rank instead of a large one.

    Stage s is on rank s % p, so a microbatch passes each rank v times, and filling the
    pipeline takes 1/v of the time. The bubble is (p-1)/v / (m + (p-1)/v), at the cost
    of (pv-1)/(p-1) times as many messages. Microbatches form groups of at least p: a
    whole group passes one stage of a rank before its first microbatch reaches the
    rank's next stage. In the warm-up, rank r runs the first group's forwards in v-1
    stages, and in its last stage 2(p-1-r) forwards, as in Megatron-LM: 1F1B's p-1-r
    would give the same bubble, in less memory, if messages took no time. The limit in
    flight is one more than these forwards. With two groups of p or more, rank 0 stores
    the activations of p(1 + (p-1)/(pv)) microbatches; with 1F1B, of p. (With v = 1,
    rank 0 stores those of 2p - 1.)

    By default, Megatron-LM requires a multiple of p microbatches; PyTorch requires
    groups of one size. Here groups have p to 2p - 1 microbatches, so every number of
    microbatches is legal, and from p microbatches on the bubble is that of the formula;
    larger groups need more memory.

    Raises ValueError for fewer than one rank, microbatch or stage. Source: Narayanan et
    al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", arXiv:2104.04473, section 2.2; Korthikanti et al. 2022,
    arXiv:2205.05198, section 4.2.3; PyTorch's ScheduleInterleaved1F1B. Chapter 11.
    """
    p, m, v = num_ranks, num_microbatches, stages_per_rank
    return _in_turns("interleaved", p, m, v, "B", lambda r: 2 * (p - 1 - r) + 1)


def zero_bubble(
    num_ranks: int, num_microbatches: int, stages_per_rank: int = 1
) -> Schedule:
    """Return ZB-H1: 1F1B with the weights' gradients computed where ranks would wait.

    The previous rank waits only for I, the gradient of the input. W, the gradients of
    the weights, can run at any later time: rank r postpones r of them, and runs them at
    the end, when 1F1B would idle. The idle time is (p-1)(F+I-W) instead of
    (p-1)(F+I+W). Rank r stores the activations of p-r microbatches, as with 1F1B, and
    those that its r postponed W need: of at most p microbatches in all.

    With v stages on each rank it is interleaved, too: the bubble is 1/v of that, with
    as many messages as interleaved, and no more memory than for v = 1 if p divides m.
    Raises ValueError for fewer than one rank, microbatch or stage. Source: Qi et al.
    2024, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section 2; PyTorch's
    ScheduleInterleavedZeroBubble. Chapter 11.
    """
    p, m, v = num_ranks, num_microbatches, stages_per_rank
    halves = _in_turns("zero_bubble", p, m, v, "I", lambda r: p - r)
    rows = [weights_behind(row, r) for r, row in enumerate(halves.ranks)]
    return replace(halves, ranks=rows)


SCHEDULES.update(interleaved=interleaved, zero_bubble=zero_bubble)


def _in_turns(
    name: str, p: int, m: int, v: int, backward: str, ahead: Callable[[int], int]
) -> Schedule:
    """Build a schedule with v stages on each rank.

    At most `ahead(r)` microbatches are in flight in the last stage of rank r. The m
    microbatches form groups of at least p, as equal as possible.
    """
    check_counts(stages_per_rank=v, num_ranks=p, num_microbatches=m)
    count = max(1, m // p)
    sizes = [m // count + (group < m % count) for group in range(count)]
    rows = []
    for rank in range(p):
        own = range(rank, p * v, p)
        limit = (v - 1) * sizes[0] + ahead(rank)
        forwards = _in_groups("F", own, sizes)
        rows.append(at_most(limit, forwards, _in_groups(backward, own[::-1], sizes)))
    return Schedule(name, p * v, m, rows)


def _in_groups(op: str, stages: Sequence[int], sizes: Sequence[int]) -> list[Action]:
    """Return an action per microbatch and stage: group by group, stage by stage."""
    starts = [0, *accumulate(sizes)]
    return [
        Action(op, stage, microbatch)
        for first, last in pairwise(starts)
        for stage in stages
        for microbatch in range(first, last)
    ]


def weights_behind(row: Sequence[Action], behind: int) -> Iterator[Action]:
    """Insert the oldest due W after each I but the first `behind`; append the rest."""
    due: list[Action] = []
    for action in row:
        yield action
        if action.op == "I":
            due.append(Action("W", action.stage, action.microbatch))
            if len(due) > behind:
                yield due.pop(0)
    yield from due


# ---- your own -----------------------------------------------------------------------


def parse(name: str, rows: Iterable[str]) -> Schedule:
    """Return the schedule that has these rows: one line of actions for each rank.

    `parse("mine", ["0F0 0B0", "1F0 1B0"])` has two stages and one microbatch, as the
    largest numbers say. Raises ValueError for a word that is no action. Chapter 11.
    """
    ranks = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    actions = [action for row in ranks for action in row]
    stages = max((action.stage for action in actions), default=-1) + 1
    microbatches = max((action.microbatch for action in actions), default=-1) + 1
    return Schedule(name, stages, microbatches, ranks)
