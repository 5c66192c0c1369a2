"""What happened at a server, as data: events, and what can be counted in them.

Chapter 13.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """Something that happened at a server.

    Attributes:
        kind: "join", "pull", "push", "step", "drop" (a gradient that no step takes),
            "leave" or "lost" (a worker that is gone without a word).
        worker: the worker's rank; -1 for a step.
        clock: how many gradients the worker had pushed before.
        version: of the weights: for a pull those that were sent; for a push or drop
            those with which the gradient was computed; for a step the new ones.
        seconds: time since the server was constructed.
        taken: for a step: the workers whose gradients it takes, in the order of adding.
    """

    kind: str
    worker: int
    clock: int
    version: int
    seconds: float
    taken: tuple[int, ...] = ()


@dataclass(frozen=True)
class Record:
    """What happened at a server, in the order in which it happened."""

    events: tuple[Event, ...]

    def of(self, kind: str) -> list[Event]:
        """Return the events of one kind."""
        return [event for event in self.events if event.kind == kind]

    @property
    def steps(self) -> int:
        """Steps of the optimizer."""
        return len(self.of("step"))

    @property
    def gradients(self) -> int:
        """Gradients in these steps."""
        return sum(len(step.taken) for step in self.of("step"))

    @property
    def seconds(self) -> float:
        """From the first pull to the last step."""
        return self.of("step")[-1].seconds - self.of("pull")[0].seconds

    def staleness(self) -> list[int]:
        """Return, for each gradient in a step, the steps between its pull and this one.

        Counted in the server's versions: a worker's clock says nothing about the age of
        its weights.
        """
        version, found = {}, []
        for event in self.events:
            if event.kind == "push":
                version[event.worker] = event.version
            found += [event.version - 1 - version[worker] for worker in event.taken]
        return found
