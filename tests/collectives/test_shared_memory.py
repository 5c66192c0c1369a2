"""The public side of shared memory: registered tensors, and nothing left behind."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from memory_cases import in_order
from on_ranks import error_of

from ddp_course.collectives import ring_all_reduce, shared_memory
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
    ring_all_reduce(x[0])  # it is a tensor like any other
    right.append(bool((x[0] == total).all()))
    shared_memory.free(y)
    y.fill_(1)  # not gone as long as the tensor is there
    shared_memory.all_reduce(y)  # but staged
    return [*right, bool((y == n).all())]


@pytest.mark.parametrize("n", [1, 3])
def test_registered_tensors_and_their_parts(n):
    results = spawn(registered, world_size=n, output="none")
    assert results == [[True] * len(results[0])] * n and results[0]


def refused() -> list[tuple[str, str]]:
    """On every rank: what is told of what cannot be done, and words of it."""
    odd, x = dist.get_rank() == 1, shared_memory.empty(8)
    all_reduce, ones = shared_memory.all_reduce, torch.ones
    table = [
        (all_reduce, [x[4:] if odd else x[:4]], "in shared memory 0 at byte 16"),
        (all_reduce, [None], "tensor is a NoneType, not a tensor"),
        (shared_memory.empty, [10**16], "shape is (10000000000000000,), which takes"),
        (partial(shared_memory.empty, dtype="float32"), [2], "dtype is 'float32'; it"),
        (all_reduce, [ones(8) if odd else x],
         "tensor float32 [8], op SUM, in shared memory 0 at byte 0; rank 1: "),
    ]  # fmt: skip
    return [(error_of(lambda c=c, a=a: c(*a)), words) for c, a, words in table]


def test_what_cannot_be_done_is_told():
    results = spawn(refused, world_size=2, output="none")
    assert results[0] == results[1]
    for text, words in results[0]:
        assert in_order(words.split("*"), text), text


def test_memory_ends_at_the_node():
    def two_nodes():
        return error_of(lambda: shared_memory.all_reduce(torch.ones(10)))

    results = spawn(two_nodes, nnodes=2, nproc_per_node=2, output="none")
    (text,) = set(results)
    assert text.endswith(
        "CollectiveError: ranks 0, 1, 2, 3: memory is shared inside a node; the group "
        "has ranks on [[0, 1], [2, 3]]. Nothing was sent."
    )


def end_in(way: str, notes: Path) -> None:
    """On every rank: use shared memory of all kinds, and end in some way."""
    x, y = torch.ones(2_000_000), shared_memory.empty(2_000_000).fill_(1)
    shared_memory.all_reduce(x)
    shared_memory.all_reduce(y)
    mine = memories(os.getpid())
    assert still_there(mine)  # so it would be seen
    (notes / f"{dist.get_rank()}").write_text(" ".join(mine))
    shared_memory.all_reduce(x)  # all have noted theirs
    if way == "exception" and dist.get_rank() == 1:
        raise ValueError("on purpose")
    if way.startswith("kill") and dist.get_rank() == int(way[-1]):
        os.kill(os.getpid(), signal.SIGKILL)
    if way != "success":
        for _ in range(100_000):
            shared_memory.all_reduce(x)


def memories(pid: int) -> set[str]:
    """Return the inodes of the memories of our making that a process has."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return set()
    return {line.split()[4] for line in lines if "memfd:ddp-course-" in line}


def still_there(inodes: set[str]) -> bool:
    """Tell whether any process of this machine has one of these memories."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return any(inodes & memories(pid) for pid in pids)


@pytest.mark.parametrize("way", ["success", "exception", "kill 0", "kill 1"])
def test_nothing_is_left_however_it_ends(way, no_leftovers, tmp_path_factory):
    notes = tmp_path_factory.mktemp("notes")
    reports = spawn(
        end_in, way, notes, world_size=3, output="none", check=False, timeout=240
    )
    assert [r.status == "ok" for r in reports] == [way == "success"] * 3
    inodes = [set((notes / f"{rank}").read_text().split()) for rank in range(3)]
    assert len(inodes[0]) >= 2  # the arena, and the tensor
    assert inodes[0] == inodes[1] == inodes[2]
    deadline = time.monotonic() + 60
    while still_there(inodes[0]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not still_there(inodes[0])


def test_volumes():
    assert volumes(0, 4, 2, 0) == [0, 0]
    assert volumes(16, 4, 4, 1) == [64] * 4  # small: everyone reads all of it
    big = volumes(1 << 20, 4, 4, 2)
    assert sum(big) - big[2] == 2 * 3 / 4 * (4 << 20)
    assert volumes(1 << 20, 4, 4, 2, registered=True) == big
