"""What each rank did, as data, which rank is to blame, and errors that tell it.

IPython asks an exception for `_render_traceback_` before it formats one itself. Ours
returns the story of the ranks, the cause first, and not the launcher's own frames:
those frames tell a reader nothing about the mistake.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

# What a rank says when another one went away: a consequence, not a cause.
LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|connectFullMesh|connection refused"
    r"|connection was likely closed|socket closed|remote process exited"
    r"|communicator was aborted",
    re.IGNORECASE,
)
# gloo and the stores raise RuntimeErrors and PyTorch's own; any other connection that
# breaks (a download, a pipe) is the reader's. C++ that gives up does so by SIGABRT.
OF_PYTORCH = re.compile(r"(RuntimeError|torch\.distributed\.\w+|killed by SIGABRT): ")
WAITED = re.compile(r"timed out|timeout", re.IGNORECASE)


@dataclass
class RankReport:
    """The end of one rank, told as data.

    `status` is "ok", "raised" (an exception), "exited" (it ended without returning),
    "killed" (by a signal) or "unfinished" (it still ran when the launch ended). `where`
    is the line of the reader's code in which it stood, if it did not return. `output`
    and `stderr` are all that it printed; `seconds` is the time spent in the function.
    """

    rank: int
    status: str
    value: Any = None
    output: str = ""
    stderr: str = ""
    error: str | None = None
    traceback: str | None = None
    where: str | None = None
    seconds: float = 0.0
    ended_at: float = 0.0  # on the monotonic clock: who was first

    @property
    def failed(self) -> bool:
        """Whether the rank ended by itself, but not by returning."""
        return self.status in ("raised", "exited", "killed")

    @property
    def lost_a_peer(self) -> bool:
        """Whether the rank failed only because another one went away."""
        error = self.error or ""
        of_pytorch = OF_PYTORCH.match(error) is not None
        return self.failed and of_pytorch and LOST.search(error) is not None

    @property
    def line(self) -> str:
        """One line about the rank, the same on every run: no ports, no process ids."""
        if self.status == "ok":
            return "returned"
        if self.status == "unfinished":
            outside = self.error or "outside of your code"
            return f"in {self.where}" if self.where else outside
        what = self.headline
        return f"{what}, in {self.where}" if self.where else what

    @property
    def headline(self) -> str:
        """The error in one line."""
        if self.lost_a_peer:
            return "lost the connection to another rank"
        lines = (self.error or self.status).strip().splitlines()
        return lines[0] if len(lines) == 1 else f"{lines[0]} ..."


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
        self.add_note(self.story)  # what a script and pytest show

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


# ---- who is to blame -----------------------------------------------------------------


def cause(
    reports: list[RankReport], may_fail: Collection[int] = ()
) -> RankReport | None:
    """Return the report of the rank that is to blame, or None if none failed.

    That is the first rank that failed by itself and may not; ranks which merely lost a
    peer, or tired of waiting for one, come last.
    """

    def blame(report: RankReport) -> tuple[bool, bool, float]:
        waited = WAITED.search(report.error or "") is not None
        return report.lost_a_peer, waited, report.ended_at

    failed = [r for r in reports if r.failed and r.rank not in may_fail]
    first = min(failed, key=blame, default=None)
    # If all make the same mistake, it is chance who does so first: take the lowest.
    alike = [report for report in failed if report.headline == first.headline]
    return min(alike, key=lambda report: report.rank, default=None)


def failure(
    reports: list[RankReport], may_fail: Collection[int] = ()
) -> RankError | None:
    """Return the exception that tells what went wrong, or None if nothing did."""
    if (first := cause(reports, may_fail)) is None:
        return None
    left = [report.rank for report in reports if report.status == "ok"]
    if first.lost_a_peer and left:
        what = f"returned while rank {first.rank} still wanted to communicate"
        return RankError(f"{_named(left)} {what}", reports)
    return RankError(f"rank {first.rank}: {first.headline}", reports, first.rank)


def late(reports: list[RankReport], timeout: float) -> RankTimeout | None:
    """Return the exception for a launch that did not end in time, or None if it did."""
    busy = [report.rank for report in reports if report.status == "unfinished"]
    if not busy:
        return None
    who = f"{_named(busy)} {'has' if len(busy) == 1 else 'have'}"
    return RankTimeout(f"{who} not returned after {timeout:g} s", reports)


def stopped(reports: list[RankReport]) -> RankInterrupted:
    """Return the exception for a launch that was stopped by hand."""
    return RankInterrupted("stopped by hand; this is where each rank was", reports)


def _named(ranks: list[int]) -> str:
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
