"""SystemBytes: what one process writes, and where it cannot be known."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from ddp_course.measure import SystemBytes, system

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/io is Linux's")


def write(nbytes: int, path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    for _ in range(0, nbytes, 50_000):
        os.write(fd, bytes(50_000))
    os.close(fd)


@linux
def test_what_a_process_and_its_threads_write_is_counted(tmp_path):
    with SystemBytes() as outer:
        write(100_000, tmp_path / "a")
        with SystemBytes() as inner:
            thread = threading.Thread(target=write, args=(250_000, tmp_path / "b"))
            thread.start()
            thread.join()
        write(100_000, tmp_path / "c")
    write(100_000, tmp_path / "d")
    assert 250_000 <= inner.written < 260_000
    assert 450_000 <= outer.written < 460_000
    assert f"{outer.written:,} written" in repr(outer)


@linux
def test_within_the_block_there_is_no_number_yet(tmp_path):
    with SystemBytes() as count:
        write(100_000, tmp_path / "a")
        for name in ("written", "read"):
            with pytest.raises(RuntimeError, match="when the block has ended"):
                getattr(count, name)
        assert repr(count) == "<SystemBytes: counting>"
    assert count.written >= 100_000


@linux
def test_what_is_read_is_counted(tmp_path):
    (tmp_path / "a").write_bytes(bytes(300_000))
    with SystemBytes() as count:
        (tmp_path / "a").read_bytes()
    assert 300_000 <= count.read < 310_000
    assert count.written < 10_000


def test_a_system_without_the_count_is_told_so(tmp_path):
    with pytest.raises(RuntimeError, match=r"nowhere.*needs Linux; ByteMeter"):
        system._counts(tmp_path / "nowhere")
