"""The bench of tensor parallelism: all variants do the same work."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ddp_course.bench import steps, tp
from ddp_course.launch import spawn
from ddp_course.tensor_parallel import TensorParallelGPT


def weights() -> list[tuple[str, torch.Tensor | None, int]]:
    """On every rank, of each variant after three steps: a weight; parameters kept."""
    told = []
    for name, make in tp.VARIANTS.items():
        made = []

        def noted(model, make=make, made=made):
            made.extend(make(model))
            return made[0], made[1]

        step = steps.step_of(noted, steps.TINY, 32)
        for _ in range(3):
            step()
        module = getattr(made[0], "module", made[0])
        told.append((name, head_of(module), own_numel(module)))
    return told


def head_of(module) -> torch.Tensor | None:
    if isinstance(module, TensorParallelGPT):
        return module.full_state_dict()["head.out.weight"]
    weight = module.state_dict().get("head.out.weight")
    return None if weight is None else getattr(weight, "full_tensor", lambda: weight)()


def own_numel(module) -> int:
    local = (getattr(p, "to_local", lambda p=p: p)() for p in module.parameters())
    return sum(p.numel() for p in local)


def test_all_variants_do_the_same_work_and_cut_the_model():
    ranks = spawn(weights, world_size=2, output="none", device="cpu", timeout=120)
    whole = steps.TINY.num_parameters
    for rank, told in enumerate(ranks):
        reference = told[0][1]
        for name, weight, numel in told:
            if name == "one rank alone":
                assert numel == (1 if rank else whole)
            else:
                assert numel < 0.6 * whole, name
            if weight is not None:
                error = (weight - reference).abs().max().item()
                assert error == pytest.approx(0, abs=1e-5), name  # of 3e-4


def test_ours_are_compared_with_theirs_at_their_best():
    assert {n for n in tp.VARIANTS if n.startswith("tp")} < tp.COMPARED.keys()
    for name, others in tp.COMPARED.items():
        assert {name, *others} <= tp.VARIANTS.keys()
    assert {"DTensor default", "DTensor best"} < set(tp.COMPARED["tp gloo"])


def batches() -> torch.Tensor:
    made = tp.OneBatch(lambda x, y: x)
    mine = torch.full((2, 3), dist.get_rank())
    return torch.stack([made(mine, mine), made(mine + 5, mine)])


def test_all_ranks_work_on_one_batch():
    for told in spawn(batches, world_size=2, output="none", device="cpu"):
        assert not told.any()
