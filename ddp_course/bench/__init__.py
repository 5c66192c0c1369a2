"""Floor 3: the course's code side by side with PyTorch's own (`ddp-course bench`).

    rows            what a bench returns, and how two things are measured fairly
    all_reduce      every all-reduce of the course beside gloo's
    launch          `spawn` beside `torch.multiprocessing.spawn`
    launch_process  one of the two, in a process of its own

A bench is a function that takes `quick` and yields rows, one for each case.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from ddp_course.bench import all_reduce, launch
from ddp_course.bench.rows import Row, table
from ddp_course.commands import CommandError

BENCHES: dict[str, Callable[[bool], Iterator[Row]]] = {
    "launch": launch.bench,
    "all-reduce": all_reduce.bench,
}


def command(name: str | None, names_only: bool, file: Path | None, quick: bool) -> int:
    """Run one bench, print its rows as a table, and write them to `file` as JSON."""
    if names_only:
        print("\n".join(BENCHES))
        return 0
    if name not in BENCHES:
        wrong = "which bench?" if name is None else f"there is no bench {name!r};"
        raise CommandError(f"{wrong} there is: {', '.join(BENCHES)}")
    if file is not None and not file.absolute().parent.is_dir():
        raise CommandError(f"there is no folder {file.absolute().parent}")
    rows = []
    with Console(stderr=True).status("measuring") as status:
        for row in BENCHES[name](quick):
            rows.append(row)
            status.update(f"measuring; done: {row['case']}")
    Console().print(table(rows))
    if file is not None:
        file.write_text(json.dumps(rows, indent=1) + "\n")
    return 0
