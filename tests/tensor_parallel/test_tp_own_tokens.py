"""Gradients of norms and biases along cut sequences, however forward is called.

One all-reduce sums those of a whole model; where layers are called one by one, or run
again in backward, it is one for each layer. The sums are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tp_cases import CONFIG, batch, gradients, model

from ddp_course.launch import spawn
from ddp_course.measure import TorchCollectives
from ddp_course.mechanisms.recompute import recompute_blocks
from ddp_course.mechanisms.whole_state import full_state_dict
from ddp_course.mesh import Mesh, make_groups
from ddp_course.model import GPT
from ddp_course.pipeline import PipelineParallel
from ddp_course.tensor_parallel import TensorParallelGPT, ops, tensor_parallel
from ddp_course.tensor_parallel.fused import FusedRowParallelLinear
from ddp_course.zero import FullyShardedDataParallel

Gradients = dict[str, Tensor]
BLOCKS = CONFIG.n_layer
ONE_BY_ONE = 4 * BLOCKS  # all-reduces of the norms and biases of all blocks


def checkpointed(gpt: nn.Module, use_reentrant: bool) -> None:
    for block in gpt.blocks:
        again = functools.partial(checkpoint, use_reentrant=use_reentrant)
        block.forward = functools.partial(again, block.forward)


def one_by_one(gpt: TensorParallelGPT) -> None:
    """Call the layers as a pipeline does."""

    def forward(x: Tensor, y: Tensor) -> tuple[None, Tensor]:
        for layer in [gpt.embed, *gpt.blocks, gpt.head]:
            x = layer(x)
        return None, gpt.loss_fn(x, y)

    gpt.forward = forward


# name -> what changes the model, and the all-reduces of a forward and backward: two for
# the loss, one for the positions, and those of norms and biases.
WAYS: dict[str, tuple[Callable | None, int]] = {
    "plain": (None, 3 + 1),
    "checkpoint": (functools.partial(checkpointed, use_reentrant=False), 3 + 1),
    "reentrant": (
        functools.partial(checkpointed, use_reentrant=True),
        3 + 1 + ONE_BY_ONE,
    ),
    "recompute": (recompute_blocks, 3 + 1 + ONE_BY_ONE),
    "one by one": (one_by_one, 3 + 1 + ONE_BY_ONE),
}


def accumulated(gpt: nn.Module) -> Gradients:
    """Return the sums of two backwards' gradients, in float64."""
    for step in range(2):
        gpt(*batch(step))[1].backward()
    return gradients(gpt)


def of_one_process(name: str) -> Gradients:
    return accumulated(model(name).double())


def in_each_way() -> dict[tuple[str, str], tuple[Gradients, int]]:
    """On every rank: gradients of two backwards, and how many all-reduces they took."""
    results = {}
    for name in ("plain", "frozen"):
        for way, (change, _) in WAYS.items():
            gpt = tensor_parallel(model(name).double(), sequence_parallel=True)
            if change is not None:
                change(gpt)
            with TorchCollectives() as torch_log:
                found = accumulated(gpt)
            results[way, name] = found, torch_log.count("all_reduce")
    for plant, wrong in PLANTS.items():
        gpt = tensor_parallel(model().double(), sequence_parallel=True)
        with pytest.MonkeyPatch.context() as patch:
            wrong(patch)
            results[plant, "plant"] = accumulated(gpt), 0
    return results


def far(found: Gradients, expected: Gradients) -> list[str]:
    """Return the names of gradients that differ by more than roundings of float64."""
    return [*(found.keys() ^ expected.keys())] + [
        name
        for name in found.keys() & expected.keys()
        if not torch.allclose(found[name], expected[name], rtol=1e-9, atol=1e-12)
    ]


# ---- planted fakes -------------------------------------------------------------------


def averaged(patch: pytest.MonkeyPatch) -> None:
    right = ops.copy_all_to_group

    def wrong(tensors, group=None):
        scaled = [t / group.size + t.detach() * (1 - 1 / group.size) for t in tensors]
        return right(scaled, group)

    patch.setattr(ops, "copy_all_to_group", wrong)


def summed_twice(patch: pytest.MonkeyPatch) -> None:
    right = ops.OwnTokensLayer.summed

    def wrong(layer):
        return [ops.copy_to_group(t, layer.group) for t in right(layer)]

    patch.setattr(ops.OwnTokensLayer, "summed", wrong)


def not_summed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ops, "copy_all_to_group", lambda tensors, group=None: [*tensors])


def of_the_first_forward(patch: pytest.MonkeyPatch) -> None:
    """Copies that are kept: a second backward goes through the graph of the first."""
    right = ops.copy_all_to_group
    first = {}

    def wrong(tensors, group=None):
        key = tuple(map(id, tensors))
        return first.setdefault(key, [t.detach() for t in right(tensors, group)])

    patch.setattr(ops, "copy_all_to_group", wrong)


PLANTS = {f.__name__: f for f in (averaged, summed_twice, not_summed)}
PLANTS["of_the_first_forward"] = of_the_first_forward


def test_however_forward_is_called():
    ranks = spawn(in_each_way, world_size=3, output="none", device="cpu", timeout=200)
    expected = {name: of_one_process(name) for name in ("plain", "frozen")}
    for rank in ranks:
        for way, (_, all_reduces) in WAYS.items():
            found, sent = rank[way, "plain"]
            assert not far(found, expected["plain"]), way
            assert sent == 2 * all_reduces, way
            found, sent = rank[way, "frozen"]
            assert not far(found, expected["frozen"]), way
            if way in ("plain", "checkpoint"):  # positions are frozen
                assert sent == 2 * 3, way
        for plant in PLANTS:
            assert far(rank[plant, "plant"][0], expected["plain"]), plant


# ---- beside other axes ---------------------------------------------------------------

SCHEDULES, MICROBATCHES = ("1f1b", "zero_bubble"), 3
EVERY_LAYER = ("embed", "blocks.0", "blocks.1", "head")
# reshard_after_forward, and the modules that stage 3 gathers as one. Those of the last
# case leave nothing for the whole model to sum.
SHARDED = ((True, None), (False, None), (True, EVERY_LAYER[1:]), (True, EVERY_LAYER))


def cut(axis: str) -> tuple[TensorParallelGPT, dist.ProcessGroup]:
    groups = make_groups(Mesh({axis: 2, "tp": 2}))
    gpt = tensor_parallel(model().double(), groups.group("tp"), sequence_parallel=True)
    return gpt, groups.group(axis)


def stepped(parallel: nn.Module) -> Gradients:
    """Step once by SGD with lr 1; return how far each parameter has gone."""
    before = full_state_dict(parallel)
    before = {name: tensor.clone() for name, tensor in before.items()}
    torch.optim.SGD(parallel.parameters(), lr=1.0).step()
    after = full_state_dict(parallel)
    return {name: before[name] - after[name] for name in before}


def in_a_pipeline(schedule: str) -> tuple[Gradients, int]:
    gpt, group = cut("pp")
    pipeline = PipelineParallel(gpt, schedule, MICROBATCHES, group)
    with TorchCollectives() as torch_log:
        pipeline.step(*batch(0))
    return stepped(pipeline), torch_log.count("all_reduce")


def inside_of_fsdp(reshard: bool | None, units: tuple | None) -> Gradients:
    """Return the gradients of two backwards after two forwards, of other rows."""
    gpt, group = cut("dp")
    sharded = FullyShardedDataParallel(
        gpt, group, reshard_after_forward=reshard, units=units
    )
    for _ in range(2):
        sharded(*batch(dist.get_rank(group)))[1].backward()
    return stepped(sharded)


def beside_others() -> dict[Any, Any]:
    results = {name: in_a_pipeline(name) for name in SCHEDULES}
    return results | {case: inside_of_fsdp(*case) for case in SHARDED}


def test_inside_of_a_pipeline_and_of_stage_3():
    ranks = spawn(beside_others, world_size=4, output="none", device="cpu", timeout=200)
    gpt: GPT = model().double()
    gpt(*batch(0))[1].backward()
    once, both = gradients(gpt), of_one_process("plain")
    for rank, results in enumerate(ranks):
        for schedule in SCHEDULES:
            found, sent = results[schedule]
            assert not far(found, once), schedule
            mine = 4 + 1 + 2 * (rank >= 2)  # a block, an end, and the loss
            assert sent == MICROBATCHES * mine, schedule
        for case in SHARDED:
            assert not far(results[case], both), case


# ---- types, and a forward that fails -------------------------------------------------


def types_of_copies() -> list[tuple]:
    """Sum the gradients of tensors of two types; return types and gradients."""
    wide = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    narrow = torch.ones(2, requires_grad=True)
    copies = ops.copy_all_to_group([wide, narrow])
    sum(copy.sum() for copy in copies).backward()
    return [
        (copy.dtype, t.grad) for copy, t in zip(copies, (wide, narrow), strict=True)
    ]


def type_under_autocast() -> torch.dtype:
    full = nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        layer = FusedRowParallelLinear(full, sequence_parallel=True)
        own = 4 // dist.get_world_size()
        return layer(torch.ones(1, dist.get_world_size(), own)).dtype


def left_by_a_failed_forward() -> list[object]:
    """Return the copies that layers still have after a forward that has failed."""
    gpt = tensor_parallel(model(), sequence_parallel=True)

    def fail(x: Tensor) -> Tensor:
        raise ArithmeticError("planted")

    gpt.blocks[1].forward = fail
    with pytest.raises(ArithmeticError, match="planted"):
        gpt(*batch(0))
    layers = [m for m in gpt.modules() if isinstance(m, ops.OwnTokensLayer)]
    assert len(layers) == 4 * CONFIG.n_layer + 1
    return [layer.copies for layer in layers if layer.copies]


def small_facts() -> tuple:
    return types_of_copies(), type_under_autocast(), left_by_a_failed_forward()


def test_copies_keep_their_types_and_no_forward_leaves_any():
    for copies, autocast, left in spawn(small_facts, world_size=2, output="none"):
        (wide, of_wide), (narrow, of_narrow) = copies
        assert (wide, narrow) == (torch.float64, torch.float32)
        assert of_wide.dtype == torch.float64 and of_narrow.dtype == torch.float32
        assert torch.equal(of_wide, torch.full((2, 3), 2.0, dtype=torch.float64))
        assert torch.equal(of_narrow, torch.full((2,), 2.0))
        assert autocast == torch.bfloat16
        assert left == []
