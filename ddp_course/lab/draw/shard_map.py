"""A map of shards: the rank that owns each element. Chapters 07 and 08."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ddp_course.lab.draw.drawing import Box, Drawing
from ddp_course.lab.draw.kinds import room
from ddp_course.lab.palette import (
    INK,
    MUTED,
    PANEL_EDGE,
    WHOLE,
    darker,
    rank_color,
    text_color,
)

MARGIN, WIDE, TOP, ROW_H, CELL_H, NAME_H = 16, 688, 58, 84, 26, 20
LEAST = 13  # each element gets a tick if it is at least this many pixels wide
FILLS = ("#FFFFFF", WHOLE)  # alternate between parameters; colours stand for ranks


@dataclass(frozen=True)
class FlatRow:
    """Parameters side by side in a flat buffer that is cut into equal shards.

    Attributes:
        name: the buffer's name.
        parameters: (name, number of elements) in the order of the buffer.
        shard: number of elements in a shard.
        world_size: number of shards.
    """

    name: str
    parameters: tuple[tuple[str, int], ...]
    shard: int
    world_size: int

    @property
    def numel(self) -> int:
        """The number of elements of all shards together, padding included."""
        return self.shard * self.world_size

    @property
    def padding(self) -> int:
        """The number of elements that belong to no parameter."""
        return self.numel - sum(numel for _, numel in self.parameters)


def flat_rows(plan: Iterable[Any]) -> list[FlatRow]:
    """Return a row for each flat buffer of a plan.

    `plan` comes from `zero.shard_plan` or `zero.unit_plan`, or is a list of rows.
    Raises ValueError if it is empty.
    """
    rows: list[FlatRow] = []
    for part in plan:
        if isinstance(part, FlatRow):
            rows.append(part)
        elif hasattr(part, "flats"):  # a unit, usually with one flat buffer
            rows += [_row(flat.name, flat) for flat in part.flats]
        else:
            rows.append(_row(f"bucket {part.bucket.index}", part))
    if not rows:
        raise ValueError("the plan has no parts; at least one must be drawn")
    return rows


def _row(name: str, sharded: Any) -> FlatRow:
    bucket = sharded.bucket
    ends = [*bucket.offsets[1:], bucket.numel]
    numels = [b - a for a, b in zip(bucket.offsets, ends, strict=True)]
    parameters = tuple(zip(bucket.parameters, numels, strict=True))
    return FlatRow(name, parameters, sharded.shard_numel, sharded.world_size)


def shard_map(plan: Iterable[Any], title: str = "Who owns which elements") -> Drawing:
    """Draw a plan's flat buffers: parameters above, the ranks' shards below.

    `plan` comes from `zero.shard_plan` or `zero.unit_plan`. A shard may end in the
    middle of a parameter. In small models, every element has a tick. Padding has a
    dashed edge. Raises ValueError for an empty plan. Chapters 07 and 08.
    """
    rows = flat_rows(plan)
    most = max(row.numel for row in rows)
    scale = WIDE / most  # pixels per element, the same in all rows
    ranks = max(row.world_size for row in rows)
    d = Drawing(
        WIDE + 2 * MARGIN,
        TOP + ROW_H * len(rows) + 26,
        title=f"{title}: {ranks} rank{'s' * (ranks > 1)}",
        description=" ".join(map(_in_words, rows)),
    )
    d.text(MARGIN, 26, d.title, size=15, bold=True, anchor="start")
    for i, row in enumerate(rows):
        with d.shifted(MARGIN, TOP + i * ROW_H):
            _draw_row(d, row, scale)
    words = "Above: parameters side by side. Below: the shards of equal length. "
    words += "Dashed: padding." if any(row.padding for row in rows) else "No padding."
    y = TOP + ROW_H * len(rows) + 10
    d.text(MARGIN, y, words, size=11, anchor="start", fill=MUTED)
    return d


def _draw_row(d: Drawing, row: FlatRow, scale: float) -> None:
    says = f"{row.name}: {row.numel:,} elements, {row.shard:,} for each rank"
    d.text(0, 0, says, size=12, anchor="start", bold=True)
    x, y, single = 0.0, 10, scale >= LEAST
    for k, (name, numel) in enumerate(row.parameters):
        wide = numel * scale
        d.rect(x, y, wide, NAME_H, fill=FILLS[k % 2])
        _write(d, (x, y, wide, NAME_H), *_names(name, numel))
        x += wide
    if row.padding:
        box = x, y, row.padding * scale, NAME_H
        d.rect(*box, fill="#FFFFFF", stroke=PANEL_EDGE, dashed=True)
        _write(d, box, "padding", fill=MUTED)
    y += NAME_H
    real = row.numel - row.padding
    for rank in range(row.world_size):
        first, last = rank * row.shard, (rank + 1) * row.shard
        x, end = first * scale, min(last, real) * scale
        if last > real:
            left = max(first, real) * scale
            d.rect(left, y, last * scale - left, CELL_H, fill="#FFFFFF",
                   stroke=PANEL_EDGE, dashed=True)  # fmt: skip
        if end <= x:
            continue
        fill, names = rank_color(rank), (f"rank {rank}", f"{rank}")
        d.rect(x, y, end - x, CELL_H, fill=fill, stroke=darker(fill))
        box = x - 1, y, end - x + 2, CELL_H  # so that the name may touch the edge
        _write(d, box, *names, fill=text_color(fill), size=12, bold=True)
        if single:
            color = darker(fill)
            for cell in range(first + 1, min(last, real)):
                for edge in (y, y + CELL_H - 4):
                    d.line((cell * scale, edge), (cell * scale, edge + 4), stroke=color)


def _names(name: str, numel: int) -> tuple[str, ...]:
    """Return names of a parameter, from long to short."""
    words = name.removesuffix(".weight").split(".")
    short = [".".join(words[k:]) for k in range(len(words))]
    return (f"{name}, {numel:,}", name, *short)


def _write(
    d: Drawing,
    box: Box,
    *names: str,
    fill: str = INK,
    size: int = 11,
    bold: bool = False,
) -> None:
    """Write the longest name that fits into a box."""
    x, y, wide, high = box
    for name in names:
        if room(name, size, bold) < wide - 2:
            look = {"size": size, "bold": bold, "fill": fill}
            d.text(x + wide / 2, y + high / 2 + 4, name, **look)
            return


def _in_words(row: FlatRow) -> str:
    edges, start = [], 0
    for name, numel in row.parameters:
        end = start + numel
        first, last = start // row.shard, (end - 1) // row.shard
        owner = f"rank {first}" if first == last else f"ranks {first} to {last}"
        owner = owner if numel else "no rank"
        edges.append(f"{name} ({numel} elements) belongs to {owner}")
        start = end
    return (
        f"{row.name}: {'; '.join(edges)}; {row.padding} of {row.numel} elements are "
        "padding."
    )
