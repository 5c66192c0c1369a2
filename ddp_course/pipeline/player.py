"""Pass the messages of a program, without a process: do all of them arrive?

A message passes when one rank has posted the send and the other the receive, and both
wait until then (a rendezvous). No backend is stricter, so a program that finishes here
finishes everywhere: also on CUDA, where messages queue up in one stream, and with large
messages over TCP. If every rank finishes its row in one run, it does so in every run,
on ranks of any speed, because each rank's order is fixed (Kahn 1974, "The semantics of
a simple language for parallel programming"). If not, ranks wait for each other in a
circle, in every run. Chapters 10 and 11.
"""

from collections import deque
from typing import NoReturn

from ddp_course.pipeline.program import (
    Instruction,
    InstructionGroup,
    Program,
    describe_circle,
)
from ddp_course.pipeline.schedule import Action, ScheduleError

# The sides of a message, "send" or "recv" -> the action whose result is the message
Sides = dict[str, Action]


def play(program: Program) -> None:
    """Run a program whose messages block.

    Raises ScheduleError if it does not end, if a rank receives another message than its
    peer sends, or if it sends or needs a result that it does not have. Chapters 10, 11.
    """
    _Play(program).run()


class _Play:
    """A run with blocking messages: each rank's place in its row."""

    def __init__(self, program: Program) -> None:
        self.schedule, self.rows = program.schedule, program.ranks
        self.at = [0] * len(self.rows)  # per rank, the index of its next group
        self.has: list[set[Action]] = [set() for _ in self.rows]  # results of each rank
        # (sender, receiver) -> messages that only one of the two has posted
        self.half: dict[tuple[int, int], deque[Sides]] = {}
        self.waiting: dict[int, list[Sides]] = {}  # rank -> messages it waits for

    def run(self) -> None:
        """Advance the ranks in turns until none can go on."""
        ranks, moved = range(len(self.rows)), True
        while moved:
            before = list(self.at)
            for rank in ranks:
                while self.at[rank] < len(self.rows[rank]) and self._step(rank):
                    self.at[rank] += 1
            moved = self.at != before
        stuck = [rank for rank in ranks if self.at[rank] < len(self.rows[rank])]
        if stuck:
            self._fail(describe_circle({rank: self._waits(rank) for rank in stuck}))

    def _fail(self, words: str) -> NoReturn:
        raise ScheduleError(f"{self.schedule.name}: {words}")

    def _step(self, rank: int) -> bool:
        """Execute a rank's next group; return False if it must wait."""
        group = self.rows[rank][self.at[rank]]
        if group[0].kind == "compute":
            self._compute(rank, group[0].action)
            return True
        return self._exchange(rank, group)

    def _compute(self, rank: int, action: Action) -> None:
        """Run an action, whose messages have passed already."""
        for need in self.schedule.needs(action):
            if need not in self.has[rank]:
                lacks = f"without {need}, which it needs"
                self._fail(f"rank {rank} runs {action} {lacks}")
        self.has[rank].add(action)

    def _exchange(self, rank: int, group: InstructionGroup) -> bool:
        """Post a group's messages in the first call; return whether all have passed."""
        if rank not in self.waiting:
            self.waiting[rank] = [self._post(rank, step) for step in group]
        if any(len(sides) < 2 for sides in self.waiting[rank]):
            return False
        del self.waiting[rank]
        self.has[rank].update(step.action for step in group if step.kind == "recv")
        return True

    def _post(self, rank: int, step: Instruction) -> Sides:
        """Post one side of a message; match the peer's side, if it is posted."""
        link = (rank, step.peer) if step.kind == "send" else (step.peer, rank)
        if step.kind == "send" and step.action not in self.has[rank]:
            self._fail(f"rank {rank} sends {step.action}, which it has not computed")
        half = self.half.setdefault(link, deque())
        if not half or step.kind in half[0]:
            half.append({step.kind: step.action})
            return half[-1]
        sides = half.popleft()
        sides[step.kind] = step.action
        send, receive = sides["send"], sides["recv"]
        if send != receive:
            self._fail(
                f"rank {link[1]} receives {receive} from rank {link[0]}, which sends "
                f"{send}"
            )
        return sides

    def _waits(self, rank: int) -> tuple[str, int]:
        """Return a text with the message that a rank waits for, and the peer."""
        group = self.rows[rank][self.at[rank]]
        posted = zip(group, self.waiting[rank], strict=True)
        step = next(step for step, sides in posted if len(sides) < 2)
        verb = "sends {} to" if step.kind == "send" else "receives {} from"
        return f"{verb.format(step.action)} rank {step.peer}", step.peer
