"""One number is the position in the data, for every number of ranks and workers."""

import pytest
from refusals import refused
from torch.utils.data import DataLoader, IterableDataset

from ddp_course.failures.position import PositionSampler, SharedStream, epoch_order

LENGTH, BATCH = 50, 12  # four batches, and two samples that fill none


def drawn(ranks: int, steps: int, state: dict | None = None) -> tuple[list, dict]:
    """Return the global batches of some steps, and the position after them."""
    samplers = [PositionSampler(LENGTH, BATCH, rank, ranks, 3) for rank in range(ranks)]
    if state is not None:
        for sampler in samplers:
            sampler.load_state_dict(state)
    batches: list = []
    while len(batches) < steps:
        for parts in zip(*samplers, strict=True):
            batches.append([row for part in parts for row in part])
            for sampler in samplers:
                sampler.advance()
            if len(batches) == steps:
                break
    states = [sampler.state_dict() for sampler in samplers]
    assert states.count(states[0]) == ranks
    return batches, states[0]


def test_other_numbers_of_ranks_go_on_with_the_same_rows_in_the_same_order():
    whole, end = drawn(1, 11)
    found, state = [], None
    for ranks, steps in ((4, 2), (2, 4), (3, 1), (4, 4)):  # ends within epochs
        batches, state = drawn(ranks, steps, state)
        found += batches
    assert (found, state) == (whole, end)
    assert whole[0] == epoch_order(LENGTH, 3, 0)[:BATCH]
    assert sorted(sum(whole[:4], [])) != sorted(sum(whole[4:8], []))


def test_no_sample_comes_twice_in_an_epoch_and_epochs_differ():
    batches, state = drawn(3, 8)
    epochs = sum(batches[:4], []), sum(batches[4:], [])
    assert [len({*epoch}) for epoch in epochs] == [48, 48]
    assert epochs[0] != epochs[1]
    assert state == {"length": 50, "seed": 3, "epoch": 2, "used": 0}


def test_workers_draw_ahead_and_the_position_does_not():
    sampler = PositionSampler(LENGTH, BATCH, rank=1, ranks=2)
    loader = DataLoader(range(LENGTH), batch_sampler=sampler, num_workers=2)
    batches = iter(loader)
    first = next(batches).tolist()
    assert sampler.used == 0  # planted: one that counts what it yields has 48
    sampler.advance()
    rest = PositionSampler(LENGTH, BATCH, rank=1, ranks=2)
    rest.load_state_dict(sampler.state_dict())
    assert [first, *rest] == list(PositionSampler(LENGTH, BATCH, 1, 2))
    assert len(rest) == 3


def test_a_larger_batch_than_the_rest_begins_the_next_epoch():
    _, state = drawn(1, 3)
    sampler = PositionSampler(LENGTH, 16, seed=3)
    sampler.load_state_dict(state)
    assert (sampler.epoch, sampler.used) == (1, 0)


def streamed(ranks: int, workers: int, used: int = 0) -> list[list[int]]:
    """Return the global batches of a stream, put together from all ranks."""
    loaders = [
        DataLoader(
            SharedStream(range(LENGTH), BATCH, rank, ranks, used),
            batch_size=BATCH // ranks,
            num_workers=workers,
        )
        for rank in range(ranks)
    ]
    parts = zip(*loaders, strict=True)  # as many batches on each rank
    return [sum((part.tolist() for part in batch), []) for batch in parts]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 2), (3, 0)])
def test_a_streams_rows_depend_on_no_number_of_ranks_or_workers(ranks, workers):
    rows = [list(range(start, start + BATCH)) for start in range(0, 48, BATCH)]
    assert streamed(ranks, workers) == rows
    assert streamed(ranks, workers, used=2 * BATCH) == rows[2:]


class EveryRow(IterableDataset):
    """The plant: a stream that every worker of every rank yields whole."""

    def __iter__(self):
        return iter(range(LENGTH))


def test_a_naive_stream_yields_every_row_once_for_each_worker():
    rows = [row for batch in DataLoader(EveryRow(), 5, num_workers=2) for row in batch]
    assert len(rows) == 2 * LENGTH


test_what_cannot_be_is_refused = refused(
    (lambda: PositionSampler(50, 10, 0, 3), "is 10; it must be a multiple of 3"),
    (lambda: PositionSampler(50, 12, 3, 3), "rank is 3; it must be from 0 to 2"),
    (lambda: PositionSampler(8, 12), "batch_size is 12; it must be at most 8"),
    (lambda: SharedStream([], 0), "batch_size is 0; it must be a multiple of 1"),
    (
        lambda: PositionSampler(50, 12).load_state_dict(drawn(1, 1)[1]),
        "seed is 3 in the saved position and 0 here; use the same data and the same",
    ),
)
