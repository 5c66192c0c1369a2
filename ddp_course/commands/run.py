"""`run`: execute chapters without a browser, and store nothing."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from nbformat import NotebookNode
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from ddp_course.commands import chapters, tell
from ddp_course.commands.execute import code_cells, execute, read_notebook


def command(args: Namespace) -> int:
    """Run chapters, print what failed, and return the exit code."""
    paths = chapters.find(args.chapters)
    return for_each(paths, lambda path: run_chapter(path, args.timeout)[1])


def for_each(paths: list[Path], work: Callable[[Path], list[str]]) -> int:
    """Call `work` for every chapter, and print the problems that it returns.

    Returns an exit code: 1 if there was a problem.
    """
    wrong = 0
    for path in paths:
        try:
            problems = work(path)
        except ValueError as error:
            problems = [str(error)]
        for problem in problems:
            tell(f"{path.stem}, {problem}")
            wrong = 1
    return wrong


def run_chapter(path: Path, timeout: int) -> tuple[NotebookNode, list[str]]:
    """Execute a chapter with a progress bar; return the notebook, and its problems."""
    notebook = read_notebook(path)
    cells = len(code_cells(notebook))
    started = time.monotonic()
    console = Console(stderr=True)
    columns = "{task.description}", BarColumn(), MofNCompleteColumn()
    where = {"console": console, "disable": not console.is_terminal}
    with Progress(*columns, TimeElapsedColumn(), **where) as progress:
        bar = progress.add_task(path.stem, total=cells)
        failure = execute(notebook, path.parent, timeout, lambda: progress.advance(bar))
    if failure is None:
        seconds = time.monotonic() - started
        print(f"{path.stem}: {cells} cells ran in {seconds:.1f} s", flush=True)
    return notebook, [] if failure is None else [str(failure)]
