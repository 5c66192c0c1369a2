"""Make web pages of the course from the stored notebooks, by Sphinx (`conf.py`).

    ddp-course site --out /srv/www/ddp-course

Nothing is executed and nothing is downloaded, neither here nor in the reader's browser:
the pages open from the disk, search and formulas included.
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
REST = "## The package"  # from this heading on, the README is a page of its own
NEEDS = ("sphinx", "myst_nb", "sphinx_book_theme")
MARK = ".buildinfo"  # Sphinx writes this file beside its pages
LONG = 70  # lines: longer sources are shown at a click
RUN = {  # piece of a cell's source -> what the reader can do in JupyterLab, not here
    "raise NotImplementedError": "write your answer there, and the check says whether "
    "it is right, or gives a hint",
    "explore(": "there this cell has sliders",
}


def command(args: Namespace) -> int:
    """Make the pages in a new folder, or in place of an older edition."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise CommandError(
            f'{missing[0]} is not installed; type: python -m pip install -e ".[site]"'
        )
    course, out = chapters.course(), args.out.absolute()
    ours = not out.exists() or (out / MARK).exists()
    if not ours and (out.is_file() or any(out.iterdir())):
        raise CommandError(f"{out} holds other files; name a new folder: --out FOLDER")
    with tempfile.TemporaryDirectory(prefix="ddp-course-site-") as folder:
        source, pages = Path(folder, "source"), Path(folder, "pages")
        collect(course, source)
        build(source, pages)
        for path in course.glob("notebooks/*.ipynb"):  # as they are, to be downloaded
            shutil.copy(path, pages / "_sources/notebooks")
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(pages, out)
    print(f"{len(list(out.rglob('*.html')))} pages: open {out / 'index.html'}")
    return 0


def build(source: Path, pages: Path) -> None:
    """Let Sphinx make `pages` from `source`; treat its warnings as errors."""
    from sphinx.application import Sphinx

    warnings, doctrees = io.StringIO(), pages.with_name("doctrees")
    app = Sphinx(source, HERE, pages, doctrees, "html", status=None, warning=warnings)
    app.build()
    if warnings.getvalue():
        raise CommandError(f"Sphinx warns:\n{warnings.getvalue()}")


# ---- the files that Sphinx reads


def collect(course: Path, source: Path) -> None:
    """Put all pages into a new folder `source`; the README becomes the first two."""
    shutil.copytree(course / "images", source / "images")
    (source / "notebooks").mkdir()
    notebooks = sorted((course / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    for path in notebooks:
        page = prepare(json.loads(path.read_text()))
        (source / "notebooks" / path.name).write_text(json.dumps(page))
    more = sorted((course / "notebooks").glob("*.md"))
    shutil.copytree(course / "docs/decisions", source / "docs/decisions")
    for page in source.glob("docs/decisions/[0-9]*.md"):  # listed by the page README
        page.write_text(f"---\norphan: true\n---\n\n{page.read_text()}")
    for path in [*more, course / "CONTRIBUTING.md", course / "CHANGELOG.md"]:
        (source / path.relative_to(course)).write_text(relink(path.read_text()))
    licence = (course / "LICENSE").read_text()
    (source / "LICENSE.md").write_text(f"# Licence\n\n```text\n{licence}```\n")
    names = [f"notebooks/{path.stem}" for path in (*notebooks, *more)]
    names += ["reference", "CONTRIBUTING", "docs/decisions/README", "CHANGELOG"]
    contents = "\n".join([*names, "LICENSE"])
    first, _, rest = (course / "README.md").read_text().partition(REST)
    (source / "reference.md").write_text(relink(f"# Reference\n\n{REST}{rest}"))
    (source / "index.md").write_text(
        f"{relink(first)}\n"
        "[Reference](reference.md): the package, training in any layout, GPUs, "
        "clusters, classrooms.\n\n"
        f"```{{toctree}}\n:hidden:\n\n{contents}\n```\n"
    )


def relink(markdown: str) -> str:
    """Return Markdown whose links lead to the pages of the site.

    The README is two pages: what a learner needs first, and the reference.
    """
    first = r"\]\(((?:\.\./)*)README\.md(?=\)|#chapters)"
    markdown = re.sub(first, r"](\1index.md", markdown)
    markdown = re.sub(r"\]\(((?:\.\./)*)README\.md#", r"](\1reference.md#", markdown)
    return markdown.replace("](LICENSE)", "](LICENSE.md)")


def prepare(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return a notebook for the site.

    Cells that need JupyterLab get a remark; long sources open at a click.
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
    """Return a Markdown cell that says what the reader can do in JupyterLab."""
    head = ":::{admonition} Run it yourself\n:class: tip"
    source = f"{head}\n`ddp-course lab`: {what}.\n:::"
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": source}
