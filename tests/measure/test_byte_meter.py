"""ByteMeter: what it counts, for whom, and that it agrees with the operating system."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ddp_course.launch import Topology, here, spawn
from ddp_course.measure import ByteMeter, Bytes, SystemBytes, active_meters, system
from ddp_course.measure.meter import table

TWO_NODES = Topology(2, 2)
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/io is Linux's")


def meter_of(rank: int) -> ByteMeter:
    return ByteMeter(TWO_NODES.place(rank))


# ---- exact numbers -----------------------------------------------------------------


COUNT, REPORT = ByteMeter.count_sent, ByteMeter.report
PLANTS = {  # a method that counts wrongly
    "nothing": ("count_sent", COUNT),
    "off by a header": ("count_sent", lambda self, to, n: COUNT(self, to, n + 48)),
    "no empty messages": ("count_sent", lambda self, to, n: n and COUNT(self, to, n)),
    "one peer": ("count_sent", lambda self, to, n: COUNT(self, 0, n)),
    "only the last": (
        "count_sent",
        lambda self, to, n: (COUNT(self, to, n), self.sent.update({to: n})),
    ),
    "links swapped": (
        "report",
        lambda self: replace(r := REPORT(self), inside=r.between, between=r.inside),
    ),
    "along every axis": ("sent_to", lambda self, peers: self.total_sent),
}


def counts_exactly() -> bool:
    meter = meter_of(1)
    for peer, nbytes in [(0, 100), (2, 7), (0, 11), (3, 0)]:
        meter.count_sent(peer, nbytes)
    meter.count_received(3, 5)
    totals = meter.total_sent, meter.total_received, meter.total_messages
    return (
        meter.report()
        == Bytes(1, {0: 111, 2: 7, 3: 0}, {3: 5}, {0: 2, 2: 1, 3: 1}, 111, 7)
        and totals == (118, 5, 4)
        and (meter.sent_to([0, 1]), meter.report().sent_to([2, 3, 2])) == (111, 7)
    )


@pytest.mark.parametrize("plant", PLANTS)
def test_counts_are_exact_and_wrong_meters_are_seen(plant, monkeypatch):
    monkeypatch.setattr(ByteMeter, *PLANTS[plant])
    assert counts_exactly() == (plant == "nothing")


def test_nonsense_is_refused_and_changes_nothing():
    meter = meter_of(0)
    for count in (meter.count_sent, meter.count_received):
        with pytest.raises(ValueError, match="nbytes is -1"):
            count(1, -1)
    assert meter.report() == Bytes(0, {}, {}, {}, 0, 0)
    meter.count_sent(4, 1)
    with pytest.raises(ValueError, match="rank is 4"):
        meter.report()


# ---- which meters count ------------------------------------------------------------


def collective(nbytes: int) -> threading.Thread:
    """Do as an asynchronous collective does: ask when called, count when done."""
    meters = active_meters()

    def work() -> None:
        time.sleep(0.02)
        for meter in meters:
            meter.count_sent(1, nbytes)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_meters_count_what_was_started_within_their_blocks():
    outer, inner, after = meter_of(0), meter_of(0), meter_of(0)
    with outer:
        works = [collective(1)]
        with inner:
            works.append(collective(10))
        with after:
            works.append(collective(100))
    works.append(collective(1000))
    with inner:  # a second block: it counts on
        works.append(collective(10_000))
        with pytest.raises(RuntimeError, match="open already"), inner:
            pass  # not twice in itself
    for work in works:
        work.join()
    assert (outer.total_sent, inner.total_sent, after.total_sent) == (111, 10_010, 100)
    assert active_meters() == ()


def test_meters_may_close_out_of_order_and_after_an_error():
    first, second = meter_of(0), meter_of(0)
    first.__enter__()
    second.__enter__()
    assert active_meters() == (first, second)
    first.__exit__()
    assert active_meters() == (second,)
    second.__exit__()
    with pytest.raises(ZeroDivisionError), meter_of(0):
        1 / 0  # noqa: B018
    assert active_meters() == ()


class Interrupted(int):
    """A number: while it is checked, another thread counts as much."""

    def __new__(cls, count: Callable[[int, int], None], patience: float):
        return super().__new__(cls, 1)

    def __init__(self, count: Callable[[int, int], None], patience: float) -> None:
        self.other = threading.Thread(target=count, args=(1, 1))
        self.patience = patience

    def __lt__(self, other):
        self.other.start()
        self.other.join(self.patience)  # if there is a lock, it cannot end before us
        return int(self) < other


def survives_threads(meter: ByteMeter, patience: float) -> bool:
    for count in (meter.count_sent, meter.count_received):
        for _ in range(5):
            number = Interrupted(count, patience)
            count(1, number)
            number.other.join()
    return (meter.total_sent, meter.total_received, meter.total_messages) == (10,) * 3


def test_threads_lose_no_count_unless_there_is_no_lock():
    assert survives_threads(meter_of(0), patience=0.002)
    meter = meter_of(0)
    meter._lock = contextlib.nullcontext()
    assert not survives_threads(meter, patience=60.0)


def test_a_meter_can_be_pickled_and_counts_on():
    with meter_of(2) as meter:
        meter.count_sent(0, 8)
        twin = pickle.loads(pickle.dumps(meter))
    assert twin.report() == meter.report() == pickle.loads(pickle.dumps(meter.report()))
    twin.count_sent(0, 1)
    assert (twin.sent, meter.sent) == ({0: 9}, {0: 8})


# ---- reports and the table ---------------------------------------------------------


def test_a_report_reads_like_a_sentence():
    report = Bytes(1, {0: 1500, 2: 7}, {0: 3}, {0: 2, 2: 1}, 1500, 7)
    assert repr(report) == (
        "rank 1 sent 1,507 bytes, 1,500 to 0, 7 to 2 (messages: 3, bytes inside the "
        "node: 1,500, between nodes: 7) and received 3"
    )


def test_the_table_shows_who_sent_how_much_to_whom():
    ring = [Bytes(r, {(r + 1) % 3: 1000}, {}, {}, 0, 0) for r in range(3)]
    assert table(ring).splitlines() == [
        "| sent: from \\ to |     0 |     1 |     2 |   sum |",
        "|----------------:|------:|------:|------:|------:|",
        "|          rank 0 |     - | 1,000 |     - | 1,000 |",
        "|          rank 1 |     - |     - | 1,000 | 1,000 |",
        "|          rank 2 | 1,000 |     - |     - | 1,000 |",
        "|             sum | 1,000 | 1,000 | 1,000 | 3,000 |",
    ]
    silent = Bytes(0, {}, {}, {}, 0, 0)
    assert "rank 0" in table([silent])
    with pytest.raises(ValueError, match="two reports are of the same rank"):
        table([silent, silent])
    with pytest.raises(TypeError, match="the report of rank 0 alone; it must be a li"):
        table(silent)


# ---- the operating system's count --------------------------------------------------


def write(nbytes: int, path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    for _ in range(0, nbytes, 50_000):
        os.write(fd, bytes(50_000))
    os.close(fd)


@linux
def test_what_a_process_and_its_threads_write_is_counted_when_the_block_ends(tmp_path):
    with SystemBytes() as outer:
        write(100_000, tmp_path / "a")
        with SystemBytes() as inner:
            thread = threading.Thread(target=write, args=(250_000, tmp_path / "b"))
            thread.start()
            thread.join()
        write(100_000, tmp_path / "c")
        with pytest.raises(RuntimeError, match="read it after the .with. block"):
            _ = outer.written
        assert repr(outer) == "<SystemBytes: counting>"
    write(100_000, tmp_path / "d")
    assert 250_000 <= inner.written < 260_000
    assert 450_000 <= outer.written < 460_000
    assert f"{outer.written:,} written" in repr(outer)


def test_a_system_without_the_count_is_told_so(tmp_path):
    with pytest.raises(RuntimeError, match=r"nowhere.*needs Linux; ByteMeter"):
        system._count(tmp_path / "nowhere")


# ---- in real ranks ------------------------------------------------------------------

ELEMENTS = (1_000_003, 2_000_000, 500_009)  # of float32: 14 MB in three messages


def rounds_of_a_ring(quiet: float = 0.2) -> dict:
    """Send around a ring and count by hand, rightly and in three wrong ways."""
    rank, n = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    meters = {name: ByteMeter() for name in ("right", "elements", "forgets", "double")}
    dist.barrier()
    with SystemBytes() as late:
        with SystemBytes() as system:
            for step, numel in enumerate(ELEMENTS):
                work = dist.isend(torch.zeros(numel), right)
                dist.recv(torch.empty(numel), left)
                work.wait()
                meters["right"].count_sent(right, 4 * numel)
                meters["elements"].count_sent(right, numel)
                meters["forgets"].count_sent(right, 4 * numel if step < 2 else 0)
                meters["double"].count_sent(right, 4 * numel + 2**16)
        time.sleep(quiet)
    return {
        "meters": meters,
        "written": system.written,
        "late": late.written - system.written,
        "place": here(),
    }


def agree(written: int, counted: int) -> bool:
    """Tell whether the operating system saw what the meter counted."""
    return abs(written / counted - 1) < 0.005


@linux
def test_the_meter_agrees_with_the_operating_system():
    for result in spawn(rounds_of_a_ring, nnodes=2, nproc_per_node=2):
        report, written = result["meters"]["right"].report(), result["written"]
        assert agree(written, report.total_sent)
        assert 0 <= written - report.total_sent < 1000  # 48 bytes of header each
        for plant in ("elements", "forgets", "double"):
            assert not agree(written, result["meters"][plant].total_sent), plant
        assert result["late"] == 0, "something was written after the last send was done"
        assert report.rank == result["place"].rank
        assert (report.between == 0) == (report.rank in (0, 2))
        assert report.inside + report.between == report.total_sent == 4 * sum(ELEMENTS)
