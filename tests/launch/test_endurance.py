"""Endurance: what takes hours, gigabytes, two users, or a killed rank at every place.

    DDP_COURSE_ENDURANCE=1 pytest -m endurance tests

Of most of it there is a short form, which runs without that, too. What the long forms
came to, and when, is written into tests/endurance.json.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import none_left

from ddp_course import collectives as ours
from ddp_course.collectives import (
    halving_doubling_all_reduce,
    hierarchical_all_reduce,
    naive_all_reduce,
    ring_all_reduce,
    shared_memory,
    tree_all_reduce,
)
from ddp_course.launch import RankInterrupted, RankTimeout, spawn

ENDURANCE = bool(os.environ.get("DDP_COURSE_ENDURANCE"))  # everything, however long
pytestmark = [pytest.mark.endurance, pytest.mark.timeout(3000 if ENDURANCE else 600)]


def add_ranks():
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


def test_many_launches_at_once_from_one_process():
    """8 of them; 50 with DDP_COURSE_ENDURANCE=1."""
    number = 50 if ENDURANCE else 8
    with ThreadPoolExecutor(number) as threads:
        sums = threads.map(lambda _: spawn(add_ranks, world_size=2), range(number))
        assert list(sums) == [[1.0, 1.0]] * number


@pytest.mark.skipif(not ENDURANCE, reason="only with DDP_COURSE_ENDURANCE=1")
def test_launches_at_once_from_five_processes(tmp_path):
    script = tmp_path / "ten.py"
    script.write_text(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from test_endurance import add_ranks\n"
        "from ddp_course.launch import spawn\n"
        "with ThreadPoolExecutor(10) as threads:\n"
        "    f = lambda _: spawn(add_ranks, world_size=2, output='none')\n"
        "    print(list(threads.map(f, range(10))))\n"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    runs = [
        subprocess.Popen(
            [sys.executable, script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        for _ in range(5)
    ]
    assert [run.communicate(timeout=300)[0] for run in runs] == [
        f"{[[1.0, 1.0]] * 10}\n"
    ] * 5


@pytest.fixture
def deaf():
    """Ignore Ctrl-C outside of launches: the test itself must survive its own stops."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, before)


def stops_at_random_moments(times: int) -> tuple[int, list[int]]:
    """Press stop, once or hammered, during start, run or end of `times` launches.

    Return how many were stopped, and the process ids of their ranks. Where ranks start
    late, later stops of longer launches follow until one is seen.
    """

    def work(seconds):
        print(os.getpid(), flush=True)
        time.sleep(seconds)

    def press(after, presses):
        time.sleep(after)
        for _ in range(presses):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.001)

    dice = random.Random(0)
    stopped, pids, latest = 0, [], 0.2
    while times > 0 or not pids:
        times, latest = times - 1, latest * (1 if times > 0 else 2)
        how = dice.uniform(0, latest), dice.choice([1, 1, 5])
        finger = threading.Thread(target=press, args=how)
        finger.start()
        try:
            seconds = dice.choice([0.02, 60]) if times >= 0 else 60
            limits = {"world_size": 2, "output": "none", "timeout": 10 * latest}
            spawn(work, seconds, **limits)
        except RankInterrupted as stop:
            stopped += 1
            pids += [int(word) for r in stop.reports for word in r.output.split()]
            assert all(r.status in ("ok", "unfinished") for r in stop.reports)
        except RankTimeout:
            pass  # the stop came before the launch listened
        finger.join()
    return stopped, pids


def test_many_launches_in_a_row_beside_others_that_are_stopped(
    no_leftovers, deaf, record_property
):
    """The stop button is the main thread's: launches of another thread go on.

    6 of each; 2,000 and 800 with DDP_COURSE_ENDURANCE=1. No memory is lost.
    """
    launches, stops = (2000, 800) if ENDURANCE else (6, 6)
    spawn(add_ranks, output="none")
    before = psutil.Process().memory_info().rss
    with ThreadPoolExecutor(1) as other:
        row = other.submit(
            lambda: [spawn(add_ranks, output="none") for _ in range(launches)]
        )
        stopped, pids = stops_at_random_moments(stops)
        assert row.result() == [[6.0] * 4] * launches
    assert stopped > (stops // 4 if ENDURANCE else 0)
    assert none_left(pids)
    grown = (psutil.Process().memory_info().rss - before) / 2**20
    record_property("launches", launches + stops)
    record_property("stopped", stopped)
    record_property("MiB more", round(grown, 1))
    assert grown < 64


# ---- a rank that is killed inside of a collective ------------------------------------

N = 2  # ranks


def whole() -> torch.Tensor:
    return torch.ones(N * 500_000)


COLLECTIVES = {
    "shared_memory.all_reduce": lambda: shared_memory.all_reduce(whole()),
    "ring_all_reduce": lambda: ring_all_reduce(whole()),
    "naive_all_reduce": lambda: naive_all_reduce(whole()),
    "tree_all_reduce": lambda: tree_all_reduce(whole()),
    "halving_doubling_all_reduce": lambda: halving_doubling_all_reduce(whole()),
    "hierarchical_all_reduce": lambda: hierarchical_all_reduce(whole()),
    "broadcast": lambda: ours.broadcast(whole(), 0),
    "reduce": lambda: ours.reduce(whole(), 0),
    "all_gather_single": lambda: ours.all_gather_single(whole(), whole()[:500_000]),
    "reduce_scatter_single": lambda: ours.reduce_scatter_single(
        whole()[:500_000], whole()
    ),
    "all_to_all_single": lambda: ours.all_to_all_single(whole(), whole()),
    "barrier": ours.barrier,
    "gloo's all_reduce": lambda: dist.all_reduce(whole()),
}
KILLED = COLLECTIVES if ENDURANCE else list(COLLECTIVES)[:2]


def killed_inside(name: str, moment: float, results: str) -> None:
    """Call it again and again; in the third call rank 1 is killed.

    Or in a later one, if fewer functions are called in that: who waits longer looks
    more often whether others have come.
    """
    calls = 0

    def count(*_) -> None:
        nonlocal calls
        calls += 1
        if calls > last:
            Path(results).write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    last = float("inf")
    for time_of_the_call in range(10):
        if dist.get_rank() == 1 and time_of_the_call:
            last = moment * calls if time_of_the_call > 1 else last
            calls = 0
            sys.setprofile(count)
        COLLECTIVES[name]()
        sys.setprofile(None)


@pytest.mark.parametrize("name", KILLED)
def test_of_a_rank_killed_inside_a_collective_the_others_hear_at_once(
    name, tmp_path, record_property
):
    for moment in (0.1, 0.5, 0.9) if ENDURANCE else (0.5,):
        results = tmp_path / "killed"
        call = killed_inside, name, moment, str(results)
        reports = spawn(*call, world_size=N, output="none", check=False, timeout=300)
        late = time.time() - float(results.read_text())
        assert reports[1].status == "killed", reports
        assert reports[0].status in ("raised", "unfinished"), reports
        record_property(f"killed at {moment}, heard after s", round(late, 2))
        assert late < 100  # not the 300 of the launch; 2 on a machine that is free


# ---- large tensors -------------------------------------------------------------------


def a_gibibyte(name: str) -> bool:
    """Whether every element of 1 GiB is what it must be; here whole, there in parts."""
    rank = dist.get_rank()
    whole = torch.arange(1 << 28, dtype=torch.float32).remainder_(1009)
    mine = whole.tensor_split(N)[rank]
    if name == "broadcast":
        found = whole.clone() if rank == 0 else torch.zeros_like(whole)
        ours.broadcast(found, 0)
    elif name == "all_gather_single":
        ours.all_gather_single(found := torch.empty_like(whole), mine.clone())
    elif name == "reduce_scatter_single":
        ours.reduce_scatter_single(found := torch.empty_like(mine), whole)
        whole = mine.mul_(N)
    elif name == "all_to_all_single":
        ours.all_to_all_single(found := torch.empty_like(whole), whole)
        whole = mine.repeat(N)
    else:
        globals()[name].all_reduce(found := whole.clone())
        whole.mul_(N)
    return torch.equal(found, whole)


LARGE = "shared_memory ring halving_doubling tree naive hierarchical broadcast "
LARGE += "all_gather_single reduce_scatter_single all_to_all_single"


@pytest.mark.skipif(not ENDURANCE, reason="only with DDP_COURSE_ENDURANCE=1")
@pytest.mark.parametrize("name", LARGE.split())
def test_a_gibibyte_arrives_whole(name):
    results = spawn(a_gibibyte, name, world_size=N, output="none", timeout=600)
    assert all(results)


# ---- no room in /dev/shm -------------------------------------------------------------

NO_ROOM = """
mount -t tmpfs -o size=64k none /dev/shm && head -c 65536 /dev/zero > /dev/shm/full
exec "$@"
"""


def sums_without_room() -> bool:
    x, y = whole(), shared_memory.empty(1000).fill_(1)
    for tensor in (x, y):
        shared_memory.all_reduce(tensor)
    return os.statvfs("/dev/shm").f_bavail == 0 and x.sum() + y.sum() == 2 * (
        len(x) + len(y)
    )


@pytest.mark.skipif(not ENDURANCE, reason="only with DDP_COURSE_ENDURANCE=1")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_ranks_share_memory_where_dev_shm_is_full():
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_endurance as t; "
    code += "print(t.spawn(t.sums_without_room, world_size=2, output='none'))"
    run = [sys.executable, "-c", code]
    command = ["unshare", "--mount", "sh", "-c", NO_ROOM, "sh", *run]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("[tensor(True), tensor(True)]\n"), done


# ---- another user of the same machine ------------------------------------------------

NOBODY = 65534
AS_NOBODY = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
LOOKS = """
import os, sys
found = []
for pid in sys.argv[1:]:
    for what in ("fd", "environ", "mem", "map_files"):
        path = f"/proc/{pid}/{what}"
        try:
            os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)
            found.append(path)
        except OSError:
            pass
    try:
        os.kill(int(pid), 0)
        found.append(f"signal {pid}")
    except PermissionError:
        pass
for folder, folders, files in [*os.walk("/dev/shm"), *os.walk(os.environ["TMPDIR"])]:
    for name in files + folders:
        path = os.path.join(folder, name)
        found += [path] * os.access(path, os.R_OK if name in files else os.X_OK)
print(found)
"""


def looked_at_by_another(results: str) -> list[str]:
    """Share memory; then let another user look at this rank, and at all that lies."""
    shared_memory.all_reduce(whole())
    pids = [0] * N
    dist.all_gather_object(pids, os.getpid())
    look = [*AS_NOBODY, sys.executable, "-I", "-c", LOOKS, *map(str, pids)]
    env = {"TMPDIR": results, "PATH": os.environ["PATH"]}
    return subprocess.run(look, capture_output=True, text=True, env=env, cwd="/")


@pytest.mark.skipif(os.geteuid() != 0, reason="who is not root is nobody else")
def test_another_user_can_neither_read_nor_reach_a_rank(monkeypatch, tmp_path):
    """Not its memory, files, environment; nor signal it."""
    if subprocess.run([*AS_NOBODY, sys.executable, "-I", "-c", ""], cwd="/").returncode:
        pytest.skip("another user cannot run this Python")
    folder = tempfile.mkdtemp(dir="/tmp")
    Path(folder).chmod(0o1777)
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr("tempfile.tempdir", None)
    try:
        for result in spawn(looked_at_by_another, folder, world_size=N, output="none"):
            assert result.stdout == "[]\n", result
        (Path(folder) / "plant").write_text("to be seen")
        (result, _) = spawn(looked_at_by_another, folder, world_size=N, output="none")
        assert "plant" in result.stdout
    finally:
        shutil.rmtree(folder)
