"""Mixtures: the formulas beside modules, messages and draws."""

from itertools import combinations

import pytest
import torch
from refusals import refused
from torch.utils.flop_counter import FlopCounterMode

from ddp_course.experts.balance import capacity, loads, within_capacity
from ddp_course.experts.gpt import build_mixture_gpt
from ddp_course.gpt_config import MixtureConfig
from ddp_course.planning.workload import Workload
from ddp_course.theory import (
    ComposedRank,
    balanced_rows,
    busiest_rank,
    dispatch_volume,
    dropped_choices,
    gpt_activations,
    gpt_peak,
    mixture_cost,
    tensor_parallel_parameters,
    tensor_parallel_volume,
)


@pytest.mark.parametrize("k", [1, 2, 8])
def test_parameters_and_products_are_those_of_the_model(k):
    config = MixtureConfig(n_layer=2, d_model=48, experts=8, experts_per_token=k)
    cost = mixture_cost(48, 4 * 48, 8, k)
    mixture = build_mixture_gpt(config).blocks[0].mlp
    assert cost.parameters == sum(p.numel() for p in mixture.parameters())
    one = mixture_cost(48, 4 * 48, 1, 1)
    assert cost.active == k * (one.parameters - 48) + 48 * 8
    with FlopCounterMode(display=False) as counter:
        mixture(torch.zeros(1, 10, 48))
    assert counter.get_total_flops() == 10 * cost.flops
    # The costs by which a pipeline is cut: multiply-adds of a row of T tokens.
    block = config.layer_costs[1] - (4 * 48 * 48 + 2 * 64 * 48) * 64
    assert block == 64 * cost.flops // 2


def test_mixtral_has_46_7_billion_parameters_and_uses_12_9():
    cost = mixture_cost(4096, 14336, 8, 2, matrices=3, bias=False)
    attention = 4096 * (4096 + 1024) * 2 + 2 * 4096  # and two norms
    rest = 32 * attention + 2 * 32000 * 4096 + 4096
    assert (32 * cost.parameters + rest) / 1e9 == pytest.approx(46.70, abs=0.01)
    assert (32 * cost.active + rest) / 1e9 == pytest.approx(12.88, abs=0.01)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_uniform_choices_send_the_balanced_rows(ranks):
    tokens, k, experts = 24, 2, 8
    pairs = list(combinations(range(experts), k)) * (tokens // 4)
    away = sum(e // (experts // ranks) != 0 for pair in pairs for e in pair)
    assert away / len(pairs) == balanced_rows(1, k, ranks)
    volume = dispatch_volume(10, 6, 5, experts=8, ranks=ranks, itemsize=2)
    assert volume.backward == 160
    assert volume.forward == 160 + 64 * (ranks - 1) // ranks
    assert volume.total == volume.forward + volume.backward


def test_loads_and_drops_are_counted():
    chosen = torch.randint(8, (64, 2), generator=torch.Generator().manual_seed(0))
    load = loads(chosen, 8)
    limit = capacity(64, 8, 2, 1.0)
    dropped = int((~within_capacity(chosen, 8, limit)).sum())
    assert dropped_choices(load.tolist(), limit) == dropped > 0
    assert busiest_rank([1, 1, 1, 1], 2) == 1
    assert busiest_rank([4, 0, 0, 0], 2) == 2
    assert busiest_rank([3, 1, 2, 2], 4) == 1.5


WORDS = "experts is 8, and this formula is for a GPT without experts"
test_formulas_of_dense_models_refuse_experts = refused(
    (lambda: ComposedRank(MixtureConfig()), WORDS),
    (lambda: tensor_parallel_parameters(MixtureConfig(), 2), WORDS),
    (lambda: tensor_parallel_volume(MixtureConfig(), 1, 2), WORDS),
    (lambda: gpt_activations(MixtureConfig(), 1), WORDS),
    (lambda: gpt_peak(MixtureConfig(), 1), WORDS),
    (lambda: Workload.of_gpt(MixtureConfig(), 8), WORDS),
)
