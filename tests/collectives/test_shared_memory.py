"""The public side of shared memory: registered tensors, and nothing left behind."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from memory_cases import in_order
from on_ranks import error_of

from ddp_course.collectives import ring_all_reduce, shared_memory
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
    ring_all_reduce(x[0])  # it is a tensor like any other
    right.append(bool((x[0] == total).all()))
    shared_memory.free(y)
    y.fill_(1)  # not gone as long as the tensor is there
    shared_memory.all_reduce(y)  # but staged
    return [*right, bool((y == n).all())]


def shards(numel: int) -> list[bool]:
    """On every rank: both halves of an all-reduce, in all the places they can lie."""
    me, n = dist.get_rank(), dist.get_world_size()
    numbers, right = torch.arange(n * numel, dtype=torch.float32), []
    mine, sent = slice(me * numel, (me + 1) * numel), (n - 1) * 4 * numel
    others = torch.ones_like(numbers, dtype=torch.bool)
    others[mine] = False
    sums = (n * numbers + sum(range(n)))[mine]
    for full in (shared_memory.empty(n * numel), torch.empty(n * numel)):
        for into in (torch.empty(numel), full[mine]):  # elsewhere, and in place
            full.copy_(numbers + me)
            with ByteMeter() as meter:
                shared_memory.reduce_scatter_single(into, full)
            right.append(torch.equal(into, sums) and meter.total_sent == sent)
            right.append(torch.equal(full[others], (numbers + me)[others]))
        full.copy_(numbers + me)
        shared_memory.reduce_scatter_single(full[mine], full, dist.ReduceOp.AVG)
        right.append(torch.equal(full[mine], sums / n))
        registered = shared_memory.empty(numel).copy_(numbers[mine])
        for source in (full[mine].copy_(numbers[mine]), registered, numbers[mine]):
            full[others] = -1.0
            with ByteMeter() as meter:
                work = shared_memory.all_gather_single(full, source, async_op=True)
                work.wait()
            right.append(torch.equal(full, numbers) and meter.total_sent == sent)
        peers = shared_memory.peers(registered[1:])
        shared_memory.all_reduce(torch.ones(1))  # nobody writes before all have looked
        right += [torch.equal(p, numbers[r * numel + 1 : (r + 1) * numel])
                  for r, p in enumerate(peers)]  # fmt: skip
    return right


@pytest.mark.parametrize("n", [1, 2, 3])
def test_registered_tensors_their_parts_and_shards(n):
    told = spawn(lambda: registered() + shards(70_001), world_size=n, output="none")
    assert told == [[True] * (22 + 2 * n)] * n


def refused() -> list[tuple[str, str]]:
    """On every rank: what is told of what cannot be done, and words of it."""
    odd, x = dist.get_rank() == 1, shared_memory.empty(8)
    scatter, gather = (
        shared_memory.reduce_scatter_single,
        shared_memory.all_gather_single,
    )
    ones = torch.ones
    table = [
        (scatter, [ones(3), x], "torch.float32 with 8 elements; it must be * with 6"),
        (gather, [x, ones(3)], "output is torch.float32 with 8 elements"),
        (gather, [ones(8), x[4:] if odd else x[:4]], "in shared memory 0 at byte 16"),
        (scatter, [ones(4), ones(8) if odd else x], "rank 0: shared_memory.reduce_sca"),
        (shared_memory.peers, [ones(8)], "does not lie, contiguous, in memory that"),
        (gather, [ones(2), None], "input is a NoneType, not a tensor"),
        (shared_memory.all_reduce, [ones(8) if odd else x],
         "tensor float32 [8], op SUM, in shared memory 0 at byte 0; rank 1: "),
    ]  # fmt: skip
    return [(error_of(lambda c=c, a=a: c(*a)), words) for c, a, words in table]


def test_what_cannot_be_done_is_told():
    told = spawn(refused, world_size=2, output="none")
    assert told[0] == told[1]
    for text, words in told[0]:
        assert in_order(words.split("*"), text), text


def test_memory_ends_at_the_node():
    def two_nodes():
        return error_of(lambda: shared_memory.all_reduce(torch.ones(10)))

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
