"""One layer's causal attention over a divided sequence, forward and backward.

The first rows compare real computation with one process and with PyTorch's ring. Four
ranks share two cores here, so they measure the cost of dividing, not its gain. In the
other rows, a step of a ring sleeps in proportion to its pairs of query and key, and
messages cross emulated links: no core is the bottleneck, and the recorded events show
whether messages are hidden and what zigzag gains. Chapter 16.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ddp_course.bench import steps
from ddp_course.bench.turns import Pair, Row, Timings, against, row, rows_of
from ddp_course.collectives import barrier
from ddp_course.context_parallel.assignment import assign
from ddp_course.context_parallel.naive import gathered_attention
from ddp_course.context_parallel.pytorch import pytorch_ring
from ddp_course.context_parallel.recorded import RingRecorder, SleepingSteps
from ddp_course.context_parallel.ring import Ring
from ddp_course.context_parallel.ulysses import ulysses_attention
from ddp_course.launch import Link, Links, spawn
from ddp_course.measure import Event, EventLog, busy
from ddp_course.spec import ATTENTION

ABOUT = "Attention over a divided sequence, forward and backward, four ways."
BATCH, HEADS, CHANNELS = 1, 12, 12
ONE, RING, GATHER = "one process", "PyTorch ring", "PyTorch gather"
DIVIDED = (*ATTENTION, "zigzag")
ZIGZAG, PLAIN, WORK = "zigzag, waiting", "ring, waiting", "computing or sending"
PAIRS = (
    *against(ONE, dict.fromkeys((*DIVIDED, RING, GATHER))),
    *against(RING, dict.fromkeys(DIVIDED)),
    Pair(ZIGZAG, WORK, 1.15, "zigzag", "the longer of its computing and its sending"),
    Pair(ZIGZAG, PLAIN, 0.63, "zigzag", "a plain ring, waiting"),
)
RANKS, SHORT = 4, 256  # SHORT: tokens; computing is simulated by sleeping
BACKWARD = 2.5  # backward has five products of matrices, forward has two
SHARES = (0.25, 0.5, 1.0)  # a message's time / the time of a forward step of zigzag


def bench(quick: bool) -> Iterator[Row]:
    """Yield rows of computing for several numbers of ranks, then of simulated links."""
    for ranks in (2, RANKS):
        for length in (1024,) if quick else (1024, 4096):
            timings = steps.on_ranks(ranks, computing, length, 3 if quick else 9)
            case = f"{ranks} ranks, {length} tokens"
            yield from rows_of(case, PAIRS, timings, ranks=ranks, tokens=length)
    for share in SHARES[1:2] if quick else SHARES:
        seconds, turns = (0.1, 3) if quick else (0.2, 5)
        case = f"4 ranks, a message takes {share:g} of a step"
        yield from waiting(case, share, seconds, turns)


# ---- real computing ------------------------------------------------------------------


def computing(length: int, turns: int) -> Timings:
    """Return the seconds of each attention, by turn; all ranks call it."""
    n, rank = dist.get_world_size(), dist.get_rank()
    whole = random_inputs(length)

    def own(assignment: str) -> tuple[list[Tensor], list[Tensor]]:
        places = [torch.tensor([i for some in ranges for i in some])
                  for ranges in assign(length, n, assignment)]  # fmt: skip
        parts = [x[:, :, places[rank]].clone() for x in whole]
        return parts, places

    straight, places = own("contiguous")
    crossed, _ = own("zigzag")
    ring, zigzag = (Ring(assign(length, n, a)) for a in ("contiguous", "zigzag"))
    attentions: dict[str, tuple[list[Tensor], Callable[..., Tensor]]] = {
        "gathered": (straight, lambda q, k, v: gathered_attention(q, k, v, places)),
        "ulysses": (straight, ulysses_attention),
        "ring": (straight, ring),
        "zigzag": (crossed, zigzag),
        RING: (crossed, pytorch_ring),
        GATHER: (crossed, partial(pytorch_ring, rotate="allgather")),
    }
    ways = {ONE: partial(once, attention, whole) if rank == 0 else lambda: None}
    ways |= {name: partial(once, f, parts) for name, (parts, f) in attentions.items()}
    return steps.together(ways, turns, 120.0, 1, warm=1)


def random_inputs(length: int) -> list[Tensor]:
    """Return q, k, v and a gradient of the output, (B, H, T, D) each."""
    random = torch.Generator().manual_seed(0)
    shape = BATCH, HEADS, length, CHANNELS
    return [torch.randn(shape, generator=random) for _ in range(4)]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention in one process."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def once(attend: Callable[..., Tensor], parts: list[Tensor]) -> None:
    """Run forward and backward."""
    qkv = [x.detach().requires_grad_() for x in parts[:3]]
    attend(*qkv).backward(parts[3])


# ---- waiting in place of computing ---------------------------------------------------


class Step(NamedTuple):
    """The seconds of one rank's step, of its computing, and of its sending."""

    step: float
    compute: float
    send: float


def waiting(case: str, share: float, seconds: float, turns: int) -> Iterator[Row]:
    """Yield a zigzag step's ratios to its work and to a plain ring's step.

    `seconds` is the time for the pairs of c queries and c keys, where a rank has c
    tokens.
    """
    u = 2 * BATCH * HEADS * (SHORT // RANKS) * CHANNELS * 4  # bytes of a message
    links = Links(inside=Link(0.0, u / (share * seconds / 2)))
    run = partial(spawn, world_size=RANKS, links=links, device="cpu", output="none")
    results = run(waited_steps, seconds, turns, timeout=600)
    zigzag, plain = (
        [Step(*map(max, zip(*turn, strict=True))) for turn in zip(*ranks, strict=True)]
        for ranks in zip(*results, strict=True)
    )
    work = [max(one.compute, one.send) for one in zigzag]
    took = [one.step for one in zigzag]
    for pair, theirs in zip(
        PAIRS[-2:], (work, [one.step for one in plain]), strict=True
    ):
        paired = statistics.median(a / b for a, b in zip(took, theirs, strict=True))
        both = map(statistics.median, (took, theirs))
        yield row(case, pair, "seconds", *both, paired=paired, ranks=RANKS)


def waited_steps(seconds: float, turns: int) -> tuple[list[Step], list[Step]]:
    """Return the steps of zigzag and of a plain ring, in turns; all ranks call it."""
    steps_of = {assignment: [] for assignment in ("zigzag", "contiguous")}
    for _ in range(turns):
        for assignment, found in steps_of.items():
            barrier()
            found.append(measured(waited_step(assignment, seconds)))
    return tuple(steps_of.values())


def waited_step(assignment: str, seconds: float) -> list[Event]:
    """Run forward and backward in a ring with sleeping steps; return its events."""
    n, rank = dist.get_world_size(), dist.get_rank()
    c, assigned = SHORT // n, assign(SHORT, n, assignment)
    slow, recorder = SleepingSteps(seconds / c**2), RingRecorder()
    ring = Ring(assigned, parts=[recorder, slow])
    places = [i for some in assigned[rank] for i in some]
    *qkv, dout = (x[:, :, places] for x in random_inputs(SHORT))
    with EventLog() as log, log.span("step"):
        out = ring(*(x.requires_grad_() for x in qkv))
        recorder.op, slow.seconds = "backward", slow.seconds * BACKWARD
        out.backward(dout)
        recorder.finish()
    return log.events


def measured(events: list[Event]) -> Step:
    """Return the seconds of a recorded step."""
    return Step(*(busy(events, op) for op in Step._fields))
