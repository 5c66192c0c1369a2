"""`bench`: the course's code beside PyTorch's own."""

import json
from argparse import Namespace

from rich.console import Console

from ddp_course import bench
from ddp_course.bench.table import lines
from ddp_course.commands.bench_figure import plot_bench


def command(args: Namespace) -> int:
    """Run a bench, print its rows, write and draw them; or list all benches."""
    if args.list:
        for each, about in bench.benches().items():
            print(f"{each:<12}{about}")
        return 0
    name = args.bench
    module, rows = bench.load(name), []
    with Console(stderr=True).status("measuring") as status:
        for row in module.bench(args.quick):
            rows.append({"bench": name} | row)
            status.update(f"measuring; done: {row['case']}")
    print("\n".join(lines(module.ABOUT, module.PAIRS, rows)))
    if args.json is not None:
        each = ",\n".join(map(json.dumps, rows))
        args.json.write_text(f"[\n{each}\n]\n")
    if args.figure is not None:
        plot_bench(module.PAIRS, rows).savefig(args.figure)
    return 0
