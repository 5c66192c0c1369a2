"""Chapter 18: counted FLOPs, merged traces, what tells faults apart, the dry run."""

import json
import time

import pytest

from ddp_course.bench.predict import (
    CLUSTER,
    GPT,
    LINKS,
    SOFTWARE,
    dry_steps,
    layouts,
    took,
    wrong_draws,
)
from ddp_course.chapters.ch18_how_fast.beside import counted_flops
from ddp_course.chapters.ch18_how_fast.traces import (
    GLOO,
    events_of,
    merged,
    profiled,
    shares,
)
from ddp_course.launch import spawn
from ddp_course.measure import Event
from ddp_course.model import GPTConfig
from ddp_course.planning.step_time import Candidate, predict


def test_flops_are_the_formulas():
    config = GPTConfig(n_layer=2, d_model=48, n_head=4, block_size=32, vocab_size=40)
    n = 2 * 12 * 48**2 + 48 * 40
    assert counted_flops(config) == 6 * n + 12 * 2 * 48 * 32
    assert counted_flops(config, recomputed=True) > 1.2 * counted_flops(config)


def test_a_merged_trace_has_all_ranks_on_one_clock(tmp_path):
    begin = time.perf_counter()
    ours = spawn(profiled, "late rank", str(tmp_path), output="none")
    took = time.perf_counter() - begin
    trace = merged(tmp_path)
    assert {e["pid"] for e in trace["traceEvents"]} == {0, 1, 2, 3}
    events = events_of(trace)
    steps = [e for e in events if e.op == "step"]
    assert [e.rank for e in steps] == [0, 1, 2, 3]
    mine = [e for rank in ours for e in rank if e.op == "step"]
    # One clock: moved by one time for all ranks, our steps lie within theirs.
    pairs = [*zip(steps, mine, strict=True)]
    least = max(theirs.start - our.start for theirs, our in pairs)
    most = min(theirs.end - our.end for theirs, our in pairs)
    assert least < most + 0.1
    assert max(theirs.seconds for theirs in steps) < took
    assert sum(e.op == GLOO for e in events) == 16
    arrows = [e for e in trace["traceEvents"] if e.get("ph") in ("s", "f")]
    ends = {(e["pid"], e["id"]) for e in arrows}
    assert len(arrows) == 2 * len(ends) > 0, "each has a start and an end"
    assert len({number for _, number in ends}) == len(ends), "on the same rank"
    gloo = [[e for e in events if e.op == GLOO and e.rank == r] for r in range(4)]
    last_call = max(e.start for rank in gloo for e in rank)
    ends = [max(e.end for e in rank) for rank in gloo]
    assert last_call < min(ends), "no rank is done before all have made the last call"


def test_traces_with_other_origins_are_shifted(tmp_path):
    for rank, base in enumerate((1000, 3000)):  # nanoseconds
        event = {"ph": "X", "cat": "user_annotation", "name": "step", "pid": 77}
        event |= {"ts": 10.0, "dur": 5.0, "tid": 1}
        text = {"traceEvents": [event], "baseTimeNanoseconds": base}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(text))
    starts = [e.start for e in events_of(merged(tmp_path))]
    assert starts == pytest.approx([10e-6, 12e-6])
    with pytest.raises(ValueError, match="it has no rank0.json"):
        merged(tmp_path / "nowhere")


def test_shares_of_a_step():
    def rank(number, sends, late=1.0):
        return [
            Event(number, "step", 0, 10),
            Event(number, "compute", 0, 6),
            Event(number, GLOO, sends, sends + late, lane="communication"),
        ]

    assert shares(rank(0, 5) + rank(1, 5)) == (0, pytest.approx(0.4), 1)
    assert shares(rank(0, 6) + rank(1, 6))[:2] == (0.1, pytest.approx(0.3))
    assert shares(rank(0, 6, 4.0) + rank(1, 6))[2] == 4


def test_a_dry_run_is_never_faster_than_predicted():
    """And hardly slower: on a busy machine messages take more of the processor."""
    layouts = [Candidate(dp=2, pp=2), Candidate(dp=2, tp=2, microbatch=4)]
    cluster = CLUSTER
    ranks = spawn(dry_steps, layouts, links=LINKS, output="none", timeout=240)
    for k, layout in enumerate(layouts):
        foreseen = predict(GPT, cluster, layout, SOFTWARE).seconds
        assert took([rank[k] for rank in ranks]) > 0.97 * foreseen
        for rank in ranks:
            sent = [event.op for event in rank[k] if event.lane == "communication"]
            assert sent.count("average") == GPT.layers // layout.pp


def test_draws_with_other_fastest_layouts_are_counted():
    foreseen = [float(k) for k in range(20)]
    assert wrong_draws(foreseen, foreseen) == 0
    swapped = [1.0, 0.0, *foreseen[2:]]
    assert 0 < wrong_draws(swapped, foreseen) < 30  # both are drawn in 14 of 95
    assert wrong_draws(foreseen[::-1], foreseen) == 100
    assert len({layout[:4] for layout in layouts()}) == 9 and len(layouts()) == 20
