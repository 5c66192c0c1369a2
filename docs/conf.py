"""Sphinx's settings for the web edition; `make_site.py` collects its pages.

The pages open from the disk, search and formulas included: nothing is downloaded.
"""

import json
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
ADDRESS = tomllib.loads(PROJECT.read_text())["project"]["urls"]["Repository"]
EXCERPTS = "_static/excerpts.js"


def buttons(address: str) -> dict[str, Any]:
    """Return the theme's options for links to the repository, if there is one."""
    if "example.org" in address:
        return {}
    return {
        "repository_url": address,
        "repository_branch": "main",
        "use_repository_button": True,
        "use_edit_page_button": True,
        "use_issues_button": True,
    }


project = "Distributed training, from real processes up"
language = "en"
extensions = ["myst_nb"]
nb_execution_mode = "off"
nb_merge_streams = True
nb_code_prompt_hide = "Hide them"
nb_render_markdown_format = "myst"  # tables, too
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
html_theme = "sphinx_book_theme"
html_title = "Distributed training"
html_math_renderer = "mathml"
html_static_path = ["static"]
html_css_files = ["course.css"]
html_js_files = [("course.js", {"defer": "defer"})]
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system
html_copy_source = True  # the download button; `make_site.py` puts the notebooks there
html_sourcelink_suffix = ""
html_show_sourcelink = False
html_show_search_summary = True
html_use_index = False
html_theme_options = {
    "home_page_in_toc": True,
    "show_toc_level": 2,
    "navbar_persistent": [],  # the sidebar has the search
    "footer_content_items": ["extra-footer.html"],
    "extra_footer": "MIT licence",
    "use_fullscreen_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
} | buttons(ADDRESS)


class Sections(HTMLParser):
    """The text of a page, by section, in tags that the search can read."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.kept, self.depth, self.skipped = "", 0, 0
        self.feed(page)

    def handle_starttag(
        self, tag: str, attributes: list[tuple[str, str | None]]
    ) -> None:
        """Open a section; begin to skip what is not prose."""
        if tag == "section":
            self.depth += 1
            self.kept += f'<section id="{dict(attributes).get("id", "")}">'
        self.skipped += tag in ("script", "style", "math")

    def handle_endtag(self, tag: str) -> None:
        """Close a section."""
        if tag == "section":
            self.depth -= 1
            self.kept += "</section>"
        self.skipped -= tag in ("script", "style", "math")

    def handle_data(self, data: str) -> None:
        """Keep a piece of text that is in a section."""
        if self.depth and not self.skipped and data != "#":  # a heading's own link
            text = re.sub(r"\s+", " ", data)
            self.kept += text.replace("&", "&amp;").replace("<", "&lt;")


def write_excerpts(app: Any, error: Exception | None) -> None:
    """Write the text of all pages into a script, from which the search quotes.

    Without the script, the search would fetch the pages, which browsers forbid if
    they are opened from the disk.
    """
    out = Path(app.outdir)
    if error is None and app.builder.name == "html":
        files = {name: out / f"{name}.html" for name in app.env.found_docs}
        texts = {name: Sections(file.read_text()).kept for name, file in files.items()}
        (out / EXCERPTS).write_text(f"const EXCERPTS = {json.dumps(texts)};\n")


def load_excerpts(app: Any, page: str, *_: Any) -> None:
    """Let the page of the search, and no other, load the texts."""
    if page == "search":
        app.add_js_file("excerpts.js")
        app.add_js_file("search.js")


def setup(app: Any) -> dict[str, bool]:
    """Let Sphinx write formulas as MathML, which browsers draw without a script."""
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
    app.connect("html-page-context", load_excerpts)
    app.connect("build-finished", write_excerpts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
