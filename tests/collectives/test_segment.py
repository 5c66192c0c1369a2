"""Shared memory on real ranks: the same bytes, barriers that hold, nothing left."""

from __future__ import annotations

import errno
import gc
import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_course.collectives import segment as module
from ddp_course.collectives.mapping import same_machine, shared_memory
from ddp_course.collectives.meeting import Meeting, Notice
from ddp_course.collectives.segment import Segment, share
from ddp_course.launch import spawn

SIZES = [1, 2, 3, 4, 5, 8]


def exchange(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def shared(nbytes=4096, timeout=60.0) -> Segment:
    return share(nbytes, dist.get_rank(), dist.get_world_size(), exchange, timeout)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:ddp-course-")


def open_files() -> list[str]:
    links = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(link.readlink()))
        except FileNotFoundError:  # that of the listing itself
            continue
    return [link for link in links if "memfd:ddp-course-" in link]


def catch(do) -> str:
    """Return the type and text of what `do()` raises."""
    try:
        do()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def nap(chance: random.Random) -> None:
    """Sleep a little, sometimes, so that ranks come in any order."""
    if chance.random() < 0.3:
        time.sleep(chance.random() * 1e-3)


# ---- one machine, one memory -------------------------------------------------------


def test_ranks_with_the_same_kernel_and_processes_are_on_one_machine():
    assert same_machine(lambda here: [here, here])
    assert not same_machine(lambda here: [here, ("another boot", here[1])])
    assert not same_machine(lambda here: [here, (here[0], "pid:[1]")])
    assert not same_machine(lambda here: [here, None])


def test_a_machine_without_proc_shares_nothing(monkeypatch):
    def missing(self):
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", missing)
    assert not same_machine(lambda here: [here, here])


@pytest.mark.parametrize("world_size", SIZES)
def test_all_ranks_see_the_same_memory_and_no_name_or_file_stays(
    world_size, no_leftovers
):
    def look():
        rank, size = dist.get_rank(), dist.get_world_size()
        names = set(os.listdir("/dev/shm"))  # noqa: PTH208
        segment = shared(8 * size)
        table = segment.view(0, (size,), torch.int64)
        clean = segment.bytes.sum().item() == 0
        segment.barrier()
        table[rank] = rank + 1
        segment.barrier()
        seen = table.tolist()
        segment.barrier()
        facts = {
            "clean": clean and same_machine(exchange),
            "aligned": table.data_ptr() % 4096 == 0,
            "seen": seen == list(range(1, size + 1)),
            "no name": set(os.listdir("/dev/shm")) <= names,  # noqa: PTH208
            "no file": open_files() == [],
            "count": segment.count == 3 and segment.turn == 1,
            "mapped": mappings() == 1,
        }
        del segment
        gc.collect()
        facts["a tensor keeps it"] = mappings() == 1 and table.tolist() == seen
        del table
        facts["then it is gone"] = mappings() == 0
        return [what for what, true in facts.items() if not true]

    assert spawn(look, world_size=world_size) == [[]] * world_size


def test_a_view_lies_within_the_memory():
    segment = share(64, 0, 1, lambda value: [value])
    assert segment.view(0, (2, 4), torch.float64).shape == (2, 4)
    assert segment.view(64, (0,), torch.float64).numel() == 0
    for offset, numel in [(0, 9), (8, 8), (-8, 1), (65, 0)]:
        with pytest.raises(ValueError, match="do not lie within 64"):
            segment.view(offset, (numel,), torch.float64)


def no_memory(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def forbidden(*_):
    raise PermissionError(errno.EACCES, "Permission denied")


def test_if_one_rank_cannot_have_the_memory_all_say_so():
    def attempts():
        rank, told = dist.get_rank(), {}

        def attempt(what, broken_rank, owner, name, replacement):
            original = getattr(owner, name)
            if rank == broken_rank:
                setattr(owner, name, replacement)
            told[what] = catch(shared)
            setattr(owner, name, original)

        memfd = os.memfd_create
        attempt("no memfd", 0, os, "memfd_create", None)
        attempt("no memory", 0, os, "posix_fallocate", no_memory)
        attempt("other user", 1, os, "open", forbidden)
        attempt("full", 2, torch, "from_file", no_memory)
        # As in another container: the number is that of another process there.
        attempt("other", 0, os, "memfd_create", lambda _: memfd("somebody-elses"))
        shared().barrier()  # after all that it still works
        return told, open_files(), mappings()

    if not hasattr(os, "memfd_create"):
        pytest.skip("no memfd here")
    results = spawn(attempts, world_size=3)
    assert [(files, maps) for _, files, maps in results] == [([], 0)] * 3
    told = [told for told, *_ in results]
    assert told == [told[0]] * 3
    begin = r"OSError: no \d+ bytes of shared memory: "
    for what, text in {
        "no memfd": "rank 0 cannot make it: 'NoneType'",
        "no memory": "rank 0 cannot make it: .* No space left on device",
        "other user": "rank 1 cannot map it: .* Permission denied",
        "full": "rank 2 cannot map it: .* No space left on device",
        "other": "rank 1 cannot .* is another file here.*; rank 2 cannot",
    }.items():
        assert re.match(begin + text, told[0][what]), told[0][what]


# ---- the barrier -------------------------------------------------------------------


class Absent(Segment):
    """A planted mistake: it does not wait."""

    def barrier(self):
        self.count += 1


class OneRound(Segment):
    """A planted mistake: it hears of one neighbour only."""

    def barrier(self):
        self._rounds = self._rounds[:1]
        super().barrier()


def early_ranks(kind: type[Segment], rounds: int = 150) -> int:
    """Count how often a rank passed a barrier at which another had not arrived."""
    segment = shared(8 * 64 * dist.get_world_size())
    segment.__class__ = kind
    places = segment.view(0, (segment.size, 64), torch.int64)[:, 0]
    chance, early = random.Random(segment.rank), 0
    for number in range(1, rounds + 1):
        nap(chance)
        places[segment.rank] = number
        segment.barrier()
        early += int(places.min()) < number
    dist.barrier()
    return early


@pytest.mark.parametrize("world_size", SIZES)
def test_nobody_passes_a_barrier_before_all_have_arrived(world_size):
    assert sum(spawn(early_ranks, Segment, world_size=world_size)) == 0


@pytest.mark.parametrize("wrong", [Absent, OneRound])
def test_planted_barriers_are_passed_early(wrong):
    assert sum(spawn(early_ranks, wrong, world_size=4)) > 0


def test_a_rank_can_sleep_at_a_barrier():
    def sleepers():
        module.SPINS = 0
        return early_ranks(Segment, 30)

    assert sum(spawn(sleepers, world_size=3)) == 0


def test_c_libraries_without_a_steady_clock_can_sleep_too():
    class Older:
        def __init__(self, libc):
            self.sem_timedwait = libc.sem_timedwait

    def sleepers():
        libc = module._libc()
        module.SPINS, module._libc = 0, lambda: libc
        segment = shared(8)
        module._libc = lambda: Older(libc)
        for _ in range(20):
            time.sleep(1e-3 * segment.rank)
            segment.barrier()
        segment.timeout = 0.3
        return catch(segment.barrier) if segment.rank else "away"

    assert "rank 0 of 2 did not arrive" in spawn(sleepers, world_size=2)[1]


@pytest.mark.parametrize(
    ("absent", "named"), [([2], "rank 2 of 4"), ([1, 3], "ranks 1, 3 of 4")]
)
def test_who_does_not_arrive_is_named(absent, named):
    def wait():
        segment = shared(timeout=0.7)
        segment.barrier()
        if segment.rank in absent:
            dist.barrier()
            return "absent"
        first = catch(segment.barrier)
        dist.barrier()
        return first, catch(segment.barrier)

    for rank, told in enumerate(spawn(wait, world_size=4)):
        if rank in absent:
            assert told == "absent"
        else:
            missed = f"{named} did not arrive within 0.7 s; rank {rank} waited"
            first, again = told
            assert first == f"TimeoutError: {missed}"
            assert again.startswith("RuntimeError") and missed in again


def test_a_rank_that_fails_between_barriers_does_not_keep_the_others_waiting():
    def fail():
        segment = shared(timeout=3600.0)

        def work():
            with segment:
                segment.barrier()
                if segment.rank == 1:
                    raise ValueError("no")
                segment.barrier()

        return catch(work), catch(segment.barrier)

    told = spawn(fail, world_size=3)
    assert told[1][0] == "ValueError: no"
    assert "can no longer be used: rank 1 left it: ValueError: no" in told[1][1]
    for rank in (0, 2):  # one of them may learn it from the other
        assert told[rank][0].startswith("RuntimeError: rank")
        assert "failed and left this shared memory" in told[rank][0]
    assert any("RuntimeError: rank 1 failed" in first for first, _ in told)


def test_ctrl_c_ends_the_waiting():
    def interrupt():
        segment = shared(timeout=3600.0)
        if segment.rank == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            told = catch(segment.barrier)
            dist.barrier()
        else:
            dist.barrier()
            segment.barrier()  # rank 0 had told that it came to this one
            told = catch(segment.barrier)
        return told

    told = spawn(interrupt, world_size=2)
    assert told[0].startswith("KeyboardInterrupt")
    assert told[1] == "RuntimeError: rank 0 failed and left this shared memory"


def test_a_meeting_must_pass_exactly_one_barrier():
    def twice():
        segment.barrier()
        segment.barrier()

    for meeting, number in ((lambda: None, 0), (twice, 2)):
        segment = share(64, 0, 1, lambda value: [value])
        segment.meet()
        segment.meet(segment.barrier)
        with pytest.raises(RuntimeError, match=f"passed {number} barriers here"):
            segment.meet(meeting)
        with pytest.raises(RuntimeError, match="can no longer be used"):
            segment.barrier()


# ---- meetings ----------------------------------------------------------------------


def one_page(meeting: Meeting) -> None:
    """Plant a mistake: the next notice overwrites the one that others still read."""
    meeting._hashes = meeting._hashes[:1] * 2
    meeting._texts = meeting._texts[:1] * 2


def no_barrier(meeting: Meeting) -> None:
    """Plant a mistake: notices are read before all are there."""
    meeting.segment.__class__ = Absent


def wrong_meetings(plant=None, rounds: int = 300) -> int:
    """Count the meetings at which a rank did not see what all had shown."""
    segment = shared(Meeting.nbytes(dist.get_world_size()))
    meeting = Meeting(segment)
    if plant:
        plant(meeting)
    slow, common, wrong = random.Random(segment.rank), random.Random(1), 0
    for number in range(rounds):
        if common.random() < 0.5:
            notices = [b"the same"] * segment.size
        else:
            notices = [b"%d: %d" % (number, rank) for rank in range(segment.size)]
        nap(slow)
        expected = None if len(set(notices)) == 1 else notices
        wrong += meeting.meet(notices[segment.rank]) != expected
    dist.barrier()
    return wrong


@pytest.mark.parametrize("world_size", SIZES)
def test_all_ranks_see_all_notices(world_size):
    assert sum(spawn(wrong_meetings, world_size=world_size)) == 0


@pytest.mark.parametrize("plant", [one_page, no_barrier])
def test_planted_meetings_are_seen(plant):
    assert sum(spawn(wrong_meetings, plant, world_size=3)) > 0


def test_long_notices_differ_even_where_they_are_cut():
    def meet():
        segment = shared(Meeting.nbytes(2) + 64)
        meeting, rank = Meeting(segment, 64), segment.rank
        long = b"x" * 5000
        same = meeting.meet(long)
        differ = meeting.meet(long + b"%d" % rank)
        empty = meeting.meet(b"" if rank else b"not")
        notice = Notice(b"kept")
        again = [meeting.meet(notice) for _ in range(5)]
        return same, [len(text) for text in differ], empty, again

    expected = (None, [4096, 4096], [b"not", b""], [None] * 5)
    assert spawn(meet, world_size=2) == [expected] * 2


# ---- nothing is left ---------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("moment", [1, 2, 3, "barrier"])
def test_kill_9_at_any_moment_leaves_nothing(victim, moment, no_leftovers):
    def die():
        calls = 0

        def deadly(value):
            nonlocal calls
            calls += 1
            if calls == moment and dist.get_rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            return exchange(value)

        segment = share(1 << 20, dist.get_rank(), 2, deadly)
        for number in range(100):
            if number == 50 and dist.get_rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            segment.barrier()

    reports = spawn(die, world_size=2, check=False, timeout=60, output="none")
    assert reports[victim].status != "ok"


def test_memory_of_one_rank_needs_nobody():
    memory = shared_memory(10, 0, lambda value: [value])
    memory[3] = 7
    assert memory.tolist() == [0, 0, 0, 7, 0, 0, 0, 0, 0, 0]
    assert mappings() == 1
    del memory
    assert mappings() == 0
