"""Make web pages of the course from the stored notebooks, by Sphinx (`conf.py`).

    ddp-course site --out /srv/www/ddp-course

Nothing is executed, and nothing is downloaded, neither here nor by who reads the pages:
they open from the disk, search and formulas included.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import tempfile
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddp_course.commands import CommandError, chapters

HERE = Path(__file__).parent
NEEDS = ("sphinx", "myst_nb", "sphinx_book_theme")
MARK = ".buildinfo"  # Sphinx puts it beside its pages
LONG = 70  # lines of source: more are shown at a click
RUN = {  # what a page cannot do: a piece of a cell's source -> what one does instead
    "raise NotImplementedError": "write your answer there, and the check says whether "
    "it is right, or gives a hint",
    "explore(": "there this cell has sliders",
}


def command(told: Namespace) -> int:
    """Make the pages in a folder of their own, which an older edition may fill."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise CommandError(
            f'{missing[0]} is not installed; type: python -m pip install -e ".[site]"'
        )
    course, out = chapters.course(), told.out.absolute()
    ours = not out.exists() or (out / MARK).exists()
    if not ours and (out.is_file() or any(out.iterdir())):
        raise CommandError(f"{out} holds something else; type another --out FOLDER")
    with tempfile.TemporaryDirectory(prefix="ddp-course-site-") as folder:
        source, pages = Path(folder, "source"), Path(folder, "pages")
        collect(course, source)
        build(source, pages)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(pages, out)
    print(f"{len(list(out.rglob('*.html')))} pages: open {out / 'index.html'}")
    return 0


def build(source: Path, pages: Path) -> None:
    """Let Sphinx make `pages` from `source`; whatever it warns of is an error."""
    from sphinx.application import Sphinx

    told, doctrees = io.StringIO(), pages.with_name("doctrees")
    app = Sphinx(source, HERE, pages, doctrees, "html", status=None, warning=told)
    app.build()
    if told.getvalue():
        raise CommandError(f"Sphinx is not content:\n{told.getvalue()}")


# From the course to what Sphinx reads


def collect(course: Path, source: Path) -> None:
    """Put all pages into a new folder `source`: the README comes first."""
    shutil.copytree(course / "images", source / "images")
    (source / "notebooks").mkdir()
    notebooks = sorted((course / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    for path in notebooks:
        page = prepare(json.loads(path.read_text()))
        (source / "notebooks" / path.name).write_text(json.dumps(page))
    more = sorted((course / "notebooks").glob("*.md"))
    decisions = sorted((course / "docs/decisions").glob("*.md"), reverse=True)
    about = [course / "CONTRIBUTING.md", course / "CHANGELOG.md", *decisions]
    for path in [*more, *about]:
        page = source / path.relative_to(course)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(relink(path.read_text()))
    licence = (course / "LICENSE").read_text()
    (source / "LICENSE.md").write_text(f"# Licence\n\n```text\n{licence}```\n")
    pages = (*notebooks, *more, *about)
    names = [path.relative_to(course).with_suffix("").as_posix() for path in pages]
    contents = "\n".join([*names, "LICENSE"])
    (source / "index.md").write_text(
        f"{relink((course / 'README.md').read_text())}\n\n"
        f"```{{toctree}}\n:hidden:\n\n{contents}\n```\n"
    )


def relink(markdown: str) -> str:
    """Return Markdown whose links go to the pages of the site."""
    markdown = re.sub(r"\]\(((?:\.\./)*)README\.md", r"](\1index.md", markdown)
    return markdown.replace("](LICENSE)", "](LICENSE.md)")


def prepare(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return a notebook for the site.

    What only runs in JupyterLab says so, and long sources open at a click.
    """
    cells = []
    for cell in notebook["cells"]:
        cells.append(cell)
        cell["source"] = text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            cell["source"] = relink(text)
            continue
        for output in cell["outputs"]:
            lines = "".join(output.get("data", {}).get("text/markdown", "")).count("\n")
            if lines > LONG:
                show = {"code_prompt_show": f"Show {lines} lines"}
                cell["metadata"] |= {"tags": ["hide-output"], "mystnb": show}
        cells += [
            remark(what, f"run-{len(cells)}")
            for piece, what in RUN.items()
            if piece in text
        ]
    return {**notebook, "cells": cells}


def remark(what: str, name: str) -> dict[str, Any]:
    """Return a cell that says what one can do on one's own machine."""
    head = ":::{admonition} Run it yourself\n:class: tip"
    source = f"{head}\n`ddp-course lab`: {what}.\n:::"
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": source}
