"""The bucket plan: PyTorch's rules, checked against PyTorch's own function."""

import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_course.mechanisms import broadcast
from ddp_course.mechanisms.buckets import MIB, Bucket, bucket_plan
from ddp_course.model import GPTConfig, build_gpt

KB = 1024 / MIB  # a cap of so many MiB is one KiB


def pairs(*numels, dtype=torch.float32):
    return [
        (f"p{k}", nn.Parameter(torch.zeros(n, dtype=dtype)))
        for k, n in enumerate(numels)
    ]


def test_the_last_parameters_come_first_and_the_first_bucket_is_small():
    plan = bucket_plan(pairs(100, 300, 200, 256, 10), 2 * KB, 1 * KB)
    # 266 * 4 bytes are 1 KiB or more; 500 * 4 are not yet 2 KiB.
    assert plan[0] == Bucket(
        0, ("p4", "p3"), (0, 10), 266, torch.float32, torch.device("cpu")
    )
    assert plan[1].parameters == ("p2", "p1", "p0")
    assert plan[1].offsets == (0, 200, 500)
    assert plan[1].nbytes == 2400


def test_frozen_and_empty_ones_are_in_no_bucket_and_tied_ones_in_one():
    named = pairs(3, 0, 5)
    named[0][1].requires_grad_(False)
    plan = bucket_plan([*named, ("again", named[2][1])])
    assert [b.parameters for b in plan] == [("p2",)]
    assert bucket_plan(pairs(0)) == ()
    model = build_gpt(GPTConfig(n_layer=1, tied=True))
    (bucket,) = bucket_plan(model.named_parameters(), 25, 25)
    assert bucket.numel == sum(p.numel() for p in model.parameters())
    assert "head.out.weight" not in bucket.parameters


def test_types_have_buckets_of_their_own_and_the_first_complete_one_comes_first():
    # In reverse: f64 opens, three f32 fill a bucket, f64 closes at the very end.
    named = [
        ("a", nn.Parameter(torch.zeros(2, dtype=torch.float64))),
        ("b", nn.Parameter(torch.zeros(4))),
        ("c", nn.Parameter(torch.zeros(4))),
        ("d", nn.Parameter(torch.zeros(2, dtype=torch.float64))),
    ]
    plan = bucket_plan(named)
    assert [(b.index, b.parameters, b.dtype) for b in plan] == [
        (0, ("c", "b"), torch.float32),
        (1, ("d", "a"), torch.float64),
    ]


def theirs(named, cap, first):
    """Return PyTorch's buckets, as sets of names, for parameters in reverse order."""
    turned = [(name, p) for name, p in named if p.requires_grad and p.numel()][::-1]
    buckets, _ = dist._compute_bucket_assignment_by_size(
        [p for _, p in turned], [int(first * MIB), int(cap * MIB)]
    )
    return {tuple(turned[at][0] for at in bucket) for bucket in buckets}


@pytest.mark.parametrize("seed", range(20))
def test_the_plan_is_pytorchs(seed):
    rng = random.Random(seed)
    dtypes = [torch.float32, torch.float64, torch.bfloat16][: rng.randint(1, 3)]
    named = [
        (
            f"p{k}",
            nn.Parameter(torch.zeros(rng.randint(0, 600), dtype=rng.choice(dtypes))),
        )
        for k in range(rng.randint(1, 40))
    ]
    for _, parameter in named:
        parameter.requires_grad_(rng.random() < 0.9)
    cap, first = 4 * KB, 1 * KB
    plan = bucket_plan(named, cap, first)
    assert {bucket.parameters for bucket in plan} == theirs(named, cap, first)
    sizes = dict(named)
    for bucket in plan:
        ends = [
            at + sizes[name].numel()
            for name, at in zip(bucket.parameters, bucket.offsets, strict=True)
        ]
        assert [*bucket.offsets, bucket.numel] == [0, *ends]  # no gap, no overlap


def test_a_first_bucket_above_the_cap_is_cut_to_it():
    named = pairs(*[256] * 4)
    assert bucket_plan(named, 1 * KB) == bucket_plan(named, 1 * KB, 1 * KB)
    assert len(bucket_plan(named, 1 * KB)) == 4


@pytest.mark.parametrize("cap", [0, -1, float("nan"), "25", None, True])
def test_a_cap_that_is_none_is_refused(cap):
    with pytest.raises(ValueError, match="bucket_cap_mb is .*above 0"):
        bucket_plan(pairs(3), cap)
    with pytest.raises(ValueError, match="first_bucket_mb is"):
        bucket_plan(pairs(3), 25, cap)


def test_a_bucket_tells_what_it_holds():
    results = str(bucket_plan(build_gpt("1m").named_parameters())[0])
    assert results == (
        "bucket 0: 1.01 MiB of float32, 12 parameters: "
        "head.out.weight ... blocks.3.attn.qkv.weight"
    )


def test_a_batch_is_closed_when_it_is_full_and_each_size_is_asked_once():
    asked = []
    with mock.patch.object(broadcast, "TOGETHER", 30):
        sizes = lambda number: asked.append(number) or 10  # noqa: E731
        batches = list(broadcast.in_batches(range(8), sizes, lambda number: number % 2))
    assert batches == [[0, 2, 4], [1, 3, 5], [6], [7]]
    assert asked == list(range(8))
