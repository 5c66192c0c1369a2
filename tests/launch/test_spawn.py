"""`spawn` on real ranks: what comes back, what is shown, what is told of failures."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import none_left

from ddp_course.launch import (
    CannotSendError,
    Link,
    Links,
    RankError,
    RankInterrupted,
    RankTimeout,
    device,
    here,
    parent,
    scratch,
    send_over_link,
    server,
    spawn,
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


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_values_come_back_in_rank_order_and_the_group_is_ready(world_size):
    def answer():
        return dist.get_rank(), dist.get_world_size(), sum_of_ranks()

    total = sum(range(world_size))
    assert spawn(answer, world_size=world_size) == [
        (rank, world_size, total) for rank in range(world_size)
    ]


def test_default_is_four_ranks():
    assert spawn(dist.get_rank) == [0, 1, 2, 3]


def test_many_kinds_of_values():
    def answer(factor):
        rank = dist.get_rank()
        leaf = torch.full((2,), float(rank), requires_grad=True)
        return {
            "tensor": torch.arange(3) * factor + rank,
            "with a graph": leaf * 2,
            "module": torch.nn.Linear(2, 1, bias=False),
            "dataclass": Point(rank, torch.ones(2)),
            "nothing": None,
        }

    zero, one = spawn(answer, 10, world_size=2)
    assert one["tensor"].tolist() == [1, 11, 21]
    assert one["with a graph"].tolist() == [2.0, 2.0]
    assert one["module"](torch.ones(1, 2)).shape == (1, 1)
    assert isinstance(one["dataclass"], Point)
    assert one["dataclass"].x == 1
    assert zero["nothing"] is None


def test_closures_and_lambdas_take_their_surroundings_along():
    offset, table = 100, {"a": 1}

    def outer(k):
        return lambda: dist.get_rank() * k + offset + table["a"]

    assert spawn(outer(10), world_size=2) == [101, 111]


def test_large_value_arrives():
    def large():
        return torch.full((25_000_000,), dist.get_rank(), dtype=torch.float32)  # 100 MB

    values = spawn(large, world_size=2)
    assert [value[-1].item() for value in values] == [0.0, 1.0]
    assert values[0].numel() * 4 == 100_000_000


def test_large_argument_arrives():
    block = torch.arange(25_000_000, dtype=torch.float32)
    assert spawn(lambda: block[-1].item(), world_size=2) == [block[-1].item()] * 2


def test_value_that_cannot_be_sent_is_named():
    def lock_inside():
        return {"fine": 1, "items": [1, {"lock": threading.Lock()}]}

    with pytest.raises(RankError, match="cannot be sent") as caught:
        spawn(lock_inside, world_size=2)
    assert "the value['items'][1]['lock'] is a _thread.lock" in str(caught.value)


def test_function_that_cannot_be_sent_is_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr(
        "ddp_course.launch.server.start", lambda _: pytest.fail("start")
    )
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


def test_seconds_are_those_of_the_function():
    slow, fast = spawn(
        lambda: time.sleep(0.3 * (1 - dist.get_rank())), world_size=2, check=False
    )
    assert slow.seconds > 0.3 > fast.seconds


# ---- what the ranks print ----------------------------------------------------------


def talk():
    rank = dist.get_rank()
    time.sleep(0.05 * (3 - rank))  # the last rank is the first to speak
    print(f"I am {rank}")
    os.write(1, b"written below Python\n")
    print(f"warned by {rank}", file=sys.stderr)
    print("no newline at the end", end="")


def test_output_comes_in_rank_order(capsys):
    spawn(talk)
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if line.startswith("[")]
    assert lines == [
        f"[rank {rank}] {text}"
        for rank in range(4)
        for text in (f"I am {rank}", "written below Python", "no newline at the end")
    ]
    assert err.splitlines() == [f"[rank {rank}] warned by {rank}" for rank in range(4)]


def test_live_output_comes_as_it_is_printed(capsys):
    spawn(talk, output="live")
    lines = [x for x in capsys.readouterr().out.splitlines() if "I am" in x]
    assert sorted(lines) == [f"[rank {rank}] I am {rank}" for rank in range(4)]
    assert lines[0] == "[rank 3] I am 3"


def test_no_output_but_kept_in_the_report(capsys):
    reports = spawn(talk, output="none", check=False)
    assert capsys.readouterr() == ("", "")
    assert reports[2].output.splitlines()[0] == "I am 2"
    assert reports[2].stderr == "warned by 2\n"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_ten_megabytes_of_output_do_not_block(stream, capsys):
    def shout():
        for _ in range(10):
            print("x" * 1_000_000, file=getattr(sys, stream))

    reports = spawn(shout, world_size=2, check=False, max_lines=3)
    text = reports[1].output if stream == "stdout" else reports[1].stderr
    assert len(text) == 10_000_010
    shown = "".join(capsys.readouterr())
    assert shown.count("x" * 1_000_000) == 6
    assert "more than 3 lines" in shown


# ---- failures ----------------------------------------------------------------------


def test_a_rank_that_raises_is_the_cause_and_its_peers_are_not():
    def fail():
        if dist.get_rank() == 2:
            raise ValueError("two is enough")
        sum_of_ranks()

    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        spawn(fail)
    assert time.monotonic() - start < 20  # and not the deadline
    error = caught.value
    assert str(error) == "rank 2: ValueError: two is enough"
    assert error.rank == 2
    assert [report.status for report in error.reports] == ["raised"] * 4
    assert [report.lost_a_peer for report in error.reports] == [True, True, False, True]
    assert 'raise ValueError("two is enough")' in error.story
    assert "ddp_course/launch" not in error.story
    assert (
        "rank 0: lost the connection to another rank, in test_spawn.py" in error.story
    )


@pytest.mark.parametrize("repetition", range(5))
def test_the_cause_is_found_every_time(repetition):
    def fail():
        if dist.get_rank() == 1:
            raise KeyError("culprit")
        while True:
            sum_of_ranks()

    with pytest.raises(RankError, match="rank 1: KeyError: 'culprit'"):
        spawn(fail)


def test_a_rank_that_exits():
    def leave():
        if dist.get_rank() == 1:
            sys.exit(3)
        sum_of_ranks()

    with pytest.raises(RankError, match="rank 1: SystemExit: 3") as caught:
        spawn(leave, world_size=2)
    assert caught.value.reports[1].status == "exited"


def test_a_rank_that_ends_without_a_word():
    def vanish():
        if dist.get_rank() == 1:
            os._exit(7)
        sum_of_ranks()

    with pytest.raises(RankError, match="rank 1: ended with exit code 7"):
        spawn(vanish, world_size=2)


def test_a_rank_that_is_killed():
    def die():
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        sum_of_ranks()

    with pytest.raises(RankError, match="rank 0: killed by SIGKILL") as caught:
        spawn(die, world_size=3)
    assert caught.value.reports[0].status == "killed"


def test_a_rank_that_dies_in_cpp_says_where_and_why():
    def abort():
        if dist.get_rank() == 1:
            os.write(2, b"terminate called after throwing 'gloo::Something'\n")
            os.abort()
        sum_of_ranks()

    with pytest.raises(RankError, match="rank 1: killed by SIGABRT") as caught:
        spawn(abort, world_size=2)
    report = caught.value.reports[1]
    assert "gloo::Something" in report.error
    assert report.where.endswith("os.abort()")


def test_a_mismatch_that_gloo_answers_with_an_abort_has_a_cause():
    def mismatch():
        dist.all_reduce(torch.ones(5 if dist.get_rank() == 1 else 500_000))

    with pytest.raises(RankError) as caught:
        spawn(mismatch, world_size=2, timeout=5)
    assert "dist.all_reduce" in caught.value.story


def test_a_rank_that_returns_too_early_is_named():
    def early():
        if dist.get_rank() > 0:
            sum_of_ranks()

    with pytest.raises(RankError, match="rank 0 returned while rank"):
        spawn(early, world_size=3)


def test_check_false_returns_the_same_as_data():
    def mixed():
        rank = dist.get_rank()
        print("hello from", rank)
        if rank == 1:
            raise RuntimeError("told as data")
        if rank == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return rank

    reports = spawn(mixed, check=False, output="none")
    assert [r.status for r in reports] == ["ok", "raised", "killed", "ok"]
    assert [r.value for r in reports] == [0, None, None, 3]
    assert reports[1].error == "RuntimeError: told as data"
    assert reports[1].where.endswith('raise RuntimeError("told as data")')
    assert "RuntimeError: told as data" in reports[1].traceback
    assert reports[2].error == "killed by SIGTERM"
    assert reports[1].output == "hello from 1\n"
    assert all(r.seconds >= 0 for r in reports)


def test_a_failure_ends_the_launch_although_a_peer_is_deaf():
    def deaf():
        if dist.get_rank() == 0:
            time.sleep(60)
        raise ValueError("now")

    seconds = time.monotonic()
    with pytest.raises(RankError, match="rank 1: ValueError: now") as caught:
        spawn(deaf, world_size=2)
    assert time.monotonic() - seconds < 30
    assert caught.value.reports[0].status == "unfinished"
    assert caught.value.reports[0].where.endswith("time.sleep(60)")


# ---- the deadline ------------------------------------------------------------------


def test_a_deadlock_ends_with_the_line_in_which_each_rank_hangs():
    def deadlock():
        x = torch.zeros(1)
        if dist.get_rank() == 0:
            dist.recv(x, src=1)  # hangs inside C++
        elif dist.get_rank() == 1:
            while True:  # hangs in Python
                pass
        return "done"

    with pytest.raises(RankTimeout, match="ranks 0 and 1 have not returned") as caught:
        spawn(deadlock, world_size=3, timeout=1.5)
    zero, one, two = caught.value.reports
    assert "dist.recv(x, src=1)" in zero.where
    assert "while True" in one.where or "pass" in one.where
    assert two.status == "ok"
    assert caught.value.story.splitlines()[2] == "  rank 2: returned"


def test_a_deadline_also_works_on_a_rank_that_holds_the_gil_or_is_stopped():
    def stopped():
        os.kill(os.getpid(), signal.SIGSTOP if dist.get_rank() else signal.SIGCONT)

    with pytest.raises(RankTimeout, match="rank 1 has not returned"):
        spawn(stopped, world_size=2, timeout=1)


# ---- nothing left behind -----------------------------------------------------------


def with_children():
    """Start a DataLoader whose workers live on, and a process of another program."""
    loader = torch.utils.data.DataLoader(
        list(range(8)), num_workers=2, persistent_workers=True
    )
    batches = [batch.item() for batch in loader]
    sleeper = subprocess.Popen(["sleep", "600"])
    workers = [worker.pid for worker in loader._iterator._workers]
    return [os.getpid(), sleeper.pid, *workers], batches, loader


def test_a_dataloader_works_in_a_rank_and_its_workers_die_with_it(no_leftovers):
    def load():
        pids, batches, _ = with_children()
        return pids, batches

    told = spawn(load, world_size=2)
    assert [batches for _, batches in told] == [list(range(8))] * 2
    assert none_left([pid for pids, _ in told for pid in pids])


@pytest.mark.parametrize("ending", ["raise", "deadline", "kill"])
def test_workers_die_with_a_rank_that_fails(ending, no_leftovers):
    def fail():
        pids, _, keep = with_children()
        print(*pids, flush=True)
        if ending == "raise":
            raise ValueError
        if ending == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        return keep

    reports = spawn(fail, world_size=2, timeout=6, check=False, output="none")
    pids = [int(pid) for report in reports for pid in report.output.split()]
    assert len(pids) >= 4
    assert none_left(pids)


def test_after_many_kinds_of_ends_nothing_is_left(no_leftovers):
    def end_somehow(how):
        if dist.get_rank() == 1:
            {"return": int, "raise": lambda: 1 / 0, "hang": lambda: time.sleep(99)}[
                how
            ]()

    for how in ("return", "raise", "hang"):
        spawn(end_somehow, how, world_size=2, timeout=1, check=False)


def test_the_plant_is_seen_by_the_search_for_leftovers():
    process = subprocess.Popen(["sleep", "600"])
    assert not none_left([process.pid], seconds=0.2)
    process.kill()
    process.wait()
    assert none_left([process.pid])


# ---- rendezvous, names, devices ----------------------------------------------------


def test_the_environment_is_torchruns():
    expected = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    told = spawn(lambda: {n: os.environ[n] for n in expected}, world_size=2)
    assert told[1] == expected


def test_changes_of_the_environment_reach_the_ranks(monkeypatch):
    monkeypatch.setenv("READERS_OWN", "changed later")

    def look():
        return os.environ["READERS_OWN"], os.environ["MORE"], torch.get_num_threads()

    assert spawn(look, world_size=1, env={"MORE": "yes"}, threads=2) == [
        ("changed later", "yes", 2)
    ]


def test_debug_level_is_read_in_the_rank():
    level = spawn(
        lambda: dist.get_debug_level().name,
        world_size=1,
        env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    )
    assert level == ["DETAIL"]


@pytest.mark.parametrize("url", ["env://", "tcp://", "file://"])
def test_every_kind_of_rendezvous_works_inside_a_launch(url, tmp_path):
    def meet():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = {
            "env://": "env://",
            "tcp://": "tcp://127.0.0.1:" + os.environ["MASTER_PORT"],
            "file://": f"file://{tmp_path}/meeting",
        }[url]
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
        total = sum_of_ranks()
        dist.barrier()
        dist.destroy_process_group()
        return total

    assert spawn(meet, world_size=3, init=False) == [3.0] * 3


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
    def look(env_store):
        if env_store:
            dist.init_process_group("gloo")  # env://: a TCPStore on MASTER_PORT
        sum_of_ranks()
        found = listening()
        dist.barrier()
        return found

    with_file = spawn(look, False)
    with_tcp = spawn(look, True, init=False)
    assert all(with_file)
    assert all(with_tcp)
    assert set.union(*with_file, *with_tcp) <= LOOPBACK


def test_gloo_is_told_to_use_loopback():
    """Where the host name means 127.0.0.1, as in CI, it would do so untold."""
    told = spawn(lambda: os.environ["GLOO_SOCKET_IFNAME"], world_size=2)
    assert told == ["lo0" if sys.platform == "darwin" else "lo"] * 2


def test_the_look_at_listening_sockets_sees_an_open_one():
    def plant():
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        return listening(), store.port

    [(found, _)] = spawn(plant, world_size=1, init=False)
    assert not found <= LOOPBACK


def test_twelve_ranks_on_three_emulated_nodes():
    def who():
        place = here()
        return place.rank, place.node_rank, place.local_rank, os.environ["GROUP_RANK"]

    told = spawn(who, nnodes=3, nproc_per_node=4)
    assert told == [(r, r // 4, r % 4, str(r // 4)) for r in range(12)]


def test_links_between_nodes_are_as_slow_as_asked():
    def time_two_sends():
        rank, x = dist.get_rank(), torch.zeros(1000)
        seconds = []
        for peer in (1, 2):  # 1 is on rank 0's node, 2 is not
            start = time.monotonic()
            if rank == 0:
                send_over_link(x, peer)
            elif rank == peer:
                dist.recv(x, 0)
            seconds.append(time.monotonic() - start)
            dist.barrier()
        return seconds

    links = Links(
        between=Link(latency=0.2, bandwidth=20_000)
    )  # 0.2 s + 4000 B / 20 kB/s
    told = spawn(time_two_sends, nnodes=2, nproc_per_node=2, links=links)
    inside, between = told[0]
    assert between >= 0.4
    assert inside < between


def test_without_a_gpu_the_ranks_are_on_the_cpu_over_gloo_and_say_so(
    capsys, monkeypatch
):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("ddp_course.launch.api._told", set())

    def look():
        return str(device()), dist.get_backend(), torch.get_num_threads()

    assert spawn(look, world_size=2) == [("cpu", "gloo", 1)] * 2
    assert capsys.readouterr().out == (
        "2 ranks on the CPU, talking over gloo: this machine has no GPU.\n"
    )


# ---- elsewhere ---------------------------------------------------------------------


def test_spawn_where_there_is_no_fork_server_and_no_memory_file(
    no_leftovers, monkeypatch
):
    in_folder = functools.partial(scratch.scratch_files, in_memory=False)
    monkeypatch.setattr(parent, "scratch_files", in_folder)
    offset = 5
    told = spawn(lambda: sum_of_ranks() + offset, world_size=2, start_method="spawn")
    assert told == [6.0, 6.0]


def test_a_script_is_not_run_again_in_its_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "print('the script runs')\n"
        "import torch.distributed as dist\n"
        "from ddp_course.launch import spawn\n"
        "def f(): return dist.get_rank()\n"
        "print(spawn(f, world_size=2))\n"
    )
    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("the script runs") == 1
    assert run.stdout.endswith("[0, 1]\n")
    assert run.stderr == ""


def test_what_c_has_printed_arrives_too(monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)

    def print_from_c():
        import ctypes

        ctypes.CDLL(None).printf(b"printed by C\n")

    [report] = spawn(print_from_c, world_size=1, check=False, output="none")
    assert report.output == "printed by C\n"


def test_a_closed_stdout_is_no_error():
    assert spawn(lambda: sys.stdout.close(), world_size=2) == [None, None]


def test_the_end_of_a_rank_is_noticed_although_its_child_holds_the_pipes():
    def leave_a_child():
        if dist.get_rank() == 1:
            # From another thread: it is not told to die with its parent.
            child = threading.Thread(target=lambda: os.fork() or time.sleep(30))
            child.daemon = True
            child.start()
            time.sleep(0.3)
            os._exit(9)
        sum_of_ranks()

    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1: ended with exit code 9"):
        spawn(leave_a_child, world_size=2)
    assert time.monotonic() - start < 20


def test_the_same_mistake_on_all_ranks_is_told_of_rank_0():
    def all_wrong():
        raise ValueError("everywhere")

    for _ in range(5):
        with pytest.raises(RankError, match="rank 0: ValueError: everywhere"):
            spawn(all_wrong)


def test_several_meetings_on_one_port():
    def meet_again_and_again():
        next(dist.rendezvous("env://"))
        totals = []
        for _ in range(3):
            dist.init_process_group("gloo")
            totals.append(sum_of_ranks())
            dist.barrier()
            dist.destroy_process_group()
        return totals

    for _ in range(5):
        assert spawn(meet_again_and_again, init=False, timeout=60) == [[6.0] * 3] * 4


def test_the_stop_button_is_no_ordinary_exception():
    assert not issubclass(RankInterrupted, Exception)
    assert issubclass(RankInterrupted, KeyboardInterrupt)


@pytest.mark.skipif(server.METHOD != "forkserver", reason="no fork server here")
def test_ranks_find_imported_what_their_modules_import():
    """What many ranks would import, one after the other, the fork server has."""

    def imported():
        wanted = {"torch._dynamo", "IPython.display", "pytest", "ddp_course.train"}
        threads = len(list(Path(f"/proc/{os.getppid()}/task").iterdir()))
        return wanted & sys.modules.keys(), threads, gc.get_freeze_count()

    [(names, threads_of_the_server, frozen)] = spawn(imported, world_size=1)
    assert len(names) == 4
    assert frozen > 100_000  # their pages are not copied for the garbage collector
    assert threads_of_the_server == 1  # or their locks would be copied as they are


@pytest.mark.skipif(server.METHOD != "forkserver", reason="no fork server here")
def test_an_edited_file_of_the_course_replaces_the_server(tmp_path, monkeypatch):
    def whose_child():
        return os.getppid()

    edited = tmp_path / "edited.py"
    edited.write_text("")
    monkeypatch.setattr(server, "_imported", lambda: [edited])
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


def test_what_the_server_imports_is_watched():
    """All that `preload` has imported, but the launcher's and the lab's."""
    watched = {str(path) for path in server._imported()}
    look = (
        "import sys; import ddp_course.preload\n"
        "print(*{m.__file__ for n, m in sys.modules.items()"
        " if n.startswith('ddp_course') and m.__file__}, sep='\\n')"
    )
    told = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, check=True
    )
    imported = set(told.stdout.split())
    assert len(imported) > 60
    assert imported <= watched


def test_a_file_that_cannot_be_imported_is_left_to_the_rank(monkeypatch):
    monkeypatch.setitem(sys.modules, "ddp_course.train", None)  # ImportError
    monkeypatch.delitem(sys.modules, "ddp_course.preload", raising=False)
    __import__("ddp_course.preload")  # as the server does
