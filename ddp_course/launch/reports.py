"""What each rank did, which rank caused a failure, and the errors that show both.

IPython calls an exception's method `_render_traceback_`, if it has one. The method here
returns the traceback of the cause and a line per rank, without the launcher's own
frames, which do not show the mistake.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from ddp_course.launch.calls import Call, first_difference
from ddp_course.launch.deadlock import by_text

# Errors of a rank that has lost its connection to another: a consequence, not a cause.
LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|connectFullMesh|connection refused"
    r"|connection was likely closed|socket closed|remote process exited"
    r"|communicator was aborted",
    re.IGNORECASE,
)
# gloo and the stores raise RuntimeError or an error of torch.distributed, or abort. Any
# other broken connection (of a download, a pipe) belongs to the user's code.
OF_PYTORCH = re.compile(r"(RuntimeError|torch\.distributed\.\w+|killed by SIGABRT): ")
MISMATCH = "Is there a distributed collective mismatch in your code?"  # gloo's words
WAITED = re.compile(r"timed out|timeout", re.IGNORECASE)


@dataclass
class RankReport:
    """The result of one rank.

    `status` is "ok", "raised" (an exception), "exited" (it ended without returning),
    "killed" (by a signal) or "unfinished" (it still ran when the launch ended). `where`
    is the line of the user's code that the rank had reached, if it did not return.
    `output` and `stderr` are what it printed; `seconds` is the time spent in the
    function. `calls` are its last collectives, as `read_calls` returns them.
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
    ended_at: float = 0.0  # on the monotonic clock, in seconds
    calls: dict[Call, tuple[str, str]] = field(default_factory=dict, repr=False)

    @property
    def failed(self) -> bool:
        """Whether the rank ended without returning; not if the launcher ended it."""
        return self.status in ("raised", "exited", "killed")

    @property
    def lost_a_peer(self) -> bool:
        """Whether the rank failed only because another rank had ended."""
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
        return f"{self.headline}, in {self.where}" if self.where else self.headline

    @property
    def headline(self) -> str:
        """The error in one line."""
        if self.lost_a_peer:
            return "lost the connection to another rank"
        lines = (self.error or self.status).strip().splitlines()
        return lines[0] if len(lines) == 1 else f"{lines[0]} ..."


RED, PLAIN = "\x1b[31m", "\x1b[0m"


class LaunchError(Exception):
    """The base class of a launch's errors."""

    def _render_traceback_(self) -> list[str]:
        return [f"{RED}{type(self).__name__}{PLAIN}: {self}"]


class LaunchArgumentError(LaunchError, ValueError):
    """An invalid argument of `spawn`; nothing was started."""


class CannotSendError(LaunchError, TypeError):
    """A function, argument or result that cannot be sent between processes."""


class ExceptionWithReports(BaseException):
    """An exception that shows what every rank did.

    `rank` is the rank that caused it (None if unknown), `headline` says in one line
    what happened, and `reports` has one `RankReport` per rank, in rank order.
    `str(error)` is the headline, the same on every run.
    """

    def __init__(
        self, headline: str, reports: list[RankReport], rank: int | None = None
    ) -> None:
        super().__init__(headline)
        self.headline = headline
        self.reports = reports
        self.rank = rank
        self.add_note(self.story)  # shown by scripts and pytest

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


class RankError(ExceptionWithReports, LaunchError, RuntimeError):
    """A rank failed and ended the launch."""


class RankTimeout(RankError, TimeoutError):
    """The launch did not end before its deadline; `reports` say where each rank was."""


class RankInterrupted(ExceptionWithReports, KeyboardInterrupt):
    """The user stopped the launch (Jupyter's stop button, Ctrl-C); not an Exception."""


# ---- the cause -----------------------------------------------------------------------


def cause(
    reports: list[RankReport], may_fail: Collection[int] = ()
) -> RankReport | None:
    """Return the report of the rank that caused the failure, or None if none failed.

    The cause is the first rank to fail that is not in `may_fail`. Ranks that only lost
    a peer, or whose wait for a peer timed out, count after all others.
    """

    def blame(report: RankReport) -> tuple[bool, bool, float]:
        waited = WAITED.search(report.error or "") is not None
        return report.lost_a_peer, waited, report.ended_at

    failed = [r for r in reports if r.failed and r.rank not in may_fail]
    first = min(failed, key=blame, default=None)
    # If ranks raise the same error, chance decides which rank is first: return the
    # lowest rank's report.
    alike = [report for report in failed if report.headline == first.headline]
    return min(alike, key=lambda report: report.rank, default=None)


def failure(
    reports: list[RankReport], may_fail: Collection[int] = ()
) -> RankError | None:
    """Return the exception for the failure of a rank, or None if no rank failed."""
    if (first := cause(reports, may_fail)) is None:
        return None
    unexplained = first.lost_a_peer or MISMATCH in first.error
    if unexplained and (calls := describe_mismatch(reports)):
        return RankError(calls, reports)
    left = [report.rank for report in reports if report.status == "ok"]
    excused = any(r.failed and r.rank in may_fail for r in reports)  # perhaps the cause
    if first.lost_a_peer and left and not excused:
        waiting = f"while rank {first.rank} still wanted to communicate"
        return RankError(f"{_named(left)} returned {waiting}", reports)
    return RankError(f"rank {first.rank}: {first.headline}", reports, first.rank)


def timeout_error(reports: list[RankReport], timeout: float) -> RankTimeout | None:
    """Return the exception for a launch that did not end in time, or None if it did."""
    busy = [report.rank for report in reports if report.status == "unfinished"]
    if not busy:
        return None
    have = "has" if len(busy) == 1 else "have"
    calls = describe_mismatch(reports)
    after = f"not returned after {timeout:g} s{calls and '; '}{calls}"
    return RankTimeout(f"{_named(busy)} {have} {after}", reports)


def describe_mismatch(reports: list[RankReport]) -> str:
    """Name the first collective in which the ranks' types or counts differ, or ""."""
    words = first_difference([report.calls for report in reports])
    if not words:
        return ""
    each = by_text(list(words.values()), list(words))
    return f"the ranks' collectives do not fit together: {each}"


def interrupt_error(reports: list[RankReport]) -> RankInterrupted:
    """Return the exception for a launch that was stopped by hand."""
    return RankInterrupted("stopped by hand; this is where each rank was", reports)


def _named(ranks: list[int]) -> str:
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
