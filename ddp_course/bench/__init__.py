"""Floor 4: the course's code side by side with PyTorch's own (`ddp-course bench`).

    turns           any number of contenders, measured in turns; pairs, and their rows;
                    how much of the machine other programs took meanwhile
    steps           training steps as contenders, and the cases in which they meet
    table           what is printed
    all_reduce      every all-reduce of the course beside gloo's
    ddp             a training step under our DDP beside PyTorch's
    zero            a training step under our ZeRO and FSDP beside PyTorch's
    tp              a training step under our tensor parallelism beside PyTorch's
    pp              a training step under our pipeline beside PyTorch's, and bubbles
    async_          a parameter server beside its formulas, bare messages and rpc
    order           priority over our DDP on slow links, beside what was simulated
    precision       a training step in 16 bits, ours beside PyTorch's
    models          fifty small models under every strategy, beside one process
    launch          `spawn` beside `torch.multiprocessing.spawn`
    launch_process  one of the two, in a process of its own

A bench is a module here with ABOUT, a sentence; PAIRS, what is laid over what; and
`bench(quick)`, which yields rows; with `shown(rows)` it prints a table of its own, and
with `failed(row)` it may fail. It is found by looking: to add one is to add a file. (A
module cannot be imported as `async`, so that one ends in an underscore.)
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from ddp_course.bench.table import lines
from ddp_course.commands import CommandError, check_file


def benches() -> dict[str, ModuleType]:
    """Return the benches that there are, by name."""
    modules = [
        importlib.import_module(f"{__name__}.{found.name}")
        for found in pkgutil.iter_modules(__path__)
    ]
    return {
        module.__name__.rpartition(".")[2].rstrip("_").replace("_", "-"): module
        for module in modules
        if all(hasattr(module, name) for name in ("ABOUT", "PAIRS", "bench"))
    }


def command(
    name: str | None,
    names_only: bool,
    file: Path | None,
    quick: bool,
    figure: Path | None = None,
    draw: Callable[[Iterable, list], Any] | None = None,
) -> int:
    """Run one bench, print a table of its rows, and write them to `file` as JSON.

    `figure` is a file to draw the rows into, by `draw(pairs, rows)`, which returns a
    figure of matplotlib. Returns the exit code: 1 if a row says that something failed.
    """
    known = benches()
    if names_only:
        for each, module in known.items():
            print(f"{each:<12}{module.ABOUT}")
        return 0
    if name not in known:
        wrong = "which bench?" if name is None else f"there is no bench {name!r};"
        raise CommandError(f"{wrong} there are: {', '.join(known)}")
    check_file(file)
    check_file(figure, (".svg", ".png", ".pdf"))
    module, rows = known[name], []
    if figure is not None and not module.PAIRS:
        raise CommandError(f"{name} has a table, and nothing to draw")
    with Console(stderr=True).status("measuring") as status:
        for row in module.bench(quick):
            rows.append(row)
            status.update(f"measuring; done: {row['case']}")
    shown = getattr(module, "shown", partial(lines, module.ABOUT, module.PAIRS))
    print("\n".join(shown(rows)))
    if file is not None:
        each = ",\n".join(map(json.dumps, rows))
        file.write_text(f"[\n{each}\n]\n")
    if figure is not None:
        draw(module.PAIRS, rows).savefig(figure)
    return int(any(map(getattr(module, "failed", lambda row: False), rows)))
