"""What goes wrong in a launch, told so that the cause comes first.

IPython asks an exception for `_render_traceback_` before it formats one itself. Ours
returns the story of the ranks, and not the launcher's own frames: those frames tell a
reader nothing about the mistake.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_course.launch.reports import RankReport

RED, PLAIN = "\x1b[31m", "\x1b[0m"


class LaunchError(Exception):
    """Anything that a launch can complain about."""

    def _render_traceback_(self) -> list[str]:
        return [f"{RED}{type(self).__name__}{PLAIN}: {self}"]


class LaunchArgumentError(LaunchError, ValueError):
    """An argument of `spawn` that cannot be; nothing was started."""


class CannotSendError(LaunchError, TypeError):
    """A function, argument or result that cannot be sent between processes."""


class Story(BaseException):
    """An exception that tells what every rank did.

    `rank` is the rank that caused it, `headline` says in one line what happened, and
    `reports` holds one `RankReport` for each rank, in rank order. `str(error)` is the
    headline; what the launcher itself writes there is the same on every run.
    """

    def __init__(
        self, headline: str, reports: list[RankReport], rank: int | None = None
    ) -> None:
        super().__init__(headline)
        self.headline = headline
        self.reports = reports
        self.rank = rank
        if hasattr(self, "add_note"):  # Python 3.11: what a script and pytest show
            self.add_note(self.story)

    def __reduce__(self) -> tuple:
        """Pickle with all three arguments, not only the headline."""
        return type(self), (self.headline, self.reports, self.rank)

    @property
    def story(self) -> str:
        """The cause's own traceback, then one line for each rank."""
        cause = None if self.rank is None else self.reports[self.rank].traceback
        width = len(str(len(self.reports) - 1))
        lines = [f"  rank {r.rank:>{width}}: {r.line}" for r in self.reports]
        return "\n".join(([cause.rstrip(), ""] if cause else []) + lines)

    def _render_traceback_(self) -> list[str]:
        return [f"{RED}{type(self).__name__}{PLAIN}: {self}", *self.story.split("\n")]


class RankError(Story, LaunchError, RuntimeError):
    """A rank failed and ended the launch."""


class RankTimeout(RankError, TimeoutError):
    """The launch did not end before its deadline; `reports` say where each rank is."""


class RankInterrupted(Story, KeyboardInterrupt):
    """The launch was stopped: Jupyter's stop button, Ctrl-C. No `Exception`."""
