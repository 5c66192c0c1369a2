"""Planning: FLOPs, links, predicted steps, the search, and published training runs."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import product

import pytest
from refusals import refused

from ddp_course.planning import step_time
from ddp_course.planning.accelerators import ACCELERATORS, Cluster
from ddp_course.planning.anchors import ANCHORS
from ddp_course.planning.search import candidates, divisors, search, why_impossible
from ddp_course.planning.step_time import Candidate, Software, exposed_sending, predict
from ddp_course.planning.workload import Workload
from ddp_course.theory import model_states, pipeline_bubble, step_volume

GPT = Workload(1_300_000_000, 24, 2048, 16, 2048, 50_304, 64, tied=True)
H100 = ACCELERATORS["h100"]
EIGHT = Cluster(H100, 8)


# ---- FLOPs ---------------------------------------------------------------------------


def test_flops_of_a_token_are_6n_and_attention():
    block = (1_300_000_000 - 50_304 * 2048) / 24
    multiplying = 24 * block + 50_304 * 2048
    assert GPT.flops_per_token == 6 * multiplying + 12 * 24 * 2048 * 2048
    untied = replace(GPT, tied=False)  # a lookup table multiplies nothing
    assert untied.flops_per_token == GPT.flops_per_token - 6 * 50_304 * 2048


def test_a_long_sequence_costs_more_than_its_parameters():
    """Llama 3 405B: attention adds 8 % at 8k tokens, 134 % at 131k."""
    llama = Workload(405_850_000_000, 126, 16_384, 128, 8192, 128_256, 16, kv_heads=8)
    long = replace(llama, sequence=131_072)
    without = 6 * (llama.parameters - 128_256 * 16_384)
    assert round(llama.flops_per_token / without - 1, 3) == 0.084
    assert round(long.flops_per_token / without - 1, 2) == 1.34


@pytest.mark.parametrize("billions", [0.1, 1, 7, 70, 405, 1000])
def test_the_usual_shape_has_about_the_parameters_that_were_asked_for(billions):
    w = Workload.of_size(int(billions * 1e9), 4096, 50_257, 64)
    counted = 12 * w.layers * w.hidden**2 + w.embeddings
    assert abs(counted / w.parameters - 1) < 0.2
    assert w.hidden % w.heads == 0 and w.heads % 8 in range(8)


test_what_is_no_model_is_refused = refused(
    (lambda: replace(GPT, heads=7), "heads is 7; it must divide hidden, .* 2048"),
    (lambda: replace(GPT, parameters=1000), "of 50,304 words in 2,048 channels"),
)


# ---- links ---------------------------------------------------------------------------


def test_a_group_is_as_fast_as_the_slowest_link_on_its_ring():
    cluster = Cluster(H100, 64, node=8, network=50e9, reached=1.0)
    assert cluster.bandwidth(8) == 450e9  # inside a node
    assert cluster.bandwidth(8, stride=8) == 50e9  # one rank in each node
    assert cluster.bandwidth(64) == 400e9  # eight rings, by eight network cards
    assert cluster.bandwidth(16, stride=4) == 100e9
    fast = replace(cluster, network=200e9)
    assert fast.bandwidth(64) == 450e9, "what leaves a node passes its links, too"


# ---- a step --------------------------------------------------------------------------


def test_one_gpu_computes_and_steps_and_sends_nothing():
    one = predict(GPT, Cluster(H100, 1), Candidate(microbatch=4))
    assert {k for k, v in one.parts.items() if v} == {"compute", "optimizer"}
    assert not any(one.sent.values())
    bound = H100.matmul * step_time.SUSTAINED
    assert 0.5 * bound < one.mfu(GPT, Cluster(H100, 1)) < 1.1 * bound


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_memory_and_bytes_are_those_of_the_formulas(zero):
    software = Software(precision="mixed")
    layout = Candidate(dp=8, zero=zero, microbatch=8)
    step = predict(GPT, EIGHT, layout, software)
    states = model_states(GPT.parameters, 8, zero)
    for kind in ("parameters", "gradients", "optimizer states"):
        assert step.ledger[kind] == pytest.approx(states[kind], rel=1e-6)
    sent = step_volume(GPT.parameters, 8, zero).total
    assert step.sent["dp"] == pytest.approx(float(sent), rel=1e-6)


def test_a_bubble_is_that_of_the_formula():
    layout = Candidate(pp=8, microbatch=1)
    step = predict(replace(GPT, vocab=8), EIGHT, layout)
    share = step.parts["bubble"] / (step.parts["bubble"] + step.parts["compute"])
    assert share == pytest.approx(float(pipeline_bubble("1f1b", 8, 64)), rel=1e-6)
    half = predict(replace(GPT, vocab=8), EIGHT, layout._replace(stages=2))
    assert half.parts["bubble"] == pytest.approx(step.parts["bubble"] / 2)


@pytest.mark.parametrize(("sending", "computing"), [(1, 10), (10, 10), (30, 10)])
def test_sending_goes_on_behind_computing_as_a_queue_of_buckets_does(
    sending, computing
):
    layers, sent = 5, 0.0
    for layer in range(1, layers + 1):
        computed = layer * computing / layers
        sent = max(sent, computed) + sending / layers
    exposed = exposed_sending(sending, computing, layers)
    assert exposed == pytest.approx(sent - computing)


def test_what_slows_a_step_down():
    def seconds(layout=None, cluster=EIGHT, software=Software()):  # noqa: B008
        return predict(GPT, cluster, layout or Candidate(dp=8), software).seconds

    slow = Cluster(H100, 8, node=1, network=1e9)
    assert seconds(Candidate(dp=8, recompute="full")) > 1.2 * seconds()
    assert seconds(cluster=slow) > seconds()
    assert seconds(cluster=slow, software=Software(overlap=False)) > seconds(
        cluster=slow
    )
    assert seconds(Candidate(tp=8), slow) > 5 * seconds(Candidate(tp=8))
    assert seconds(software=Software(fused_attention=False)) > seconds()


def test_recomputing_keeps_less_and_no_mfu_counts_it():
    kept, again = (
        predict(GPT, EIGHT, Candidate(dp=8, microbatch=8, recompute=how))
        for how in ("none", "full")
    )
    assert again.ledger["activations"] < 0.3 * kept.ledger["activations"]
    assert again.mfu(GPT, EIGHT) < 0.85 * kept.mfu(GPT, EIGHT)


# ---- the search ----------------------------------------------------------------------


def test_every_layout_is_tried():
    found = set(candidates(GPT, EIGHT, Software()))
    meshes = {c[:4] for c in found}
    axes = [
        m for m in product((1, 2, 4, 8), repeat=4) if m[0] * m[1] * m[2] * m[3] == 8
    ]
    assert meshes == set(axes)
    assert all(why_impossible(c, GPT, EIGHT) is None for c in found)
    assert {c.zero for c in found if c.dp * c.cp == 1} == {0}


def test_the_fastest_that_fits_comes_first():
    found = search(GPT, EIGHT)
    seconds = [each.seconds for each in found.best]
    assert seconds == sorted(seconds)
    assert all(each.ledger.total <= found.limit for each in found.best)
    small = Cluster(replace(H100, memory=10e9), 8)
    less = search(GPT, small)
    assert less.best[0].seconds >= found.best[0].seconds
    assert less.too_large and all(p.ledger.total > less.limit for p in less.too_large)
    assert not search(GPT, Cluster(replace(H100, memory=1e9), 8)).best


def test_slow_links_between_nodes_keep_tensor_parallelism_inside():
    big = Workload.of_size(30_000_000_000, 2048, 50_257, 256)
    cluster = Cluster(H100, 64, node=4, network=5e9)
    assert search(big, cluster).best[0].candidate.tp <= 4


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Candidate(dp=4), "dp 4 takes 4 GPUs of 8"),
        (Candidate(dp=8, microbatch=16), "dp 8 x 16 rows must divide 64 rows"),
        (Candidate(pp=8, stages=4), "pp 8 x 4 stages are more than 24 layers"),
        (Candidate(dp=2, pp=4, zero=3), "ZeRO-3 gathers every layer"),
    ],
)
def test_a_layout_that_cannot_be(layout, says):
    assert says in why_impossible(layout, GPT, EIGHT)


test_no_layout_at_all_is_refused = refused(
    (lambda: search(GPT, Cluster(H100, 29)), "no layout of 29 GPUs divides 64 rows"),
    (
        lambda: search(GPT, EIGHT, recompute="all"),
        "recompute is 'all'; it can be 'none",
    ),
    (
        lambda: search(GPT, EIGHT, recompute="selective"),
        "'selective'; fused attention keeps no scores to recompute",
    ),
)


def test_a_gpu_in_place_of_a_cluster_is_refused():
    with pytest.raises(ValueError, match="of type Accelerator; it must be a Cluster"):
        search(GPT, ACCELERATORS["h100"])


def test_the_name_of_a_gpu_in_place_of_its_data_sheet_is_refused():
    must = r"gpu is 'h100'; it must be an Accelerator, such as ACCELERATORS\[\"h100\"\]"
    with pytest.raises(ValueError, match=must):
        Cluster("h100", 8)


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(49) == [1, 7, 49]


# ---- published training runs ---------------------------------------------------------


def test_half_of_the_published_trainings_are_within_a_quarter():
    others = [abs(anchor.error) for anchor in ANCHORS if not anchor.fitted]
    assert len(others) >= 10
    assert statistics.median(others) <= 0.25
    fitted = [anchor.error for anchor in ANCHORS if anchor.fitted]
    assert abs(statistics.median(fitted)) < 0.01, "the one number that is fitted"


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        (step_time, "SUSTAINED", 1.0),  # as on the data sheet
        (step_time, "SCORES", 0),  # attention's scores cost nothing
        (step_time, "WHOLE", 100),
    ],
)
def test_a_wrong_constant_is_seen(monkeypatch, module, name, wrong):
    monkeypatch.setattr(module, name, wrong)
    step_time.layer_seconds.cache_clear()
    try:
        fitted = [anchor.error for anchor in ANCHORS if anchor.fitted]
        assert abs(statistics.median(fitted)) > 0.01
    finally:
        step_time.layer_seconds.cache_clear()


def test_layouts_of_anchors_use_all_their_accelerators_and_rows():
    for anchor in ANCHORS:
        c, w = anchor.candidate, anchor.workload
        assert w.rows % (c.dp * c.microbatch) == 0, anchor.name
        assert w.heads % c.tp == 0, anchor.name


# ---- data sheets ---------------------------------------------------------------------


def test_data_sheets_are_dense_and_in_one_direction():
    assert ACCELERATORS["h100"].flops == 989e12  # NVIDIA's headline, sparse: 1979
    assert ACCELERATORS["h100"].link == 450e9  # both directions: 900
    assert round(ACCELERATORS["h100"].ridge) == 295
    for name, gpu in ACCELERATORS.items():
        assert 0.5 < gpu.matmul < 0.9 and gpu.ridge > 100, name
