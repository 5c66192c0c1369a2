"""`spawn` on real ranks: what comes back, what is shown, what is told of failures."""

import contextlib
import ctypes
import dataclasses
import functools
import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import none_left, wait_until_gone

from ddp_course.launch import (
    CannotSendError,
    RankError,
    RankTimeout,
    api,
    device,
    parent,
    rendezvous,
    scratch,
    server,
    spawn,
    transcript,
)


@dataclasses.dataclass
class Point:
    x: int
    y: torch.Tensor


def sum_of_ranks():
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


# ---- values ------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, None])
def test_values_come_back_in_rank_order_and_the_group_is_ready(world_size):
    def answer(factor):
        return dist.get_rank() * factor, dist.get_world_size(), sum_of_ranks()

    n = world_size or 4
    assert spawn(answer, 10, world_size=world_size) == [
        (10 * rank, n, sum(range(n))) for rank in range(n)
    ]


def test_closures_travel_and_many_kinds_of_values_come_back():
    block, table = torch.full((5_000_000,), 5.0), {"a": 1}  # 20 MB, there and back

    def outer(k):
        def answer():
            rank = dist.get_rank()
            leaf = torch.full((2,), float(rank), requires_grad=True)
            return {
                "number": rank * k + table["a"],
                "large": block + rank,
                "with a graph": leaf * 2,
                "module": torch.nn.Linear(2, 1, bias=False),
                "dataclass": Point(rank, torch.ones(2)),
                "nothing": None,
            }

        return answer

    zero, one = spawn(outer(10), world_size=2)
    assert (zero["number"], one["number"]) == (1, 11)
    assert (zero["large"][-1], one["large"][-1]) == (5, 6)
    assert one["with a graph"].tolist() == [2.0, 2.0]
    assert one["module"](torch.ones(1, 2)).shape == (1, 1)
    assert isinstance(one["dataclass"], Point) and one["dataclass"].x == 1
    assert zero["nothing"] is None


def test_what_cannot_be_sent_is_named(monkeypatch):
    def lock_inside():
        return {"fine": 1, "items": [1, {"lock": threading.Lock()}]}

    with pytest.raises(RankError, match="cannot be sent") as caught:
        spawn(lock_inside, world_size=2)
    assert "the value['items'][1]['lock'] is a _thread.lock" in str(caught.value)
    monkeypatch.setattr(server, "start", lambda _: pytest.fail("start"))
    the_lock = threading.Lock()
    with pytest.raises(CannotSendError, match="the_lock"):
        spawn(lambda: the_lock)


def test_functions_of_modules_are_imported_from_disk_and_never_stale(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "readers_own_module.py"
    source.write_text("def f():\n    return 'first'\n")
    import readers_own_module

    assert spawn(readers_own_module.f, world_size=2) == ["first"] * 2
    source.write_text("def f():\n    return 'the second'\n")
    assert spawn(readers_own_module.f, world_size=2) == ["the second"] * 2


# ---- what the ranks print ----------------------------------------------------------


def talk():
    rank, x = dist.get_rank(), torch.zeros(1)
    if rank < 3:  # the last rank is the first to speak
        dist.recv(x, rank + 1)
    print(f"I am {rank}", flush=True)
    if rank > 0:
        dist.send(x, rank - 1)
    os.write(1, b"written below Python\n")
    print(f"warned by {rank}", file=sys.stderr)
    ctypes.CDLL(None).printf(b"printed by C, no newline at the end")


def test_output_comes_in_rank_order_and_is_kept_in_the_reports(capsys, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    said = ("I am {}", "written below Python", "printed by C, no newline at the end")
    reports = spawn(talk, check=False)
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if line.startswith("[")]
    assert lines == [f"[rank {r}] {text.format(r)}" for r in range(4) for text in said]
    assert err.splitlines() == [f"[rank {r}] warned by {r}" for r in range(4)]
    assert reports[2].output == "\n".join(said).format(2)
    assert reports[2].stderr == "warned by 2\n"


def test_live_output_comes_as_it_is_printed(tmp_path, monkeypatch):
    class Screen(io.StringIO):
        """Lets rank 0 go on as soon as it shows what rank 1 has printed."""

        def write(self, text):
            if "I am 1" in text:
                (tmp_path / "shown").touch()
            return super().write(text)

    def wait_for_the_screen():
        rank = dist.get_rank()
        while rank == 0 and not (tmp_path / "shown").exists():
            time.sleep(0.01)
        print(f"I am {rank}", flush=True)

    monkeypatch.setattr(sys, "stdout", screen := Screen())
    spawn(wait_for_the_screen, world_size=2, output="live")
    lines = [line for line in screen.getvalue().splitlines() if "I am" in line]
    assert lines == ["[rank 1] I am 1", "[rank 0] I am 0"]


def test_none_shows_nothing_and_seconds_are_those_of_the_function(capsys):
    def work():
        print("hello")
        sys.stdout.close()  # no error
        time.sleep(0.3)

    start = time.monotonic()
    (report,) = spawn(work, world_size=1, check=False, output="none")
    assert 0.3 <= report.seconds < time.monotonic() - start
    assert (report.status, report.output) == ("ok", "hello\n")
    assert capsys.readouterr() == ("", "")


def test_ten_megabytes_of_output_do_not_block(capsys, monkeypatch):
    monkeypatch.setattr(transcript, "MAX_LINES", 3)

    def shout():
        for _ in range(10):
            print("x" * 1_000_000, file=(sys.stdout, sys.stderr)[dist.get_rank()])

    one, two = spawn(shout, world_size=2, check=False)
    assert len(one.output) == len(two.stderr) == 10_000_010
    shown = "".join(capsys.readouterr())
    assert shown.count("x" * 1_000_000) == 6
    assert shown.count("more than 3 lines") == 2


# ---- failures ----------------------------------------------------------------------


def test_a_rank_that_raises_is_the_cause_and_its_peers_are_not(monkeypatch):
    monkeypatch.setattr(parent, "GRACE", 20)  # it is over when the last one has ended

    def fail():
        if dist.get_rank() == 2:
            raise ValueError("one is enough")
        while True:
            sum_of_ranks()

    with pytest.raises(RankError) as caught:
        spawn(fail)
    error = caught.value
    assert str(error) == "rank 2: ValueError: one is enough"
    assert error.rank == 2
    assert [report.status for report in error.reports] == ["raised"] * 4
    assert [r.rank for r in error.reports if r.lost_a_peer] == [0, 1, 3]
    assert 'raise ValueError("one is enough")' in error.story
    assert "ddp_course/launch" not in error.story
    assert "rank 1: lost the connection to another rank, in test_sp" in error.story


def test_every_way_to_end_is_told_as_data(monkeypatch):
    monkeypatch.setattr(parent, "GRACE", 20)  # it is over when the last one has ended

    def end_somehow():
        rank = dist.get_rank()
        print("hello from", rank)
        if rank == 1:
            raise RuntimeError("told as data")
        if rank == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        if rank == 3:
            sys.exit(3)
        if rank == 4:
            os._exit(7)
        if rank == 5:
            os.write(2, b"terminate called after throwing 'gloo::Something'\n")
            os.abort()
        return rank

    reports = spawn(end_somehow, world_size=6, check=False, output="none")
    statuses = ["ok", "raised", "killed", "exited", "exited", "killed"]
    assert [report.status for report in reports] == statuses
    assert [report.value for report in reports] == [0] + [None] * 5
    raised, killed, left, vanished, aborted = reports[1:]
    assert raised.error == "RuntimeError: told as data"
    assert raised.where.endswith('raise RuntimeError("told as data")')
    assert "RuntimeError: told as data" in raised.traceback
    assert raised.output == "hello from 1\n"
    assert killed.error == "killed by SIGTERM"
    assert left.error == "SystemExit: 3"
    assert vanished.error.startswith("ended with exit code 7")
    assert aborted.error.startswith("killed by SIGABRT")
    assert "gloo::Something" in aborted.error
    assert aborted.where.endswith("os.abort()")
    assert all(report.seconds >= 0 for report in reports)


def test_who_may_fail_ends_nobody_and_others_do():
    def dies(who):
        if dist.get_rank() in who:
            os.kill(os.getpid(), signal.SIGKILL)
        # Whoever was ended for it would not come to its end.
        time.sleep(parent.patient(parent.GRACE) + 0.3)
        return dist.get_rank()

    first, killed, last = spawn(dies, [1], world_size=3, may_fail=[1])
    assert (first, last) == (0, 2)
    assert (killed.status, killed.error) == ("killed", "killed by SIGKILL")
    with pytest.raises(RankError, match="rank 2: killed by SIGKILL"):
        spawn(dies, [1, 2], world_size=3, may_fail=[1])


UNEQUAL = "the ranks' collectives do not fit together: "


@pytest.mark.parametrize(
    ("first", "others"),
    [(torch.ones(3), torch.ones(4)), (torch.ones(5), torch.ones(500_000))],
    ids=["gloo loses a peer", "gloo aborts"],
)
def test_unequal_tensors_are_named(first, others):
    def unequal():
        sum_of_ranks()
        dist.all_reduce(first if dist.get_rank() == 0 else others)

    with pytest.raises(RankError) as caught:
        spawn(unequal, world_size=2, timeout=60)
    n, m = len(first), len(others)
    each = f"rank 0: all_reduce(float32 [{n}]); rank 1: all_reduce(float32 [{m}])"
    assert str(caught.value) == UNEQUAL + each
    assert "dist.all_reduce" in caught.value.story


def listen_when(arrived: Callable[[parent.Rank, str], object], monkeypatch) -> None:
    """Let a launch's clock begin, and failures count, when all ranks have arrived.

    `arrived` gets a rank and what it has printed. On a busy machine, ranks start late.
    """

    class Patient(parent.Launch):
        def _listen(self):
            while not all(
                arrived(rank, self.transcript.text(rank.rank, "stdout"))
                for rank in self.ranks
            ):
                self._read_pipes(0.1)
            super()._listen()

    monkeypatch.setattr(api, "Launch", Patient)


def returned_or_there(rank: parent.Rank, printed: str) -> bool:
    return rank.report is not None or "there" in printed


def test_a_collective_that_does_not_fit_is_named_at_the_deadline(monkeypatch):
    def other_calls():
        pair, works = dist.new_group([0, 1]), []
        how = {"group": pair, "async_op": True}
        if dist.get_rank() == 0:
            works = [dist.broadcast(torch.ones(2), src, **how) for src in (0, 1)]
        elif dist.get_rank() == 1:
            works = [dist.all_reduce(torch.ones(2), **how)]
        print("there")
        for work in works:
            work.wait()

    listen_when(returned_or_there, monkeypatch)
    with pytest.raises(RankError) as caught:
        spawn(other_calls, world_size=3, timeout=3)
    each = "rank 0: broadcast(float32 [2]); rank 1: all_reduce(float32 [2])"
    assert str(caught.value).endswith(UNEQUAL + each)


def test_a_rank_that_returns_too_early_is_named():
    def early():
        if dist.get_rank() > 0:
            sum_of_ranks()

    with pytest.raises(RankError, match="rank 0 returned while rank"):
        spawn(early, world_size=2)


def test_a_failure_ends_the_launch_although_a_peer_is_deaf():
    def deaf():
        if dist.get_rank() == 0:  # in this line from the message on
            dist.send(torch.zeros(1), 1) or time.sleep(60)
        else:
            dist.recv(torch.zeros(1), 0)
        raise ValueError("now")

    with pytest.raises(RankError, match="rank 1: ValueError: now") as caught:
        spawn(deaf, world_size=2)
    assert caught.value.reports[0].status == "unfinished"
    assert caught.value.reports[0].where.endswith("time.sleep(60)")


# ---- the deadline ------------------------------------------------------------------


def test_a_deadlock_ends_with_the_line_in_which_each_rank_hangs(
    no_leftovers, monkeypatch
):
    def deadlock():
        rank, x = dist.get_rank(), torch.zeros(1)
        if rank != 2:  # which is there when it has returned
            print("there")
        if rank == 0:
            dist.recv(x, src=1)  # hangs inside C++
        elif rank == 1:
            while True:  # hangs in Python
                pass
        elif rank == 3:
            os.kill(os.getpid(), signal.SIGSTOP)  # cannot even answer
        return "done"

    listen_when(returned_or_there, monkeypatch)
    with pytest.raises(RankTimeout, match="ranks 0, 1 and 3 have not ret") as caught:
        spawn(deadlock, timeout=3)
    zero, one, two, three = caught.value.reports
    assert "dist.recv(x, src=1)" in zero.where
    assert "while True" in one.where or "pass" in one.where
    assert two.status == "ok"
    assert "did not answer: it is suspended" in three.line
    assert caught.value.story.splitlines()[2] == "  rank 2: returned"


# ---- nothing left behind -----------------------------------------------------------


def test_children_die_with_a_rank_however_it_ends(no_leftovers, monkeypatch):
    """Workers of a DataLoader, which live on, and a process of another program."""
    listen_when(lambda rank, _: rank.report or rank.rank == 2, monkeypatch)

    def end_somehow():
        loader = torch.utils.data.DataLoader(
            list(range(8)), num_workers=2, persistent_workers=True
        )
        batches = [batch.item() for batch in loader]
        sleeper = subprocess.Popen(["sleep", "600"])
        workers = [worker.pid for worker in loader._iterator._workers]
        print(os.getpid(), sleeper.pid, *workers, flush=True)
        dist.barrier()
        time.sleep(0.1)
        if dist.get_rank() == 0:
            raise ValueError
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_rank() == 2:
            time.sleep(600)
        return batches

    reports = spawn(end_somehow, check=False, output="none")
    statuses = [report.status for report in reports]
    assert statuses == ["raised", "killed", "unfinished", "ok"]
    assert reports[3].value == list(range(8))
    pids = [int(pid) for report in reports for pid in report.output.split()]
    assert len(pids) == 16
    assert none_left(pids)


def test_the_plant_is_seen_by_the_search_for_leftovers():
    process = subprocess.Popen(["sleep", "600"])
    assert not none_left([process.pid], seconds=0.2)
    process.kill()
    process.wait()
    assert none_left([process.pid])


def test_a_file_that_stays_is_left_and_one_that_has_gone_is_not(tmp_path):
    (tmp_path / "stays").touch()
    assert wait_until_gone({"stays", "gone"}, tmp_path, seconds=0.2) == {"stays"}


# ---- rendezvous, names, devices ----------------------------------------------------


def test_a_rank_finds_what_was_decided_for_it(monkeypatch):
    """The names that torchrun sets are in test_job.py and chapter 01."""
    monkeypatch.setenv("READERS_OWN", "changed later")
    names = ("READERS_OWN", "RANK", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")

    def look():
        found = tuple(os.environ[name] for name in names)
        return *found, torch.get_num_threads(), dist.get_debug_level().name

    env, loopback = (
        {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        rendezvous.loopback_interface(),
    )
    assert spawn(look, world_size=2, env=env, threads=2) == [
        ("changed later", str(rank), "2", loopback, 2, "DETAIL") for rank in range(2)
    ]


def test_without_a_gpu_the_ranks_are_on_the_cpu_over_gloo_and_say_so_once(
    capsys, monkeypatch
):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("ddp_course.launch.api._announced", set())

    def look():
        return str(device()), dist.get_backend(), torch.get_num_threads()

    for _ in range(2):
        assert spawn(look, world_size=2) == [("cpu", "gloo", 1)] * 2
    assert capsys.readouterr().out == (
        "2 ranks on the CPU, talking over gloo: this machine has no GPU.\n"
    )


def test_several_meetings_on_one_port():
    """Chapter 01 meets once: at env://, tcp:// and file://. Other ports stay free."""

    def meet_again_and_again():
        next(dist.rendezvous("env://"))
        totals = []
        for _ in range(3):
            dist.init_process_group("gloo")
            totals.append(sum_of_ranks())
            dist.barrier()
            dist.destroy_process_group()
        elsewhere, _, _ = next(dist.rendezvous("tcp://127.0.0.1:0", 0, 1))
        return totals, elsewhere.port == int(os.environ["MASTER_PORT"])

    found = spawn(meet_again_and_again, init=False)
    assert found == [([6.0] * 3, False)] * 4


def test_a_rank_that_returns_when_the_store_has_gone_has_returned():
    """With `init=False` the store may be rank 0's, and end with it."""

    def outlive_the_store():
        dist.init_process_group("gloo")
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            store.get("rank 1 is ready")
            os._exit(0)
        store.set("rank 1 is ready", "yes")
        with pytest.raises(RuntimeError):
            while True:
                store.check(["anything"])
        return "returned"

    gone, value = spawn(outlive_the_store, world_size=2, init=False, may_fail=[0])
    assert (gone.status, value) == ("exited", "returned")


def listening() -> set[str]:
    """The addresses on which this very process listens (Linux)."""
    inodes = set()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.add(str(file.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (row.split()[i] for i in (1, 3, 9))
            if state == "0A" and f"socket:[{inode}]" in inodes:
                found.add(local.split(":")[0])
    return found


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "0" * 24 + "01000000"}


def test_store_and_gloo_listen_on_loopback_only():
    def look():
        dist.init_process_group("gloo")  # env://: a TCPStore on MASTER_PORT
        sum_of_ranks()
        found = listening()
        dist.barrier()
        planted = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # on all interfaces
        return found, listening(), planted.port

    for found, with_plant, _ in spawn(look, init=False):
        assert found and found <= LOOPBACK
        assert not with_plant <= LOOPBACK


# ---- elsewhere ---------------------------------------------------------------------


def test_spawn_where_there_is_no_fork_server_and_no_memory_file(
    no_leftovers, monkeypatch
):
    in_folder = functools.partial(scratch.scratch_files, in_memory=False)
    monkeypatch.setattr(parent, "scratch_files", in_folder)
    monkeypatch.setattr(server, "METHOD", "spawn")
    offset = 5
    assert spawn(lambda: sum_of_ranks() + offset, world_size=2) == [6.0] * 2


def test_a_script_is_not_run_again_nor_what_lies_in_the_current_folder(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "print('the script runs')\n"
        "import torch.distributed as dist\n"
        "from ddp_course.launch import spawn\n"
        "def f(): return dist.get_rank()\n"
        "print(spawn(f, world_size=2))\n"
    )
    folder = tmp_path / "current"
    folder.mkdir()
    for name in ("random", "cloudpickle", "sympy"):
        (folder / f"{name}.py").write_text("open('was run', 'w')\n")
    run = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr
    assert not (folder / "was run").exists()
    assert run.stdout.count("the script runs") == 1
    assert run.stdout.endswith("[0, 1]\n")
    assert run.stderr == ""


def test_the_end_of_a_rank_is_noticed_although_its_child_holds_the_pipes():
    def leave_a_child():
        forked = threading.Event()

        def fork():  # a thread's child is not told to die with its parent
            if os.fork():
                forked.set()
            else:
                time.sleep(300)

        if dist.get_rank() == 1:
            threading.Thread(target=fork, daemon=True).start()
            forked.wait()
            os._exit(9)
        sum_of_ranks()

    with pytest.raises(RankError, match="rank 1: ended with exit code 9"):
        spawn(leave_a_child, world_size=2)  # in 120 s; the child holds them for 300


@pytest.mark.skipif(server.METHOD != "forkserver", reason="no fork server here")
def test_ranks_find_imported_what_their_modules_import_and_all_that_is_watched():
    """What many ranks would import, one after the other, the fork server has.

    Of the course, too, and of the kit of the chapters: an edit of it would be seen.
    """

    def imported():
        wanted = {"torch._dynamo", "IPython.display", "pytest", "ddp_course.train"}
        threads = len(list(Path(f"/proc/{os.getppid()}/task").iterdir()))
        files = {getattr(module, "__file__", None) for module in sys.modules.values()}
        own = {file for file in files - {None} if file.startswith(str(server.COURSE))}
        assert (
            not {"matplotlib", "ipywidgets"} & sys.modules.keys()
        )  # for the lab's own
        garbage = gc.get_freeze_count(), gc.isenabled()
        return wanted & sys.modules.keys(), threads, garbage, own

    [(names, threads_of_the_server, garbage, own)] = spawn(imported, world_size=1)
    frozen, collects = garbage
    assert len(names) == 4
    assert frozen > 100_000  # their pages are not copied for the garbage collector
    assert collects  # again: the server does not, while it imports
    assert threads_of_the_server == 1  # or their locks would be copied as they are
    assert len(own) > 60 and str(server.COURSE / "lab/exercises.py") in own
    assert own <= {str(path) for path in server._imported()}


@pytest.mark.skipif(server.METHOD != "forkserver", reason="no fork server here")
def test_an_edited_file_of_the_course_replaces_the_server(tmp_path, monkeypatch):
    def whose_child():
        return os.getppid()

    edited = tmp_path / "edited.py"
    edited.write_text("")
    monkeypatch.setattr(server, "_imported", lambda: [edited])
    monkeypatch.setitem(server._served, "version", server._last_edit())
    [before], [still] = (spawn(whose_child, world_size=1) for _ in range(2))
    os.utime(edited, ns=(1, 1))
    [after] = spawn(whose_child, world_size=1)
    assert before == still != after


def test_an_editors_lock_is_no_file_of_the_course(tmp_path, monkeypatch):
    lock, file = tmp_path / ".#open.py", tmp_path / "saved.py"
    lock.symlink_to("somebody@somewhere.123")  # as Emacs does
    file.write_text("")
    os.utime(file, ns=(5, 5))
    monkeypatch.setattr(server, "_imported", lambda: [lock, file])
    assert server._last_edit() == 5


def test_a_file_that_cannot_be_imported_is_left_to_the_rank(monkeypatch):
    monkeypatch.setitem(sys.modules, "ddp_course.train", None)  # ImportError
    monkeypatch.delitem(sys.modules, "ddp_course.preload", raising=False)
    monkeypatch.setattr(gc, "freeze", lambda: None)  # this process goes on
    __import__("ddp_course.preload")  # as the server does
