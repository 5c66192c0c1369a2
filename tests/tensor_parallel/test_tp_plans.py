"""The layout of a model, and what cannot be cut: without a process."""

from __future__ import annotations

import pytest
from torch import nn

from ddp_course import theory
from ddp_course.mechanisms.placements import Shard
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.spec import AXES
from ddp_course.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ddp_course.tensor_parallel.checks import SHARED
from ddp_course.tensor_parallel.gpt import placement_of


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("n", [1, 3])
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
