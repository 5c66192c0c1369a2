"""Shared memory on real ranks: the same bytes, barriers that hold, nothing left."""

import errno
import gc
import os
import random
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from conftest import wait_until_gone
from memory_cases import exchange, mappings
from on_ranks import error_of

from ddp_course.collectives import memory_barrier as module
from ddp_course.collectives.allocator import allocate, container
from ddp_course.collectives.memory_barrier import LONGEST, Barrier
from ddp_course.launch import spawn


def shared(timeout=60.0, kind=Barrier) -> Barrier:
    return kind(dist.get_rank(), dist.get_world_size(), exchange, timeout)


def open_files() -> list[str]:
    links = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(link.readlink()))
        except FileNotFoundError:  # that of the listing itself
            continue
    return [link for link in links if "memfd:ddp-course-" in link]


def nap(chance: random.Random) -> None:
    """Sleep a little, sometimes, so that ranks come in any order."""
    if chance.random() < 0.3:
        time.sleep(chance.random() * 1e-3)


# ---- one machine, one memory -------------------------------------------------------


def test_memory_can_be_shared_on_one_kernel_with_the_same_processes(monkeypatch):
    boot, processes = container()
    assert (boot, processes) == container()
    assert boot in Path("/proc/sys/kernel/random/boot_id").read_text()
    assert processes.startswith("pid:[")
    monkeypatch.setattr(Path, "read_text", no_memory)  # a machine without /proc
    assert container() is None


def memory_faults() -> list[str]:
    """On every rank: use the same memory; return what is not as promised."""
    rank, size = dist.get_rank(), dist.get_world_size()
    names = set(os.listdir("/dev/shm"))  # noqa: PTH208
    barrier, memory = shared(), allocate(8 * size, rank, exchange)
    table = memory.view(torch.int64)
    clean = memory.sum().item() == 0
    barrier.wait()
    table[rank] = rank + 1
    barrier.wait()
    seen = table.tolist()
    barrier.wait()
    named = set(os.listdir("/dev/shm")) - names  # noqa: PTH208
    facts = {
        "clean": clean and len(set(exchange(container()))) == 1,
        "aligned": table.data_ptr() % 4096 == 0,
        "seen": seen == list(range(1, size + 1)),
        "no name": wait_until_gone(named, "/dev/shm") == set(),
        "no file": open_files() == [],
        "count": barrier.count == 3 and barrier.turn == 1,
        "mapped": mappings() == 2,
    }
    del barrier, memory
    gc.collect()
    facts["a tensor keeps it"] = mappings() == 1 and table.tolist() == seen
    del table
    facts["then it is gone"] = mappings() == 0
    return [what for what, true in facts.items() if not true]


def no_memory(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def forbidden(*_):
    raise PermissionError(errno.EACCES, "Permission denied")


def test_if_one_rank_cannot_have_the_memory_all_say_so():
    def attempts():
        rank, result = dist.get_rank(), {}

        def attempt(what, broken_rank, owner, name, replacement):
            original = getattr(owner, name)
            if rank == broken_rank:
                setattr(owner, name, replacement)
            result[what] = error_of(shared)
            setattr(owner, name, original)

        memfd = os.memfd_create
        attempt("no memfd", 0, os, "memfd_create", None)
        attempt("no memory", 0, os, "posix_fallocate", no_memory)
        attempt("other user", 1, os, "open", forbidden)
        attempt("full", 2, torch, "from_file", no_memory)
        # As in another container: the number is that of another process there.
        attempt("other", 0, os, "memfd_create", lambda _: memfd("somebody-elses"))
        shared().wait()  # after all that it still works
        return result, open_files(), mappings()

    if not hasattr(os, "memfd_create"):
        pytest.skip("no memfd here")
    results = spawn(attempts, world_size=3)
    assert [(files, maps) for _, files, maps in results] == [([], 0)] * 3
    result = [result for result, *_ in results]
    assert result == [result[0]] * 3
    begin = r"OSError: no \d+ bytes of shared memory: "
    for what, text in {
        "no memfd": "rank 0 cannot create it: 'NoneType'",
        "no memory": "rank 0 cannot create it: .* No space left on device",
        "other user": "rank 1 cannot map it: .* Permission denied",
        "full": "rank 2 cannot map it: .* No space left on device",
        "other": "rank 1 cannot .* is another file here.*; rank 2 cannot",
    }.items():
        assert re.match(begin + text, result[0][what]), result[0][what]


# ---- the barrier -------------------------------------------------------------------


class Absent(Barrier):
    """A planted mistake: it does not wait."""

    def wait(self):
        self.count += 1


class OneRound(Barrier):
    """A planted mistake: it hears of one neighbour only."""

    def wait(self):
        self._rounds = self._rounds[:1]
        super().wait()


class OnePage(Barrier):
    """A planted mistake: the next text overwrites the one that others still read."""

    def meet(self, text):
        self._hashes, self._texts = self._hashes[:1] * 2, self._texts[:1] * 2
        return super().meet(text)

    def wait(self):
        super().wait()
        if self.rank == 1 and self.count % 10 == 0:
            time.sleep(2e-3)  # and reads late, however many cores there are


def early_ranks(kind: type[Barrier], rounds: int = 150) -> int:
    """Count how often a rank passed a barrier at which another had not arrived."""
    barrier = shared(kind=kind)
    memory = allocate(8 * 64 * barrier.size, barrier.rank, exchange)
    places = memory.view(torch.int64).view(-1, 64)[:, 0]
    chance, early = random.Random(barrier.rank), 0
    for number in range(1, rounds + 1):
        nap(chance)
        places[barrier.rank] = number
        barrier.wait()
        early += int(places.min()) < number
    dist.barrier()
    return early


def wrong_meetings(kind: type[Barrier], rounds: int = 300) -> int:
    """Count the meetings at which a rank did not see what all had shown."""
    barrier = shared(kind=kind)
    slow, common, wrong = random.Random(barrier.rank), random.Random(1), 0
    for number in range(rounds):
        if common.random() < 0.5:
            texts = ["the same"] * barrier.size
        else:
            texts = [f"{number}: {rank}" for rank in range(barrier.size)]
        nap(slow)
        expected = None if len(set(texts)) == 1 else texts
        wrong += barrier.meet(texts[barrier.rank]) != expected
    dist.barrier()
    return wrong


@pytest.mark.timeout(500)
@pytest.mark.parametrize("world_size", [1, 5])
def test_memory_barriers_and_meetings_are_as_promised(world_size, no_leftovers):
    def faults():
        return memory_faults(), early_ranks(Barrier), wrong_meetings(Barrier)

    results = spawn(faults, world_size=world_size, timeout=400)
    assert results == [([], 0, 0)] * world_size


@pytest.mark.timeout(500)
def test_planted_barriers_and_meetings_are_seen_and_a_rank_can_sleep_at_one():
    def planted():
        early = map(early_ranks, (Absent, OneRound))
        faults = [*early, *map(wrong_meetings, (OnePage, Absent))]
        module.SPINS = 0
        return faults, early_ranks(Barrier, 30)

    results = spawn(planted, world_size=4, timeout=400)
    assert all(map(sum, zip(*(faults for faults, _ in results), strict=True))), results
    assert not any(asleep for _, asleep in results)


def late(absent: list[int]) -> tuple[str, str]:
    """On every rank: wait in vain for some; return what that says, and once more.

    Ranks of a busy machine come one by one: no clock goes on before all others came.
    """
    barrier = shared()
    barrier.wait()
    barrier.timeout, start = 0.7, time.monotonic()
    others = [rank for rank in range(barrier.size) if rank not in absent]

    def monotonic() -> float:
        came = all(barrier._arrived[rank] == 2 for rank in others)
        return time.monotonic() if came else start

    clock = SimpleNamespace(monotonic=monotonic, time_ns=time.time_ns)
    with patch.object(module, "time", clock):
        first = "absent" if barrier.rank in absent else error_of(barrier.wait)
    dist.barrier()
    return first, "" if barrier.rank in absent else error_of(barrier.wait)


def fails_between() -> tuple[str, str]:
    """On every rank: rank 1 fails between two barriers."""
    barrier = shared(timeout=3600.0)

    def work():
        with barrier:
            barrier.wait()
            if barrier.rank == 1:
                raise ValueError("no")
            barrier.wait()

    return error_of(work), error_of(barrier.wait)


def test_who_does_not_arrive_is_named_and_who_fails_keeps_nobody_waiting():
    def all_of_it():
        return late([2]), late([1, 3]), fails_between()

    results = spawn(all_of_it, world_size=4)
    for k, named in enumerate(["rank 2 of 4", "ranks 1, 3 of 4"]):
        for rank, (first, again) in enumerate(facts[k] for facts in results):
            if rank in ([2], [1, 3])[k]:
                assert first == "absent"
                continue
            missed = f"{named} did not arrive within 0.7 s; rank {rank} waited"
            assert first == f"TimeoutError: {missed}"
            assert again.startswith("RuntimeError") and missed in again
    failed = [facts[2] for facts in results]
    first, again = failed.pop(1)
    assert first == "ValueError: no"
    assert "can no longer be used: rank 1 left it: ValueError: no" in again
    for first, _ in failed:  # one of them may learn it from another
        assert first.startswith("RuntimeError: rank")
        assert "failed and left this shared memory" in first
    assert any("RuntimeError: rank 1 failed" in first for first, _ in failed)


def interrupted() -> str:
    """On both ranks: rank 0 waits, and rank 1 interrupts it."""
    barrier = shared(timeout=3600.0)
    pids = exchange(os.getpid())
    if barrier.rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        error = error_of(barrier.wait)
        dist.barrier()
        return error
    while not barrier._arrived[0]:
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(pids[0], signal.SIGINT)
    dist.barrier()
    barrier.wait()  # rank 0 had told that it came to this one
    return error_of(barrier.wait)


def long_texts() -> tuple:
    """On both ranks: show texts that are equal where they are cut, and others."""
    barrier, long = shared(), "x" * (LONGEST + 1000)
    same = barrier.meet(long)
    differ = barrier.meet(f"{long}{barrier.rank}")
    empty = barrier.meet("" if barrier.rank else "not")
    again = [barrier.meet("kept") for _ in range(5)]
    return same, [len(text) for text in differ], empty, again


def test_ctrl_c_ends_the_waiting_and_long_texts_differ_even_where_they_are_cut():
    results = spawn(lambda: (long_texts(), interrupted()), world_size=2)
    expected = (None, [LONGEST] * 2, ["not", ""], [None] * 5)
    assert [texts for texts, _ in results] == [expected] * 2
    assert results[0][1].startswith("KeyboardInterrupt")
    assert results[1][1] == "RuntimeError: rank 0 failed and left this shared memory"


# ---- nothing is left ---------------------------------------------------------------


@pytest.mark.parametrize(("victim", "moment"), [(0, 1), (1, 2), (0, 4), (1, "barrier")])
def test_kill_9_at_any_moment_leaves_nothing(victim, moment, no_leftovers):
    def die():
        calls = 0

        def deadly(value):
            nonlocal calls
            calls += 1
            if calls == moment and dist.get_rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            return exchange(value)

        barrier = Barrier(dist.get_rank(), 2, deadly)
        memory = allocate(1 << 20, dist.get_rank(), deadly)
        for number in range(100):
            if number == 50 and dist.get_rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            memory[number] = 1
            barrier.wait()

    reports = spawn(die, world_size=2, check=False, timeout=60, output="none")
    assert reports[victim].status != "ok"
