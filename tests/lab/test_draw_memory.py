"""What several chapters draw: memory."""

import itertools

import pytest
from drawings import MIB, apart, laid_out, ledger, problems, rects
from matplotlib.colors import to_hex
from refusals import refused

from ddp_course.lab import rank_color
from ddp_course.lab.draw.kinds import KIND_LOOKS, kinds_among
from ddp_course.lab.draw.ledgers import ledgers, memory_against_communication
from ddp_course.lab.draw.memory import plot_memory
from ddp_course.lab.draw.shard_map import WIDE, FlatRow, flat_rows, shard_map
from ddp_course.lab.palette import RANK_COLORS, contrast
from ddp_course.model import build_gpt
from ddp_course.zero.shards import shard_plan
from ddp_course.zero.units import unit_plan

ROWS = {
    "one": [FlatRow("bucket 0", (("weight", 12), ("bias", 3)), 4, 4)],
    "cells": [
        FlatRow("bucket 0", (("1.bias", 4), ("1.weight", 20)), 8, 3),
        FlatRow("bucket 1", (("0.bias", 5), ("0.weight", 14)), 7, 3),
    ],
    "large": [FlatRow("root", (("a.weight", 99_999), ("b.bias", 7)), 12_501, 8)],
    "mostly padding": [FlatRow("u", (("w", 1),), 1, 4)],
}
test_the_layout = laid_out((shard_map, ROWS.values()))


def test_kinds_are_no_ranks_and_can_be_told_apart_without_colours():
    greys = [look.fill for look in KIND_LOOKS.values() if not look.pattern]
    assert not set(greys) & set(RANK_COLORS)
    for a, b in itertools.combinations(greys, 2):
        assert contrast(a, b) > 1.4
    patterns = [look.pattern for look in KIND_LOOKS.values() if look.pattern]
    assert len(set(patterns)) == len(patterns)
    hatched = [k for k, look in KIND_LOOKS.items() if look.pattern == "lines"]
    assert hatched == ["communication buffers"]  # as everywhere


def owners(drawing):
    """Width of the shards by rank: rectangles in the rank's colour."""
    found = {}
    for _, _, wide, _, e in rects(drawing):
        if e.get("fill") in RANK_COLORS:
            rank = RANK_COLORS.index(e.get("fill"))
            found.setdefault(rank, []).append(wide)
    return found


@pytest.mark.parametrize("name", ROWS)
def test_shards_are_as_wide_as_their_elements(name):
    rows = ROWS[name]
    shown = owners(shard_map(rows))
    scale = WIDE / max(row.numel for row in rows)
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


def test_plans_of_both_kinds():
    model = build_gpt("1m")
    buckets = shard_plan(model.named_parameters(), 4, 1)
    units = unit_plan(model, 3)
    rows = flat_rows(buckets), flat_rows(units)
    assert [row.name for row in rows[0]] == [f"bucket {k}" for k in range(len(buckets))]
    assert [row.name for row in rows[1]] == ["root", *(f"blocks.{k}" for k in range(4))]
    assert [row.padding for row in rows[0]] == [part.padding for part in buckets]
    assert [row.numel for row in rows[1]] == [unit.nbytes // 4 for unit in units]
    for parts, drawn in zip((buckets, units), rows, strict=True):
        assert sum(n for row in drawn for _, n in row.parameters) == 1_038_240
        assert list(problems(shard_map(parts))) == []
    assert flat_rows(ROWS["cells"]) == ROWS["cells"]


def test_a_row_knows_which_ranks_own_a_parameter():
    said = shard_map(ROWS["cells"]).description
    assert "1.bias (4 elements) belongs to rank 0" in said
    assert "1.weight (20 elements) belongs to ranks 0 to 2" in said
    assert "2 of 21 elements are padding" in said


def test_a_parameter_without_elements_belongs_to_no_rank():
    parameters = ("none", 0), ("weight", 4), ("last", 0)
    said = shard_map([FlatRow("bucket 0", parameters, 2, 2)]).description
    assert "none (0 elements) belongs to no rank; weight (4 elements) belongs" in said
    assert "last (0 elements) belongs to no rank" in said


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


test_texts_do_not_overlap = apart(
    lambda: ledgers(LEDGERS, THEORY),
    lambda: ledgers({"a": [ledger(1)] * 2, "b": [ledger(1, 2)] * 2}),
    lambda: memory_against_communication(STAGE_ROWS),
)


test_what_cannot_be_drawn = refused(
    (lambda: kinds_among([{"weights": 1}]), "is 'weights'; it can be 'parameters'"),
    (lambda: kinds_among([{"other": -1}]), "bytes of other is -1; .* 0 or more"),
    (lambda: shard_map([]), "no parts"),
    (lambda: plot_memory([]), "no moment"),
    (lambda: plot_memory([(0, ledger(), "")]), "no moment with any"),
    (lambda: plot_memory({}), "0 logs"),
    (lambda: ledgers({}), "no ledgers"),
    (lambda: ledgers({"a": [ledger()]}), "a ledger of 'a' is empty"),
    (lambda: ledgers({"a": []}), "a ledger of 'a' is empty"),
    (lambda: ledgers({"a": ledger(1)}), "'a' has one ledger; it must have a list"),
    (lambda: ledgers({"a": [ledger(1)]}, {"b": 1}), "theory has the name 'b'"),
    (lambda: ledgers({"a": [ledger(1)]}, {"a": [1, 2]}), "of 1 ranks .* for 2"),
    (lambda: memory_against_communication([]), "one must be DDP"),
    (lambda: memory_against_communication(STAGE_ROWS * 2), "each may occur once"),
    (lambda: memory_against_communication([("DDP", 0, 1)]), "of 'DDP' is 0.0; it must"),
)
