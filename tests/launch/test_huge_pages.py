"""The fork server's memory in huge pages: the same bytes, and a cheaper fork."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_course.launch import huge_pages, spawn
from ddp_course.launch.huge_pages import HUGE, _whole_huge_pages

VERSION = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
linux = pytest.mark.skipif(
    sys.platform != "linux" or VERSION < (6, 1), reason="MADV_COLLAPSE is of Linux 6.1"
)

MAPS = """\
00400000-00c00000 r--p 00000000 08:01 131 /usr/bin/python3
00c00000-01400000 rw-p 00800000 08:01 131 /usr/bin/python3
01800000-02500000 rw-p 00000000 00:00 0                                  [heap]
7f0000100000-7f0000500000 rw-p 00000000 00:00 0
7f0000700000-7f0000800000 rw-p 00000000 00:00 0
7f0001000000-7f0001800000 rw-s 00000000 00:01 99 /dev/shm/segment
7f0002000000-7f0002800000 r--p 00000000 00:00 0
7ffd00000000-7ffd00800000 rw-p 00000000 00:00 0                          [stack]
"""


def test_only_own_memory_and_whole_huge_pages():
    """Not files, not what others share, not the stack, not parts of 2 MiB."""
    assert [*_whole_huge_pages(MAPS.splitlines())] == [
        (0x01800000, 6 * HUGE),
        (0x7F0000200000, HUGE),
    ]


def huge_bytes(pid: int) -> int:
    told = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * int(re.search(r"AnonHugePages: +(\d+) kB", told).group(1))


SCRIPT = """
import os
from test_huge_pages import huge_bytes
from ddp_course.launch.huge_pages import use_huge_pages
some, before = bytearray(os.urandom(1 << 20) * 16), huge_bytes(os.getpid())
copy = some.hex()
moved = use_huge_pages()
print(moved >= 12 << 20, huge_bytes(os.getpid()) - before >= 12 << 20)
print(some.hex() == copy)
"""


@pytest.fixture
def free_huge_pages():
    """Skip where Linux has none: its memory can be too fragmented."""
    if not huge_pages.use_huge_pages():
        pytest.skip("no huge pages are to be had")


@linux
def test_memory_is_moved_and_stays_as_it_is(free_huge_pages):
    path = os.pathsep.join(p for p in sys.path if p)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert run.stdout.split() == ["True"] * 3, run.stdout + run.stderr


def test_a_system_without_does_nothing(tmp_path, monkeypatch):
    assert huge_pages.use_huge_pages(tmp_path / "nowhere") == 0
    monkeypatch.setattr(huge_pages, "COLLAPSE", 12345)  # as Linux before 6.1
    assert huge_pages.use_huge_pages() == 0


@linux
def test_the_fork_server_has_most_of_its_memory_in_them(free_huge_pages):
    [server] = spawn(os.getppid, world_size=1, output="none")
    assert huge_bytes(server) > 50 << 20
