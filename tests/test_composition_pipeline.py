"""A pipeline of a tensor-parallel model trains as one process does."""

import functools
import gc
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_course.launch import spawn
from ddp_course.mechanisms.agreement import ReplicaError
from ddp_course.mechanisms.placements import placed
from ddp_course.mechanisms.whole_state import gathered
from ddp_course.mesh import Mesh, make_groups
from ddp_course.model import GPT, GPTConfig, build_gpt
from ddp_course.parallelize import choose_layout, parallelize
from ddp_course.pipeline import PipelineParallel
from ddp_course.tensor_parallel import tensor_parallel

CONFIG = GPTConfig(12, 6, n_layer=6, n_head=2, d_model=16)
STEPS, CLIP = 5, 0.5


def model(tied: bool) -> GPT:
    """Return a GPT; a tied one has frozen parameters, too."""
    gpt = build_gpt(replace(CONFIG, tied=tied))
    if tied:
        gpt.blocks[2].requires_grad_(False)
        gpt.blocks[4].mlp.up.weight.requires_grad_(False)
    return gpt


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(12, (5, 7), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1], drawn[:, 1:]


@functools.cache
def alone(tied: bool) -> list[tuple[float, float, dict, dict]]:
    """Return loss, norm, parameters and gradients after each step in one process."""
    gpt, told = model(tied), []
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = gpt(*batch(step))[1]
        loss.backward()
        norm = nn.utils.clip_grad_norm_(gpt.parameters(), CLIP)
        optimizer.step()
        named = dict(gpt.named_parameters())
        state = {n: p.detach().clone() for n, p in named.items()}
        grads = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
        told.append((loss.item(), norm.item(), state, grads))
    return told


def composed(schedule: str, tied: bool) -> list[tuple[float, float, dict, dict]]:
    """Return the same on this rank of tp 2 x pp 2; the states are whole on rank 0."""
    mesh = make_groups(Mesh({"pp": 2, "tp": 2}))
    gpt = tensor_parallel(model(tied), mesh.group("tp"))
    pipeline, told = PipelineParallel(gpt, schedule, 4, mesh.group("pp")), []
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = pipeline.step(*batch(step))
        norm = pipeline.clip_grad_norm_(CLIP)
        optimizer.step()
        named = [(placed(p), p) for p in pipeline.parameters()]
        own = {w.name: (w, {"": p.grad}) for w, p in named if p.grad is not None}
        grads = gathered(own, pipeline.groups, pipeline.plain.shapes)
        grads = {name: state[""] for name, state in grads.items()}
        told.append((loss.item(), norm.item(), pipeline.full_state_dict(), grads))
    logits, loss = pipeline(batch(9)[0])[0], pipeline(*batch(9))[1]
    state = pipeline.full_optimizer_state_dict(optimizer)
    return [*told, (logits, loss.item(), len(state.get("state", ())))]


def all_schedules() -> dict:
    cases = ("interleaved", True), ("zero_bubble", False)  # and the rest on 8 ranks
    return {case: composed(*case) for case in cases}


def test_tensor_parallel_stages_train_as_one_process():
    ranks = spawn(all_schedules, world_size=4, output="none", timeout=250)
    for (name, tied), (*steps, _) in ranks[0].items():
        for found, right in zip(steps, alone(tied), strict=True):
            assert found[:2] == pytest.approx(right[:2], rel=1e-4), (name, tied)
            for whole, one in zip(found[2:], right[2:], strict=True):
                assert one.keys() <= whole.keys(), (name, tied)
                for key, value in one.items():
                    close = torch.allclose(whole[key], value, rtol=1e-4, atol=1e-5)
                    assert close, (name, tied, key)
        for told in ranks:
            assert [step[:2] for step in told[name, tied][:-1]] == [
                step[:2] for step in steps
            ]
    for case, (*_, (none, loss, states)) in ranks[0].items():
        logits = [told[case][-1][0] for told in ranks]
        assert none is None and logits[2].shape == (5, 6, 12)
        assert torch.equal(logits[2], logits[3])
        assert loss == ranks[3][case][-1][1] and states > 0


def one_of_two_pipelines_cannot_be() -> str:
    layout = choose_layout(4, "ddp", pp=2)
    axes = make_groups(layout.mesh)
    other = replace(CONFIG, n_layer=6 + (dist.get_rank() == 3))
    with pytest.raises(ReplicaError) as told:
        parallelize(build_gpt(other), layout, axes)
    return str(told.value)


def test_a_pipeline_that_cannot_be_made_is_told_to_the_other_replica_too():
    told = spawn(one_of_two_pipelines_cannot_be, world_size=4, timeout=20)
    assert len(set(told)) == 1 and "ranks 2, 3: the ranks differ" in told[0], told


def weights_are_split() -> tuple[int, int, int]:
    """Return how many gradients of this rank's weights came with W, and of how many.

    And how many blocks there are when the model has been let go of.
    """
    mesh = make_groups(Mesh({"pp": 2, "tp": 2}))
    gpt = tensor_parallel(model(False), mesh.group("tp"))
    pipeline, came = PipelineParallel(gpt, "zero_bubble", 2, mesh.group("pp")), set()
    blocks, inside = [weakref.ref(block) for block in gpt.blocks], pipeline.weight_grads
    del gpt
    gc.collect()
    for name, parameter in pipeline.named_parameters():

        def note(_, name=name):
            if inside.tasks is None:  # nobody collects: it is W, not I
                came.add(name)

        parameter.register_post_accumulate_grad_hook(note)
    pipeline.step(*batch(0))
    dist.barrier()
    layers = ("qkv.weight", "proj.weight", "up.weight", "down.weight", "out.weight")
    linear = {n for n, _ in pipeline.named_parameters() if n.endswith(layers)}
    return len(linear & came), len(linear), sum(ref() is not None for ref in blocks)


def test_linear_layers_that_are_cut_are_split_by_zero_bubble():
    told = spawn(weights_are_split, world_size=4, output="none")
    assert all(split == linear > 8 for split, linear, _ in told)
    assert [blocks for *_, blocks in told] == [3, 3, 3, 3]
