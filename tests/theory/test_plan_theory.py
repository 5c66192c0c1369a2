"""The plan: what fits, what it sends, and how many GPUs would do."""

from __future__ import annotations

import pytest
from refusals import refused

from ddp_course.model import PRESETS, build_gpt
from ddp_course.theory import (
    MODELS,
    Model,
    fewest_gpus,
    gathered_bytes,
    gpt_peak,
    model_states,
    plan,
)

GB = 1e9
PAPER = Model(7_500_000_000)


def test_known_models_have_the_parameters_that_are_known():
    assert MODELS["gpt2"].parameters == 124_439_808
    assert MODELS["gpt2-xl"].parameters == 1_557_611_200
    assert round(MODELS["gpt3-175b"].parameters / 1e9) == 175
    for name in PRESETS:
        model, gpt = MODELS[name], build_gpt(name)
        sizes = [sum(p.numel() for p in block.parameters()) for block in gpt.blocks]
        assert {model.block} == set(sizes)
        assert sum(model.units) == model.parameters == gpt.config.num_parameters


def test_every_number_of_a_row():
    model, gpus = MODELS["8m"], 3
    rows = plan(model, gpus, 1 * GB, precision="fp32", batch=4, bandwidth=2 * GB)
    kept = gpt_peak(model.config, 4)
    for stage, row in enumerate(rows[:4]):
        numel = model.units if stage == 3 else model.parameters
        states = model_states(numel, gpus, stage, "adamw", "fp32")
        for kind in ("parameters", "gradients", "optimizer states"):
            assert row.ledger[kind] == states[kind]
        assert row.ledger["activations"] == kept
        assert row.seconds == row.bytes_sent / (2 * GB)
        assert row.stage == stage and row.on_host == row.host_bytes == 0
    two_and_root = [model.root, model.block, model.block]
    whole = gathered_bytes(two_and_root, gpus, "fp32", gradients=two_and_root[:2])
    assert rows[3].ledger["communication buffers"] == whole
    offload = rows[4]
    states = model_states(model.units, gpus, 3, "adamw", "fp32")
    assert offload.ledger == {
        **dict.fromkeys(states, 0),
        "activations": kept,
        "communication buffers": whole,
    }
    assert offload.on_host == states.total
    assert offload.host_bytes == 2 * states["parameters"] + states["gradients"]
    assert offload.bytes_sent == rows[3].bytes_sent


def test_one_gpu_sends_nothing():
    rows = plan(PAPER, 1, 200 * GB)
    assert [row.bytes_sent for row in rows] == [0] * 5
    assert [row.times_ddp for row in rows] == [None] * 5
    assert len({row.ledger.total for row in rows[:4]}) == 1  # there is no redundancy


def test_what_is_not_known_is_not_counted_and_is_said():
    rows = plan(PAPER, 8, 80 * GB)
    assert rows[4].fits is None and rows[4].ledger.total == 0
    with_blocks = plan(Model(7_500_000_000, layers=32, hidden=4096), 8, 80 * GB)
    assert with_blocks[4].fits is None  # their activations are not known, either
    assert with_blocks[3].ledger["communication buffers"] > 0
    assert with_blocks[3].ledger["activations"] == 0
    full = Model(7_500_000_000, 32, 4096, 32, 2048)
    results = plan(full, 8, 80 * GB)
    assert results[0].ledger["activations"] > 0 and results[0].fits is False
    assert results[1].fits is results[4].fits is True


def test_recomputation_and_fused_attention_need_less():
    model, course = MODELS["gpt2-xl"], MODELS["1m"]
    scores = model.activations("mixed", fused_attention=False)
    fused = model.activations("mixed")
    selective = model.activations("mixed", recompute="selective", fused_attention=False)
    full = model.activations("mixed", recompute="full")
    assert full < selective < fused < scores  # fused: a sum per score row is kept
    assert model.activations("fp32") > 1.8 * fused
    exact = gpt_peak(course.config, 1)
    assert course.activations("fp32", recompute="selective") == exact
    assert course.activations("fp32", fused_attention=False) > exact


def test_as_few_gpus_as_do():
    for model, memory in ((PAPER, 16 * GB), (MODELS["gpt3-175b"], 80 * GB)):
        enough = fewest_gpus(model, memory, recompute="full")
        assert plan(model, enough, memory, recompute="full")[3].fits is not False
        assert plan(model, enough - 1, memory, recompute="full")[3].fits is False
    assert fewest_gpus(PAPER, 16 * GB) == 8  # 120 / 16 = 7.5
    assert fewest_gpus(PAPER, 120 * GB) == 1
    assert fewest_gpus(MODELS["gpt3-175b"], 16 * GB) is None  # activations alone


@pytest.mark.parametrize(
    ("name", "memory", "enough"),
    [("8m", 0.02, 33), ("1m", 0.01, 3), ("1m", 0.005, 8), ("1m", 0.0029, None)],
)
def test_a_small_model_is_padded_on_many_gpus_and_yet_fits_on_a_few(
    name, memory, enough
):
    model = MODELS[name]
    fits = [n for n in range(1, 300) if plan(model, n, memory * GB)[3].fits]
    assert fewest_gpus(model, memory * GB) == (fits[0] if fits else None) == enough
    assert not plan(model, 2**20, memory * GB)[3].fits  # by nothing but padding


test_bad_input_is_named = refused(
    (lambda: Model(10, layers=2), "layers is 2 and hidden 0; set both or neither"),
    (lambda: Model(10, layers=2, hidden=8), "more than the model's 10"),
    (lambda: plan("gpt2-xl", 8, GB), "model is 'gpt2-xl'; it must be a Model, such as"),
    (lambda: fewest_gpus("gpt2-xl", GB), "model is 'gpt2-xl'"),
    (lambda: plan(PAPER, 8, memory=24), "memory is 24 bytes; .* .24 GB are 24e9"),
    (lambda: fewest_gpus(PAPER, memory=24), "memory is 24 bytes"),
    (lambda: plan(PAPER, 1, GB, optimizer="lion"), "optimizer is 'lion'"),
    (lambda: plan(PAPER, 1, GB, precision="fp8"), "precision is 'fp8'"),
    (lambda: plan(PAPER, 1, GB, recompute="all"), "recompute is 'all'"),
)
