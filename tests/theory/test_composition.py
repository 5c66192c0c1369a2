"""Compositions: the formulas beside a count of every element and of every message."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from refusals import refused

from ddp_course.model import GPTConfig, build_gpt
from ddp_course.theory import ComposedRank

SMALL = {"vocab_size": 16, "block_size": 8, "n_head": 4, "d_model": 8}
LAYERS = 5  # embedding, three blocks, head


def config(tied=False):
    return GPTConfig(n_layer=LAYERS - 2, tied=tied, **SMALL)


def stages_of(pp, per_rank=1):
    """Deal the layers out: rank -> its stages."""
    bounds = [k * LAYERS // (pp * per_rank) for k in range(pp * per_rank + 1)]
    stages = [range(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
    return [stages[rank::pp] for rank in range(pp)]


CUT = "embed.tokens|qkv|attn.proj.weight|mlp.up|mlp.down.weight|head.out"


def elements(model, tp, stages, coordinate):
    """Yield (parameter, element) of all that a rank of tp and pp has, one by one."""
    seen = set()
    for layer in (layer for stage in stages for layer in stage):
        part = [model.embed, *model.blocks, model.head][layer]
        name = ["embed", *(f"blocks.{k}" for k in range(LAYERS - 2)), "head"][layer]
        for path, parameter in part.named_parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            is_cut = re.search(CUT, f"{name}.{path}")
            for k in range(parameter.numel()):
                if not is_cut or k % tp == coordinate:
                    yield f"{name}.{path}", k


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (1, 2), (2, 3)])
def test_what_ranks_have_is_what_one_finds_by_going_through_all_elements(tp, pp, tied):
    model, shape, found = build_gpt(config(tied)), config(tied), Counter()
    for stages in stages_of(pp):
        for coordinate in range(tp):
            own = list(elements(model, tp, stages, coordinate))
            results = sum(ComposedRank(shape, stages, tp=tp).units())
            assert len(own) == len(set(own)) == results
            found.update(own)
    whole = {name for name, _ in found}
    assert sum(ComposedRank(shape).units()) == shape.num_parameters
    assert min(found.values()) == 1 and max(found.values()) == tp
    if not (tied and pp > 1):  # else both ends have the matrix
        assert whole == {name for name, _ in model.named_parameters()}
        assert len(found) == shape.num_parameters


def ring(n, nbytes):
    """Count an all-reduce's bytes step by step: n - 1 down, n - 1 up, a piece each."""
    return sum(Fraction(nbytes, n) for _ in range(2 * (n - 1)))


def half(n, nbytes):
    return ring(n, nbytes) / 2


def messages(shape, rows, microbatches, stages, dp, tp, replicas, zero):
    """Go through a step, message by message; return axis -> bytes of one rank."""
    sent, last = Counter(), LAYERS - 1
    hidden = Fraction(rows, microbatches) * shape.block_size * shape.d_model * 4
    for _ in range(microbatches):
        for stage in stages:
            for layer in stage:  # forward, then backward
                inside = {0: (1, 0), last: (0, 1)}.get(layer, (2, 2))
                for _ in range(sum(inside)):
                    sent["tp"] += ring(tp, hidden)
                if layer == last:  # the loss: the largest logit, sums and the target's
                    for numbers in (1, 2):
                        sent["tp"] += ring(tp, numbers * hidden / shape.d_model)
            sent["pp"] += hidden * (stage[-1] < last)  # forward, to the next
            sent["pp"] += hidden * (stage[0] > 0)  # its gradient, to the one before
    layers = [layer for stage in stages for layer in stage]
    if shape.tied and (0 in layers) != (last in layers):
        sent["pp"] += ring(2, shape.vocab_size * shape.d_model // tp * 4)
    units, shards = ComposedRank(shape, stages, tp=tp).units(), dp // replicas
    for numel in units if zero == 3 else [sum(units)]:
        padded = numel if zero == 0 else shards * -(-numel // shards)
        passes = {0: 2, 1: 2, 2: 2, 3: 3}[zero]
        for _ in range(passes):
            sent["dp"] += half(shards, 4 * padded)
        sent["replicas"] += ring(replicas, Fraction(4 * padded, shards))
    return sent


CASES = [  # dp, replicas, tp, pp, per_rank, zero, tied
    (2, 1, 2, 2, 1, 0, False),
    (2, 1, 2, 2, 2, 1, True),
    (3, 1, 1, 3, 1, 2, True),
    (2, 1, 2, 1, 1, 3, False),
    (4, 2, 1, 1, 1, 3, False),
    (8, 2, 1, 1, 1, 3, True),
    (6, 3, 2, 1, 1, 3, True),
    (1, 1, 4, 2, 2, 0, False),
]


def off(volume) -> list[tuple]:
    """Return in which cases `volume(...)` differs from the messages, and where."""
    wrong = []
    for dp, replicas, tp, pp, per_rank, zero, tied in CASES:
        for rank, stages in enumerate(stages_of(pp, per_rank)):
            sizes = {"dp": dp, "tp": tp, "replicas": replicas, "zero": zero}
            results = volume(config(tied), 6, stages, **sizes)
            found = messages(config(tied), 6, 3, stages, **sizes)
            wrong += [
                (dp, tp, pp, zero, rank, axis)
                for axis in ("tp", "pp", "dp", "replicas")
                if getattr(results, axis) != found[axis]
            ]
    return wrong


def volume_of(shape, rows, stages, **sizes):
    return ComposedRank(shape, stages, **sizes).volume(rows)


def test_what_goes_along_each_axis_is_what_its_messages_add_up_to():
    assert off(volume_of) == []


def whole_model_along_dp(shape, rows, stages, **sizes):
    whole = ComposedRank(shape, **sizes | {"tp": 1}).volume(rows)
    return replace(volume_of(shape, rows, stages, **sizes), dp=whole.dp)


def all_of_dp_shards(shape, rows, stages, **sizes):
    return ComposedRank(shape, stages, **sizes | {"replicas": 1}).volume(rows)


def every_rank_has_every_layer(shape, rows, stages, **sizes):
    return ComposedRank(shape, **sizes).volume(rows)


@pytest.mark.parametrize(
    "wrong", [whole_model_along_dp, all_of_dp_shards, every_rank_has_every_layer]
)
def test_axes_that_forget_one_another_are_rejected(wrong):
    assert off(wrong)


def of(**options):
    return lambda: ComposedRank(config(), **options)


test_what_cannot_be_is_refused = refused(
    (of(dp=4, replicas=3), "replicas is 3; it must divide dp, 4"),
    (of(tp=3), "tp_size is 3; it must divide the 4 heads"),
    (of(stages=[range(6)]), "each must have some of layers 0 to 4"),
    (of(stages=[]), "each must have some of layers"),
    (of(buffers=[5]), "buffers have 5 elements; they must"),
    (lambda: of(zero=4)().states(), "stage is 4"),
    (lambda: of(zero=4)().volume(2), "stage is 4; it can be 0"),
)
