"""`bench`: the course's code beside PyTorch's own."""

import json
from argparse import Namespace

from rich.console import Console

from ddp_course import bench
from ddp_course.bench.table import lines
from ddp_course.commands import CommandError, check_file
from ddp_course.commands.bench_figure import plot_bench


def command(told: Namespace) -> int:
    """Run a bench, print its rows, write and draw them; or list all benches."""
    known = bench.benches()
    if told.list:
        for each, module in known.items():
            print(f"{each:<12}{module.ABOUT}")
        return 0
    name = told.bench
    if name not in known:
        wrong = "which bench?" if name is None else f"there is no bench {name!r};"
        raise CommandError(f"{wrong} there are: {', '.join(known)}")
    check_file(told.json)
    check_file(told.figure, (".svg", ".png", ".pdf"))
    module, rows = known[name], []
    with Console(stderr=True).status("measuring") as status:
        for row in module.bench(told.quick):
            rows.append({"bench": name} | row)
            status.update(f"measuring; done: {row['case']}")
    print("\n".join(lines(module.ABOUT, module.PAIRS, rows)))
    if told.json is not None:
        each = ",\n".join(map(json.dumps, rows))
        told.json.write_text(f"[\n{each}\n]\n")
    if told.figure is not None:
        plot_bench(module.PAIRS, rows).savefig(told.figure)
    return 0
