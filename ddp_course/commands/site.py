"""`site`: the course as web pages, made by Sphinx from the stored notebooks.

Nothing is executed, and nothing is downloaded, neither here nor by who reads the pages:
they open from the disk, search and formulas included.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddp_course.commands import CommandError, chapters

NEEDS = ("sphinx", "myst_nb", "sphinx_book_theme")
MARK = ".buildinfo"  # Sphinx puts it beside its pages
LONG = 70  # lines of source: more are shown at a click
RUN = {  # what a page cannot do: a piece of a cell's source -> what one does instead
    "raise NotImplementedError": "write your answer there, and the check says whether "
    "it is right, or gives a hint",
    "explore(": "there this cell has sliders",
}
SETTINGS = {
    "project": "Distributed training, from real processes up",
    "language": "en",
    "extensions": ["myst_nb", __name__],
    "nb_execution_mode": "off",
    "nb_merge_streams": True,
    "nb_code_prompt_hide": "Hide them",
    "nb_render_markdown_format": "myst",  # tables, too
    "myst_enable_extensions": ["colon_fence", "dollarmath"],
    "myst_heading_anchors": 3,
    "html_theme": "sphinx_book_theme",
    "html_title": "Distributed training",
    "html_math_renderer": "mathml",
    "html_static_path": ["static"],
    "html_css_files": ["course.css"],
    "html_js_files": [("course.js", {"defer": "defer"})],
    "html_context": {"default_mode": "auto"},  # light or dark, as the reader's system
    "html_copy_source": False,
    "html_show_sourcelink": False,
    "html_show_search_summary": False,  # it would fetch pages, which a disk does not do
    "html_use_index": False,
    "html_theme_options": {
        "home_page_in_toc": True,
        "show_toc_level": 2,
        "navbar_persistent": [],  # the search stands in the sidebar
        "footer_content_items": ["extra-footer.html"],
        "extra_footer": "MIT licence",
        "use_download_button": False,
        "use_fullscreen_button": False,
        "pygments_light_style": "a11y-high-contrast-light",
        "pygments_dark_style": "a11y-high-contrast-dark",
    },
}
CSS = """\
.bd-article img, .bd-article svg { max-width: 100%; height: auto; }
.picture { display: block; overflow-x: auto; }
.picture[tabindex]::before {
  content: "Wider than the page: swipe it, or use arrow keys.";
  position: sticky; left: 0; font-size: 0.85rem; }
.bd-article code, code .pre { overflow-wrap: anywhere; white-space: pre-wrap; }
[data-theme="dark"] .bd-content .cell_output .text_html:has(img) {
  background: none !important; color: inherit !important; padding: 0; }
[data-theme="dark"] .bd-content .cell_output .text_html img,
[data-theme="dark"] .bd-content .bd-article img {
  background: none !important; filter: brightness(0.8) !important; padding: 0; }
.highlight .gd { background: #D55E0033; color: inherit !important; }
.highlight .gi { background: #009E7333; color: inherit !important; }
.formula { overflow-x: auto; overflow-y: hidden; }
@media print { .bd-article img { min-width: 0 !important; } }
@media print { .picture::before { display: none; } }
@media print { details::details-content { content-visibility: visible; height: auto; } }
@media print {
  .bd-article pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 72%; }
  .bd-article pre, .bd-article details, .bd-article details * {
    break-inside: auto !important; }
  .bd-article .cell_input:not(:has(details)), .bd-article img { break-inside: avoid; }
}
@media (max-width: 600px) { .bd-article math { font-size: 80%; } }
"""
SMALLEST = 9 / 11  # of a picture's own size: its letters have 11 pixels or more
SCRIPT = f"""\
// A picture has a box of its own, in which it scrolls where it would be too small.
const look = (box) => {{
  const wide = box.scrollWidth > box.clientWidth;
  if (wide) box.tabIndex = 0; else box.removeAttribute("tabindex");
}};
const boxes = new ResizeObserver((seen) => seen.forEach((one) => look(one.target)));
addEventListener("load", () => document.querySelectorAll(".picture").forEach(look));
for (const img of document.querySelectorAll(".bd-article img")) {{
  const box = document.createElement("span");
  box.className = "picture";
  img.replaceWith(box);
  box.append(img);
  const fit = () => {{
    img.style.minWidth = `${{img.naturalWidth * {SMALLEST}}}px`;
    boxes.observe(box);
  }};
  if (img.complete) fit(); else img.addEventListener("load", fit);
}}
// On paper it is light, whatever it is on the screen.
const root = document.documentElement;
let theme;
addEventListener("beforeprint", () => {{
  theme = root.dataset.theme;
  root.dataset.theme = "light";
}});
addEventListener("afterprint", () => {{ root.dataset.theme = theme; }});
"""


def command(told: Namespace) -> int:
    """Make the pages in a folder of their own, which an older edition may fill."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise CommandError(
            f"{missing[0]} is not installed; type: python -m pip install "
            '"ddp-course[site]" (in a clone: -e ".[site]")'
        )
    course, out = chapters.course(), told.out.absolute()
    if not (course / "README.md").exists():
        raise CommandError("the web edition is made in a clone of the repository")
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
    app = Sphinx(
        source, None, pages, doctrees, "html", SETTINGS, status=None, warning=told
    )
    app.build()
    if told.getvalue():
        raise CommandError(f"Sphinx is not content:\n{told.getvalue()}")


def setup(app: Any) -> dict[str, bool]:
    """Tell Sphinx how formulas are written: as MathML, which browsers draw alone."""
    from docutils.nodes import SkipNode
    from docutils.utils.math.latex2mathml import tex2mathml

    def inline(writer: Any, node: Any) -> None:
        writer.body.append(tex2mathml(node.astext(), as_block=False))
        raise SkipNode

    def block(writer: Any, node: Any) -> None:
        formula = tex2mathml(node.astext(), as_block=True)
        writer.body.append(f'<div class="formula" tabindex="0">{formula}</div>')
        raise SkipNode

    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


# From the course to what Sphinx reads


def collect(course: Path, source: Path) -> None:
    """Put all pages into a new folder `source`: the README comes first."""
    shutil.copytree(course / "images", source / "images")
    (source / "static").mkdir()
    (source / "static/course.css").write_text(CSS)
    (source / "static/course.js").write_text(SCRIPT)
    (source / "notebooks").mkdir()
    notebooks = sorted((course / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    for path in notebooks:
        page = prepare(json.loads(path.read_text()))
        (source / "notebooks" / path.name).write_text(json.dumps(page))
    more = sorted((course / "notebooks").glob("*.md"))
    for path in [*more, course / "CONTRIBUTING.md"]:
        (source / path.relative_to(course)).write_text(relink(path.read_text()))
    licence = (course / "LICENSE").read_text()
    (source / "LICENSE.md").write_text(f"# Licence\n\n```text\n{licence}```\n")
    names = [f"notebooks/{path.stem}" for path in (*notebooks, *more)]
    contents = "\n".join([*names, "CONTRIBUTING", "LICENSE"])
    (source / "index.md").write_text(
        f"{relink((course / 'README.md').read_text())}\n\n"
        f"```{{toctree}}\n:hidden:\n\n{contents}\n```\n"
    )


def relink(markdown: str) -> str:
    """Return Markdown whose links go to the pages of the site."""
    for here, there in (("README.md", "index.md"), ("(LICENSE)", "(LICENSE.md)")):
        markdown = markdown.replace(here, there)
    return markdown


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
