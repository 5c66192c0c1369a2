"""The formulas of memory: against the papers' tables, and what PyTorch keeps."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from torch import Tensor, nn

from ddp_course.measure import Ledger
from ddp_course.model import PRESETS, GPTConfig, build_gpt
from ddp_course.theory import (
    Precision,
    bytes_sent,
    gathered_bytes,
    gpt_activations,
    gpt_peak,
    layer_activations,
    model_activations,
    model_states,
    shard_numel,
    step_volume,
)

GB = 1e9

# Rajbhandari et al. 2020, table 1: GB per device, for 7.5 B, 128 B and 1 T parameters,
# with P_os, P_os+g and P_os+g+p (our stages 1 to 3).
ZERO_TABLE = {
    1: ((120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)),
    4: ((52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)),
    16: ((35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)),
    64: ((31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)),
    256: ((30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)),
    1024: ((30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)),
}
SIZES = (7_500_000_000, 128_000_000_000, 10**12)


def as_printed(value: float, printed: float) -> bool:
    """Tell whether the paper may have rounded `value`, up or down, to `printed`."""
    digits = len(str(printed).split(".")[1]) if isinstance(printed, float) else 0
    return abs(value - printed) < 10**-digits


def off_the_table(states) -> list[tuple]:
    """Return where `states(numel, world_size, stage)` is not what the paper printed."""
    return [
        (world, numel, stage)
        for world, row in ZERO_TABLE.items()
        for numel, printed in zip(SIZES, row, strict=True)
        for stage, gigabytes in enumerate(printed, start=1)
        if not as_printed(states(numel, world, stage).total / GB, gigabytes)
    ]


def test_the_zero_papers_table_1():
    assert off_the_table(model_states) == []


def nothing_sharded(numel, world, stage):
    return model_states(numel, world, 0)


def one_stage_off(numel, world, stage):
    return model_states(numel, world, min(stage + 1, 3))


def no_master_copy(numel, world, stage):
    return model_states(numel, world, stage, precision="bf16-pure")


def binary(numel, world, stage):
    return Ledger({"other": int(model_states(numel, world, stage).total / 1.0737)})


def test_wrong_formulas_are_off_the_table():
    for wrong in (nothing_sharded, one_stage_off, no_master_copy, binary):
        assert len(off_the_table(wrong)) > 10, wrong


@pytest.mark.parametrize(
    ("precision", "optimizer", "per_parameter"),
    [
        ("fp32", "adamw", (4, 4, 8)),
        ("bf16", "adam", (4, 4, 8)),
        ("fp16", "adam", (4, 4, 8)),
        ("mixed", "adamw", (2, 2, 12)),
        ("mixed-fp32-gradients", "adamw", (2, 4, 12)),
        ("fsdp-bf16", "adamw", (4, 4, 8)),
        ("mixed-both-gradients", "adamw", (2, 2, 16)),
        ("bf16-pure", "adamw", (2, 2, 4)),
        ("fp32", "sgd", (4, 4, 0)),
        ("mixed", "sgd", (2, 2, 4)),
        ("fp32", "sgd-momentum", (4, 4, 4)),
        ("fp32", 3, (4, 4, 12)),
        (Precision(2, 2, 0, 1, 2, 2, 2), 2, (2, 2, 2)),
    ],
)
def test_bytes_per_parameter(precision, optimizer, per_parameter):
    ledger = model_states(1000, 4, 0, optimizer, precision)
    assert tuple(n / 1000 for n in ledger.values())[:3] == per_parameter
    assert model_states(1000, 4, 3, optimizer, precision).total == ledger.total / 4


# ---- padding -----------------------------------------------------------------------


@given(st.lists(st.integers(1, 999), min_size=1, max_size=5), st.integers(1, 9))
def test_shards_are_what_chunks_of_a_padded_buffer_are(sizes, world):
    shard = shard_numel(sizes, world)
    assert 0 <= world * shard - sum(sizes) < world * len(sizes)
    # As DTensor's Shard(0) and torch.chunk cut: the first has ceil(n / N).
    assert shard == sum(torch.zeros(n).chunk(world)[0].numel() for n in sizes)


def test_padding_is_in_what_is_sharded_and_nowhere_else():
    whole = model_states([10, 7], 4, 0, "adamw", "fp32")
    assert whole == {**dict.fromkeys(whole, 0), "parameters": 68, "gradients": 68,
                     "optimizer states": 136}  # fmt: skip
    for stage, (p, g) in enumerate(((17, 17), (17, 5), (5, 5)), start=1):
        ledger = model_states([10, 7], 4, stage, "adamw", "fp32")
        assert ledger["parameters"] == 4 * p and ledger["gradients"] == 4 * g
        assert ledger["optimizer states"] == 8 * 5
    assert model_states(17, 4, 3).total == 16 * 5


def test_gathered_blocks_with_their_padding():
    assert gathered_bytes([10, 7], 4, "fp32") == 4 * (12 + 8)
    assert gathered_bytes([10], 4, "fsdp-bf16", gradients=[10]) == 2 * 12 + 2 * 12
    assert gathered_bytes([10], 4, "mixed-fp32-gradients", gradients=[10]) == 72
    assert gathered_bytes([], 4) == 0


# ---- bytes sent --------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 4, 64])
def test_a_step_sends_twice_twice_twice_and_three_times(world):
    numel = 12 * 64  # which these divide
    once = Fraction(world - 1, world) * 4 * numel
    for stage, times in enumerate((2, 2, 2, 3)):
        assert step_volume(numel, world, stage, "fp32").total == times * once
    kept = step_volume(numel, world, 3, "fp32", reshard_after_forward=False)
    assert kept.total == 2 * once
    ring = bytes_sent("all_reduce_ring", world)[0]
    assert step_volume(numel, world, 0, "fp32").total == 4 * numel * ring


def test_what_travels_has_its_own_type():
    parts = step_volume(100, 2, 3, "fsdp-bf16")
    assert (parts.reduced, parts.gathered) == (100, 200)
    parts = step_volume(100, 2, 1, "mixed-fp32-gradients")
    assert (parts.reduced, parts.gathered) == (200, 100)
    assert step_volume([3, 3], 2, 3, "fp32").total == 3 * 4 * 2 * 2  # padding travels
    assert step_volume([3, 3], 2, 0, "fp32").total == 2 * 4 * 3  # here none does


# ---- activations -------------------------------------------------------------------


def test_table_2_of_korthikanti():
    """Every row: no parallelism, TP, TP + SP, with selective recomputation, full."""
    s, b, h, a, t = 2048, 1, 12288, 96, 8
    sbh, scores = s * b * h, 5 * Fraction(a * s, h)

    def kept(**options) -> Fraction:
        return Fraction(sum(layer_activations(b, s, h, a, **options).values()), sbh)

    sequence = {"tp": t, "sequence_parallel": True}
    parts = layer_activations(b, s, h, a)
    assert parts["attention"] == 11 * sbh
    assert parts["mlp"] == 19 * sbh and parts["norms"] == 4 * sbh
    assert kept() == 34 + scores and scores == 80  # most of it
    assert kept(tp=t) == 10 + Fraction(24, t) + scores / t
    assert kept(**sequence) == 34 / Fraction(t) + scores / t
    assert kept(tp=t, recompute="selective") == 10 + Fraction(24, t)
    assert kept(**sequence, recompute="selective") == Fraction(34, t)
    assert kept(recompute="full") == 2

    fused = layer_activations(1, 2048, 12288, 96, fused_attention=True)["scores"]
    assert fused == 4 * 96 * 2048


def test_a_whole_model():
    sbh, v = 1024 * 768, 50257
    layer = sum(layer_activations(1, 1024, 768, 12).values())
    assert model_activations(12, 1, 1024, 768, 12) == 12 * layer
    beside = 5 * sbh + 4 * 1024 * v
    assert model_activations(12, 1, 1024, 768, 12, v) == 12 * layer + beside
    full = model_activations(12, 1, 1024, 768, 12, v, recompute="full")
    assert full == 12 * 2 * sbh + max(beside, layer - 2 * sbh)
    selective = model_activations(12, 1, 1024, 768, 12, recompute="selective")
    scores = layer_activations(1, 1024, 768, 12)["scores"]
    assert selective == 12 * (layer - scores) + scores


# ---- the course's GPT, to the byte -------------------------------------------------


def kept_for_backward(model: nn.Module, run) -> int:
    """Return the bytes of all storages that a forward keeps, parameters left out."""
    own = {p.untyped_storage() for p in model.parameters()}
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage not in own:
            kept[storage] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(kept.values())


SHAPES = [  # V, block size, L, H, C; B, T
    (GPTConfig(11, 11, 2, 4, 16), 2, 8),
    (GPTConfig(7, 4, 2, 3, 12), 1, 1),
    (GPTConfig(50, 36, 3, 2, 24), 5, 33),
    (GPTConfig(4, 19, 1, 16, 16), 2, 16),
    (PRESETS["1m"], 1, 32),
]


@pytest.mark.parametrize(("config", "b", "t"), SHAPES)
def test_the_gpt_keeps_what_is_said(config, b, t):
    model, block = build_gpt(config), build_gpt(config).blocks[0]
    idx = torch.zeros(b, t, dtype=torch.int64)
    targets = torch.zeros(b, t, dtype=torch.int64)
    parts = gpt_activations(config, b, t)
    whole = kept_for_backward(model, lambda: model(idx, targets))
    assert whole == sum(parts.values()) == gpt_peak(config, b, t)
    assert kept_for_backward(model, lambda: model(idx)) == whole - parts["loss"]
    x = torch.randn(b, t, config.d_model, requires_grad=True)
    of_one = kept_for_backward(block, lambda: block(x))
    assert config.n_layer * of_one == parts["blocks"]
    # Korthikanti's layer, in float32 and without dropout, but for the norms' 2 x 8
    # bytes per token that the paper leaves out.
    paper = layer_activations(
        b, t, config.d_model, config.n_head, itemsize=4, dropout=False,
        fused_attention=True,
    )  # fmt: skip
    assert of_one == sum(paper.values()) + 16 * b * t
    less = sum(gpt_activations(config, b, t, "full").values())
    assert whole - less == config.n_layer * (of_one - 4 * b * t * config.d_model)


# ---- bad input ---------------------------------------------------------------------


test_bad_input_is_named = refused(
    (lambda: model_states([], 1), "numel is empty"),
    (lambda: model_states(1, 1, 4), "stage is 4; it can be 0 .DDP., 1, 2 or 3"),
    (lambda: model_states(1, 1, True), "stage is True"),
    (lambda: model_states(1, 1, 0, "lion"), "optimizer is 'lion'; it can be 'adamw'"),
    (lambda: model_states(1, 1, 0, -1), "optimizer is -1"),
    (lambda: model_states(1, 1, precision="fp8"), "precision is 'fp8'; it can be"),
    (lambda: step_volume(1, 1, -1), "stage is -1"),
    (
        lambda: layer_activations(1, 1, 10, 3),
        "^heads is 3; .* hidden, which is 10",
    ),
    (
        lambda: layer_activations(1, 1, 12, 3, tp=2),
        "^tp is 2; .* heads, which is 3",
    ),
    (lambda: layer_activations(1, 1, 1, 1, recompute="half"), "recompute is 'half'"),
    (
        lambda: gpt_activations(PRESETS["1m"], 1, 65),
        "tokens is 65; it must be at most block_size, 64",
    ),
    (lambda: gpt_peak(PRESETS["1m"], 1, 1, "selective"), "recompute is 'selective'"),
)
