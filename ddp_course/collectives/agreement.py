"""Before anything is sent: do all ranks mean the same?

Every rank writes down what it is about to do, or what is wrong with its arguments, and
reads what the others wrote. On one machine they do so in shared memory (`segment`),
which costs microseconds; ranks on several machines exchange their notes through
the store at which they met. Explained in chapter 02.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ddp_course.collectives.mapping import same_machine
from ddp_course.collectives.meeting import Meeting, Notice
from ddp_course.collectives.segment import share
from ddp_course.collectives.stuck import Watch

PROBLEM = "!"  # the first letter of a note that tells of a problem

Exchange = Callable[[Any], list[Any]]


class CollectiveError(ValueError):
    """The ranks' calls of a collective do not fit together; nothing was sent.

    Every rank of the group raises it, with the same text.
    """


class Agreement:
    """Called by every rank before it sends anything: returns if all mean the same."""

    def __init__(self, exchange: Exchange, ranks: Sequence[int], watch: Watch) -> None:
        self.exchange = exchange
        self.ranks = ranks
        self.watch = watch

    def __call__(
        self,
        words: str,
        problem: str | None = None,
        fits: Callable[[list[str]], str | None] | None = None,
    ) -> None:
        """Show `words`, or the `problem`, and compare with those of the other ranks.

        Words must be equal, unless `fits` judges them: it is given the words of all
        ranks and returns what is wrong, None if nothing is, and "" if they cannot be
        compared. Raises CollectiveError.
        """
        self.watch.doing = words
        notes = self.compare(f"{PROBLEM}{problem}" if problem else words)
        if notes is None:
            if not problem and not fits:
                return
            notes = [f"{PROBLEM}{problem}" if problem else words] * len(self.ranks)
        wrong = judge(words, notes, self.ranks, fits)
        if wrong:
            raise CollectiveError(f"{wrong}. Nothing was sent.")

    def compare(self, note: str) -> list[str] | None:
        """Return None if all ranks show the same note, otherwise all of them."""
        notes = self.exchange(note)
        return None if notes == [note] * len(notes) else notes


class AgreementInMemory(Agreement):
    """The same for ranks of one machine, in memory that they share."""

    def __init__(
        self, exchange: Exchange, ranks: Sequence[int], watch: Watch, meeting: Meeting
    ) -> None:
        super().__init__(exchange, ranks, watch)
        self.use(meeting)
        self.notices: dict[str, Notice] = {}

    def use(self, meeting: Meeting) -> None:
        """Meet there from now on; all ranks change together."""
        self.meeting = meeting
        meeting.segment.watch = self._look

    def _look(self, late: list[int] | None) -> None:
        """Follow, while the meeting waits, whether those who are late can come."""
        if late is None:
            self.watch.over()
        else:
            self.watch([self.ranks[index] for index in late])

    def notice(self, note: str) -> Notice:
        """Return the note as the meeting wants it; kept, as calls repeat themselves."""
        notice = self.notices.get(note)
        if notice is None:
            if len(self.notices) > 1000:
                self.notices.clear()
            notice = self.notices[note] = Notice(note.encode())
        return notice

    def compare(self, note: str) -> list[str] | None:
        """Return None if all ranks show the same note, otherwise all of them."""
        notes = self.meeting.meet(self.notice(note))
        return None if notes is None else [note.decode() for note in notes]


def judge(
    words: str,
    notes: list[str],
    ranks: Sequence[int],
    fits: Callable[[list[str]], str | None] | None = None,
) -> str | None:
    """Return what is wrong, in the same words on every rank; None if nothing is."""
    problems = {
        rank: note[len(PROBLEM) :]
        for rank, note in zip(ranks, notes, strict=True)
        if note.startswith(PROBLEM)
    }
    if problems:
        by_text: dict[str, list[int]] = {}
        for rank, text in problems.items():
            by_text.setdefault(text, []).append(rank)
        return "; ".join(f"{_named(who)}: {text}" for text, who in by_text.items())
    if fits is not None and (wrong := fits(notes)) != "":
        return wrong
    by_text = {}
    for rank, note in zip(ranks, notes, strict=True):
        by_text.setdefault(note, []).append(rank)
    if len(by_text) == 1:
        return None
    told = "; ".join(f"{_named(who)}: {text}" for text, who in by_text.items())
    return f"the ranks do not call the same. {told}"


def _named(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def agreement(
    exchange: Exchange, rank: int, ranks: Sequence[int], watch: Watch
) -> Agreement:
    """Return how the ranks of a group agree; a collective call of all of them."""
    size = len(ranks)
    if size == 1:
        return Agreement(lambda note: [note], ranks, watch)
    if same_machine(exchange):
        try:
            segment = share(Meeting.nbytes(size), rank, size, exchange)
        except OSError:  # on all ranks, or on none
            return Agreement(exchange, ranks, watch)
        return AgreementInMemory(exchange, ranks, watch, Meeting(segment))
    return Agreement(exchange, ranks, watch)
