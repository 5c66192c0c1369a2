"""Plans: which rank sends which chunks to which rank in which step, as plain data.

A collective is planned before anything is sent. Each rank's buffer is divided into
chunks, numbered 0, 1, 2, ...; a *transfer* says that in some step one rank sends a few
consecutive chunks to another, which either adds them to its own or overwrites its own;
and a *plan* is all transfers of a collective. Plans can be printed, drawn, counted and
simulated (`simulate`) without any process; `runtime` executes them on real ranks.

Within one step all transfers happen together: a rank sends its chunks as they were
before the step. Explained in chapter 02.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

Contributions = tuple[int, ...]  # the ranks whose numbers are in a chunk, sorted


@dataclass(frozen=True, order=True)
class Transfer:
    """A message: in step `step`, rank `src` sends chunks [first, last) to rank `dst`.

    With `reduce`, `dst` combines them with its own chunks (for a sum, it adds them);
    otherwise they replace its own chunks.
    """

    step: int
    src: int
    dst: int
    first: int
    last: int
    reduce: bool

    def __str__(self) -> str:
        some = f"chunk {self.first}"
        if self.last - self.first > 1:
            some = f"chunks {self.first}-{self.last - 1}"
        way = "adds" if self.reduce else "keeps"
        return f"step {self.step}: {self.src} -> {self.dst}, {some}; {self.dst} {way}"


@dataclass(frozen=True, eq=False)
class Plan:
    """All transfers of one collective among `world_size` ranks.

    The buffer has `chunks` chunks. `start[r]` are the chunks in which rank r has
    numbers at the start, and `end[r]` those that must be complete on rank r at the end.
    A chunk is complete if it combines the numbers of all ranks that started with it,
    each once (or at least once, if combining is `idempotent`, as with a maximum).
    """

    name: str
    world_size: int
    chunks: int
    transfers: tuple[Transfer, ...]
    start: tuple[frozenset[int], ...]
    end: tuple[frozenset[int], ...]
    idempotent: bool = False

    @cached_property
    def steps(self) -> int:
        """The number of steps."""
        return max((t.step for t in self.transfers), default=-1) + 1

    def sent_by(self, rank: int) -> tuple[Transfer, ...]:
        """Return the transfers that `rank` sends, in the order of the steps."""
        return tuple(t for t in self.transfers if t.src == rank)

    def received_by(self, rank: int) -> tuple[Transfer, ...]:
        """Return the transfers that `rank` receives, in the order of the steps."""
        return tuple(t for t in self.transfers if t.dst == rank)

    def chunks_sent(self) -> list[int]:
        """Return how many chunks each rank sends."""
        sent = Counter()
        for t in self.transfers:
            sent[t.src] += t.last - t.first
        return [sent[rank] for rank in range(self.world_size)]

    def __str__(self) -> str:
        return "\n".join([f"{self.name}, {self.world_size} ranks", *map(str, self)])

    def __iter__(self):
        return iter(self.transfers)


def make_plan(
    name: str,
    world_size: int,
    chunks: int,
    transfers: Iterable[Transfer],
    start: Sequence[Iterable[int]] | None = None,
    end: Sequence[Iterable[int]] | None = None,
    idempotent: bool = False,
) -> Plan:
    """Return a plan; by default every rank starts and ends with every chunk."""
    everything, transfers = [range(chunks)] * world_size, tuple(sorted(transfers))
    ends = [tuple(map(frozenset, chunks or everything)) for chunks in (start, end)]
    return Plan(name, world_size, chunks, transfers, *ends, idempotent)


def chain(name: str, *plans: Plan) -> Plan:
    """Return the plan that executes `plans` one after the other.

    All plans must have the same numbers of ranks and chunks. The result starts like the
    first plan and ends like the last.
    """
    transfers, step = [], 0
    for plan in plans:
        transfers += [replace(t, step=t.step + step) for t in plan.transfers]
        step += plan.steps
    first, end = plans[0], plans[-1].end
    return make_plan(name, first.world_size, first.chunks, transfers, first.start, end)


def backwards(plan: Plan, name: str, reduce: bool) -> Plan:
    """Return the plan that sends every message of `plan` back, the last one first.

    With `reduce` the receivers combine (a broadcast becomes a reduce), and every rank
    starts with every chunk. Otherwise the new plan starts as `plan` ends.
    """
    transfers = [
        Transfer(plan.steps - 1 - t.step, t.dst, t.src, t.first, t.last, reduce)
        for t in plan.transfers
    ]
    start = None if reduce else plan.end
    return make_plan(name, plan.world_size, plan.chunks, transfers, start, plan.start)


def among(
    plan: Plan, ranks: Sequence[int], *, times: int = 1, skip: int = 0
) -> list[Transfer]:
    """Return the transfers of `plan` for a part of a larger world.

    Rank i of `plan` is rank `ranks[i]` of that world. Chunk c of `plan` becomes `times`
    chunks of that world, from chunk `skip + c * times` on.
    """

    def moved(t: Transfer) -> Transfer:
        first, last = (skip + chunk * times for chunk in (t.first, t.last))
        return Transfer(t.step, ranks[t.src], ranks[t.dst], first, last, t.reduce)

    return [moved(t) for t in plan.transfers]


def bounds(numel: int, chunks: int) -> list[int]:
    """Return where the chunks of a buffer of `numel` elements begin and end.

    Chunk c is [bounds[c], bounds[c + 1]). If `chunks` does not divide `numel`, some
    chunks have one element more than the others; none is ever longer by two.
    """
    return [c * numel // chunks for c in range(chunks + 1)]


State = list[list[Contributions]]  # state[rank][chunk]


def simulate(plan: Plan) -> list[State]:
    """Simulate a plan: return the contents of every chunk of every rank, step by step.

    There are `plan.steps + 1` states, the first one before anything was sent. A chunk
    is described by the ranks that contributed to it: (0, 2) is the sum of ranks 0 and
    2, (0, 0) has rank 0's numbers twice, and () is empty.
    """
    state: State = [
        [(rank,) if chunk in plan.start[rank] else () for chunk in range(plan.chunks)]
        for rank in range(plan.world_size)
    ]
    states = [state]
    for step in range(plan.steps):
        before, state = state, [list(chunks) for chunks in state]
        for t in plan.transfers:
            if t.step == step:
                for chunk in range(t.first, t.last):
                    sent, own = before[t.src][chunk], state[t.dst][chunk]
                    both = set(own + sent) if plan.idempotent else own + sent
                    state[t.dst][chunk] = tuple(sorted(both)) if t.reduce else sent
        states.append(state)
    return states


def mistakes(plan: Plan) -> list[str]:
    """Return the errors in a plan's outcome, as sentences; [] if the plan is right.

    Each chunk that a rank must have at the end has to combine the numbers of every rank
    that started with that chunk, each exactly once.
    """
    wrong = []
    outcome = simulate(plan)[-1]
    for rank, wanted in enumerate(plan.end):
        for chunk in sorted(wanted):
            right = tuple(r for r, has in enumerate(plan.start) if chunk in has)
            if (has := outcome[rank][chunk]) != right:
                found = f"rank {rank} ends with {has} in chunk {chunk}"
                wrong.append(f"{found}; it should have {right}")
    return wrong
