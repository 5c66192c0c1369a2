"""Uneven numbers of batches: ours under Join ends where PyTorch's ends."""

import pytest
import torch
import torch.distributed as dist
from ddp_cases import SMALL_BUCKETS, Ours, Small
from on_ranks import error_of
from torch import nn
from torch.distributed.algorithms.join import Join
from trained import same

from ddp_course.collectives import ring_all_reduce
from ddp_course.launch import spawn


def my_batches(accumulate: int) -> list[tuple[int, torch.Tensor]]:
    """Return rank r's batches: 2 + r steps; the middle rank has the most."""
    rank = dist.get_rank()
    steps = [3, 6, 4, 2][rank]
    generator = torch.Generator().manual_seed(rank)
    return [
        (k, torch.randn(3, 7, generator=generator)) for k in range(steps * accumulate)
    ]


def trained(wrap, accumulate: int = 1, **how) -> dict[str, torch.Tensor]:
    model = Small()
    ddp = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Join([ddp], **how):
        for k, x in my_batches(accumulate):
            if (k + 1) % accumulate:
                with ddp.no_sync():
                    ddp(x).square().mean().backward()
                continue
            ddp(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


THEIRS = nn.parallel.DistributedDataParallel
MINE = {
    "gloo": lambda m: Ours(m, **SMALL_BUCKETS),
    "ring": lambda m: Ours(m, all_reduce=ring_all_reduce),
    "shared": lambda m: Ours(m, buckets_in_shared_memory=True),
    "find": lambda m: Ours(m, find_unused_parameters=True),
}
CASES = {
    "even weight": {},
    "those who train": {"divide_by_initial_world_size": False},
    "accumulation": {"accumulate": 2},
}


def everything() -> dict:
    told = {}
    for case, how in CASES.items():
        told[case] = {"theirs": trained(THEIRS, **how)}
        for name, wrap in MINE.items():
            told[case][name] = trained(wrap, **how)
    told["thrown"] = error_of(
        lambda: trained(MINE["gloo"], throw_on_early_termination=True)
    )
    return told


@pytest.mark.parametrize("n", [2, 3])
def test_uneven_batches_end_as_in_pytorch(n):
    told = spawn(everything, world_size=n, output="none")
    for case in CASES:
        theirs = told[0][case]["theirs"]
        for name in MINE:
            for rank in told:
                mine = rank[case][name]
                assert same(mine, told[0][case][name]), (case, name)
                assert same(mine, theirs, rtol=1e-4), (case, name)
    # The cases differ from each other, so that a test can tell them apart.
    ends = [told[0][case]["theirs"]["first.weight"] for case in CASES]
    assert not torch.allclose(ends[0], ends[1], rtol=1e-3)
    assert not torch.allclose(ends[0], ends[2], rtol=1e-3)
    assert all("exhausted" in rank["thrown"] for rank in told)
