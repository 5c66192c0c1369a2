"""The sampler's indices are PyTorch's, one by one; and samplers that are not, fail."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain

import pytest
import torch
from refusals import refused
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler as PyTorchSampler

from ddp_course.data_parallel import DistributedSampler, Share, sampler, shares
from ddp_course.launch import spawn

LENGTHS = [0, 1, 2, 3, 5, 12, 13, 100]
RANKS = [1, 2, 3, 4, 7]


def like_pytorch(cls: type) -> None:
    """Assert that `cls` gives PyTorch's indices, in every epoch and on every rank."""
    for length in LENGTHS:
        data = range(length)
        for n in RANKS:
            for shuffle in (True, False):
                for drop_last in (True, False):
                    options = {"shuffle": shuffle, "seed": 5, "drop_last": drop_last}
                    for rank in range(n):
                        ours = cls(data, n, rank, **options)
                        theirs = PyTorchSampler(data, n, rank, **options)
                        assert len(ours) == len(theirs)
                        for epoch in (0, 1, 4):
                            ours.set_epoch(epoch)
                            theirs.set_epoch(epoch)
                            assert list(ours) == list(theirs)


def test_bit_equal_to_pytorch():
    like_pytorch(DistributedSampler)
    ours, theirs = DistributedSampler(range(7), 3, 1), PyTorchSampler(range(7), 3, 1)
    for name in ("num_samples", "total_size", "num_replicas", "rank", "epoch"):
        assert getattr(ours, name) == getattr(theirs, name)


def covers(cls: type) -> None:
    """Assert what a sampler must do, without looking at PyTorch's."""
    for n in RANKS:
        ranks = [cls(range(13), n, rank) for rank in range(n)]
        epochs = []
        for epoch in (0, 1):
            for one in ranks:
                one.set_epoch(epoch)
            epochs.append([list(one) for one in ranks])
            times = Counter(chain(*epochs[-1]))
            assert set(times) == set(range(13)), "every sample is given out"
            assert times.total() - 13 < n, "few are given out twice"
            assert len({len(indices) for indices in epochs[-1]}) == 1, "equally many"
        assert epochs[0] != epochs[1], "another order in another epoch"


class IgnoresEpoch(DistributedSampler):
    def set_epoch(self, epoch):
        pass


class EpochForOneRank(DistributedSampler):
    def set_epoch(self, epoch):
        super().set_epoch(epoch if self.rank == 0 else 0)


def planted(deal: Callable) -> type:
    """Return a sampler whose share is what `deal(sampler, order)` says."""

    class Fake(DistributedSampler):
        @property
        def share(self):
            seed = self.seed + (self.rank if deal is order_of_its_own else 0)
            order = sampler.epoch_order(self.length, self.shuffle, seed, self.epoch)
            return Share(self.rank, deal(self, order))

    return Fake


def dropped_in_place_of_padding(one, order):
    return sampler.truncate(order, one.num_replicas)[one.rank :: one.num_replicas]


def neither_padded_nor_dropped(one, order):
    return order[one.rank :: one.num_replicas]


def order_of_its_own(one, order):
    return sampler.pad(order, one.num_replicas)[one.rank :: one.num_replicas]


def in_blocks(one, order):  # a legal plan, but not PyTorch's
    m = one.num_samples
    return sampler.pad(order, one.num_replicas)[one.rank * m : (one.rank + 1) * m]


IN_BLOCKS = planted(in_blocks)
FAKES = [
    IgnoresEpoch,
    EpochForOneRank,
    planted(dropped_in_place_of_padding),
    planted(neither_padded_nor_dropped),
    planted(order_of_its_own),
]


def test_it_covers_the_data():
    covers(DistributedSampler)
    covers(PyTorchSampler)
    covers(IN_BLOCKS)


@pytest.mark.parametrize("fake", [*FAKES, IN_BLOCKS])
def test_planted_samplers_fail(fake):
    with pytest.raises(AssertionError):
        like_pytorch(fake)
    if fake is not IN_BLOCKS:
        with pytest.raises(AssertionError):
            covers(fake)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_duplicates_are_told(length, n):
    plan = shares(length, n, epoch=3)
    assert [share.rank for share in plan] == list(range(n))
    assert sorted(chain(*(s.originals for s in plan))) == list(range(length))
    assert sum(share.num_padded for share in plan) == -length % n
    for share in plan:
        assert share.originals + share.padded == share.indices
        assert len(share.padded) == share.num_padded
        one = DistributedSampler(range(length), n, share.rank)
        one.set_epoch(3)
        assert one.share == share
    assert all(s.num_padded == 0 for s in shares(length, n, drop_last=True))


def test_the_plan_of_ten_samples():
    plan = shares(10, 4, shuffle=False)
    assert [share.indices for share in plan] == [
        [0, 4, 8],
        [1, 5, 9],
        [2, 6, 0],
        [3, 7, 1],
    ]
    assert [share.padded for share in plan] == [[], [], [0], [1]]
    cut = shares(10, 4, shuffle=False, drop_last=True)
    assert [s.indices for s in cut] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [s.indices for s in shares(2, 5, shuffle=False)] == [[0], [1], [0], [1], [0]]


def on_ranks() -> tuple[list, list, list]:
    """In a DataLoader, with the rank and the world size of the process group."""
    data = torch.arange(11) * 10
    ours, theirs = DistributedSampler(data, seed=2), PyTorchSampler(data, seed=2)
    seen = []
    for one in (ours, theirs):
        loader = DataLoader(data, batch_size=2, sampler=one)
        seen.append([])
        for epoch in range(2):
            one.set_epoch(epoch)
            seen[-1].append([batch.tolist() for batch in loader])
    originals = DataLoader(data, batch_size=2, sampler=ours.share.originals)
    return *seen, [x for batch in originals for x in batch.tolist()]


def test_in_a_data_loader():
    results = spawn(on_ranks, world_size=3, output="none")
    assert all(ours == theirs for ours, theirs, _ in results)
    assert sorted(chain(*(o for _, _, o in results))) == list(range(0, 110, 10))
    assert results[0][0][0] != results[0][0][1]


def of_nine(*arguments):
    return partial(DistributedSampler, range(9), *arguments)


test_bad_arguments = refused(
    (of_nine(0, 0), "num_replicas is 0; it must be an integer, 1 or more"),
    (of_nine(2, 2), "rank is 2; it must be an integer from 0 to 1"),
    (of_nine(2, -1), "rank is -1; it must be an integer from 0 to 1"),
    (of_nine(2.0, 0), "num_replicas is 2.0; it must be an integer, 1 or more"),
    (of_nine(2, 0, True, "a"), "seed is 'a'; it must be an integer"),
    (of_nine(), "num_replicas is None, and there is no process group to ask"),
    (of_nine(2), "rank is None, and there is no process group to ask"),
)


def test_bad_data():
    with pytest.raises(TypeError, match="dataset is a generator, which has no length"):
        DistributedSampler((i for i in range(3)), 2, 0)
    with pytest.raises(ValueError, match="length is -1; it must be an integer, 0 or"):
        shares(-1, 2)
    with pytest.raises(ValueError, match="epoch is None; it must be an integer"):
        DistributedSampler(range(3), 2, 0).set_epoch(None)
    data = [1, 2, 3]
    one = DistributedSampler(data, 2, 0)
    data.append(4)
    with pytest.raises(RuntimeError, match="had 3 samples .* and has 4 now"):
        list(one)
