"""`run`: execute chapters, store nothing. `notebooks`: store them clean, or check."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from nbformat import NotebookNode
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from ddp_course.commands import chapters, clean, tell
from ddp_course.commands.execute import code_cells, execute


def command(told: Namespace) -> int:
    """Run, save or check chapters, tell what is wrong, and return the exit code.

    `run` stores nothing. A chapter that fails, or that shows what only one machine has,
    is not saved.
    """
    paths = chapters.find(told.chapters or ["all"])
    if told.name == "run":
        return _each(paths, lambda path: _run(path, told.timeout)[1])
    if told.save:
        return _each(paths, lambda path: _save(path, told.timeout))
    wrong = _each(paths, clean.complaints)
    if not wrong:
        print("clean")
    return wrong


def _each(paths: list[Path], work: Callable[[Path], list[str]]) -> int:
    """Do `work` for every chapter and tell the problems that it returns."""
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


def _run(path: Path, timeout: int) -> tuple[NotebookNode, list[str]]:
    """Execute a chapter with a bar. Returns the notebook with outputs, and problems."""
    notebook = clean.read(path)
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


def _save(path: Path, timeout: int) -> list[str]:
    notebook, problems = _run(path, timeout)
    if not problems:
        clean.clean(notebook)
        problems = list(clean.incurable(notebook))
    if problems:
        return problems
    text = clean.text_of(notebook).encode()
    if text != path.read_bytes():
        whole = path.with_suffix(".ipynb.new")  # so that nobody sees half a notebook
        whole.write_bytes(text)
        whole.replace(path)
        print(f"{path.stem}: stored")
    return []
