"""Thirty seats on one machine: as many kernels of chapter 05 at once all end right.

Memory is what a seat's processes have for themselves and their share of what they have
together (PSS). It takes ten minutes of a machine with two cores:

    DDP_COURSE_ENDURANCE=1 pytest -n 0 -s --timeout=0 tests/test_seats.py
"""

import mmap
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from conftest import descendants

CHAPTER = Path(__file__).parents[1] / "notebooks/05_ddp_internals.ipynb"
SEATS = int(os.environ.get("DDP_COURSE_SEATS", 30))
CELLS = int(os.environ.get("DDP_COURSE_SEATS_CELLS", 0))  # of code; 0: all
MIB = 2**20


def pss(pid: int) -> int:
    """Return the bytes of a process; what n processes share counts 1/n for each."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has ended meanwhile
        return 0
    return 1024 * int(re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)[1])


def test_memory_is_counted_once():
    grown = [block_in_mib() for _ in range(5)]
    assert any(45 < mib < 60 for mib in grown), grown
    assert pss(2**22 + 1) == 0


def block_in_mib() -> float:
    """Return by how much the PSS of this process grows when it maps 50 MiB.

    They are new memory: an object of that size may get what other tests have freed. PSS
    also grows or shrinks if another process that has the same libraries in memory ends
    or begins at that moment.
    """
    piece, before = os.urandom(MIB), pss(os.getpid())
    with mmap.mmap(-1, 50 * MIB) as block:
        for _ in range(50):
            block.write(piece)
        after = pss(os.getpid())
    assert before > 10 * MIB
    return (after - before) / MIB


@pytest.mark.endurance
@pytest.mark.kernel
@pytest.mark.skipif(
    "DDP_COURSE_ENDURANCE" not in os.environ, reason="takes the machine"
)
def test_thirty_seats(tmp_path):
    notebook = nbformat.read(CHAPTER, as_version=4)
    if CELLS:
        code = [c for c in notebook.cells if c.cell_type == "code"]
        notebook.cells = code[:CELLS]
    nbformat.write(notebook, tmp_path / "05.ipynb")
    typed = [sys.executable, "-m", "ddp_course", "run", "05.ipynb", "--timeout", "7200"]
    free, began = psutil.virtual_memory().available, time.monotonic()
    seats = [
        subprocess.Popen(
            typed,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(SEATS)
    ]
    worst, at_once, least = [0] * SEATS, 0, free
    while any(seat.poll() is None for seat in seats):
        now = [sum(map(pss, descendants(seat.pid))) for seat in seats]
        worst, at_once = list(map(max, worst, now)), max(at_once, sum(now))
        least = min(least, psutil.virtual_memory().available)
        time.sleep(2)
    one, each = max(worst) / MIB, at_once / MIB / SEATS
    print(f"\n{SEATS} seats, {(time.monotonic() - began) / 60:.0f} minutes")
    print(f"a seat at its worst: {one:.0f} MiB; when all had most: {each:.0f} MiB each")
    print(f"the machine had {(free - least) / MIB / SEATS:.0f} MiB less for each seat")
    failed = [seat.stdout.read() for seat in seats if seat.returncode]
    assert failed == []
