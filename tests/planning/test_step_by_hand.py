"""Every part of a predicted step, beside what one writes down by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_course.planning.accelerators import ACCELERATORS, Cluster
from ddp_course.planning.search import why_impossible
from ddp_course.planning.step_time import (
    LOGITS,
    MEMORY_REACHED,
    SUSTAINED,
    Candidate,
    Software,
    exposed_messages,
    head_seconds,
    layer_seconds,
    predict,
)
from ddp_course.planning.workload import Workload
from ddp_course.theory import (
    attention_volume,
    gathered_bytes,
    layer_activations,
    step_volume,
)

H100 = ACCELERATORS["h100"]
GPT = Workload(1_300_000_000, 24, 2048, 16, 2048, 50_304, 64, tied=True)
SOFTWARE = Software(precision="mixed")
SLOW = Cluster(H100, 8, node=2, network=1e9, latency=1e-3, reached=1.0)
PRODUCTS = H100.flops * H100.matmul * SUSTAINED
MEMORY = H100.bandwidth * MEMORY_REACHED
HIDDEN = 2048 * 2048 * 2  # bytes of a row's activations in 16 bits


def step(layout: Candidate, cluster: Cluster = SLOW, software: Software = SOFTWARE):
    return predict(GPT, cluster, layout, software)


def layer(layout: Candidate) -> tuple[float, float, float]:
    return layer_seconds(GPT, SLOW, layout, SOFTWARE)


def test_attention_is_halved_by_the_mask_and_costs_two_and_a_half_times_backward():
    forward = 4 * 2048 * 2048 * 2048 / 2 / PRODUCTS
    assert layer(Candidate())[2] == pytest.approx(3.5 * forward)
    plain = replace(SOFTWARE, fused_attention=False)
    *_, scores = layer_seconds(GPT, SLOW, Candidate(), plain)
    traffic = 13 * 16 * 2048 * 2048 / MEMORY  # bytes of the scores, forward
    assert scores == pytest.approx(3 * (2 * forward + traffic))


def test_recomputing_adds_a_forward():
    forward, backward, _ = layer(Candidate())
    again = layer(Candidate(recompute="full"))
    assert again[:2] == pytest.approx((forward, backward + forward))


def test_the_head_multiplies_and_reads_logits():
    logits = 2048 * 50_304
    by_hand = 6 * 2048 * logits / PRODUCTS + LOGITS * logits / MEMORY
    assert head_seconds(GPT, SLOW, Candidate()) == pytest.approx(by_hand)
    assert LOGITS >= 4 * 4, "float32 is written and read forward and backward"


@pytest.mark.parametrize(("recompute", "calls"), [("none", 4), ("full", 6)])
def test_tensor_parallelism_waits_for_its_all_reduces(recompute, calls):
    found = step(Candidate(dp=4, tp=2, recompute=recompute))
    number = (24 * calls + 2) * 16  # layers, embedding and head; microbatches
    once = 2 * 1e-3 + HIDDEN / H100.link  # 2 (n - 1) / n of S, two messages
    assert found.parts["tp"] == pytest.approx(number * once)
    assert found.sent["tp"] == pytest.approx(number * HIDDEN)


def test_a_pipeline_fills_drains_and_waits_for_the_slowest():
    layout = Candidate(pp=4, tp=2)
    found = step(layout)
    forward, backward, _ = layer(Candidate(tp=2))
    work = 6 * (forward + backward) + head_seconds(GPT, SLOW, layout)
    tp = (6 * 4 + 1) * (2e-3 + HIDDEN / H100.link)
    assert found.parts["compute"] == pytest.approx(64 * work)
    assert found.parts["bubble"] == pytest.approx(3 * (work + tp))
    message = 2e-3 + HIDDEN / 2 / 1e9  # half of it on each rank of tp; another node
    waited = 2 * 3 + 2 * 2 + (64 - 4) * 2 * 3 / 4  # filling, draining, and between
    assert found.parts["pp"] == pytest.approx(waited * message)
    assert found.sent["pp"] == pytest.approx(2 * 64 * HIDDEN / 2)
    waits = step(layout, software=replace(SOFTWARE, overlap=False))
    assert waits.parts["pp"] == pytest.approx((waited + 2 * 64) * message)


def seconds_added(hops: list[float], m: int) -> float:
    """Return how much longer 1F1B takes with these messages than without."""
    p, forward, backward = len(hops) + 1, 1, 2
    ready = [0.0] * p
    ended: dict[tuple[str, int, int], float] = {}
    orders = []
    for rank in range(p):
        warm = min(m, p - 1 - rank)
        names = ["F"] * warm + ["F", "B"] * (m - warm) + ["B"] * warm
        counts = {"F": iter(range(m)), "B": iter(range(m))}
        orders.append([(name, next(counts[name])) for name in names])
    while any(orders):
        for rank, order in enumerate(orders):
            while order:
                name, k = order[0]
                source = rank - 1 if name == "F" else rank + 1
                needed = ("F", rank, k) if name == "B" and source == p else None
                at = ended.get(needed or (name, source, k), 0.0 if source < 0 else None)
                if at is None:
                    break
                at += 0 if needed or source < 0 else hops[min(rank, source)]
                seconds = forward if name == "F" else backward
                ready[rank] = max(ready[rank], at) + seconds
                ended[name, rank, k] = ready[rank]
                order.pop(0)
    return max(ready) - (m + p - 1) * (forward + backward)


@pytest.mark.parametrize("m", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize(
    "hops",
    [[0.1], [0.1] * 3, [0.05] * 7, [0.1, 0.4, 0.1], [0.1] * 3 + [0.8] + [0.1] * 3],
)
def test_messages_of_1f1b_are_waited_for_as_in_a_schedule_that_runs(hops, m):
    wanted = seconds_added(hops, m)
    equal = len(set(hops)) == 1 and (m <= len(hops) + 1 or m % (len(hops) + 1) == 0)
    about = 1e-9 if equal else 0.2
    assert exposed_messages(hops, m) == pytest.approx(wanted, rel=about)
    if m > 2 * len(hops):  # twice the filling, as one often reads, is far too little
        assert 2 * sum(hops) < 0.8 * wanted


def test_dp_or_pp_crosses_the_nodes():
    inside, across = (
        step(
            Candidate(dp=2, pp=2, tp=2),
            replace(SLOW, node=4),
            replace(SOFTWARE, data_outermost=outer),
        )
        for outer in (False, True)
    )
    assert across.parts["pp"] < inside.parts["pp"] / 4
    assert across.parts["dp"] > 10 * inside.parts["dp"] > 0


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_keys_and_values_are_hidden_by_attention_alone(recompute):
    layout = Candidate(dp=2, cp=4, recompute=recompute)
    volume = attention_volume(
        "ring", 4, batch=1, length=2048, heads=16, d_head=128, itemsize=2
    )
    sent = float(volume.total + (recompute == "full") * volume.forward)
    found = step(layout)
    assert found.sent["cp"] == pytest.approx(24 * 32 * sent)
    messages = 12 + 3 * (recompute == "full")
    around = messages * 2e-3 + sent / 2e9  # two ranks in a node: two network cards
    attention = layer(Candidate(cp=4, recompute=recompute))[2]
    assert found.parts["cp"] == pytest.approx(24 * 32 * (around - attention))
    hidden = step(layout, Cluster(H100, 8, latency=0, reached=100.0))
    assert hidden.parts["cp"] == 0


def test_zero_sends_for_every_microbatch_what_it_does_not_keep():
    numel = GPT.parameters
    for zero, times in ((0, 1), (1, 1), (2, 8), (3, 8)):
        volume = step_volume(numel, 8, zero)
        wanted = times * volume.reduced + volume.gathered * (8 if zero == 3 else 1)
        found = step(Candidate(dp=8, zero=zero))  # 8 microbatches
        assert found.sent["dp"] == pytest.approx(float(wanted), rel=1e-6)
    often, once = (step(Candidate(dp=8, zero=3, microbatch=b)) for b in (1, 8))
    assert often.parts["dp"] > 4 * once.parts["dp"]


def test_ranks_of_cp_average_and_shard_as_those_of_dp():
    found = step(Candidate(dp=4, cp=2, zero=1))
    assert found.sent["dp"] == step(Candidate(dp=8, zero=1)).sent["dp"]
    assert found.ledger["optimizer states"] == pytest.approx(
        12 * GPT.parameters / 8, rel=1e-6
    )


def test_the_optimizer_reads_and_writes_its_shard():
    whole = step(Candidate(dp=8)).parts["optimizer"]
    nbytes = 2 * (2 + 4 + 8) + 2  # weight, copy and two states; a gradient is read
    assert whole == pytest.approx(nbytes * GPT.parameters / MEMORY)
    assert step(Candidate(dp=8, zero=1)).parts["optimizer"] == pytest.approx(whole / 8)


# ---- memory --------------------------------------------------------------------------


def kept(**how) -> int:
    options = {"fused_attention": True, "sequence_parallel": True, "dropout": False}
    return sum(layer_activations(1, 2048, 2048, 16, **options | how).values())


def test_a_stage_keeps_its_layers_and_the_larger_end():
    untied = replace(GPT, tied=False)
    found = predict(untied, SLOW, Candidate(pp=8), SOFTWARE)
    numel = 3 * untied.block + 50_304 * 2048  # an end has one of both matrices
    assert found.ledger["parameters"] == pytest.approx(2 * numel, rel=1e-6)
    first = 8 * 3 * kept()  # as many microbatches as stages
    last = 3 * kept() + 4 * 2048 * 50_304
    assert found.ledger["activations"] == max(first, last)
    few = predict(replace(GPT, rows=1), SLOW, Candidate(pp=8), SOFTWARE)
    assert few.ledger["activations"] == last, "logits stand on the last stage"


def test_a_recomputed_layer_is_kept_while_it_computes_backward():
    found = step(Candidate(dp=8, recompute="full"))
    inputs, again = 24 * kept(recompute="full"), kept() - kept(recompute="full")
    logits = 4 * 2048 * 50_304
    assert found.ledger["activations"] == inputs + max(again, logits)


def test_zero_3_gathers_two_blocks_and_the_root():
    block, root = int(GPT.block), 50_304 * 2048
    wanted = gathered_bytes([block, block, root], 8, "mixed", gradients=[block, root])
    found = step(Candidate(dp=8, zero=3)).ledger
    assert found["communication buffers"] == wanted
    assert step(Candidate(dp=8, zero=2)).ledger["communication buffers"] == 0


# ---- what cannot be ------------------------------------------------------------------


def test_heads_are_not_cut():
    odd = replace(GPT, heads=2, rows=96)
    cluster = Cluster(H100, 8, node=8)
    assert "must divide 2 heads" in why_impossible(Candidate(dp=2, tp=4), odd, cluster)
    assert "stay in a node" in why_impossible(Candidate(tp=8), GPT, SLOW)
    assert "must divide half" in why_impossible(
        Candidate(cp=8), replace(GPT, sequence=8), SLOW
    )


def test_another_node_is_twice_as_far():
    assert (SLOW.delay(2), SLOW.delay(2, stride=2)) == (1e-3, 2e-3)
