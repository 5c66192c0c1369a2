"""Who waits for whom at a parameter server: decided in a ledger, without any process.

A worker pulls the weights, computes a gradient with them, and pushes it. What differs
between the ways to train is when it may pull again, and which gradients make a step:

    rule          a step takes                     a worker that has pushed waits for
    SYNCHRONOUS   the mean of all                  all others
    backup(b)     the mean of all but b at most;   all others but b
                  who comes later came in vain
    ASYNCHRONOUS  one gradient                     nobody
    bounded(s)    one gradient                     those that are more than s behind it

The *version* of the weights counts steps, the *clock* of a worker its gradients. That
a gradient was computed with old weights shows in versions: its *staleness* is how many
steps were taken between its pull and its own step. With bounded(s) a worker at clock c
has all gradients of clocks below c - s, as in the paper, and none of clock c + s or
later: so bounded(0) is synchronous but for this, that the gradients of a clock make a
small step each, and not a large one together.

Sources: Dean et al. 2012, "Large Scale Distributed Deep Networks" (asynchronous); Ho
et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server"; Chen et al. 2016, arXiv:1604.00981 (backup workers). Chapter 13.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ddp_course.parameter_server.record import Event


@dataclass(frozen=True)
class Rule:
    """A way to train with a parameter server.

    Attributes:
        together: a step takes the mean of many gradients, all of the same version.
        spare: how many gradients such a step does not wait for.
        bound: clocks by which a worker may be ahead of another one.
    """

    together: bool = False
    spare: int = 0
    bound: float = math.inf

    def __post_init__(self) -> None:
        if not isinstance(self.spare, int) or self.spare < 0:
            raise ValueError(f"spare is {self.spare!r}; it must be 0 or more workers")
        if not self.bound >= 0:
            raise ValueError(f"bound is {self.bound!r}; it must be 0 or more clocks")


SYNCHRONOUS, ASYNCHRONOUS = Rule(together=True), Rule()


def bounded(bound: int) -> Rule:
    """Return the rule of bounded staleness (SSP): asynchronous, but not too much."""
    return Rule(bound=bound)


def backup(spare: int) -> Rule:
    """Return the rule with backup workers: synchronous, without the `spare` slowest."""
    return Rule(together=True, spare=spare)


class Book:
    """The ledger of a server: what each worker has done, and what may be done next.

    Args:
        rule: who waits for whom.
        expected: the workers that are waited for before anything begins.
        steps: how many steps are to be made in all; None: there is no end.
        version: how many were made before.
        now: says how late it is, in seconds.
    """

    def __init__(
        self,
        rule: Rule,
        expected: Iterable[int] = (),
        steps: int | None = None,
        version: int = 0,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.rule, self.missing, self.version = rule, set(expected), version
        self.last = math.inf if steps is None else steps
        self.now, self.began = now, now()
        self.clock: dict[int, int] = {}  # of each that lives: gradients pushed
        self.pulled: dict[int, int] = {}  # the clock up to which it has pulled
        self.base: dict[int, int] = {}  # the version that it has
        self.waiting: dict[int, int] = {}  # whose gradient waits for a step: its clock
        self.events: list[Event] = []

    @property
    def done(self) -> bool:
        """Whether all steps are made."""
        return self.version >= self.last

    @property
    def empty(self) -> bool:
        """Whether all have come, and gone."""
        return not self.clock and not self.missing

    def may_pull(self, worker: int) -> bool:
        """Tell whether the weights may be given to this worker now."""
        if self.missing or worker in self.waiting:
            return False
        return self.clock[worker] - min(self.clock.values()) <= self.rule.bound

    def ready(self) -> list[int]:
        """Return whose gradients make a step now; nobody's: nothing is to be done."""
        if self.rule.together:
            behind = [worker for worker in self.clock if worker not in self.waiting]
            return sorted(self.waiting) if len(behind) <= self.rule.spare else []
        return [worker for worker in self.waiting if self._seen_by_none(worker)][:1]

    def _seen_by_none(self, worker: int) -> bool:
        """Whether nobody who is too far behind could still pull this gradient."""
        made = self.waiting[worker] - self.rule.bound
        return all(self.pulled[other] > made for other in self.clock)

    # ---- what happens ----------------------------------------------------------------

    def join(self, worker: int) -> None:
        """Let a worker in. One that comes late is as far as the slowest."""
        self.missing.discard(worker)
        self.clock[worker] = min(self.clock.values(), default=0)
        self.pulled[worker] = self.clock[worker]
        self._tell("join", worker)

    def pull(self, worker: int) -> None:
        """Note that a worker gets the weights as they are now."""
        self.base[worker] = self.version
        self._tell("pull", worker)
        self.pulled[worker] = self.clock[worker] + 1

    def push(self, worker: int) -> None:
        """Note that a gradient is here; it waits for its step, or came in vain."""
        late = self.rule.together and self.base[worker] < self.version
        in_vain = late or self.done
        self._tell("drop" if in_vain else "push", worker)
        if not in_vain:
            self.waiting[worker] = self.clock[worker]
        self.clock[worker] += 1

    def step(self, workers: list[int]) -> None:
        """Note that the gradients of these workers have made a step."""
        self.version += 1
        self._tell("step", -1, tuple(workers))
        for worker in list(self.waiting) if self.done else workers:
            del self.waiting[worker]

    def gone(self, worker: int, kind: str = "leave") -> None:
        """Forget a worker; what it has pushed counts."""
        self.missing.discard(worker)
        if worker in self.clock:
            self._tell(kind, worker)
            del self.clock[worker]

    def staleness(self, worker: int) -> int:
        """Return how many steps were made since the worker that waits has pulled."""
        return self.version - self.base[worker]

    def _tell(self, kind: str, worker: int, taken: tuple[int, ...] = ()) -> None:
        version = self.base[worker] if kind in ("push", "drop") else self.version
        clock = self.clock.get(worker, -1)
        seconds = self.now() - self.began
        self.events.append(Event(kind, worker, clock, version, seconds, taken))
