"""PipelineParallel trains as one process does, and as PyTorch's pipelining does."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from pipeline_cases import (
    FAKE_SCHEDULES,
    FAKES,
    ROWS,
    TOKENS,
    PipelineParallel,
    alone,
    batch,
    fake,
    far_apart,
    pytorchs,
    tied,
    train,
    whole,
)

from ddp_course.bench.pp import THEIRS
from ddp_course.launch import spawn
from ddp_course.model import cross_entropy
from ddp_course.pipeline import SCHEDULES, NaivePipeline, Pipeline

MICROBATCHES = {1: (3,), 3: (2, 7)}  # of so many ranks
RECOMPUTED = ("1f1b", "zero_bubble")
PYTORCH = ("gpipe", "1f1b", "interleaved", "zero_bubble")

one_process = functools.cache(alone)


def everything(num_microbatches: tuple[int, ...]) -> dict:
    """On every rank: train under every schedule, and under every fake."""
    results = {}
    for schedule in SCHEDULES:
        for m in num_microbatches:
            results[schedule, m, ""] = train(PipelineParallel, schedule, m)
        if schedule in RECOMPUTED and dist.get_world_size() % 2:
            m = num_microbatches[-1]
            results[schedule, m, "again"] = train(
                PipelineParallel, schedule, m, recompute=True
            )
    return results


@pytest.mark.parametrize("n", MICROBATCHES)
def test_the_same_training_as_one_process(n):
    results = spawn(
        everything, MICROBATCHES[n], world_size=n, output="none", timeout=250
    )
    assert len(results[0]) >= len(SCHEDULES) * len(MICROBATCHES[n])
    for case in results[0]:
        wrong = far_apart(whole([rank[case] for rank in results]), one_process())
        assert not wrong, (case, wrong[:3])


SAME = {"model": "untied", "seed": 0, "steps": 2}
FORM = TOKENS, 14


def ours_and_theirs(m: int) -> dict:
    """Train the untied GPT under the schedules of PyTorch, and up the ladder."""
    p = dist.get_world_size()
    sizes = [2] * p
    results = {("by hand", "naive"): train(NaivePipeline, sizes, m, FORM, **SAME)}
    for schedule in PYTORCH:
        ours = train(PipelineParallel, schedule, m, model="untied", steps=2)
        results["ours", schedule] = ours
        if schedule in THEIRS:  # PyTorch 2.12 has no zero bubble that runs
            results["theirs", schedule] = pytorchs(schedule, m, steps=2)
        if schedule != "zero_bubble":  # no halves in the readable one
            plan = SCHEDULES[schedule](p, m)
            sizes = [8 // plan.num_stages] * plan.num_stages
            readable = Pipeline, plan, sizes, FORM, cross_entropy
            results["readable", schedule] = train(*readable, **SAME)
    return results


def test_the_same_training_as_pytorchs():
    results = spawn(ours_and_theirs, 4, world_size=4, output="none", timeout=250)
    for case in results[0]:
        trained = whole([rank[case] for rank in results])
        clip = case[0] in ("ours", "theirs")
        assert not far_apart(trained, one_process("untied", 2, clip=clip)), case


def all_fakes() -> dict:
    results = {}
    for name in FAKES:
        schedule = FAKE_SCHEDULES.get(name, "gpipe")
        results[name] = fake(name, schedule, 3)
    return results


def test_planted_fakes_are_seen():
    results = spawn(all_fakes, world_size=2, output="none", timeout=200)
    for name in FAKES:
        try:
            wrong = far_apart(
                whole([rank[name] for rank in results]), one_process("tied", 3)
            )
        except AssertionError:  # the two copies of a tied weight differ
            assert name == "tied not at all"
            continue
        assert wrong, f"{name} not seen"


def accumulated() -> tuple[dict, list, list]:
    """Two steps without zero_grad between them, and an evaluation."""
    pipeline = PipelineParallel(tied(), "interleaved", 3)
    for step in (0, 1):
        pipeline.step(*batch(step))
    found = {n: p.grad for n, p in pipeline.named_parameters() if p.grad is not None}
    with torch.no_grad():
        logits, loss = pipeline(*batch(2, ROWS + 1))
    return found, [pipeline(batch(2)[0])[0], logits], loss


def test_gradients_add_up_and_evaluation_goes_forward_only():
    results = spawn(accumulated, world_size=2, output="none", timeout=100)
    plain = tied()
    for step in (0, 1):
        plain(*batch(step))[1].backward()
    for name, parameter in plain.named_parameters():
        for found, _, _ in results:
            if name in found:
                assert torch.allclose(found[name], parameter.grad, atol=1e-5), name
        assert (parameter.grad is None) != any(name in found for found, _, _ in results)
    for _, _, loss in results:
        assert loss == pytest.approx(plain(*batch(2, ROWS + 1))[1].item(), abs=1e-5)
    (_, (none, _), _), (_, (logits, _), _) = results
    assert none is None
    assert torch.allclose(logits, plain(batch(2)[0])[0], atol=1e-5)
