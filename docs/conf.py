"""Sphinx's settings for the web edition; `make_site.py` collects its pages.

The pages open from the disk, search and formulas included: nothing is downloaded.
"""

from typing import Any

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
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # it would fetch pages, which a disk does not do
html_use_index = False
html_theme_options = {
    "home_page_in_toc": True,
    "show_toc_level": 2,
    "navbar_persistent": [],  # the search stands in the sidebar
    "footer_content_items": ["extra-footer.html"],
    "extra_footer": "MIT licence",
    "use_download_button": False,
    "use_fullscreen_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}


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
