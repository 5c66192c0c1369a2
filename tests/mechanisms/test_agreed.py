"""`agreed`: all ranks return their value, or all raise the same sentence."""

import torch.distributed as dist
from on_ranks import error_of, launched

from ddp_course.launch import spawn
from ddp_course.mechanisms.agreement import agreed


def grid() -> list[dist.ProcessGroup]:
    """Return this rank's row and column of a 2 x 2 grid of ranks."""
    both = []
    for lines in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        groups = [dist.new_group(line) for line in lines]
        both.append(
            next(
                g
                for g, ranks in zip(groups, lines, strict=True)
                if dist.get_rank() in ranks
            )
        )
    return both


def raises_on(ranks: set[int], error: Exception) -> int:
    if dist.get_rank() in ranks:
        raise error
    return 10 * dist.get_rank()


def along_both_axes():
    rank, axes = dist.get_rank(), grid()
    none, bad = set(), ValueError("size is 3; it must be even")
    return {
        "equal": agreed(lambda: raises_on(none, bad), *axes, size=2),
        "one raises": error_of(lambda: agreed(lambda: raises_on({3}, bad), *axes)),
        "three raise": error_of(
            lambda: agreed(lambda: raises_on({0, 1, 3}, bad), *axes, size=rank)
        ),
        "unexpected": error_of(
            lambda: agreed(lambda: raises_on({1}, KeyError("size")), *axes)
        ),
        "one differs": error_of(
            lambda: agreed(lambda: None, *axes, size=2 + (rank == 3), lr=1)
        ),
        "rows differ": error_of(lambda: agreed(lambda: None, *axes, row=rank // 2)),
        "order differs": error_of(
            lambda: agreed(
                lambda: None, *axes, **({"a": 1, "b": 2} if rank else {"b": 2, "a": 1})
            )
        ),
        "all ranks": agreed(lambda: rank, None, size=2),
    }


ranks = launched(4, along_both_axes)


def test_all_ranks_return_their_value_or_raise_the_same_sentence(ranks):
    results = ranks["along_both_axes"]
    assert [result.pop("equal") for result in results] == [0, 10, 20, 30]
    assert [result.pop("all ranks") for result in results] == [0, 1, 2, 3]
    bad = "size is 3; it must be even. Nothing was sent."
    for result in results:
        assert result == {
            "one raises": f"ReplicaError: rank 3: {bad}",
            "three raise": f"ReplicaError: ranks 0, 1, 3: {bad}",
            "unexpected": "ReplicaError: rank 1: KeyError: 'size'. Nothing was sent.",
            "one differs": "ReplicaError: the ranks differ. size is 2 on ranks 0, 1, "
            "2, 3 on rank 3. Nothing was sent.",
            "rows differ": "ReplicaError: the ranks differ. row is 0 on ranks 0, 1, 1 "
            "on ranks 2, 3. Nothing was sent.",
            "order differs": "ReplicaError: the parameters are in another order: rank "
            "0: b a; ranks 1, 2, 3: a b. Nothing was sent.",
        }


def test_one_process_alone_raises_its_own_problem():
    def bad():
        raise ValueError("size is 3")

    assert agreed(lambda: 5) == 5
    assert error_of(lambda: agreed(bad)) == "ReplicaError: size is 3. Nothing was sent."


def in_other_groups() -> str:
    """Rank 0 waits in one group for rank 1, which waits in another one."""
    groups = dist.new_group([0, 1]), dist.group.WORLD
    return error_of(lambda: agreed(int, groups[dist.get_rank()]))


def on_rank_0_alone() -> str:
    return error_of(lambda: agreed(int, None)) if dist.get_rank() == 0 else ""


def test_a_rank_that_cannot_come_is_named():
    """A planted mistake: the ranks compare in other groups, or one does not compare."""
    for error in spawn(in_other_groups, world_size=2, output="none"):
        assert error.startswith("DeadlockError: these wait for each other: rank 0 at ")
    error, _ = spawn(on_rank_0_alone, world_size=2, output="none")
    assert error.startswith("DeadlockError: ranks [1] have returned")
