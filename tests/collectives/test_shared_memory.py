"""The public side of shared memory: registered tensors, and nothing left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_course.collectives import ring, shared_memory
from ddp_course.collectives.shared_memory import volumes
from ddp_course.launch import spawn


def registered() -> list[bool]:
    """On every rank: tensors in shared memory, and parts of them, of several types."""
    me, n = dist.get_rank(), dist.get_world_size()
    total = sum(range(n))
    x = shared_memory.empty(4, 1000).fill_(me)
    y = shared_memory.empty(1001, dtype=torch.float64).fill_(me)
    shared_memory.all_reduce(x[1:3])  # a contiguous part
    shared_memory.all_reduce(y, dist.ReduceOp.AVG)
    outside = torch.full((7,), me)
    shared_memory.all_reduce(outside)
    right = [
        bool((x[1:3] == total).all()),
        bool((x[0] == me).all() and (x[3] == me).all()),
        bool((y == total / n).all()),
        bool((outside == total).all()),
    ]
    ring.all_reduce(x[0])  # it is a tensor like any other
    right.append(bool((x[0] == total).all()))
    shared_memory.free(y)
    y.fill_(1)  # not gone as long as the tensor is there
    shared_memory.all_reduce(y)  # but staged
    return [*right, bool((y == n).all())]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_registered_tensors_and_their_parts(n):
    if n == 1:  # nothing to share: `free` has nothing to give back
        assert spawn(registered, world_size=1, output="none") == [[True] * 6]
    else:
        assert spawn(registered, world_size=n, output="none") == [[True] * 6] * n


def one_is_elsewhere() -> str:
    x = shared_memory.empty(10)
    try:
        shared_memory.all_reduce(torch.ones(10) if dist.get_rank() else x)
    except ValueError as error:
        return str(error)
    return ""


def test_registered_on_one_rank_only_is_told():
    told = spawn(one_is_elsewhere, world_size=2, output="none")
    assert told[0] == told[1]
    assert "rank 0: shared_memory.all_reduce" in told[0]
    assert "in shared memory 0 at byte 0" in told[0]


def two_nodes() -> str:
    try:
        shared_memory.all_reduce(torch.ones(10))
    except ValueError as error:
        return str(error)
    return ""


def test_memory_ends_at_the_node():
    told = spawn(two_nodes, nnodes=2, nproc_per_node=2, output="none")
    assert set(told) == {
        "ranks 0, 1, 2, 3: memory is shared inside a node; the group has ranks on "
        "[[0, 1], [2, 3]]. Nothing was sent."
    }


def end_in(way: str) -> int:
    """On every rank: use shared memory of all kinds, and end in some way."""
    x, y = torch.ones(2_000_000), shared_memory.empty(2_000_000).fill_(1)
    shared_memory.all_reduce(x)
    shared_memory.all_reduce(y)
    if way == "exception" and dist.get_rank() == 1:
        raise ValueError("on purpose")
    if way.startswith("kill") and dist.get_rank() == int(way[-1]):
        os.kill(os.getpid(), signal.SIGKILL)
    if way != "success":
        for _ in range(100_000):
            shared_memory.all_reduce(x)
    return os.getpid()


def segments() -> int:
    """Count the memories of our making that some process of this machine still has."""
    count = 0
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            count += "memfd:ddp-course-" in maps.read_text()
        except (OSError, UnicodeDecodeError):
            continue
    return count


@pytest.mark.parametrize("way", ["success", "exception", "kill 0", "kill 1", "kill 2"])
def test_nothing_is_left_however_it_ends(way, no_leftovers):
    before = segments()
    reports = spawn(end_in, way, world_size=3, output="none", check=False, timeout=30)
    assert [r.status == "ok" for r in reports] == [way == "success"] * 3
    deadline = time.monotonic() + 5
    while segments() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert segments() <= before


def test_volumes():
    assert volumes(0, 4, 2, 0) == [0, 0]
    assert volumes(16, 4, 4, 1) == [64] * 4  # small: everyone reads all of it
    big = volumes(1 << 20, 4, 4, 2)
    assert sum(big) - big[2] == 2 * 3 / 4 * (4 << 20)
    assert volumes(1 << 20, 4, 4, 2, registered=True) == big
