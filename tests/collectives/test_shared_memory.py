"""The public side of shared memory: registered tensors, and nothing left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from memory_cases import catch

from ddp_course.collectives import ring, shared_memory
from ddp_course.collectives.shared_memory import volumes
from ddp_course.launch import spawn
from ddp_course.measure import ByteMeter


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


def shards(numel: int) -> list[bool]:
    """On every rank: both halves of an all-reduce, in all the places they can lie."""
    me, n = dist.get_rank(), dist.get_world_size()
    full = shared_memory.empty(n * numel)
    shard = shared_memory.empty(numel, dtype=torch.float64)
    mine = slice(me * numel, (me + 1) * numel)
    numbers = torch.arange(n * numel, dtype=torch.float32)
    sums = (n * numbers + sum(range(n)))[mine]
    right = []
    for into in (torch.empty(numel), full[mine]):  # elsewhere, and in place
        full.copy_(numbers + me)
        with ByteMeter() as meter:
            shared_memory.reduce_scatter_single(into, full)
        right.append(
            torch.equal(into, sums) and meter.total_sent == (n - 1) * into.nbytes
        )
    untouched = torch.ones_like(full, dtype=torch.bool)
    untouched[mine] = False
    right.append(torch.equal(full[untouched], (numbers + me)[untouched]))
    staged = numbers + me
    shared_memory.reduce_scatter_single(staged[mine], staged, dist.ReduceOp.AVG)
    right.append(torch.equal(staged[mine], sums / n))
    full[mine] = numbers[mine]
    with ByteMeter() as meter:
        shared_memory.all_gather_single(full, full[mine])  # in place
    right.append(
        torch.equal(full, numbers) and meter.total_sent == full[mine].nbytes * (n - 1)
    )
    shard.copy_(numbers[mine])
    for source in (shard, shard.clone()):  # registered, and staged
        result = torch.empty(n, numel, dtype=torch.float64)
        work = shared_memory.all_gather_single(result, source, async_op=True)
        work.wait()
        right.append(torch.equal(result.view(-1), numbers.double()))
    peers = shared_memory.peers(shard[1:])
    shared_memory.all_reduce(torch.ones(1))  # nobody writes before all have looked
    right += [torch.equal(p, numbers[r * numel + 1 : (r + 1) * numel].double())
              for r, p in enumerate(peers)]  # fmt: skip
    return right


@pytest.mark.parametrize("n", [1, 2, 3])
def test_registered_tensors_their_parts_and_shards(n):
    told = spawn(lambda: registered() + shards(70_001), world_size=n, output="none")
    assert told == [[True] * (13 + n)] * n


def refused_shards() -> list[str]:
    """On every rank: what is asked for cannot be done."""
    odd, x = dist.get_rank() == 1, shared_memory.empty(8)
    wrong = (
        lambda: shared_memory.reduce_scatter_single(torch.ones(3), x),
        lambda: shared_memory.all_gather_single(x, torch.ones(3)),
        lambda: shared_memory.all_gather_single(torch.ones(8), x[4:] if odd else x[:4]),
        lambda: shared_memory.reduce_scatter_single(
            torch.ones(4), torch.ones(8) if odd else x
        ),
        lambda: shared_memory.peers(torch.ones(8)),
        lambda: shared_memory.all_gather_single(torch.ones(2), None),
        lambda: shared_memory.all_reduce(torch.ones(8) if odd else x),
    )
    return [catch(call) for call in wrong]


def test_what_cannot_be_done_is_told():
    told = spawn(refused_shards, world_size=2, output="none")
    assert told[0] == told[1]
    for text, wanted in zip(
        told[0],
        (
            "input is torch.float32 with 8 elements; it must be torch.float32 with 6",
            "output is torch.float32 with 8 elements",
            "in shared memory 0 at byte 16",
            "rank 0: shared_memory.reduce_scatter_single",
            "does not lie, contiguous, in memory that this group shares",
            "input is a NoneType, not a tensor",
            "tensor float32 [8], op SUM, in shared memory 0 at byte 0; rank 1: ",
        ),
        strict=True,
    ):
        assert wanted in text


def test_memory_ends_at_the_node():
    def two_nodes():
        return catch(lambda: shared_memory.all_reduce(torch.ones(10)))

    told = spawn(two_nodes, nnodes=2, nproc_per_node=2, output="none")
    (text,) = set(told)
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
        end_in, way, notes, world_size=3, output="none", check=False, timeout=30
    )
    assert [r.status == "ok" for r in reports] == [way == "success"] * 3
    inodes = [set((notes / f"{rank}").read_text().split()) for rank in range(3)]
    assert len(inodes[0]) >= 2  # the arena, and the tensor
    assert inodes[0] == inodes[1] == inodes[2]
    deadline = time.monotonic() + 5
    while still_there(inodes[0]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not still_there(inodes[0])


def test_volumes():
    assert volumes(0, 4, 2, 0) == [0, 0]
    assert volumes(16, 4, 4, 1) == [64] * 4  # small: everyone reads all of it
    big = volumes(1 << 20, 4, 4, 2)
    assert sum(big) - big[2] == 2 * 3 / 4 * (4 << 20)
    assert volumes(1 << 20, 4, 4, 2, registered=True) == big
