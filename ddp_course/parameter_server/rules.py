"""Rules of a parameter server: which worker waits for which. A ledger, as plain data.

A worker pulls the weights, computes a gradient with them, and pushes it. Rules differ
in when the worker may pull again, and in which gradients make a step:

    rule          a step uses                      a worker that has pushed waits for
    SYNCHRONOUS   the mean of all gradients        all others
    backup(b)     the mean of all but at most b,   all others but b
                  which are dropped
    ASYNCHRONOUS  one gradient                     nobody
    bounded(s)    one gradient                     workers more than s clocks behind

The *version* of the weights counts steps, the *clock* of a worker counts its gradients.
The *staleness* of a gradient is the number of steps between its pull and its own step.
With bounded(s) the weights of a worker at clock c have all gradients of clocks below
c - s, as in the paper, and none of clock c + s or later. So bounded(0) differs from
SYNCHRONOUS only in that the gradients of a clock make one small step each instead of a
large one together.

Sources: Dean et al. 2012, "Large Scale Distributed Deep Networks" (asynchronous); Ho
et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server"; Chen et al. 2016, arXiv:1604.00981 (backup workers). Chapter 13.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ddp_course.parameter_server.record import ServerEvent


@dataclass(frozen=True)
class Rule:
    """A rule of a parameter server.

    Attributes:
        synchronous: whether a step uses the mean of many gradients, all of one version.
        spare: the number of gradients that such a step does not wait for.
        bound: a worker waits while it is more clocks than this ahead of the slowest.
    """

    synchronous: bool = False
    spare: int = 0
    bound: float = math.inf

    def __post_init__(self) -> None:
        if not isinstance(self.spare, int) or self.spare < 0:
            must = "it must be a whole number of workers, 0 or more"
            raise ValueError(f"spare is {self.spare!r}; {must}")
        if not self.bound >= 0:
            raise ValueError(f"bound is {self.bound!r}; it must be 0 or more clocks")


SYNCHRONOUS, ASYNCHRONOUS = Rule(synchronous=True), Rule()


def bounded(bound: int) -> Rule:
    """Return the rule of bounded staleness (SSP): wait if more than `bound` ahead."""
    return Rule(bound=bound)


def backup(spare: int) -> Rule:
    """Return the rule with backup workers: synchronous, without the `spare` slowest."""
    return Rule(synchronous=True, spare=spare)


class Book:
    """The ledger of a server: each worker's state, and which actions are allowed.

    Args:
        rule: which worker waits for which.
        expected: the workers that must join before any of them may pull.
        steps: the total number of steps; None means no end.
        version: the number of earlier steps.
        now: returns the time in seconds.
    """

    def __init__(
        self,
        rule: Rule,
        expected: Iterable[int] = (),
        steps: int | None = None,
        version: int = 0,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not isinstance(rule, Rule):
            raise ValueError(
                f"rule is {rule!r}; it can be SYNCHRONOUS, ASYNCHRONOUS, bounded(k) or "
                "backup(k)"
            )
        self.rule, self.missing, self.version = rule, set(expected), version
        self.last = math.inf if steps is None else steps
        self.now, self.began = now, now()
        self.clock: dict[int, int] = {}  # present worker -> gradients pushed
        self.pulled: dict[int, int] = {}  # worker -> clock up to which it has pulled
        self.base: dict[int, int] = {}  # worker -> version of its weights
        self.waiting: dict[int, int] = {}  # worker -> clock of its unused gradient
        self.events: list[ServerEvent] = []

    @property
    def done(self) -> bool:
        """Whether all steps are finished."""
        return self.version >= self.last

    @property
    def empty(self) -> bool:
        """Whether all workers have joined, and left."""
        return not self.clock and not self.missing

    def may_pull(self, worker: int) -> bool:
        """Return whether this worker may get the weights now."""
        if self.missing or worker in self.waiting:
            return False
        return self.clock[worker] - min(self.clock.values()) <= self.rule.bound

    def ready(self) -> list[int]:
        """Return the workers whose gradients make a step now; empty if none do."""
        if self.rule.synchronous:
            behind = [worker for worker in self.clock if worker not in self.waiting]
            return sorted(self.waiting) if len(behind) <= self.rule.spare else []
        return [worker for worker in self.waiting if self._is_in_bound(worker)][:1]

    def _is_in_bound(self, worker: int) -> bool:
        """Return whether a step may use this worker's gradient.

        A worker that is `bound` clocks behind the gradient must not pull the result.
        """
        oldest = self.waiting[worker] - self.rule.bound
        return all(self.pulled[other] > oldest for other in self.clock)

    # ---- events ----------------------------------------------------------------------

    def join(self, worker: int) -> None:
        """Add a worker; one that joins late gets the clock of the slowest."""
        self.missing.discard(worker)
        self.clock[worker] = min(self.clock.values(), default=0)
        self.pulled[worker] = self.clock[worker]
        self._record("join", worker)

    def pull(self, worker: int) -> None:
        """Record that a worker gets the present weights."""
        self.base[worker] = self.version
        self._record("pull", worker)
        self.pulled[worker] = self.clock[worker] + 1

    def push(self, worker: int) -> None:
        """Record that a gradient has arrived; it waits for its step, or is dropped."""
        late = self.rule.synchronous and self.base[worker] < self.version
        dropped = late or self.done
        self._record("drop" if dropped else "push", worker)
        if not dropped:
            self.waiting[worker] = self.clock[worker]
        self.clock[worker] += 1

    def step(self, workers: list[int]) -> None:
        """Record a step with the gradients of these workers."""
        self.version += 1
        self._record("step", -1, tuple(workers))
        for worker in list(self.waiting) if self.done else workers:
            del self.waiting[worker]

    def remove(self, worker: int, kind: str = "leave") -> None:
        """Remove a worker; a gradient that it has pushed still counts."""
        self.missing.discard(worker)
        if worker in self.clock:
            self._record(kind, worker)
            del self.clock[worker]

    def _record(self, kind: str, worker: int, workers: tuple[int, ...] = ()) -> None:
        version = self.base[worker] if kind in ("push", "drop") else self.version
        clock = self.clock.get(worker, -1)
        seconds = self.now() - self.began
        self.events.append(ServerEvent(kind, worker, clock, version, seconds, workers))
