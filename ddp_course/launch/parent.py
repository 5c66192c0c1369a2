"""The launcher's side: start the ranks, listen to them, end them, report.

One loop listens to all ranks at once and never waits for a single rank, so neither a
large result nor ten megabytes of output can block it. Whatever happens, no rank is
alive when the launch has ended.
"""

import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from ddp_course.launch import calls, rendezvous, reports, server, stacks
from ddp_course.launch import rank as rank_side
from ddp_course.launch.job import Job
from ddp_course.launch.packing import cell_labels, pack_call, unpack_value
from ddp_course.launch.reports import RankReport
from ddp_course.launch.scratch import scratch_files
from ddp_course.launch.transcript import Transcript

GRACE = 0.7  # seconds for reports after a failure; `patient` adds more under load
LEAVE = 30.0  # seconds that ranks have to end after SIGTERM, as under torchrun
TICK = 0.1  # most seconds between two looks at the clock and the stop button


@dataclass
class Rank:
    """A rank as the launcher sees it: its process, its pipes, its report."""

    rank: int
    process: BaseProcess
    result: Connection
    streams: dict[Connection, str]  # open pipes -> "stdout", "stderr" or "stacks"
    answer: bytearray = field(default_factory=bytearray)  # the result's bytes so far
    stacks: bytearray = field(default_factory=bytearray)  # the stack dumps so far
    report: RankReport | None = None


class Launch:
    """One launch, from the first process to the last report."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.ranks: list[Rank] = []
        self.transcript = Transcript(job.world_size, job.output)
        self.stopped = False  # by the stop button or Ctrl-C
        self.terminated = False  # by SIGTERM
        self.labels = cell_labels()
        self.started_at = time.monotonic()
        self.stacks_requested = False

    def run(self) -> list[RankReport]:
        """Start the ranks, wait for them, and return one report per rank.

        Raises RankInterrupted if the user stopped the launch.
        """
        call = pack_call(self.job.fn, self.job.args)
        server.warm()
        names = "call", "store", "notes"
        with self._signals_recorded(), scratch_files(*names) as (file, store, notes):
            Path(file.path).write_bytes(call)
            calls.allocate(Path(notes.path), self.job.world_size)
            try:
                self._start(call=file, store=store, notes=notes)
                self._listen()
                self._request_stacks()
            finally:
                self._end()
            rank_reports = [self._report(rank) for rank in self.ranks]
            for report in rank_reports:
                report.calls = calls.read_calls(Path(notes.path), report.rank)
        if self.stopped:
            raise reports.interrupt_error(rank_reports)
        return rank_reports

    @contextlib.contextmanager
    def _signals_recorded(self) -> Iterator[None]:
        """Record signals instead of ending the launch in the middle of a line.

        Python may raise KeyboardInterrupt between any two lines: also after a process
        was started and before it was recorded, and then that process would be left
        behind. SIGTERM is delivered again when all ranks have ended. Only the main
        thread gets signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def record(number: int, _: object) -> None:
            self.stopped |= number == signal.SIGINT
            self.terminated |= number == signal.SIGTERM

        numbers = signal.SIGINT, signal.SIGTERM
        before = {number: signal.signal(number, record) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self.terminated:
                os.kill(os.getpid(), signal.SIGTERM)

    def _start(self, **files: object) -> None:
        context = server.context()
        with rendezvous.listening_socket() as listener:
            port = str(listener.getsockname()[1])
            for place in self.job.topology.places():
                if self.stopped:
                    return
                orders = rank_side.Orders(
                    **files,
                    listener=listener if place.rank == 0 else None,
                    backend=self.job.placement.backend,
                    threads=self.job.threads,
                    init=self.job.init,
                    env=environment(self.job, place.rank, port),
                )
                self._start_rank(context, place.rank, orders)

    def _start_rank(self, context, number: int, orders: rank_side.Orders) -> None:
        result, rank_result = context.Pipe()
        streams, rank_ends = {}, {"result": rank_result}
        for name in ("stdout", "stderr", "stacks"):
            launcher_end, rank_ends[name] = context.Pipe(duplex=False)
            streams[launcher_end] = name
        args = orders, rank_side.Pipes(**rank_ends)
        process = context.Process(None, rank_side.main, f"rank {number}", args)
        self.ranks.append(Rank(number, process, result, streams))
        server.start(process)
        for rank_end in rank_ends.values():
            rank_end.close()

    def _listen(self) -> None:
        """Read the ranks' pipes until all are done, one fails, or time is up."""
        self.started_at = time.monotonic()
        deadline = self.started_at + self.job.timeout
        failed = forwarded = False
        while not (self.stopped or all(rank.report for rank in self.ranks)):
            if self.terminated and not forwarded:
                forwarded, deadline = True, min(deadline, time.monotonic() + LEAVE)
                self._signal_unfinished(signal.SIGTERM)
            if not failed and self._has_failed():
                failed = True
                deadline = min(deadline, time.monotonic() + patient(GRACE))
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._read_pipes(min(left, TICK))

    def _has_failed(self) -> bool:
        """Return whether a rank has failed that is not in `may_fail`."""
        failed = {r.rank for r in self.ranks if r.report and r.report.failed}
        return not failed <= set(self.job.may_fail)

    def _read_pipes(self, seconds: float) -> None:
        """Read once from every pipe that has data, and print what is ready to show."""
        owners = {}
        for rank in self.ranks:
            owners |= {pipe: (rank, name) for pipe, name in rank.streams.items()}
            if rank.report is None:
                owners[rank.result] = rank, "result"
                if rank.process.pid is not None:  # the process was started
                    owners[rank.process.sentinel] = rank, "end"
        ready = connection.wait(list(owners), seconds)
        for pipe in ready:
            rank, name = owners[pipe]
            if name == "end":  # the rank's own children may still hold its pipes open
                if rank.report is None and rank.result not in ready:
                    rank.report = self._report_of_dead(rank)
                continue
            try:
                data = os.read(pipe.fileno(), 2**20)
            except OSError:
                data = b""
            if name == "result":
                self._read_answer(rank, data)
            elif not data:
                del rank.streams[pipe]
                pipe.close()
                self.transcript.end(rank.rank, name)
            elif name == "stacks":
                rank.stacks += data
            else:
                self.transcript.add(rank.rank, name, data)
        self.transcript.show()

    def _read_answer(self, rank: Rank, data: bytes) -> None:
        rank.answer += data
        size = int.from_bytes(rank.answer[:8], "big")
        if len(rank.answer) >= 8 + size > 8:
            fields = pickle.loads(rank.answer[8:])
            rank.answer.clear()
            rank.report = RankReport(rank.rank, ended_at=time.monotonic(), **fields)
        elif not data:
            rank.report = self._report_of_dead(rank)

    def _report_of_dead(self, rank: Rank) -> RankReport:
        """Return the report of a rank whose process ended without sending a result."""
        report = RankReport(rank.rank, "unfinished", ended_at=time.monotonic())
        if not self.stacks_requested and server.wait_for_end(rank.process, 10.0):
            code = rank.process.exitcode
            report.status = "killed" if code < 0 else "exited"
            report.error = _describe_exit_code(code)
        return report

    def _request_stacks(self) -> None:
        """Ask every rank that still runs for a dump of its stacks, and read the dumps.

        SIGUSR1 starts the dump (`rank._redirect`).
        """
        self.stacks_requested = True
        unfinished = [rank for rank in self.ranks if not rank.report]
        if not unfinished:
            return
        self._signal_unfinished(signal.SIGUSR1)
        deadline = time.monotonic() + patient(0.5)
        received: list[int] = []
        while time.monotonic() < deadline:
            self._read_pipes(0.05)
            before = received
            received = [len(rank.stacks) for rank in unfinished if not rank.report]
            if all(received) and received == before:  # a dump arrives in many pieces
                break

    def _signal_unfinished(self, number: int) -> None:
        for rank in self.ranks:
            if rank.report is None and rank.process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, number)

    def _end(self) -> None:
        """Kill all ranks with their children, and read what is left in the pipes."""
        started = [rank for rank in self.ranks if rank.process.pid is not None]
        for rank in started:
            # Kill the rank's process group, if it has its own: a rank that was forked a
            # moment ago is still in the launcher's group.
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(rank.process.pid, signal.SIGKILL)
                    break
        for rank in started:
            server.wait_for_end(rank.process, 5.0)
        deadline = time.monotonic() + patient(0.5)
        try:
            while any(r.streams for r in self.ranks) and time.monotonic() < deadline:
                self._read_pipes(0.02)
            self.transcript.show(final=True)
        finally:
            for rank in self.ranks:
                for pipe in (rank.result, *rank.streams):
                    pipe.close()
                server.release(rank.process)

    def _report(self, rank: Rank) -> RankReport:
        """Return the rank's report, completed with its output and its line of code."""
        now = time.monotonic()
        report = rank.report or RankReport(rank.rank, "unfinished", ended_at=now)
        report.output = self.transcript.text(rank.rank, "stdout")
        report.stderr = self.transcript.text(rank.rank, "stderr")
        if report.status == "ok":
            report.value = unpack_value(report.value)
        elif report.where is None:
            dump = rank.stacks.decode(errors="replace")
            report.where = stacks.where(dump, self.labels)
            if report.status == "unfinished" and not dump:
                report.error = "did not answer: it is suspended, or still starting"
        if report.status in ("unfinished", "killed", "exited") and not report.seconds:
            report.seconds = report.ended_at - self.started_at
        if report.status == "killed" and report.stderr.strip():
            # C++ writes the reason for an abort to stderr only.
            last_words = report.stderr.strip().splitlines()[-2:]
            report.error = f"{report.error}: {' '.join(map(str.strip, last_words))}"
        return report


def patient(seconds: float) -> float:
    """Return `seconds`, or more if the load is above 4 processes per core."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0
    return seconds * max(1, load / (4 * (os.cpu_count() or 1)))


def _describe_exit_code(code: int) -> str:
    """Return in words what an exit code of multiprocessing means."""
    if code == 255:
        return "ended with exit code 255 before it returned, or the fork server died"
    if code >= 0:
        return f"ended with exit code {code} before it returned"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # real-time signals have no names
        return f"killed by signal {-code}"


def environment(job: Job, rank: int, port: str) -> dict[str, str]:
    """Return a rank's environment: this process's, and torchrun's variables."""
    place, torchruns = job.topology.place(rank), ("TORCHELASTIC_", "PET_")
    with server.STARTING:  # in another thread, `warm` may set the server's variables
        inherited = dict(os.environ)
    return {
        **{k: v for k, v in inherited.items() if not k.startswith(torchruns)},
        "GLOO_SOCKET_IFNAME": rendezvous.loopback_interface(),
        "OMP_NUM_THREADS": str(job.threads),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        **place.environment(),
        **job.placement.environment(place),
        **job.links.environment(),
        **job.env,
    }
