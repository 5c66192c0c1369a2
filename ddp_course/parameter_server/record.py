"""The record of a server's run, as data: events, and counts of them. Chapter 13."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerEvent:
    """An event at a server.

    Attributes:
        kind: "join", "pull", "push", "step", "drop" (a gradient that no step uses),
            "leave" or "lost" (a worker that has ended without a message).
        worker: the worker's rank; -1 for a step.
        clock: the number of gradients that the worker had pushed before.
        version: the version of the weights; for a push or drop, of the weights that the
            gradient was computed with; for a step, of the new weights.
        seconds: time since the server was constructed.
        workers: for a step: the workers whose gradients it uses, in order of adding.
    """

    kind: str
    worker: int
    clock: int
    version: int
    seconds: float
    workers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Record:
    """The events at a server, in the order in which they happened."""

    events: tuple[ServerEvent, ...]

    def select(self, kind: str) -> list[ServerEvent]:
        """Return the events of one kind."""
        return [event for event in self.events if event.kind == kind]

    @property
    def steps(self) -> int:
        """The number of steps of the optimizer."""
        return len(self.select("step"))

    @property
    def gradients(self) -> int:
        """The number of gradients in these steps."""
        return sum(len(step.workers) for step in self.select("step"))

    @property
    def seconds(self) -> float:
        """The time from the first pull to the last step."""
        return self.select("step")[-1].seconds - self.select("pull")[0].seconds

    def staleness(self) -> list[int]:
        """Return, for each gradient of each step, the steps since its weights' pull.

        The server's versions count these steps; a worker's clock does not show how old
        its weights are.
        """
        version, ages = {}, []
        for event in self.events:
            if event.kind == "push":
                version[event.worker] = event.version
            ages += [event.version - 1 - version[worker] for worker in event.workers]
        return ages
