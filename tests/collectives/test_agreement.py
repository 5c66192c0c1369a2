"""Calls that do not fit together: one clear error on every rank, and nothing sent."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ddp_course import collectives as ours
from ddp_course.collectives import (
    CollectiveError,
    choose,
    naive,
    ring,
    shared_memory,
)
from ddp_course.collectives.agreement import note, read
from ddp_course.collectives.call import Call
from ddp_course.collectives.memory_barrier import LONGEST
from ddp_course.launch import spawn
from ddp_course.launch.deadlock import DeadlockError, Watch
from ddp_course.measure import ByteMeter

LIST = [torch.zeros(4) for _ in range(3)]
SENT = [torch.zeros(4) for _ in range(3)]


def bad_calls(me: int) -> dict[str, tuple[Callable[[], object], str]]:
    """Return calls that cannot go well, each with words of the error. Rank 1 is odd."""
    odd = me == 1
    four = torch.zeros(4)
    matrix = torch.zeros(4, 4)
    crooked = matrix.t() if odd else matrix
    other_shape = torch.zeros(5) if odd else four
    other_type = torch.zeros(4, dtype=torch.int32) if odd else four
    op = dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM
    square, columns = torch.zeros(2, 2), torch.zeros(4, 4)[:, :2]
    shapes = {
        "other shape": (other_shape, "rank 1: * float32 [5]"),
        "other type": (other_type, "int32"),
        "same size, other shape": (square if odd else four, "float32 [2, 2]"),
        "not contiguous": (crooked, "rank 1: tensor is not contiguous"),
        "a slice of columns": (columns, "ranks 0, 1, 2: tensor is not contiguous"),
        "no tensor": ([1.0] if odd else four, "tensor is a list, not a tensor"),
        "sparse": (four.to_sparse() if odd else four, "torch.sparse_coo"),
    }
    calls = {}
    for name, (tensor, words) in shapes.items():
        for algorithm, all_reduce in choose.ALGORITHMS.items():
            calls[f"{algorithm}: {name}"] = (lambda f=all_reduce, t=tensor: f(t), words)
        calls[f"broadcast: {name}"] = (lambda t=tensor: ours.broadcast(t), words)
        calls[f"reduce: {name}"] = (lambda t=tensor: ours.reduce(t), words)
    calls["chosen"] = (lambda: ours.all_reduce(other_shape), "float32 [5]")
    calls["other op"] = (lambda: ring.all_reduce(four, op), "op MAX")
    calls["no op"] = (lambda: ring.all_reduce(four, "sum"), "op is 'sum'; it can be")
    calls["BAND"] = (
        lambda: ring.all_reduce(four, dist.ReduceOp.BAND),
        "op is *BAND*; it can be",
    )
    calls["mean of integers"] = (
        lambda: ring.all_reduce(torch.zeros(4, dtype=torch.int64), dist.ReduceOp.AVG),
        "AVG",
    )
    calls["other algorithm"] = (
        lambda: (naive if odd else ring).all_reduce(four),
        "rank 1: naive.all_reduce",
    )
    calls["other collective"] = (
        lambda: ours.broadcast(four) if odd else ring.all_reduce(four),
        "the ranks do not call the same",
    )
    calls["other root"] = (lambda: ours.broadcast(four, me % 2), "src=1")
    calls["wrong root"] = (lambda: ours.broadcast(four, 3), "src is 3; * 0 to 2")
    calls["root -1"] = (lambda: ours.reduce(four, -1), "dst is -1; * 0 to 2")
    calls["unknown way"] = (
        lambda: ours.broadcast(four, algorithm="bush"),
        "algorithm is 'bush'; it can be naive, tree",
    )
    calls["short list"] = (
        lambda: ours.all_gather(LIST[: 3 - odd], four),
        "rank 1: tensor_list has 2 tensors; the group has 3 ranks",
    )
    calls["wrong list"] = (
        lambda: ours.all_gather([*LIST[:2], torch.zeros(3)], four),
        "tensor_list[2] is torch.float32 [3]; it must be",
    )
    calls["no list"] = (lambda: ours.scatter(four, None, 0), "rank 0: scatter_list is")
    calls["two lists"] = (lambda: ours.scatter(four, LIST, 0), "only rank 0 scatters")
    calls["gather: two lists"] = (lambda: ours.gather(four, LIST, 0), "only rank 0")
    calls["wrong output"] = (
        lambda: ours.all_gather_single(torch.zeros(11), four),
        "11 elements; it must be torch.float32 with 12",
    )
    calls["wrong input"] = (
        lambda: ours.reduce_scatter_single(four, torch.zeros(12, dtype=torch.int64)),
        "input is torch.int64",
    )
    calls["all_to_all"] = (
        lambda: ours.all_to_all(
            [torch.zeros(4)] * 3, [torch.zeros(4 + (odd and k == 2)) for k in range(3)]
        ),
        "rank 1 has *[5]* for rank 2, which expects *[4]",
    )
    calls["all_to_all of two types"] = (
        lambda: ours.all_to_all(LIST, [*LIST[:2], torch.zeros(4, dtype=torch.int64)]),
        "the tensors in input_list and output_list differ in type",
    )
    calls["all_to_all or not"] = (
        lambda: ours.barrier() if odd else ours.all_to_all(SENT, LIST),
        "the ranks do not call the same",
    )
    calls["all_to_all into what is sent"] = (
        lambda: ours.all_to_all(SENT, LIST if odd else SENT[::-1]),
        "ranks 0, 2: output_list lies where input_list does",
    )
    calls["no dimension"] = (
        lambda: ours.all_to_all_single(torch.ones(()) if odd else SENT[0], LIST[0]),
        "rank 1: output has no dimension along which to divide it",
    )
    calls["a tensor as list"] = (
        lambda: ours.scatter(four, four, 0),
        "rank 0: scatter_list is Tensor; it must be a list",
    )
    calls["splits"] = (
        lambda: ours.all_to_all_single(
            torch.zeros(6), torch.zeros(6), [2, 2, 2], [3, 3, 1] if odd else [2, 2, 2]
        ),
        "rank 1: input_split_sizes is [3, 3, 1]; it must be 3 numbers",
    )
    calls["not in memory"] = (
        lambda: shared_memory.free(four),
        "does not lie in this group's shared memory",
    )
    calls["negative length"] = (lambda: shared_memory.empty(-1), "shape is (-1,); it")
    calls["other length"] = (lambda: shared_memory.empty(4 + odd), "shape=[5]")
    return calls


def caught(call: Callable[[], object]) -> str:
    try:
        call()
    except CollectiveError as error:
        return str(error)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def try_all() -> dict[str, tuple[str, int]]:
    """On every rank: call each, in order; return the errors and the bytes sent."""
    got = {}
    for name, (call, _) in bad_calls(dist.get_rank()).items():
        with ByteMeter() as meter:
            told = caught(call)
        got[name] = told, meter.total_sent
    fine = torch.tensor([1.0])
    ring.all_reduce(fine)  # and the group still works
    shared_memory.all_reduce(fine)
    return got | {"afterwards": (str(fine.item()), 0)}


def wrong_groups() -> list[str]:
    """On every rank: what is told of a group without rank 2, of a name, of a number."""
    mine = dist.new_group([0, 1])
    return [
        caught(lambda g=group: ring.all_reduce(torch.zeros(4), group=g))
        for group in (mine, "world", 3)
    ]


def in_order(parts: list[str], text: str) -> bool:
    """Tell whether the parts stand in the text, one after the other."""
    for part in parts:
        _, found, text = text.partition(part)
        if not found:
            return False
    return True


def test_every_rank_raises_the_same_clear_error_and_sends_nothing():
    both = spawn(lambda: (try_all(), wrong_groups()), world_size=3, output="none")
    told, of_groups = zip(*both, strict=True)
    assert [errors[0] for errors in of_groups[:2]] == ["nothing was raised"] * 2
    assert "rank 2 is no member of this group" in of_groups[2][0]
    assert of_groups[2][1].startswith("TypeError: group is 'world'; it must be a proc")
    assert told[0] == told[1] == told[2]
    assert told[0].pop("afterwards") == ("9.0", 0)
    for name, (_, words) in bad_calls(0).items():
        text, sent = told[0][name]
        assert in_order(words.split("*"), text), (name, text)
        assert text.endswith("Nothing was sent.") and sent == 0, name


def test_what_64_ranks_have_for_each_other_can_all_be_shown():
    """Else no rank could compare what the others give and expect."""
    comm = SimpleNamespace(size=64, ranks=range(64))
    call = Call(comm, "all_to_all")
    given = [*torch.empty(64, 12345, 128, dtype=torch.uint8)]
    taken = [*torch.empty(64, 54321, 128, dtype=torch.uint8)]
    call.pairs(taken, given)
    assert call.problem is None
    assert len(note(", ".join(call.words), None, call.show)) < LONGEST


def disagreements() -> list[object]:
    """On every rank: agree while a collective is under way; then do not agree."""
    comm, x = ours.communicator(), torch.ones(100_000)
    odd = comm.rank == 1
    work = ring.all_reduce(x, async_op=True)
    comm.agree_now("a step")
    told = [work.is_completed()]
    told.append(caught(lambda: comm.agree_now("a step" + " back" * odd)))
    told.append(caught(lambda: comm.agree_now("a step", "no" * odd or None)))
    told.append(caught(ring.all_reduce(torch.zeros(4 + odd), async_op=True).wait))
    comm.barrier = None  # as ranks on several machines
    told.append(comm.agree_now("flags", show=f"{comm.rank}1"))
    told.append(caught(lambda: comm.agree_now("a step" + " back" * odd)))
    return told


def test_ranks_agree_in_turn_and_do_not_agree_in_the_same_words():
    one, other = spawn(disagreements, world_size=2, output="none")
    assert one == other
    differ = "the ranks do not call the same. rank 0: a step; rank 1: a step back"
    under_way = one.pop(3)
    assert "float32 [5]" in under_way and under_way.endswith("Nothing was sent.")
    assert one == [
        True,
        f"{differ}. Nothing was sent.",
        "rank 1: no. Nothing was sent.",
        ["01", "11"],
        f"{differ}. Nothing was sent.",
    ]


@pytest.mark.parametrize("first", [True, False])
def test_ranks_in_different_groups_are_told_and_do_not_hang(first):
    def different_groups() -> str:
        pair = dist.new_group([0, 1])
        if not first:  # both groups are known already
            ours.barrier()
            if dist.get_rank() < 2:
                ours.barrier(pair)
        try:
            if dist.get_rank() == 0:
                ring.all_reduce(torch.zeros(4), group=pair)
            elif dist.get_rank() == 1:
                ring.all_reduce(torch.zeros(4))
        except DeadlockError as error:
            return str(error)
        return "went well"

    reports = spawn(different_groups, world_size=2, output="none", timeout=30)
    for told in reports:
        assert told.startswith("these wait for each other: rank 0 at ")
        assert "in the group of ranks [0, 1]; rank 1 at" in told


def test_a_circle_of_three_is_found_and_a_late_rank_is_none():
    store = dist.HashStore()
    watches = [Watch(store, [0, 1, 2], rank) for rank in range(3)]
    late = {0: [1], 1: [2], 2: [0]}

    def look(rank: int) -> str:
        watches[rank].since = -1e9
        try:
            watches[rank](late[rank])
        except DeadlockError as error:
            return str(error)
        return ""

    assert [look(r) for r in (0, 1, 0, 1, 0)] == [""] * 5  # 2 may still come
    assert look(2) == ""  # seen once
    assert "rank 0" in look(2) and "rank 1" in look(2)
    watches[1].over()  # 1 goes on, so nobody is stuck
    assert [look(r) for r in (0, 2, 0, 2)] == [""] * 4


def test_reading_notes():
    same = [note("ring.all_reduce", None, None)] * 3
    assert read(same, [0, 1, 2]) == [None] * 3
    shown = [note("a", None, [1, "b"]), note("a", None, None)]
    assert read(shown, [0, 1]) == [[1, "b"], None]
    for notes, told in (
        (("a", "b", "a"), "the ranks do not call the same. ranks 4, 6: a; rank 5: b"),
        (("a", "!no", "b"), "rank 5: no"),
        (("!no", "!no", "b"), "ranks 4, 5: no"),
        (("a", note("b", None, 3), "a"), "ranks 4, 6: a; rank 5: b."),
    ):
        with pytest.raises(CollectiveError, match=told):
            read(notes, [4, 5, 6])
