"""Digests of replicas: what they see, whom they name, and what stays hidden."""

import copy
from random import Random

import pytest
import torch

from ddp_course.chapters.ch19_failures.silent import flip_bit
from ddp_course.failures.digests import digest, first_spike, gather_digests, suspects
from ddp_course.launch import spawn

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)


def replica():
    torch.manual_seed(0)
    return [torch.randn(5, 3), torch.randn(7), torch.randn(2, 2, 2)]


def test_equal_replicas_have_equal_digests():
    assert digest(replica()) == digest(copy.deepcopy(replica()))


@pytest.mark.parametrize("bit", range(32))
def test_each_flipped_bit_is_seen(bit):
    tensors = replica()
    before = digest(tensors)
    flip_bit(tensors[1], bit % 7, bit)
    assert digest(tensors) != before
    flip_bit(tensors[1], bit % 7, bit)
    assert digest(tensors) == before


@pytest.mark.parametrize("dtype", TYPES)
def test_every_place_counts_in_every_type(dtype):
    dice = Random(str(dtype))
    tensors = [torch.tensor([dice.randrange(99) for _ in range(40)]).to(dtype)]
    found = {digest(tensors)}
    for place in range(40):
        tensors[0][place] += 1
        found.add(digest(tensors))
    assert len(found) == 41
    assert all(-(2**63) <= each < 2**63 for each in found)


def test_numbers_that_change_places_are_seen():
    a, b = torch.arange(4.0), torch.arange(4.0) + 9
    found = {digest(x) for x in ([a, b], [b, a], [a.flip(0), b], [torch.cat([b, a])])}
    assert len(found) == 3  # the cut into tensors is not part of the digest
    assert sum([a, b]).sum() == sum([b, a]).sum()  # a sum alone sees none of it


def test_tensors_that_change_places_are_seen():
    a, b = torch.ones(3), torch.full((3,), 2.0)
    assert digest([a, b]) != digest([b, a])


def test_a_strided_tensor_has_the_digest_of_its_numbers():
    matrix = torch.randn(4, 6)
    assert digest([matrix.T]) == digest([matrix.T.contiguous()]) != digest([matrix])


def gathered_with_a_flip(rank):
    tensors = replica()
    if torch.distributed.get_rank() == rank:
        flip_bit(tensors[0], 3, 0)
    return gather_digests(tensors)


def test_every_rank_learns_who_differs():
    found = spawn(gathered_with_a_flip, 2, world_size=3, output="none")
    assert found[0] == found[1] == found[2]
    assert suspects(found[0]) == [2]
    assert found[0][0] == digest(replica())


@pytest.mark.parametrize(
    ("row", "ranks"),
    [
        ("aaa", []),
        ("aba", [1]),
        ("ab", None),  # two ranks: who is right?
        ("abc", None),
        ("aabb", None),
        ("aabbb", [0, 1]),
        ("aabcd", None),  # most, but not more than half
        ("aaabc", [3, 4]),
        ("a", []),
    ],
)
def test_suspects_differ_from_more_than_half(row, ranks):
    assert suspects([*map(ord, row)]) == ranks


def test_a_spike_is_a_loss_far_above_those_before_it():
    assert first_spike([4.0, 3.5, 3.0, 3.1, 2.9, 9.0, 2.8]) == 5
    assert first_spike([4.0, 3.5, 3.0, 3.1, 2.9, 3.2, 2.8]) is None
    assert first_spike([4.0, 3.0, float("nan")]) == 2
    assert first_spike([float("nan"), float("nan")]) == 0
    assert first_spike([4.0, 3.0, float("inf"), 3.0]) == 2
    falling = [9.0] * 9 + [1.0] * 7 + [1.6]
    assert first_spike(falling) == 16  # the losses before the last 8 do not count
    assert first_spike([100.0, *[1.0] * 5, 3.0]) == 6  # a mean would be 17
    assert first_spike([3.0]) is first_spike([]) is None
