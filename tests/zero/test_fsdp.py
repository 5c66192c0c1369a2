"""FullyShardedDataParallel trains as one process does, and as fully_shard does."""

from __future__ import annotations

import functools

import pytest
import torch.distributed as dist
from fsdp_cases import (
    FAKES,
    OPTIMIZERS,
    WRAPPERS,
    bits,
    far_apart,
    train,
)

from ddp_course.launch import spawn

alone = functools.cache(functools.partial(train, None))  # one process, whole batch


def everything() -> dict[tuple, object]:
    """On every rank: train under every wrapper, and under every fake."""
    cases = [(name, "odd", "sgd") for name in ("naive", "simple", "ours", "shared")]
    cases += [(name, "gpt", "sgd") for name in ("naive", "simple", "shared")]
    cases += [(name, "gpt", opt) for name in ("ours", "torch") for opt in OPTIMIZERS]
    cases += [("ours", "odd", "adamw")]
    if dist.get_world_size() == 3:  # where sizes do not divide, too
        cases += [(name, "odd", "sgd") for name in WRAPPERS if name != "torch"]
        cases += [("fake", name) for name in FAKES]
    told = {}
    for case in dict.fromkeys(cases):
        name, model, *_ = case
        wrap = FAKES[model] if name == "fake" else WRAPPERS[name]
        told[case] = train(wrap, *((case[2], model) if len(case) == 3 else ("sgd",)))
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
