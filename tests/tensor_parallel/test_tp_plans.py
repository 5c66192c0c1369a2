"""The layout of a model and the closed forms of tensor parallelism: no process."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import nn

from ddp_course import theory
from ddp_course.mechanisms.placements import Shard
from ddp_course.model import PRESETS, GPTConfig, build_gpt
from ddp_course.spec import AXES
from ddp_course.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ddp_course.tensor_parallel.checks import SHARED
from ddp_course.tensor_parallel.gpt import placement_of


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 12])
def test_every_number_is_on_one_rank_or_on_all(n, tied):
    config = GPTConfig(n_layer=2, tied=tied)
    own = common = 0
    for name, parameter in build_gpt(config).named_parameters():
        how, parts = placement_of(name), [parameter]
        if isinstance(how, Shard):
            parts = parameter.chunk(n, how.dim)
        else:
            common += parameter.numel()
        assert {part.shape for part in parts} == {parts[0].shape}
        own += parts[0].numel()
    assert own == theory.tensor_parallel_parameters(config, n)
    assert common == theory.replicated_parameters(config)


def test_a_part_of_qkv_is_whole_heads():
    gpt = build_gpt(GPTConfig(n_layer=1))
    rows, head = 3 * gpt.config.d_model, 3 * gpt.blocks[0].attn.d_head
    assert placement_of("blocks.0.attn.qkv.weight") == Shard(0)
    for part in torch.arange(rows).chunk(3):
        assert part[0] % head == 0 and len(part) == 4 * head  # 4 of 12 heads


@pytest.mark.parametrize(
    ("changed", "n", "message"),
    [
        ({"n_head": 6}, 4, "n_head is 6, which 4 ranks cannot share equally"),
        ({"n_head": 6}, 4, "this model can be cut for 1, 2, 3, 6 ranks"),
        ({"vocab_size": 65}, 2, "vocab_size is 65, which 2 ranks"),
        ({}, 5, "n_head is 12"),
    ],
)
def test_sizes_that_cannot_be_cut_are_named(changed, n, message):
    assert message in GPTConfig(n_layer=1, **changed).indivisible(SHARED, n)
    assert AXES["tp"].divides == SHARED  # the command line asks without PyTorch


# ---- bytes ---------------------------------------------------------------------------


def test_four_all_reduces_for_each_block():
    config = PRESETS["1m"]
    hidden = 2 * 64 * 144 * 4
    for n in (1, 2, 3, 4):
        results = theory.tensor_parallel_volume(config, 2, n)
        once = 2 * Fraction(n - 1, n)
        assert results.hidden == (4 * 4 + 2) * once * hidden
        assert results.loss == once * 3 * 2 * 64 * 4
        assert results.parameters == 0
        assert (results.all_reduces, results.pairs) == (20, 0)
        assert results.total == results.hidden + results.loss


def test_sequence_parallelism_sends_the_same_and_some_gradients():
    config = PRESETS["1m"]
    for n in (2, 4):
        plain = theory.tensor_parallel_volume(config, 2, n)
        cut = theory.tensor_parallel_volume(config, 2, n, sequence_parallel=True)
        assert plain.hidden == cut.hidden and plain.loss == cut.loss
        common = theory.replicated_parameters(config)
        assert cut.parameters == 2 * Fraction(n - 1, n) * 4 * common
        assert cut.pairs == 18
        assert (plain.all_reduces, cut.all_reduces) == (20, 4)


def test_what_cannot_be():
    with pytest.raises(ValueError, match="tp_size is 5; it must divide the 12 heads"):
        theory.tensor_parallel_parameters(PRESETS["1m"], 5)


def test_sizes_in_place_of_a_layer_are_refused():
    whole = "takes the full layer, with weight and bias"
    for full, layer, says in (
        (144, ColumnParallelLinear, f"full is 144; ColumnParallelLinear {whole}"),
        (nn.ReLU(), RowParallelLinear, rf"full is ReLU\(\); RowParallelLinear {whole}"),
        (96, VocabParallelEmbedding, "full is 96; it must be an nn.Embedding"),
    ):
        with pytest.raises(ValueError, match=says):
            layer(full, 576)
    with pytest.raises(ValueError, match="group is 2; it must be a process group or N"):
        ColumnParallelLinear(nn.Linear(4, 8), 2)


def test_column_then_row_sends_much_less_than_gathering():
    assert theory.mlp_volume(100, 2) == 4 * 50 * 4
    assert theory.mlp_volume(100, 2, naive=True) / theory.mlp_volume(100, 2) == 3.75
