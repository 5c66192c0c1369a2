"""Settings and order of all tests; helpers that find processes left behind."""

import json
import os

# Set before PyTorch is imported: its threads, also in kernels, sleep while they wait.
# By default they spin: on two busy cores, that took most of the tests' time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import signal
import time
from collections import Counter
from datetime import date
from pathlib import Path

import pytest

from ddp_course.launch import warm

# Cheapest first: plain functions, then ranks, then kernels, then hundreds of launches.
ORDER = ("kernel", "endurance")
OUTCOMES = Path(__file__).with_name("endurance.json")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run all tests in one process per core plus one, at most 4; chosen tests in one.

    A test computes on one core on average: its ranks share two, or wait for each other.
    Every further process imports all tests again, and starts a fork server.
    """
    everything = config.args_source == config.ArgsSource.TESTPATHS
    return min(4, 1 + (os.cpu_count() or 1)) if everything else 0


def pytest_configure() -> None:
    """Configure nbval, PyTorch and Hypothesis.

    nbval starts kernels whose ports no rank of another test can take.

    PyTorch computes in one thread, as in each rank: on some CPUs a product of matrices
    in two threads has other bits, and tests compare bits with those of ranks.

    Hypothesis draws the same examples in every run, so that a test fails only if the
    code has changed. With DDP_COURSE_ENDURANCE=1 it draws new ones. No example has a
    deadline, and none is drawn too slowly: the machine may be busy.
    """
    import nbval.kernel  # not above: ranks of tests import this file, too
    import torch
    from hypothesis import HealthCheck, settings

    torch.set_num_threads(1)

    # A shell's background jobs, and all their children, ignore Ctrl-C; undo that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    nbval.kernel.KernelManager = kernel_manager()
    same = not os.environ.get("DDP_COURSE_ENDURANCE")
    at_any_speed = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("course", derandomize=same, **at_any_speed)
    settings.load_profile("course")


def kernel_manager() -> type:
    """Return a class that starts a kernel and connects to it by sockets in files."""
    from jupyter_client.manager import KernelManager

    from ddp_course.commands.execute import OwnSockets

    return type("KernelOfATest", (OwnSockets, KernelManager), {})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record outcome and date of an endurance test, if DDP_COURSE_ENDURANCE is set."""
    long = os.environ.get("DDP_COURSE_ENDURANCE") and "endurance" in report.keywords
    if long and (report.when == "call" or report.outcome == "failed"):
        write_down(report)


def write_down(report: pytest.TestReport, file: Path = OUTCOMES) -> None:
    """Replace the record of a test in `file`; keep those of all other tests."""
    known = json.loads(file.read_text()) if file.exists() else {}
    record = {"date": date.today().isoformat(), "outcome": report.outcome}
    record |= {"seconds": round(report.duration, 1), **dict(report.user_properties)}
    known[report.nodeid.removeprefix("tests/")] = record
    rows = (f"{json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known))
    file.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def file_of(item: pytest.Item) -> str:
    return item.nodeid.split("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run cheap tests before costly ones, and the notebooks last, the longest first.

    So no long notebook begins when all others have ended.
    """
    cells = Counter(file_of(item) for item in items if ".ipynb::" in item.nodeid)

    def cost(item: pytest.Item) -> tuple[bool, int, int, bool]:
        marks = [
            1 + ORDER.index(m.name) for m in item.iter_markers() if m.name in ORDER
        ]
        starts_ranks = "spawn" in getattr(item, "fixturenames", ()) or "spawn" in (
            item.nodeid
        )
        file = file_of(item)
        return file in cells, -cells[file], max(marks, default=0), starts_ranks

    items.sort(key=cost)
    for item in items:
        if file_of(item) in cells:  # kernels of a busy machine need seconds to answer
            item.output_timeout = 60  # nbval's own is 5
            item.add_marker(pytest.mark.timeout(1000))


def alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def none_left(pids: list[int], seconds: float = 120.0) -> bool:
    """Wait up to `seconds` for the processes to end; return whether they have."""
    assert pids, "no process id to look for: the test would check nothing"
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def descendants(pid: int) -> list[int]:
    """Return the ids of all processes below `pid`, at any depth."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(
                stat.read_text().rsplit(")", 1)[1].split()[1]
            )
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, new = [], [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


@pytest.fixture
def no_leftovers(tmp_path, monkeypatch):
    """Fail if the test leaves ranks, temporary files, shared memory or open files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    warm()  # so that the fork server's own files are not counted as left behind
    segments, files = names_in("/dev/shm"), names_in("/proc/self/fd")
    yield
    assert names_in(tmp_path) == set()
    assert wait_until_gone(names_in("/dev/shm") - segments, "/dev/shm") == set()
    assert len(names_in("/proc/self/fd")) <= len(files)
    ranks = ranks_of(os.getpid())
    assert not ranks or none_left(ranks)


def names_in(folder: str | Path) -> set[str]:
    """Return the names of the files and folders in a folder."""
    return {path.name for path in Path(folder).iterdir()}


def wait_until_gone(
    names: set[str], folder: str | Path, seconds: float = 60.0
) -> set[str]:
    """Wait up to `seconds` for files to be removed; return the names of those left.

    Other processes, such as ranks of Hogwild in another process of these tests, have a
    file in /dev/shm for a moment.
    """
    deadline = time.monotonic() + seconds
    while (names := names & names_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return names


def ranks_of(pid: int) -> list[int]:
    """Return the process ids of the ranks that the fork server of `pid` runs."""
    servers = [p for p in descendants(pid) if "multiprocessing.forkserver" in _line(p)]
    return [rank for server in servers for rank in descendants(server)]


def _line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def end(pid: int) -> None:
    """Kill one process that the test itself started."""
    os.kill(pid, signal.SIGKILL)
