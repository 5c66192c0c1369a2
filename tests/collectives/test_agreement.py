"""Calls that do not fit together: one clear error on every rank, and nothing sent."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from memory_cases import in_order
from on_ranks import error_of

from ddp_course import collectives as ours
from ddp_course.collectives import (
    ALGORITHMS,
    CollectiveError,
    algorithms,
    ring_all_reduce,
    shared_memory,
)
from ddp_course.collectives.meeting import (
    BARRIER_FINDERS,
    WHOLE,
    make_note,
    meeting,
    read_notes,
)
from ddp_course.collectives.memory_barrier import LONGEST
from ddp_course.launch import spawn
from ddp_course.launch.deadlock import DeadlockError, Watch, exchange_by_store
from ddp_course.measure import ByteMeter

FOUR, SQUARE, INTEGERS = torch.zeros(4), torch.zeros(2, 2), torch.zeros(12).long()
LIST = [torch.zeros(4) for _ in range(3)]
EIGHTS = [torch.zeros(4).to(torch.float8_e5m2) for _ in range(3)]
DIFFER = "the ranks make different calls"
SHAPES = {  # what rank 1 gives in place of four zeros; what is told of it
    "other shape": (torch.zeros(5), "rank 1: * float32 [5]"),
    "other type": (FOUR.int(), "int32"),
    "same size, other shape": (SQUARE, "float32 [2, 2]"),
    "not contiguous": (torch.zeros(4, 4).t(), "rank 1: tensor is not contiguous"),
    "a slice": (torch.zeros(4, 4)[:, :2], "rank 1: tensor is not contiguous"),
    "no tensor": ([1.0], "tensor is a list, not a tensor"),
    "sparse": (FOUR.to_sparse(), "torch.sparse_coo"),
    "negated": (torch._neg_view(FOUR), "rank 1: tensor is a view that negates"),
    "conjugated": (FOUR.cfloat().conj(), "pass tensor.resolve_conj().resolve_neg()"),
}


def bad_calls(odd: bool) -> dict[str, tuple[Callable[[], object], str]]:
    """Return calls that cannot go well, each with words of the error. Rank 1 is odd."""
    calls = {}
    of_one_tensor = ALGORITHMS | {"broadcast": ours.broadcast, "reduce": ours.reduce}
    for name, (tensor, words) in SHAPES.items():
        for function, call in of_one_tensor.items():
            argument = tensor if odd else FOUR
            calls[f"{function}: {name}"] = partial(call, argument), words
    single, scatter, to_all = (
        ours.reduce_scatter_single,
        ours.scatter,
        ours.all_to_all_single,
    )
    table = [  # call, its arguments, words
        (ours.all_reduce, [SHAPES["other shape"][0] if odd else FOUR], "float32 [5]"),
        (ours.all_reduce, [SHAPES["sparse"][0] if odd else FOUR], "torch.sparse_coo"),
        (partial(ours.all_reduce, algorithm="star"), [FOUR],
         "is 'star'; it can be auto, naive, tree, halving_doubling, ring, hier"),
        (ring_all_reduce, [FOUR, ours.ReduceOp.MAX if odd else ours.ReduceOp.SUM],
         "op MAX"),
        (ring_all_reduce, [FOUR, "sum"], "'sum'; it can be ReduceOp.SUM, ReduceOp.AVG"),
        (ring_all_reduce, [FOUR, dist.ReduceOp.BAND], "op is *BAND*; it can be"),
        (ring_all_reduce, [FOUR, 0], "op is 0; it can be ReduceOp.SUM, ReduceOp.AVG"),
        (ring_all_reduce, [INTEGERS, dist.ReduceOp.AVG], "AVG"),
        (ring_all_reduce, [FOUR.to(torch.uint16)], "cannot compute for torch.uint16"),
        (partial(ours.reduce_scatter, op=ours.ReduceOp.MAX), [EIGHTS[0], EIGHTS],
         "cannot compute for torch.float8_e5m2 on cpu"),
        (ours.naive_all_reduce if odd else ring_all_reduce, [FOUR], "1: naive_all_red"),
        (ours.broadcast if odd else ring_all_reduce, [FOUR], DIFFER),
        (ours.broadcast, [FOUR, int(odd)], "src=1"),
        (ours.broadcast, [FOUR, 3], "src is 3; * 0 to 2"),
        (ours.reduce, [FOUR, -1], "dst is -1; * 0 to 2"),
        (partial(ours.broadcast, algorithm="bush"), [FOUR],
         "algorithm is 'bush'; it can be naive, tree"),
        (ours.all_gather, [LIST[: 3 - odd], FOUR],
         "rank 1: tensor_list has 2 tensors; the group has 3 ranks"),
        (ours.all_gather, [[*LIST[:2], torch.zeros(3)], FOUR],
         "tensor_list[2] is torch.float32 [3]; it must be"),
        (scatter, [FOUR, None, 0], "rank 0: scatter_list is"),
        (scatter, [FOUR, LIST, 0], "only rank 0 scatters"),
        (scatter, [FOUR, FOUR, 0], "rank 0: scatter_list is Tensor; it must be a list"),
        (ours.gather, [FOUR, LIST, 0], "only rank 0"),
        (ours.gather, [FOUR, iter(LIST), 0], "ranks 1, 2: gather_list is given"),
        (ours.all_gather_single, [torch.zeros(11), FOUR],
         "11 elements; it must be torch.float32 with 12"),
        (single, [FOUR, INTEGERS], "input is torch.int64"),
        (single, [INTEGERS[:4], INTEGERS], "ranks 1, 2: output shares memory with"),
        (ours.reduce_scatter, [LIST[1], LIST], "ranks 0, 2: output shares memory"),
        (to_all, [torch.zeros(6 + 3 * odd), torch.zeros(6 + 3 * odd)],
         "rank 0 sends 2 rows to rank 1, which takes 3"),
        (to_all, [torch.zeros(6), INTEGERS],
         "input's rows are torch.int64 [], and output's torch.float32 []"),
        (to_all, [INTEGERS, INTEGERS if odd else INTEGERS + 0],
         "rank 1: output and input share memory"),
        (to_all, [torch.ones(()), torch.zeros(())], "cannot be cut into 3 equal parts"),
        (to_all, [torch.ones(4), FOUR], "input [4] cannot be cut into 3 equal parts"),
        (to_all, [torch.ones(6), torch.ones(6), 2],
         "output_split_sizes is 2; it must be a list of whole numbers, or None"),
        (to_all, [torch.ones(6), torch.ones(6), [2, 2, None] if odd else None],
         "rank 1: output_split_sizes is [2, 2, None]; it must be a list"),
        (to_all, [torch.ones(6), torch.ones(6), None, [2, 2.5, 2] if odd else None],
         "rank 1: input_split_sizes is [2, 2.5, 2]; it must be a list"),
        (to_all, [torch.ones(6), torch.ones(6), [1, 2, 3] if odd else None],
         "rank 0 sends 2 rows to rank 1, which takes 1"),
        (to_all, [torch.ones(6), torch.ones(6), [1, 2, 4] if odd else None],
         "rank 1: output_split_sizes is [1, 2, 4]; it must be 3 numbers of rows"),
        (to_all, [torch.ones(6), torch.ones(6), None, [3, 4, -1] if odd else None],
         "rank 1: input_split_sizes is [3, 4, -1]; it must be 3 numbers of rows"),
        (to_all, [torch.ones(3, 2), torch.zeros(3, 3 - odd)],
         "ranks 0, 2: input's rows are torch.float32 [3], and output's *float32 [2]"),
        (to_all, [torch.ones(3, 2 + odd), torch.zeros(3, 2 + odd)],
         "rank 1: all_to_all_single, rows float32 [3]"),
        (shared_memory.free, [FOUR], "is not in this group's shared memory"),
        (shared_memory.empty, [-1], "shape is (-1,); it"),
        (shared_memory.empty, [4 + odd], "shape=[5]"),
    ]  # fmt: skip
    for number, (call, arguments, words) in enumerate(table):
        calls[f"{number}: {words}"] = partial(call, *arguments), words
    return calls


def try_all() -> dict[str, tuple[str, int]]:
    """On every rank: call each, in order; return the errors and the bytes sent."""
    got = {}
    for name, (call, _) in bad_calls(dist.get_rank() == 1).items():
        with ByteMeter() as meter:
            error = error_of(call)
        got[name] = error, meter.total_sent
    fine = torch.tensor([1.0])
    for algorithm in ("ring", "shared_memory", "auto"):  # the group still works
        ours.all_reduce(fine, algorithm=algorithm)
    return got | {"afterwards": (str(fine.item()), 0)}


def wrong_groups() -> list[str]:
    """On every rank: what is told of a group without rank 2, of a name, of a number."""
    mine = dist.new_group([0, 1])
    return [
        error_of(lambda g=group: ring_all_reduce(torch.zeros(4), group=g))
        for group in (mine, "world", 3)
    ]


def test_every_rank_raises_the_same_clear_error_and_sends_nothing():
    how = {"world_size": 3, "output": "none", "timeout": 240}
    both = spawn(lambda: (try_all(), wrong_groups()), **how)
    results, of_groups = zip(*both, strict=True)
    assert [errors[0] for errors in of_groups[:2]] == ["no error"] * 2
    assert "rank 2 is no member of this group" in of_groups[2][0]
    assert of_groups[2][1].startswith("TypeError: group is 'world'; it must be a proc")
    assert results[0] == results[1] == results[2]
    assert results[0].pop("afterwards") == ("27.0", 0)
    for name, (_, words) in bad_calls(False).items():
        text, sent = results[0][name]
        assert in_order(words.split("*"), text), (name, text)
        assert text.endswith("Nothing was sent.") and sent == 0, name


def disagreements() -> list[object]:
    """On every rank: agree while a collective is under way; then do not agree."""
    comm, x = meeting(), torch.ones(100_000)
    odd = comm.rank == 1
    work = ring_all_reduce(x, async_op=True)
    comm.agree_now("a step")
    results = [work.is_completed()]
    results.append(error_of(lambda: comm.agree_now("a step" + " back" * odd)))
    results.append(error_of(lambda: comm.agree_now("a step", "no" * odd or None)))
    results.append(error_of(ring_all_reduce(torch.zeros(4 + odd), async_op=True).wait))
    with torch.inference_mode():
        y = torch.ones(4)
        ring_all_reduce(y, async_op=True).wait()
    results.append(y.tolist())
    flags = f"{comm.rank}" * 5000  # a model with as many parameters
    results.append([each[-1] for each in comm.agree_now("flags", show=flags)])
    comm.barrier = None  # as ranks on several machines
    results.append(comm.agree_now("flags", show=f"{comm.rank}1"))
    results.append(error_of(lambda: comm.agree_now("a step" + " back" * odd)))
    return results


def test_ranks_agree_in_turn_and_do_not_agree_in_the_same_words():
    one, other = spawn(disagreements, world_size=2, output="none")
    assert one == other
    assert WHOLE <= LONGEST - 3  # half a letter of 4 bytes may be cut off, too
    differ = f"CollectiveError: {DIFFER}. rank 0: a step; rank 1: a step back"
    under_way = one.pop(3)
    assert "float32 [5]" in under_way and under_way.endswith("Nothing was sent.")
    assert one == [
        True,
        f"{differ}. Nothing was sent.",
        "CollectiveError: rank 1: no. Nothing was sent.",
        [2.0] * 4,
        ["0", "1"],
        ["01", "11"],
        f"{differ}. Nothing was sent.",
    ]


def agree_without_a_barrier() -> tuple[str, object, list, list]:
    """On both ranks: agree with the barrier that is handed in, and without it."""
    quick = meeting()
    BARRIER_FINDERS.clear()
    slow = meeting(dist.new_group([0, 1]))
    results = [each.agree("words", show=each.rank) for each in (quick, slow)]
    return type(quick.barrier).__name__, slow.barrier, *results


def test_a_meeting_needs_no_barrier_but_gets_the_one_that_is_handed_in():
    expected = ("Barrier", None, [0, 1], [0, 1])
    assert spawn(agree_without_a_barrier, world_size=2) == [expected] * 2


@pytest.mark.parametrize("first", [True, False])
def test_ranks_in_different_groups_are_told_and_do_not_hang(first):
    def different_groups() -> str:
        pair = dist.new_group([0, 1])
        if not first:  # both groups are known already
            ours.barrier()
            ours.barrier(pair)
        mine = None if dist.get_rank() else pair
        return error_of(lambda: ring_all_reduce(torch.zeros(4), group=mine))

    for result in spawn(different_groups, world_size=2, output="none"):
        assert result.startswith("DeadlockError: these wait for each other: rank 0 at ")
        assert "in the group of ranks [0, 1]; rank 1 at" in result


def test_a_circle_of_three_is_found_and_a_late_rank_is_none():
    store = dist.HashStore()
    watches = [Watch(store, [0, 1, 2], rank) for rank in range(3)]

    def look(rank: int) -> str:
        watches[rank].since = -1e9
        try:
            watches[rank]([(rank + 1) % 3])
        except DeadlockError as error:
            return str(error)
        return ""

    assert [look(r) for r in (0, 1, 0, 1, 0)] == [""] * 5  # 2 may still come
    assert look(2) == ""  # seen once
    assert look(2) == ""  # 0 and 1 have not asked again: each may have been served
    assert look(0) == ""
    assert look(2) == ""  # 1 may still go on
    assert look(1) == ""
    assert "rank 0" in look(2) and "rank 1" in look(2)
    assert "rank 2" in look(0)  # which asks no more, as it is certain
    watches[1] = Watch(store, [0, 1, 2], 1)  # a rank that finds only certain ones
    assert look(1) == ""
    assert "rank 0" in look(1)
    watches[1].end_wait()  # 1 goes on, so nobody is stuck
    assert [look(r) for r in (0, 2, 0, 2)] == [""] * 4


class BetweenTwoLooks(Watch):
    """When this rank has found rank 1 late, and asks why, that one has returned."""

    came = True

    def __call__(self, late: list[int]) -> None:
        if self.came:
            self.store.set("ddp_course/pair/1/1", repr("here"))
        self.store.set("ddp_course/waits/1", repr({"returned": True}))
        self.since = -1e9
        super().__call__(late)


@pytest.mark.parametrize("came", [True, False])
def test_a_rank_that_comes_and_returns_between_two_looks_is_not_missed(came):
    watch = BetweenTwoLooks(dist.HashStore(), [0, 1], 0)
    watch.came = came
    exchange = exchange_by_store("pair", watch)
    if came:
        assert exchange("me") == ["me", "here"]
        return
    with pytest.raises(DeadlockError, match=r"ranks \[1\] have returned"):
        exchange("me")


def test_reading_notes():
    same = [make_note("ring_all_reduce", None, None)] * 3
    assert read_notes(same, [0, 1, 2]) == [None] * 3
    shown = [make_note("a", None, [1, "b"]), make_note("a", None, None)]
    assert read_notes(shown, [0, 1]) == [[1, "b"], None]
    for notes, result in (
        (("a", "b", "a"), "the ranks make different calls. ranks 4, 6: a; rank 5: b"),
        (("a", "!no", "b"), "rank 5: no"),
        (("!no", "!no", "b"), "ranks 4, 5: no"),
        (("a", make_note("b", None, 3), "a"), "ranks 4, 6: a; rank 5: b."),
    ):
        with pytest.raises(CollectiveError, match=result):
            read_notes(notes, [4, 5, 6])


# ---- the choice of an algorithm ------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "shares", "nbytes", "cpu", "name"),
    [
        ([[0, 1, 2]], True, 4, True, "shared_memory"),
        ([[0, 1, 2]], True, 1 << 30, True, "shared_memory"),
        ([[0, 1, 2]], True, 1 << 30, False, "ring"),  # GPUs
        ([[0, 1, 2]], False, 4, True, "tree"),
        ([[0, 1, 2]], False, 1 << 20, True, "ring"),
        ([[0, 1], [2, 3]], True, 4, True, "hierarchical"),
        ([[0, 1], [2]], True, 1 << 20, True, "ring"),
        ([[0], [1]], False, 1 << 20, True, "ring"),
        ([[0], [1]], False, 8, True, "tree"),
    ],
)
def test_the_rule(nodes, shares, nbytes, cpu, name):
    group = SimpleNamespace(nodes=nodes, shares_memory=shares)
    assert algorithms.rule(group, nbytes, cpu) == name
