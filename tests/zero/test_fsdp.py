"""FullyShardedDataParallel trains as one process does, and as fully_shard does."""

from __future__ import annotations

import functools

import pytest
import torch.distributed as dist
from fsdp_cases import (
    FAKES,
    OPTIMIZERS,
    WRAPPERS,
    Ours,
    bits,
    far_apart,
    fully_shard,
    train,
)

from ddp_course.launch import spawn

alone = functools.cache(functools.partial(train, None))  # one process, whole batch


def everything() -> dict[tuple, object]:
    """On every rank: train under every wrapper, and under every fake."""
    told = {
        (name, "odd", "sgd"): train(wrap, "sgd", "odd")
        for name, wrap in WRAPPERS.items()
    }
    for optimizer in OPTIMIZERS:
        told["ours", "gpt", optimizer] = train(Ours, optimizer, "gpt")
        told["torch", "gpt", optimizer] = train(fully_shard, optimizer, "gpt")
    for name in ("naive", "shared"):
        told[name, "gpt", "sgd"] = train(WRAPPERS[name], "sgd", "gpt")
    told["ours", "odd", "adamw"] = train(Ours, "adamw", "odd")
    if dist.get_world_size() == 3:  # where sizes do not divide, too
        told |= {("fake", name): train(wrap, "sgd") for name, wrap in FAKES.items()}
    return told


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_same_training_as_one_process_and_as_pytorch(n):
    told = spawn(everything, world_size=n, output="none")
    for name, *rest in told[0]:
        if name == "fake":
            continue
        model, optimizer = rest
        mine = [rank[name, model, optimizer] for rank in told]
        assert not far_apart(mine[0], alone(optimizer, model)), (name, rest)
        assert len({bits(rank) for rank in mine}) == 1, (name, rest)
        if model == "gpt":
            assert not far_apart(mine[0], told[0]["torch", "gpt", optimizer]), name
    for name in FAKES if n == 3 else ():
        assert far_apart(told[0]["fake", name], alone("sgd", "gpt")), f"{name} not seen"
