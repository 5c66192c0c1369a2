"""Pipelined decoding: the plan, one process's tokens, bytes, and planted mistakes."""

from fractions import Fraction
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from on_ranks import launched

from ddp_course.data import load_corpus
from ddp_course.generation import KeyValueCache, generate
from ddp_course.launch import spawn
from ddp_course.measure import ByteMeter
from ddp_course.mesh import Mesh, make_groups
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.pipeline import PipelinedDecoder, decoding, decoding_plan
from ddp_course.tensor_parallel import tensor_parallel

SMALL = GPTConfig(block_size=16, n_layer=3, n_head=6, d_model=48)
ROWS, NEW = load_corpus().batch(0, 5, 7)[0], 9
SIZES = {1: [5], 2: [1, 4], 3: [2, 1, 2]}


def model():
    gpt = build_gpt(SMALL, seed=3)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter *= 4 if parameter.ndim == 2 else 1
    return gpt


# ---- the plan ------------------------------------------------------------------------


def mistakes(plan, p, m, n) -> list[str]:
    """Return what is wrong with a plan for p ranks, m microbatches and n tokens."""
    begins = {
        (rank, work): tick
        for tick, row in enumerate(plan)
        for rank, work in enumerate(row)
        if work is not None
    }
    everything = set(product(range(p), product(range(n), range(m))))
    wrong = [] if set(begins) == everything else ["not everything, or more"]
    if sum(work is not None for row in plan for work in row) != len(everything):
        wrong.append("something twice")
    for rank, (token, k) in everything & begins.keys():
        tick = begins[rank, (token, k)]
        if rank and begins.get((rank - 1, (token, k))) != tick - 1:
            wrong.append(f"activations are not there at once: {rank, token, k}")
        if not rank and token and not begins.get((p - 1, (token - 1, k)), tick) < tick:
            wrong.append(f"the token before is not there: {token, k}")
    return wrong


CASES = list(product((1, 2, 3, 4), (1, 2, 4, 5), (1, 2, 6)))


@pytest.mark.parametrize(("p", "m", "n"), CASES)
def test_a_plan_is_complete_legal_and_as_idle_as_its_formula(p, m, n):
    plan = decoding_plan(p, m, n)
    assert mistakes(plan, p, m, n) == []
    idle = sum(work is None for row in plan for work in row)
    ticks = (n - 1) * max(m, p) + m + p - 1
    assert Fraction(idle, p * len(plan)) == 1 - Fraction(n * m, ticks)
    if m >= p:  # one bubble for the whole text, none for a token
        assert ticks - n * m == p - 1


def test_planted_plans_are_seen():
    early = decoding_plan(2, 2, 3)  # a period that is too short for four ranks
    stretched = [[row[0], row[1], None, None] for row in early]
    assert mistakes(stretched, 4, 2, 3)
    plan = decoding_plan(3, 3, 2)
    assert mistakes([row[::-1] for row in plan], 3, 3, 2)
    assert mistakes([*plan, plan[3]], 3, 3, 2)
    assert mistakes(plan[:-1], 3, 3, 2)
    plan[2], plan[3] = plan[3], plan[2]
    assert mistakes(plan, 3, 3, 2)


# ---- the ranks -----------------------------------------------------------------------


def decoder(m: int, p: int) -> PipelinedDecoder:
    return PipelinedDecoder(model(), SIZES[p], m)


def texts():
    p = dist.get_world_size()
    found = {}
    for m in (1, 2, 4, 5):
        with ByteMeter() as meter:
            text = decoder(m, p).generate(ROWS, NEW)
        found[m] = text, meter.total_sent
    return found


def last_logits():
    """Return the logits of the last rank for each item of its work, in order."""
    pipeline, seen = decoder(2, dist.get_world_size()), []
    if dist.get_rank() == dist.get_world_size() - 1:
        pipeline.layers[-1].register_forward_hook(lambda *its: seen.append(its[-1]))
    pipeline.generate(ROWS, NEW)
    return seen


def refusals():
    p = dist.get_world_size()
    for m in (0, 6):
        with pytest.raises(ValueError, match=f"num_microbatches is {m}.* 1 to 5"):
            decoder(m, p).generate(ROWS, NEW)
    with pytest.raises(ValueError, match="new_tokens is 11.* 1 to 10"):
        decoder(2, p).generate(ROWS, 11)
    for sizes in ([1] * p, [*SIZES[p], 1]):
        with pytest.raises(ValueError, match=f"for each rank, {p} in all, together 5 "):
            PipelinedDecoder(model(), sizes, 1)
    cut = tensor_parallel(model(), sequence_parallel=True)
    with pytest.raises(ValueError, match="tensor parallel with sequence_parallel=True"):
        PipelinedDecoder(cut, SIZES[p], 1)
    return True


ranks = launched((1, 2, 3), texts, last_logits, refusals)


def test_tokens_are_those_of_one_process(ranks):
    expected = generate(model(), ROWS, NEW)
    assert len(expected[:, 7:].unique()) > 10
    for found in ranks["texts"]:
        assert all(torch.equal(text, expected) for text, _ in found.values())


def test_logits_have_the_bits_of_each_microbatch_alone(ranks):
    """In whatever order the microbatches come, nothing of one is in another."""
    for k, part in enumerate(ROWS.tensor_split(2)):
        gpt, seen = model(), []
        gpt.head.register_forward_hook(lambda *its, seen=seen: seen.append(its[-1]))
        generate(gpt, part, NEW)
        found = ranks["last_logits"][-1][k::2]
        assert all(map(torch.equal, seen, found)) and len(seen) == len(found) == NEW


def test_activations_and_tokens_are_all_that_is_sent(ranks):
    n = len(ranks["texts"])
    for rank, found in enumerate(ranks["texts"]):
        activations = len(ROWS) * (7 + NEW - 1) * 48 * 4
        expected = activations if rank < n - 1 else len(ROWS) * NEW * 8
        for _, sent in found.values():
            assert sent == (expected if n > 1 else 0)


def test_what_cannot_be_is_refused(ranks):
    assert all(ranks["refusals"])


def one_cache_for_all(make):
    shared = []

    def cache(layers):
        shared[:] = shared or [make(layers)]
        return shared[0]

    return cache


def planted():
    found = []
    with patch.object(decoding, "KeyValueCache", one_cache_for_all(KeyValueCache)):
        pipeline = PipelinedDecoder(model(), SIZES[2], 2)
        try:
            found.append(pipeline.generate(ROWS[:4], 3))
        except Exception as error:
            found.append(error)
    return found


def test_one_cache_for_all_microbatches_is_seen():
    expected = generate(model(), ROWS[:4], 3)
    for (found,) in spawn(planted, world_size=2, output="none"):
        assert isinstance(found, Exception) or not torch.equal(found, expected)


def test_nccls_rules_allow_it():
    how = {"world_size": 3, "output": "none", "backend": "strict"}
    expected = generate(model(), ROWS, NEW)
    for text in spawn(lambda: decoder(4, 3).generate(ROWS, NEW), **how):
        assert torch.equal(text, expected)


def of_heads_and_stages():
    axes = make_groups(Mesh({"pp": 2, "tp": 2}))
    gpt = tensor_parallel(model(), axes.group("tp"))
    return PipelinedDecoder(gpt, SIZES[2], 3, axes.group("pp")).generate(ROWS, NEW)


def test_a_pipeline_of_divided_layers_finds_the_same_tokens():
    expected = generate(model(), ROWS, NEW)
    for text in spawn(of_heads_and_stages, world_size=4, output="none"):
        assert torch.equal(text, expected)
