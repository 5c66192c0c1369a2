"""Follow the links of Markdown files and notebooks, to files and to headings."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

LINK = re.compile(r"\]\(([^)\s]+)(?: \"[^\"\n]*\")?\)")


def markdown(path: Path) -> str:
    """Return all Markdown of a page: the text of a file, or a notebook's text cells."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    return "\n\n".join(texts)


def anchors(text: str) -> set[str]:
    """Return the names that GitHub, and the site, give to the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    plain = (re.sub(r"[^\w\- ]", "", head).strip().lower() for head in heads)
    return {head.replace(" ", "-") for head in plain}


def dead_links(folder: Path, pages: Iterable[Path] | None = None) -> list[str]:
    """Return each link of the pages, all in `folder` by default, that leads nowhere.

    A link that leaves `folder` is dead, too: whoever has the folder has nothing else.
    """
    found = []
    if pages is None:
        pages = sorted(p for s in ("md", "ipynb") for p in folder.rglob(f"*.{s}"))
    for page in pages:
        for link in LINK.findall(markdown(page)):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, heading = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            inside = target.is_relative_to(folder.resolve())
            alive = inside and target.exists()
            if alive and heading and heading not in anchors(markdown(target)):
                alive = False
            if not alive:
                found.append(f"{page.relative_to(folder)}: {link}")
    return found


def test_planted_dead_links_are_found(tmp_path):
    (tmp_path / "course/notebooks").mkdir(parents=True)
    (tmp_path / "outside.md").touch()
    (tmp_path / "course/README.md").write_text("# On a cluster: `it`\n")
    page = tmp_path / "course/notebooks/page.md"
    for link, dead in (
        ("../README.md", False),
        ("../README.md#on-a-cluster-it", False),
        ('../README.md "a tooltip"', False),
        ("https://example.org/x", False),
        ("../README.md#nowhere", True),
        ("README.md", True),
        ('README.md "a tooltip"', True),
        ("../../outside.md", True),
        ("#here", True),
    ):
        page.write_text(f"[x]({link})")
        assert bool(dead_links(tmp_path / "course")) == dead, link
