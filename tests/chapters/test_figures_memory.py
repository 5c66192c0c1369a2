"""The figures of chapters 06 to 08: every byte in its place, nothing invented."""

import itertools
import re
from dataclasses import dataclass, replace
from xml.etree import ElementTree

import matplotlib
import pytest

matplotlib.use("agg")

from drawings import (  # noqa: E402
    elements,
    fills,
    no_texts_overlap,  # noqa: E402
    problems,
    words,
)
from matplotlib.colors import to_hex  # noqa: E402

from ddp_course.chapters.ch06_memory.calculator import (  # noqa: E402
    BAR,
    FITS,
    ORDER,
    PLOT,
    Unit,
    memory_calculator,  # noqa: E402
)
from ddp_course.chapters.ch06_memory.figures import (  # noqa: E402
    SIXTEEN,
    memory_of_a_step,  # noqa: E402
    moments,
)
from ddp_course.chapters.ch07_zero.figures import (
    ZERO_STAGES,  # noqa: E402
    zero_stages,  # noqa: E402
)
from ddp_course.chapters.ch08_fsdp.figures import fully_sharded  # noqa: E402
from ddp_course.chapters.ch08_fsdp.fsdp_schedule import (  # noqa: E402
    BACKWARD,
    fsdp_schedule,
    fsdp_step,  # noqa: E402
    most_whole,
)
from ddp_course.chapters.ch08_fsdp.fsdp_timeline import (  # noqa: E402
    computing,
    fsdp_timeline,  # noqa: E402
    in_words,
    lane_of,
    units_of,
)
from ddp_course.lab import (  # noqa: E402
    explore,
    gallery,
    rank_color,
)
from ddp_course.lab.draw.kinds import KIND_LOOKS, kinds_among  # noqa: E402
from ddp_course.lab.draw.ledgers import ledgers, memory_against_communication  # noqa: E402
from ddp_course.lab.draw.memory import (
    STACK,  # noqa: E402
    plot_memory,  # noqa: E402
)
from ddp_course.lab.draw.shard_map import (  # noqa: E402
    FlatRow,
    flat_rows,
    shard_map,  # noqa: E402
)
from ddp_course.lab.palette import RANK_COLORS, contrast  # noqa: E402
from ddp_course.measure import KINDS, Event  # noqa: E402
from ddp_course.model import build_gpt  # noqa: E402
from ddp_course.theory import MODELS, Model, plan  # noqa: E402
from ddp_course.zero.shards import shard_plan  # noqa: E402
from ddp_course.zero.units import unit_plan  # noqa: E402

MIB = 2**20
SETTINGS = list(itertools.product((1, 2, 5, 8), (0, 1, 3), (True, False), (0.2, 2)))
ROWS = {
    "one": [FlatRow("bucket 0", (("weight", 12), ("bias", 3)), 4, 4)],
    "cells": [
        FlatRow("bucket 0", (("1.bias", 4), ("1.weight", 20)), 8, 3),
        FlatRow("bucket 1", (("0.bias", 5), ("0.weight", 14)), 7, 3),
    ],
    "large": [FlatRow("root", (("a.weight", 99_999), ("b.bias", 7)), 12_501, 8)],
    "mostly padding": [FlatRow("u", (("w", 1),), 1, 4)],
}


def events_of(ops, rank=0, at=5.0, told=True):
    """A schedule as stage 3 would record it, a forward being 10 ms; `told`: it says
    which units it gathers."""
    found, asked = [], "gather" if told else "silent"
    for op in ops:
        if op.op == "whole":
            continue
        start, end = at + op.start * 0.01, at + op.end * 0.01
        unit = f"blocks.{op.unit}"
        if op.lane == "compute":
            tag = {"unit": unit} if op.unit >= 0 else {}
            found.append(Event(rank, op.op, start, end, lane="compute", detail=tag))
            if op.op == "forward":  # what is whole already is asked for, too
                found.append(Event(rank, "launch", start, start, detail={asked: unit}))
            continue
        tag = {asked if op.op == "all-gather" else "reduce": unit}
        found.append(Event(rank, "launch", start, start, detail=tag))
        name = op.op.replace("-", "_") + "_single"
        found.append(Event(rank, name, start, end, 8, "communication"))
    return sorted(found, key=lambda e: e.start)


RUNS = {
    f"prefetch {k}": [
        event
        for rank in range(2)
        for event in events_of(fsdp_schedule(4, k), rank, 5 + rank)
    ]
    for k in (0, 1)
}
DRAWINGS = {
    "06": memory_of_a_step,
    "07": zero_stages,
    "08": fully_sharded,
    **{f"step {s}": lambda s=s: fsdp_step(*s) for s in SETTINGS},
    **{f"shards, {k}": lambda rows=rows: shard_map(rows) for k, rows in ROWS.items()},
    **{
        f"recorded, rank {r} from {s}": lambda r=r, s=s, w=w: fsdp_timeline(
            RUNS, r, s, w
        )
        for r in (0, 1)
        for s, w in ((0, None), (20, 3), (900, 50))
    },
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_the_layout(name):
    drawing = DRAWINGS[name]()
    assert list(problems(drawing)) == []
    assert drawing.svg() == DRAWINGS[name]().svg()
    assert len(drawing.description) > 60
    assert drawing.width <= 1100


# Kinds of memory.


def test_kinds_are_no_ranks_and_can_be_told_apart_without_colours():
    greys = [look.fill for look in KIND_LOOKS.values() if not look.pattern]
    assert not set(greys) & set(RANK_COLORS)
    for a, b in itertools.combinations(greys, 2):
        assert contrast(a, b) > 1.4
    patterns = [look.pattern for look in KIND_LOOKS.values() if look.pattern]
    assert len(set(patterns)) == len(patterns)
    hatched = [k for k, look in KIND_LOOKS.items() if look.pattern == "lines"]
    assert hatched == ["communication buffers"]  # as everywhere


def test_kinds_are_those_of_the_ledger():
    assert tuple(KIND_LOOKS) == KINDS
    assert set(STACK) == set(ORDER) == set(KINDS)


# Chapter 06.


def test_activations_rise_and_fall_and_gradients_stay():
    columns = moments(4)
    assert [len(m.activations) for m in columns] == [1, 2, 3, 4, 3, 2, 1, 0, 0, 0]
    assert [len(m.gradients) for m in columns] == [0, 0, 0, 0, 1, 2, 3, 4, 4, 0]
    for moment in columns:
        if moment.phase == "backward":  # what is computed with is what is freed
            layer = int(moment.name.split()[1])
            assert layer in moment.gradients and layer not in moment.activations
    peak = max(columns, key=lambda m: m.height)
    assert (peak.phase, peak.name) == ("forward", "layer 3")


def test_every_parameter_has_16_bytes():
    for parts in SIXTEEN.values():
        assert sum(part.count for part in parts) == 16
    said = words(memory_of_a_step())
    assert "4 + 4 + 8 = 16 bytes" in said
    assert "2 + 2 + 12 = 16 bytes" in said
    for name in ("exp_avg", "exp_avg_sq", "parameter in fp32"):
        assert name in said


# The calculator.

CALCULATORS = [
    {"model": model, "gpus": gpus, "stage": stage, "precision": precision,
     "memory_gb": memory, "optimizer": optimizer}
    for (model, gpus, stage), (precision, optimizer), memory in itertools.product(
        (("1m", 1, None), ("1m", 1024, 3), ("gpt2", 2, 0), ("gpt3-175b", 64, 2),
         (1000, 3, 1), (7.5e9, 64, None)),
        (("mixed", "adamw"), ("fp32", "sgd"), ("fsdp-bf16", "sgd-momentum")),
        (0.01, 80),
    )
]  # fmt: skip


@pytest.mark.parametrize("setting", CALCULATORS, ids=str)
def test_the_calculator_shows_what_the_plan_says(setting):
    drawing = memory_calculator(**setting)
    assert list(problems(drawing)) == []
    known = MODELS.get(setting["model"]) or Model(int(setting["model"]))
    how = {name: setting[name] for name in ("optimizer", "precision")}
    rows = plan(known, setting["gpus"], setting["memory_gb"] * 1e9, **how)[:4]
    said = words(drawing)
    unit = Unit.of(max(row.ledger.total for row in rows))
    totals = [word for word in said if re.fullmatch(r"[\d.,]+ [MG]B", word)]
    assert totals == [unit(row.ledger.total) for row in rows]
    fits = [word for word in said if word in FITS.values()]
    assert fits == [FITS[row.fits] for row in rows]
    if setting["stage"] is not None:
        row = rows[setting["stage"]]
        (sentence,) = [word for word in said if word.startswith("Each GPU sends")]
        assert unit(row.bytes_sent) in sentence
        assert any(word.startswith(f"{row.name}: ") for word in said)


def test_the_calculator_gives_the_numbers_of_the_paper():
    drawing = memory_calculator(7.5e9, gpus=64, memory_gb=32)
    said = words(drawing)
    for total in ("120 GB", "31.4 GB", "16.6 GB", "1.88 GB"):
        assert total in said
    assert "adamw, mixed: 2 + 2 + 12 bytes per parameter" in said
    assert said.count("does not fit") == 1  # DDP
    assert said.count("fits, or not") == 3  # activations are not known


def test_bars_are_as_long_as_their_bytes():
    drawing = memory_calculator("gpt2", gpus=2, memory_gb=4)
    rows = plan(MODELS["gpt2"], 2, 4e9)[:4]
    root = ElementTree.fromstring(drawing.svg())
    bars = [(float(e.get("width")), e.get("fill")) for e, _, _ in elements(root)
            if e.tag.endswith("rect") and float(e.get("height")) == BAR]  # fmt: skip
    longest = max(row.ledger.total for row in rows)
    scale = PLOT / max(1.12 * 4e9, 1.04 * longest)
    for kind in ("parameters", "gradients", "optimizer states"):
        drawn = [wide for wide, fill in bars if fill == KIND_LOOKS[kind].fill]
        want = [row.ledger[kind] * scale for row in rows]
        assert drawn == pytest.approx(want, abs=0.02)


# Chapter 07.


def test_stages_store_what_the_paper_says():
    assert [stage.nbytes for stage in ZERO_STAGES] == [16, 10, 7]
    said = words(zero_stages())
    assert "3/4" not in said  # what is to be predicted
    assert "4 + 4 + 8 = 16 bytes per parameter" in said
    assert "4 + 4 + 8/4 = 10 bytes per parameter" in said
    assert "4 + 4/4 + 8/4 = 7 bytes per parameter" in said


def test_what_is_sharded_is_there_once():
    drawing = zero_stages()
    for rank in range(4):
        colors = fills(drawing, f"{rank}")
        sample = rank == 2  # of the legend
        # A name in each of three panels; states in two of them, gradients in one.
        assert colors == [rank_color(rank)] * (3 + 2 + 1 + sample)


# Chapter 08.


def faults(ops):
    """What is wrong with a schedule, in words."""
    whole = [op for op in ops if op.op == "whole"]
    for op in (op for op in ops if op.op in ("forward", "backward")):
        held = [w for w in whole if w.unit == op.unit]
        if not any(w.start <= op.start and op.end <= w.end for w in held):
            yield f"unit {op.unit} is not whole in its {op.op}"
        for w in held:
            if w.start <= op.start and op.end <= w.end:
                gathers = [g for g in ops if g.op == "all-gather" and g.unit == op.unit]
                if not any(w.start <= g.start and g.end <= op.start for g in gathers):
                    yield f"unit {op.unit} is not gathered before its {op.op}"
        if op.op == "backward":
            sums = [r for r in ops if r.op == "reduce-scatter" and r.unit == op.unit]
            if [r.start >= op.end for r in sums] != [True]:
                yield f"the gradients of {op.unit} are not reduced once, after backward"
    sent = sorted((op for op in ops if "-" in op.op), key=lambda op: op.start)
    if any(b.start < a.end - 1e-9 for a, b in itertools.pairwise(sent)):
        yield "two messages at once"
    if ops[-1].op != "update" or ops[-1].start < max(op.end for op in sent):
        yield "the update does not come last"


@pytest.mark.parametrize(("units", "prefetch", "reshard", "message"), SETTINGS)
def test_a_unit_is_whole_when_it_computes(units, prefetch, reshard, message):
    ops = fsdp_schedule(units, prefetch, reshard, message)
    assert list(faults(ops)) == []
    assert len([op for op in ops if op.op == "all-gather"]) == units * (1 + reshard)
    assert most_whole(ops) == (min(units, 1 + prefetch) if reshard else units)


@pytest.mark.parametrize(
    ("op", "change", "says"),
    [
        ("whole", lambda op: replace(op, end=op.start), "is not whole"),
        ("whole", lambda op: replace(op, end=op.end - 1), "is not whole"),
        ("all-gather", lambda op: None, "is not gathered"),
        ("all-gather", lambda op: replace(op, end=op.end + 9), "is not gathered"),
        ("reduce-scatter", lambda op: None, "not reduced once"),
        ("reduce-scatter", lambda op: replace(op, start=0), "not reduced once"),
        ("all-gather", lambda op: replace(op, start=op.start - 0.5), "at once"),
        ("update", lambda op: replace(op, start=0), "does not come last"),
    ],
)
def test_a_wrong_schedule_is_seen(op, change, says):
    ops = [change(o) if o.op == op else o for o in fsdp_schedule(4)]
    assert any(says in fault for fault in faults([o for o in ops if o]))


def test_prefetching_hides_gathers():
    ends = [max(op.end for op in fsdp_schedule(6, k)) for k in (0, 1)]
    assert ends[1] < ends[0]
    alone = fsdp_schedule(6, 0)
    computes = [op for op in alone if op.lane == "compute"]
    for gather in (op for op in alone if op.op == "all-gather"):
        assert not any(
            c.start < gather.end - 1e-9 and gather.start < c.end - 1e-9
            for c in computes
        )


def test_the_order_of_a_step():
    ops = fsdp_schedule(2, 0)
    order = [(op.op, op.unit) for op in sorted(ops, key=lambda op: op.end)
             if op.op != "whole"]  # fmt: skip
    assert order == [
        ("all-gather", 0), ("forward", 0), ("all-gather", 1), ("forward", 1),
        ("all-gather", 1), ("backward", 1), ("reduce-scatter", 1),
        ("all-gather", 0), ("backward", 0), ("reduce-scatter", 0), ("update", -1),
    ]  # fmt: skip
    times = [op.end - op.start for op in ops if op.op == "backward"]
    assert times == pytest.approx([BACKWARD] * 2)


def test_the_schedule_says_its_numbers():
    said = " ".join(words(fsdp_step(5, 1)))
    assert "10 all-gathers, 5 reduce-scatters; at most 2 of 5 units whole" in said
    said = " ".join(words(fsdp_step(5, 1, False)))
    assert "5 all-gathers, 5 reduce-scatters; at most 5 of 5 units whole" in said


def test_a_moment_in_the_middle_of_forward():
    drawing = fully_sharded()
    for rank in range(4):
        solid = [f for f in fills(drawing, f"{rank}") if f == rank_color(rank)]
        # Units 0, 2 and 3: one rank has it; unit 1: all four.
        assert len(solid) == 3 + 4


# Recorded steps.


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_messages_are_told_apart_by_what_was_asked_for(reshard, prefetch):
    ops = fsdp_schedule(4, prefetch, reshard)
    events = events_of(ops)
    units = units_of(events)
    for lane in ("all-gather", "reduce-scatter"):
        sent = [units[id(e)] for e in events if lane_of(e) == lane]
        assert sent == [f"blocks.{op.unit}" for op in ops if op.op == lane]
    silent = events_of(ops, told=False)  # rather no name than a wrong one
    gathers = {id(e) for e in silent if lane_of(e) == "all-gather"}
    assert not gathers & set(units_of(silent))


def test_lanes_of_what_is_recorded():
    wait = Event(0, "wait", 0, 1, lane="wait")
    forward = Event(0, "forward", 0, 1, lane="compute")
    assert lane_of(wait) == lane_of(forward) == "compute"
    assert lane_of(Event(0, "launch", 0, 1, lane="launch")) == ""
    assert lane_of(Event(0, "all_gather_single", 0, 1, 8)) == "all-gather"
    assert lane_of(Event(0, "gather from memory", 0, 1, 8)) == "all-gather"
    assert lane_of(Event(0, "reduce_scatter_single", 0, 1, 8)) == "reduce-scatter"


def test_waiting_hides_nothing():
    events = [
        Event(0, "backward", 0.0, 0.010, lane="compute"),
        Event(0, "wait", 0.004, 0.008, lane="wait"),
        Event(0, "wait", 0.010, 0.011, lane="wait"),
        Event(0, "all_gather_single", 0.003, 0.008, 8, "communication"),
    ]
    pieces = [(e.start, e.end) for e in computing(events)]
    assert pieces == [(0.0, 0.004), (0.008, 0.010)]
    assert in_words(events) == "11 ms, communication 5 ms, hidden 1 ms"


def test_what_is_hidden_is_measured():
    for name, hidden in (("prefetch 0", 0), ("prefetch 1", 1)):
        mine = [e for e in RUNS[name] if e.rank == 0]
        total, sent, hid = map(float, re.findall(r"([\d.e+-]+) ms", in_words(mine)))
        assert total == pytest.approx(
            max(op.end for op in fsdp_schedule(4, hidden)) * 10, rel=1e-2
        )
        assert sent == pytest.approx(12 * 7)
        assert bool(hid) == bool(hidden)
    # What another rank does at the same time is not counted.
    drawing = fsdp_timeline(RUNS, rank=1)
    assert rank_color(1) in drawing.svg() and rank_color(0) not in drawing.svg()


# Who owns which elements.


def owners(drawing):
    """Width of the shards by rank: rectangles in the rank's colour."""
    root = ElementTree.fromstring(drawing.svg())
    found = {}
    for e, _, _ in elements(root):
        if e.tag.endswith("rect") and e.get("fill") in RANK_COLORS:
            rank = RANK_COLORS.index(e.get("fill"))
            found.setdefault(rank, []).append(float(e.get("width")))
    return found


@pytest.mark.parametrize("name", ROWS)
def test_shards_are_as_wide_as_their_elements(name):
    rows = ROWS[name]
    shown = owners(shard_map(rows))
    scale = 860 / max(row.numel for row in rows)
    for k, row in enumerate(rows):
        real = row.numel - row.padding
        for rank in range(row.world_size):
            mine = min(real, (rank + 1) * row.shard) - rank * row.shard
            if mine > 0:
                assert shown[rank][k] == pytest.approx(mine * scale, abs=0.02)
            else:
                assert len(shown.get(rank, [])) <= k
    said = shard_map(rows).description
    for row in rows:
        assert f"{row.padding} of {row.numel} elements are padding" in said


def test_a_row_knows_which_ranks_own_a_parameter():
    said = shard_map(ROWS["cells"]).description
    assert "1.bias (4 elements) belongs to rank 0" in said
    assert "1.weight (20 elements) belongs to ranks 0 to 2" in said
    assert "2 of 21 elements are padding" in said


def test_plans_of_both_kinds():
    model = build_gpt("1m")
    buckets = shard_plan(model.named_parameters(), 4, 1)
    units = unit_plan(model, 3)
    rows = flat_rows(buckets), flat_rows(units)
    assert [row.name for row in rows[0]] == [f"bucket {k}" for k in range(len(buckets))]
    assert [row.name for row in rows[1]] == ["root", *(f"blocks.{k}" for k in range(4))]
    assert [row.padding for row in rows[0]] == [part.padding for part in buckets]
    assert [row.numel for row in rows[1]] == [unit.numel for unit in units]
    for parts, drawn in zip((buckets, units), rows, strict=True):
        assert sum(n for row in drawn for _, n in row.parameters) == 1_038_240
        assert list(problems(shard_map(parts))) == []
    assert flat_rows(ROWS["cells"]) == ROWS["cells"]


# What the ledger counted.


def ledger(parameters=0, gradients=0, states=0, activations=0, buffers=0, other=0):
    """A ledger, given in MiB."""
    sizes = parameters, gradients, states, activations, buffers, other
    return {kind: n * MIB for kind, n in zip(KIND_LOOKS, sizes, strict=True)}


def recorded(most=12, at=7.0):
    """The moments of a step and its events: a moment every 10 ms."""
    has = [ledger(4, 0, 8, k) for k in (0, most / 2, most)]
    has += [ledger(4, k, 8, most - most * k / 4, k % 2) for k in (1, 2, 3, 4)]
    has += [ledger(4, 4, 8, other=0.5), ledger(4, 0, 8)]
    moments = [(at + 0.01 * k, one, f"{k}") for k, one in enumerate(has)]
    ends = [at, at + 0.021, at + 0.061, at + 0.08]
    phases = ("forward", "backward", "step")
    events = [
        Event(0, op, *times)
        for op, times in zip(phases, itertools.pairwise(ends), strict=True)
    ]
    return moments, [*events, Event(0, "all_reduce", at, at + 0.05, 8)]


@dataclass
class Log:
    """A log that knows its moments."""

    moments: list


KEPT, SPANS = recorded()
LESS, _ = recorded(3, 9.0)
BOTH = {"kept": KEPT, "recomputed": Log(LESS)}
BOTH_SPANS = {"kept": SPANS, "recomputed": recorded(3, 9.0)[1]}


def areas(axes):
    """The highest value of each area, from the bottom to the top."""
    return [path.get_paths()[0].vertices[:, 1].max() for path in axes.collections]


@pytest.mark.parametrize("clock", ["time", "count"])
def test_the_memory_of_a_step_is_stacked(clock):
    (axes,) = plot_memory(KEPT, SPANS, clock=clock).axes
    # parameters, states, gradients, buffers, other, activations
    assert areas(axes) == pytest.approx([4, 12, 16, 16, 16.5, 24])
    hatches = [path.get_hatch() for path in axes.collections]
    assert hatches == [None, None, None, "////", None, ".."]
    (top,) = [line for line in axes.lines if line.get_drawstyle() == "steps-post"]
    assert list(top.get_ydata()) == [sum(m[1].values()) / MIB for m in KEPT]
    every = 10 if clock == "time" else 1
    assert list(top.get_xdata()) == pytest.approx([every * k for k in range(len(KEPT))])
    assert "MiB" in axes.get_ylabel()


def test_the_peak_and_the_phases_are_marked():
    (axes,) = plot_memory(KEPT, SPANS).axes
    assert "peak 24 MiB" in [text.get_text() for text in axes.texts]
    (mark,) = [line for line in axes.lines if line.get_marker() == "v"]
    assert list(zip(*mark.get_data(), strict=True)) == [pytest.approx((20, 24))]
    names = [text.get_text() for text in axes.texts if "peak" not in text.get_text()]
    assert names == ["forward", "backward", "step"]
    places = [text.xy[0] for text in axes.texts if text.get_text() in names]
    assert places == pytest.approx([10.5, 41, 70.5])


def test_two_logs_have_one_axis():
    left, right = plot_memory(BOTH, BOTH_SPANS).axes
    assert left.get_ylim() == right.get_ylim()
    assert [axes.get_title() for axes in (left, right)] == ["kept", "recomputed"]
    peaks = [t.get_text() for axes in (left, right) for t in axes.texts]
    assert {"peak 24 MiB", "peak 16.8 MiB"} <= set(peaks)
    assert right.lines[0].get_xdata()[0] == pytest.approx(0)  # its own clock


LEDGERS = {
    "DDP": [ledger(4, 4, 8)] * 4,
    "ZeRO-1": [ledger(4, 4, 2)] * 4,
    "ZeRO-2": [ledger(4, 1, 2)] * 4,
    "ZeRO-3": [ledger(1, 1, 2)] * 3 + [ledger(1, 1, 1.5)],
}
THEORY = {
    "DDP": 16 * MIB, "ZeRO-1": ledger(4, 4, 2), "ZeRO-3": [ledger(1, 1, 2)] * 4,
}  # fmt: skip


def test_ledgers_are_bars_and_theory_is_a_mark():
    (axes,) = ledgers(LEDGERS, THEORY).axes
    bars = [bar for bar in axes.patches if bar.get_height()]
    tops = {}
    for bar in bars:
        middle = round(bar.get_x() + bar.get_width() / 2)
        tops[middle] = max(tops.get(middle, 0), bar.get_y() + bar.get_height())
    assert list(tops.values()) == [16] * 4 + [10] * 4 + [7] * 4 + [4, 4, 4, 3.5]
    fills = [to_hex(bar.get_facecolor()).upper() for bar in bars[:3]]
    order = ("parameters", "optimizer states", "gradients")
    assert fills == [KIND_LOOKS[kind].fill for kind in order]
    marks = [line for line in axes.lines if len(line.get_ydata())]
    says = [line.get_ydata()[0] for line in marks if line.get_color() != "white"]
    assert says == [16] * 4 + [4, 6, 10] * 4 + [1, 3, 4] * 4
    shown = [tick.get_text() for tick in axes.get_xticklabels()]
    assert shown == ["0", "1", "2", "3"] * 4
    boxes = [tick.get_bbox_patch().get_facecolor() for tick in axes.get_xticklabels()]
    assert [to_hex(c).upper() for c in boxes[:4]] == [rank_color(k) for k in range(4)]


def test_one_ledger_for_each_name_has_numbers():
    (axes,) = ledgers({name: group[-1] for name, group in LEDGERS.items()}).axes
    said = [text.get_text() for text in axes.texts]
    assert {"16", "10", "7", "3.5", "8", "4"} <= set(said)
    ticks = [tick.get_text() for tick in axes.get_xticklabels()]
    assert ticks == list(LEDGERS)


STAGE_ROWS = [
    ("DDP", 16, 2), ("ZeRO-1", 10, 2), ("ZeRO-2", 7, 2), ("ZeRO-3", 4.4, 3),
    ("ZeRO-3, kept after forward", 4.4, 2), ("PyTorch's ZRO and DDP", 10, 3),
    ("PyTorch's fully_shard", 4.4, 4),
]  # fmt: skip


def test_stages_stand_where_their_bytes_are():
    (axes,) = memory_against_communication(STAGE_ROWS).axes
    points = [line for line in axes.lines if line.get_marker() in "os"]
    at = [(p.get_xdata()[0], p.get_ydata()[0]) for p in points]
    assert at == [(sent / 2, has / 16) for _, has, sent in STAGE_ROWS]
    hollow = [p.get_markerfacecolor() == "white" for p in points]
    assert hollow == [False] * 5 + [True] * 2
    assert {text.get_text() for text in axes.texts} == {n for n, *_ in STAGE_ROWS}
    (axes,) = memory_against_communication(STAGE_ROWS, beside="ZeRO-3").axes
    assert axes.lines[2].get_xdata()[0] == pytest.approx(2 / 3)


PLOTS = {
    "memory": lambda: plot_memory(KEPT, SPANS, title="a step"),
    "memory, without events": lambda: plot_memory(Log(KEPT)),
    "two memories": lambda: plot_memory(BOTH, BOTH_SPANS, clock="count"),
    "ledgers": lambda: ledgers(LEDGERS, THEORY),
    "one each": lambda: ledgers({name: group[0] for name, group in LEDGERS.items()}),
    "two ranks": lambda: ledgers({"a": [ledger(1)] * 2, "b": [ledger(1, 2)] * 2}),
    "stages": lambda: memory_against_communication(STAGE_ROWS),
}


@pytest.mark.parametrize("name", PLOTS)
def test_texts_do_not_overlap(name):
    no_texts_overlap(PLOTS[name])


def test_sliders_and_galleries():
    controls = {"units": (1, 8), "prefetch": (0, 3), "message": (0.2, 2.0)}
    view = explore(fsdp_step, **controls, reshard_after_forward=[True, False])
    assert view.children[-1].value.startswith("<svg")
    drawing = gallery(fsdp_step, [{"prefetch": 0}, {"prefetch": 1}])
    assert list(problems(drawing)) == []
    controls = {
        "model": ["1m", "gpt2-xl", ("7.5 B", 7.5e9)], "gpus": [1, 8, 64],
        "stage": [("all", None), 0, 1, 2, 3], "memory_gb": (8, 192),
        "recompute": ["none", "full"],
    }  # fmt: skip
    view = explore(memory_calculator, **controls)
    assert view.children[-1].value.startswith("<svg")
    drawing = gallery(memory_calculator, [{"gpus": n} for n in (1, 4, 16, 64)])
    assert list(problems(drawing)) == []
    assert drawing.width <= 1000


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (lambda: kinds_among([{"weights": 1}]), "is 'weights'; it can be 'parameters'"),
        (lambda: kinds_among([{"other": -1}]), "other has -1 bytes"),
        (lambda: memory_calculator("gpt5"), "model is 'gpt5'; it can be 1m, 8m, gpt2"),
        (lambda: memory_calculator(0), "model is 0; it must be 1"),
        (lambda: memory_calculator(stage=4), "stage is 4"),
        (lambda: memory_calculator(gpus=0), "gpus is 0"),
        (lambda: memory_calculator(memory_gb=0), "memory is 0"),
        (lambda: memory_calculator(optimizer="x"), "optimizer is 'x'"),
        (lambda: memory_calculator(precision="x"), "precision is 'x'"),
        (lambda: fsdp_schedule(0), "units is 0"),
        (lambda: fsdp_schedule(9), "units is 9; .* 1 to 8"),
        (lambda: fsdp_schedule(4, -1), "prefetch is -1"),
        (lambda: fsdp_schedule(4, message=0), "message is 0"),
        (lambda: fsdp_timeline({}), "no runs"),
        (lambda: fsdp_timeline(RUNS, 7), "'prefetch 0' has no events of rank 7"),
        (lambda: fsdp_timeline(RUNS, start=-1), "start is -1"),
        (lambda: fsdp_timeline(RUNS, width=0), "width is 0"),
        (lambda: shard_map([]), "no parts"),
        (lambda: plot_memory([]), "no moment"),
        (lambda: plot_memory([(0, ledger(), "")]), "no moment in which"),
        (lambda: plot_memory({}), "0 logs"),
        (lambda: plot_memory(BOTH, {"kept": SPANS}), r"events are of \['kept'\]"),
        (lambda: plot_memory(KEPT, clock="s"), "clock is 's'"),
        (lambda: ledgers({}), "no ledgers"),
        (lambda: ledgers({"a": ledger()}), "a ledger of 'a' is empty"),
        (lambda: ledgers({"a": []}), "a ledger of 'a' is empty"),
        (lambda: ledgers({"a": ledger(1)}, {"b": 1}), "theory is of 'b'"),
        (lambda: ledgers({"a": [ledger(1)]}, {"a": [1, 2]}), "of 1 ranks, .* of 2"),
        (lambda: memory_against_communication([]), "beside is 'DDP'"),
        (lambda: memory_against_communication(STAGE_ROWS * 2), "may be there once"),
        (lambda: memory_against_communication([("DDP", 0, 1)]), "'DDP' has 0.0 bytes"),
    ],
)
def test_what_cannot_be_drawn(bad, says):
    with pytest.raises(ValueError, match=says):
        bad()
