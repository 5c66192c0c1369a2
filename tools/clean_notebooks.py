"""Store clean notebooks in the repository, or check that they are (for authors).

    ddp-course notebooks --save 01          execute the chapter, store clean outputs
    ddp-course notebooks --check            say which notebooks are not clean

What is stored must be what was shown. A rule is a complaint and a remedy, a function
that changes the notebook so that the complaint no longer holds. `clean` applies every
remedy; `complaints` reports the rules with a remedy that would change something, and
what no remedy can mend. So no rule exists twice.
"""

from __future__ import annotations

import copy
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from ddp_course.commands import chapters
from ddp_course.commands.execute import (
    code_cells,
    must_raise,
    read_notebook,
    without_colours,
)
from ddp_course.commands.run import for_each, run_chapter
from ddp_course.lab.source import without_docstrings
from ddp_course.learners_copy import PACKAGE

METADATA = {
    "kernelspec": {
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "name": "python3",
    },
    "language_info": {"name": "python"},  # without the version, which differs
}
VIEW = "application/vnd.jupyter.widget-view+json"

# Text that differs between machines or runs. Paths are those of a home, a temporary
# folder or an installation; /proc, /dev and the like are the same on all machines.
_FOLDERS = r"/(?:home|Users|root|tmp|work|opt|private|var/folders|usr/(?:local/)?lib)/"
_VOLATILE = {
    "an absolute path": re.compile(rf"(?<![\w.~-]){_FOLDERS}[^\s'\"<>]+|[A-Z]:\\\w+"),
    "a memory address": re.compile(r"\bat 0x[0-9a-f]{6,}\b"),
}

# The output of `show_source`: the name of a file, then blocks of its code.
_FILE_OR_CODE = re.compile(r"^`(\S+)`$|^(`{3,})python\n(.*?)\n\2$", re.M | re.S)


def command(results: Namespace) -> int:
    """Save or check chapters, say what is wrong, and return the exit code.

    A chapter that fails, or that shows what only one machine has, is not saved.
    """
    paths = chapters.find(results.chapters or ["all"])
    if results.save:
        return for_each(paths, lambda path: save(path, results.timeout))
    wrong = for_each(paths, complaints)
    if not wrong:
        print("clean")
    return wrong


def save(path: Path, timeout: int) -> list[str]:
    """Execute a chapter and store it clean; return what kept it from being stored."""
    notebook, problems = run_chapter(path, timeout)
    if not problems:
        clean(notebook)
        problems = list(incurable(notebook))
    if problems:
        return problems
    text = text_of(notebook).encode()
    if text != path.read_bytes():
        unfinished = path.with_suffix(".ipynb.new")  # so that nobody reads half of it
        unfinished.write_bytes(text)
        unfinished.replace(path)
        print(f"{path.stem}: stored")
    return []


def text_of(notebook: NotebookNode) -> str:
    """Return the text of a notebook's file: the same for the same notebook."""
    return nbformat.v4.writes(notebook) + "\n"


def clean(notebook: NotebookNode) -> None:
    """Apply all remedies to `notebook`, in place."""
    for remedy in RULES.values():
        remedy(notebook)


def complaints(path: Path) -> list[str]:
    """Return what is wrong with the notebook at `path`; nothing if it is clean."""
    stored, cured = read_notebook(path), read_notebook(path)
    found = []
    for complaint, remedy in RULES.items():
        better = copy.deepcopy(stored)
        remedy(better)
        if better != stored:
            found.append(complaint)
    if not found and text_of(stored) != path.read_text(encoding="utf-8"):
        found.append("the file is not laid out as `notebooks --save` writes it")
    clean(cured)
    return found + list(incurable(cured))


def incurable(notebook: NotebookNode) -> Iterator[str]:
    """Yield the problems of a notebook with outputs that only its author can mend."""
    yield from changed_sources(notebook)
    cells = code_cells(notebook)
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        yield "its cells were not run from top to bottom in a new kernel"
        return
    for number, cell in enumerate(cells, start=1):
        raised = any(output.output_type == "error" for output in cell.outputs)
        if raised != must_raise(cell):
            yield f"cell {number} " + (
                "shows an error without the tag raises-exception"
                if raised
                else "has the tag raises-exception and shows no error"
            )
        shown = without_colours("\n".join(_texts(cell.outputs)))
        for what, pattern in _VOLATILE.items():
            if match := pattern.search(shown):
                yield f"cell {number} shows {what}: {match.group()}"


def changed_sources(notebook: NotebookNode) -> Iterator[str]:
    """Yield a message for each cell that shows source which its file no longer has."""
    for number, cell in enumerate(code_cells(notebook), start=1):
        for text in (o.get("data", {}).get("text/markdown", "") for o in cell.outputs):
            for file, shown in _sources(text):
                now = (PACKAGE.parent / file).read_text(encoding="utf-8")
                versions = now, without_docstrings(now)
                if not any(_flat(shown) in _flat(version) for version in versions):
                    yield f"cell {number} shows another source than {file} now has"


def _sources(text: str) -> Iterator[tuple[str, str]]:
    """Yield the file and the code of every block that `show_source` has shown."""
    file = None
    for name, _, code in _FILE_OR_CODE.findall(text):
        file = name or file
        if code and file and (PACKAGE.parent / file).is_file():
            yield file, code


def _flat(code: str) -> str:
    """Return the lines of `code` without their indentation, between newlines."""
    return "\n".join(["", *map(str.strip, code.splitlines()), ""])


def _metadata(notebook: NotebookNode) -> None:
    notebook.metadata = nbformat.from_dict(METADATA)


def _cell_metadata(notebook: NotebookNode) -> None:
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})


def _cell_ids(notebook: NotebookNode) -> None:
    """Keep ids; name cells that have none, or one that is taken, by their place."""
    notebook.nbformat_minor = 5
    kept = {cell.get("id") for cell in notebook.cells}
    seen: set[str | None] = {None}
    for place, cell in enumerate(notebook.cells):
        if cell.get("id") in seen:
            cell.id = f"cell-{place}"
            while cell.id in kept:
                cell.id += "-"
            kept.add(cell.id)
        seen.add(cell.id)


def _widget_views(notebook: NotebookNode) -> None:
    for cell in code_cells(notebook):
        cell.outputs = [o for o in cell.outputs if VIEW not in o.get("data", {})]


def _streams(notebook: NotebookNode) -> None:
    """Join the pieces that a cell printed: their number differs from run to run."""
    for cell in code_cells(notebook):
        pieces, cell.outputs, first = cell.outputs, [], {}
        for piece in pieces:
            if piece.output_type == "stream" and piece.name in first:
                first[piece.name].text += piece.text
                continue
            cell.outputs.append(piece)
            if piece.output_type == "stream":
                first[piece.name] = piece


def _tracebacks(notebook: NotebookNode) -> None:
    """Remove this machine's folders from tracebacks, which nbval does not compare."""
    names = {
        f"{PACKAGE.parent}/": "",
        f"{Path(nbformat.__file__).parents[1]}/": "",  # site-packages
        f"{sys.base_prefix}/": "",
        f"{sys.prefix}/": "",
        f"{Path.home()}/": "~/",
    }
    outputs = (output for cell in code_cells(notebook) for output in cell.outputs)
    for output in (o for o in outputs if o.output_type == "error"):
        for folder, name in names.items():
            output.traceback = [t.replace(folder, name) for t in output.traceback]


def _texts(outputs: list[NotebookNode]) -> Iterator[str]:
    """Yield all text of the outputs; pictures are skipped."""
    for output in outputs:
        yield output.get("text", "")
        yield from output.get("traceback", [])
        data = output.get("data", {})
        yield from (v for k, v in data.items() if k.startswith("text/"))


RULES: dict[str, Callable[[NotebookNode], None]] = {
    "its metadata are not exactly the names of kernel and language": _metadata,
    "a cell's metadata hold more than its tags": _cell_metadata,
    "a cell has no id, or the id of another cell": _cell_ids,
    "the output of a widget is stored, which no viewer can show": _widget_views,
    "a stream is stored in pieces": _streams,
    "a traceback names folders of one machine": _tracebacks,
}
