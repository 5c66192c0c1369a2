"""Floor 3: the course's code side by side with PyTorch's own (`ddp-course bench`).

    others          how much of the machine other programs took meanwhile
    rows            what a bench returns, and how two things are measured fairly
    all_reduce      every all-reduce of the course beside gloo's
    steps           training steps side by side
    ddp             a training step under our DDP beside PyTorch's
    zero            a training step under our ZeRO and FSDP beside PyTorch's
    tp              a training step under our tensor parallelism beside PyTorch's
    pp              a training step under our pipeline beside PyTorch's, and bubbles
    launch          `spawn` beside `torch.multiprocessing.spawn`
    launch_process  one of the two, in a process of its own

A bench is a function that takes `quick` and yields rows, one for each case.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from ddp_course.bench import all_reduce, ddp, launch, pp, tp, zero
from ddp_course.bench.rows import Row, table
from ddp_course.commands import CommandError, check_file

BENCHES: dict[str, Callable[[bool], Iterator[Row]]] = {
    "launch": launch.bench,
    "all-reduce": all_reduce.bench,
    "ddp": ddp.bench,
    "zero": zero.bench,
    "tp": tp.bench,
    "pp": pp.bench,
}


def command(
    name: str | None,
    names_only: bool,
    file: Path | None,
    quick: bool,
    figure: Path | None = None,
    drawings: Mapping[str, Callable[[list[Row]], Any]] = MappingProxyType({}),
) -> int:
    """Run one bench, print its rows as a table, and write them to `file` as JSON.

    `figure` is a file to draw the rows into, by `drawings[name]`, which returns a
    figure of matplotlib.
    """
    if names_only:
        print("\n".join(BENCHES))
        return 0
    if name not in BENCHES:
        wrong = "which bench?" if name is None else f"there is no bench {name!r};"
        raise CommandError(f"{wrong} there are: {', '.join(BENCHES)}")
    check_file(file)
    if figure is not None and name not in drawings:
        raise CommandError(
            f"there is no figure of {name}; only of {', '.join(drawings)}"
        )
    check_file(figure, (".svg", ".png", ".pdf"))
    rows = []
    with Console(stderr=True).status("measuring") as status:
        for row in BENCHES[name](quick):
            rows.append(row)
            status.update(f"measuring; done: {row['case']}")
    Console().print(table(rows))
    if file is not None:
        file.write_text(json.dumps(rows, indent=1) + "\n")
    if figure is not None:
        drawings[name](rows).savefig(figure)
    loud = max((row.get("others", 0.0) for row in rows), default=0.0)
    if loud > all_reduce.LOUD:
        Console(stderr=True).print(
            f"Other programs took up to {loud:.0%} of the machine meanwhile: such times"
            " say little. Measure again when it is quiet."
        )
    return 0
