"""`bench`: the course's code beside PyTorch's own."""

from argparse import Namespace

from ddp_course import bench
from ddp_course.lab.bench import plot_bench


def command(told: Namespace) -> int:
    """Run a bench, or list them all, and draw what it has found if asked to."""
    files = {"file": told.json, "figure": told.figure, "draw": plot_bench}
    return bench.command(told.bench, told.list, quick=told.quick, **files)
