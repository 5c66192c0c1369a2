"""The web edition: what a reader meets in it, in a browser, from the disk.

What needs Sphinx or a browser is skipped where `.[site-test]` is not installed.
"""

import json
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import conf
import make_site as site
import pytest
from links import dead_links
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from ddp_course.commands import CommandError

ROOT = Path(__file__).parents[1]
NAMES = ["index.html", "reference.html", "search.html", "CONTRIBUTING.html"]
NAMES += ["CHANGELOG.html", "LICENSE.html", "docs/decisions/README.html"]
NAMES += [f"notebooks/{path.stem}.html" for path in ROOT.glob("notebooks/*.*")]
LOOKS = [(1366, "light"), (1366, "dark"), (1000, "light")]
LOOKS += [(390, "light"), (390, "dark")]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
built = pytest.mark.skipif(
    any(find_spec(name) is None for name in site.NEEDS), reason="no .[site]"
)
browsed = pytest.mark.skipif(
    CHROMIUM is None or find_spec("axe_playwright_python") is None,
    reason="no Chromium, or no .[site-test]",
)
pytestmark = pytest.mark.timeout(1800)  # the first test waits for the whole edition


class Page(HTMLParser):
    """What one page names (ids), points to (links, files), and shows (pictures)."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.ids, self.links, self.files = path, set(), [], []
        self.wrong: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list) -> None:
        has = dict(attrs)
        self.ids |= {has["id"]} if "id" in has else set()
        if tag == "a" and has.get("href"):
            self.links.append(has["href"])
        elif tag == "img" and len((has.get("alt") or "").split()) < 4:
            self.wrong.append(f"picture without words: {has.get('src', '')[:60]}")
        if tag in ("script", "img", "source", "iframe", "link"):
            self.files.append(has.get("src") or has.get("href") or "")


def dead(folder: Path) -> list[str]:
    """Return what is wrong in the pages of a folder, as far as their text tells it."""
    pages = {
        path: Page(path)
        for path in folder.rglob("*.html")
        if "_static" not in path.parts
    }
    wrong = []
    for path, page in pages.items():
        found = list(page.wrong)
        for link in page.files + page.links:
            to = urlsplit(link)
            if to.scheme or to.netloc:
                if link in page.files and to.scheme != "data":
                    found.append(f"from elsewhere: {link}")
                continue
            target = path if not to.path else (path.parent / unquote(to.path)).resolve()
            if target.is_dir():
                target /= "index.html"
            if not target.is_relative_to(folder) or not target.is_file():
                found.append(f"no file: {link}")
            elif to.fragment and unquote(to.fragment) not in pages[target].ids:
                found.append(f"no such place: {link}")
        wrong += [f"{path.relative_to(folder)}: {what}" for what in found]
    return wrong


AXE = {"preload": False, "resultTypes": ["violations"]}  # a disk hands out no CSS
TWO_FRAMES = "new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go)))"
WIDE = """() => {
    const wrong = [], page = document.documentElement;
    if (page.scrollWidth > innerWidth)
        wrong.push(`the page is ${page.scrollWidth} wide, the window ${innerWidth}`);
    for (const img of document.querySelectorAll("article img, article svg")) {
        const own = img.getBoundingClientRect();
        const box = img.parentElement.closest("p, div, figure, td, article");
        const pane = img.closest(".picture[tabindex]");  // scrolls, also by keys
        const inside = (pane || img).getBoundingClientRect();
        if (inside.right > box.getBoundingClientRect().right + 1)
            wrong.push(`a picture of ${own.width} is wider than its column`);
        const letters = 11 * own.width / img.naturalWidth;  // of a picture's smallest
        if (letters < 8.99) wrong.push(`letters of ${letters.toFixed(1)} pixels`);
        const dark = page.dataset.theme === "dark";
        for (let part = img; dark && part !== page; part = part.parentElement) {
            const { backgroundColor, filter } = getComputedStyle(part);
            const [red, , , alpha] = backgroundColor.match(/[\\d.]+/g).map(Number);
            if (part === img ? filter !== "brightness(0.8)" : red > 150 && alpha !== 0)
                wrong.push(`glares: ${part.tagName} ${backgroundColor} ${filter}`);
        }
        if (img.complete === false || img.naturalWidth === 0)
            wrong.push(`not loaded: ${img.src.slice(-60)}`);
    }
    return wrong;
}"""


def seen(page, folder: Path, path: Path, width: int, theme: str) -> list[str]:
    """Return what is wrong with a page in a browser, `width` pixels wide."""
    from axe_playwright_python.sync_playwright import Axe

    wrong: list[str] = []
    results = {
        "console": lambda m: m.type == "error" and wrong.append(f"console: {m.text}"),
        "pageerror": lambda error: wrong.append(f"script: {error}"),
        "request": lambda request: (
            request.url.startswith((folder.as_uri(), "data:", "blob:"))
            or wrong.append(f"asks elsewhere: {request.url}")
        ),
    }
    for event, hear in results.items():
        page.on(event, hear)
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(path.as_uri())
    page.evaluate(TWO_FRAMES)  # in which boxes see how wide their pictures are
    wrong += page.evaluate(WIDE)
    for found in Axe().run(page, options=AXE).response["violations"]:
        if found["impact"] in ("serious", "critical"):
            where = found["nodes"][0]["html"][:120]
            wrong.append(f"{found['id']} ({len(found['nodes'])}): {where}")
    for event, hear in results.items():
        page.remove_listener(event, hear)
    at = f"{path.relative_to(folder)}, {width}, {theme}"
    return [f"{at}: {what}" for what in dict.fromkeys(wrong)]


@pytest.fixture(scope="module")
def edition(tmp_path_factory) -> Path:
    """Return a folder with the whole web edition: DDP_COURSE_SITE, or a new one."""
    folder = os.environ.get("DDP_COURSE_SITE")
    out = Path(folder) if folder else tmp_path_factory.mktemp("site") / "pages"
    if not folder:
        assert site.command(Namespace(out=out)) == 0
    return out.resolve()


@pytest.fixture(scope="module")
def page() -> Iterator:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        tab = chromium.new_page()
        tab.set_default_timeout(120_000)  # on a busy machine
        yield tab
        chromium.close()


# What needs neither


def stored(*outputs: dict, source: str = "f()") -> dict:
    """Return a notebook of two cells."""
    cells = [new_markdown_cell("Two lines meet."), new_code_cell(source)]
    cells[1].outputs = list(outputs)
    return new_notebook(cells=cells)


def test_a_long_source_opens_at_a_click():
    for lines, tags in ((site.LONG, None), (site.LONG + 1, ["hide-output"])):
        data = {"text/markdown": ["```python\n"] + ["pass\n"] * (lines - 1) + ["```"]}
        (_, cell) = site.prepare(stored(new_output("display_data", data)))["cells"]
        assert cell["metadata"].get("tags") == tags


def test_what_only_runs_in_jupyterlab_says_so():
    for source, result in (
        ("def f():\n    raise NotImplementedError\n\n\ncheck_f(f)", "your answer"),
        ("explore(ring, step=(0, 3))", "sliders"),
    ):
        cells = site.prepare(stored(source=source))["cells"]
        assert result in cells[2]["source"] and "`ddp-course lab`" in cells[2]["source"]
    assert len(site.prepare(stored(source="print(1)"))["cells"]) == 2


def test_links_of_the_readme_are_links_of_the_site():
    text = "[a](../README.md#chapters) [b](LICENSE) [c](01_ranks.ipynb)"
    wanted = "[a](../index.md#chapters) [b](LICENSE.md) [c](01_ranks.ipynb)"
    assert site.relink(text) == wanted
    later = site.relink("[d](../README.md#on-a-cluster)")
    assert later == "[d](../reference.md#on-a-cluster)"


def test_buttons_lead_to_a_repository_that_exists():
    assert conf.buttons("https://example.org/ddp-course") == {}
    assert conf.buttons("https://github.com/a/b")["repository_url"].endswith("a/b")


def test_every_link_of_what_sphinx_reads_leads_somewhere(tmp_path):
    """Without Sphinx; what it makes of them is looked at below."""
    site.collect(ROOT, tmp_path / "source")
    assert dead_links(tmp_path / "source") == []


def test_what_cannot_be_made_is_told(tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("dear")
    monkeypatch.setattr(site, "NEEDS", ())
    with pytest.raises(CommandError, match="holds other files"):
        site.command(Namespace(out=tmp_path))
    monkeypatch.setattr(site, "NEEDS", ("no_such_module",))
    with pytest.raises(CommandError, match=r"no_such_module.*\.\[site\]"):
        site.command(Namespace(out=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


# What must be seen: each plant, and that a page without it is well

WELL = """<!doctype html><html lang="en"><head><title>A page</title>{head}</head>
<body><main><article><h1 id="top">A page</h1><p>{body}</p></article></main></body>
</html>
"""
DARK = "document.documentElement.dataset.theme = 'dark'"
IMG = '<img src="p.svg" alt="a square of one colour" {}>'


def planted(folder: Path, body: str, head: str = "") -> Path:
    """Write a page, and a picture of 2,000 x 20 pixels, and return the page."""
    svg = '<svg xmlns="http://www.w3.org/2000/svg" width="2000" height="20"></svg>'
    (folder / "p.svg").write_text(svg)
    page = folder / "index.html"
    page.write_text(WELL.format(body=body, head=head))
    return page


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"{IMG.format('')} <a href='#top'>up</a> <a href='https://a.b'>far</a>", None),
        ("<a href='nowhere.html'>there</a>", "no file: nowhere.html"),
        ("<a href='../outside.html'>out</a>", "no file: ../outside.html"),
        ("<a href='#bottom'>down</a>", "no such place: #bottom"),
        ("<img src='p.svg'>", "picture without words: p.svg"),
        ("<img src='p.svg' alt='figure'>", "picture without words: p.svg"),
        ("<script src='https://a.b/c'></script>", "from elsewhere: https://a.b/c"),
        ("<link rel='stylesheet' href='//a.b/c.css'>", "from elsewhere: //a.b/c.css"),
    ],
)
def test_a_planted_mistake_is_read(tmp_path, body, message):
    (tmp_path.parent / "outside.html").write_text("")
    planted(tmp_path, body)
    assert dead(tmp_path) == ([] if message is None else [f"index.html: {message}"])


SCROLLS = "style='display: block; overflow: auto' tabindex=0"
SEEN = [  # body, head, what is told
    (f"<span class=picture {SCROLLS}>{IMG.format('width=1640')}</span>", "", ""),
    (IMG.format("style='max-width: 100%'"), "", "letters of 2."),
    (IMG.format(""), "", "the page is 20"),
    (f"<span {SCROLLS}>{IMG.format('')}</span>", "", "a picture of 2000 is wider than"),
    ("<img src='q.svg' alt='a square of no colour'>", "", "not loaded"),
    (IMG.format("width=1640"), f"<script>{DARK}</script>", "glares: IMG"),
    (
        f"<b style='background: #ccd'>{IMG.format('style=filter:brightness(0.8)')}</b>",
        f"<script>{DARK}</script>",
        "glares: B ",
    ),
    ("text", "<script src='http://127.0.0.1:9/c.js'></script>", "asks elsewhere"),
    ("text", "<script>console.error('no!')</script>", "console: no!"),
    ("text", "<script>nothing.at.all</script>", "script: nothing is not defined"),
    ("<img src='p.svg' style='width: 9px'>", "", "image-alt"),
    ("<span style='color: #ccc'>pale</span>", "", "color-contrast"),
    (
        "text",
        "<style>@media (prefers-color-scheme: dark) {body {background: #222}}</style>",
        "dark: color-contrast",
    ),
]


@browsed
@pytest.mark.parametrize(("body", "head", "message"), SEEN)
def test_a_planted_mistake_is_seen(page, tmp_path, body, head, message):
    path = planted(tmp_path, body, head)
    wrong = [w for look in LOOKS for w in seen(page, tmp_path, path, *look)]
    assert any(message in what for what in wrong) if message else wrong == []


# The edition


@built
def test_every_link_leads_somewhere_and_nothing_comes_from_elsewhere(edition):
    assert dead(edition) == []


@built
def test_every_chapter_is_there_with_its_pictures_and_all_that_one_can_run(edition):
    paths = sorted((ROOT / "notebooks").glob("*_*.ipynb"))
    for path in paths:
        text = (edition / f"notebooks/{path.stem}.html").read_text()
        cells = json.loads(path.read_text())["cells"]
        code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
        prose = [c for c in cells if c["cell_type"] == "markdown"]
        stubs = sum(piece in source for source in code for piece in site.RUN)
        assert text.count("Run it yourself</p>") == stubs > 0, path.name
        whole = path.read_text()
        pictures = len(re.findall(r'^ +"image/|!\[|"<img ', whole, re.MULTILINE))
        assert text.count("<img") == pictures > 0, path.name
        assert ("<math" in text) == any("$" in "".join(c["source"]) for c in prose)
        assert "merror" not in text and "widget-view" not in text


@built
@browsed
@pytest.mark.timeout(600)  # four looks
@pytest.mark.parametrize("name", NAMES)
def test_every_page_is_well_in_a_browser(page, edition, name):
    path = edition / name
    assert [wrong for look in LOOKS for wrong in seen(page, edition, path, *look)] == []


LOST_ON_PAPER = """() => [...document.querySelectorAll('.bd-article :is(pre, img)')]
  .filter((e) => e.scrollWidth > e.clientWidth + 1 || e.tagName == 'PRE' &&
          [e, ...document.querySelectorAll('details')].some((box) =>
            getComputedStyle(box).breakInside == 'avoid'))
  .map((e) => e.textContent || e.alt)"""


@built
@browsed
def test_on_paper_no_line_is_cut_off_and_no_listing_leaves_a_page_empty(page, edition):
    page.set_viewport_size({"width": 740, "height": 1000})
    page.goto((edition / "notebooks/10_pipeline_parallel.html").as_uri())
    assert page.evaluate(LOST_ON_PAPER)  # as on a screen: long lines are scrolled
    page.emulate_media(media="print")
    assert page.evaluate(LOST_ON_PAPER) == []
    for event, theme in (
        ("", "dark"),
        ("beforeprint", "light"),
        ("afterprint", "dark"),
    ):
        page.evaluate(f"dispatchEvent(new Event('{event}'))" if event else DARK)
        assert page.evaluate("document.documentElement.dataset.theme") == theme


@built
@browsed
def test_the_search_finds_without_a_network(page, edition):
    for words, found in (("halving doubling", "03_all_reduce"), ("环形全规约", "03")):
        page.goto((edition / "search.html").as_uri() + f"?q={words}")
        page.wait_for_selector("#search-results li a")
        links = page.eval_on_selector_all(
            "#search-results a", "a => a.map(x => x.href)"
        )
        assert any(f"/{found}" in link for link in links), (words, links)
