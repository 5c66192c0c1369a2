"""The page for teachers names parts that there are, and the minutes that they take."""

import json
import re
from pathlib import Path

import reading_time

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
PAGE = (NOTEBOOKS / "workshop.md").read_text()


def parts(notebook: Path) -> dict[str, float]:
    """Return the minutes that each section takes to read, its subsections with it."""
    sections: dict[str, float] = {}
    each = reading_time.minutes(json.loads(notebook.read_text()))
    for (section, _), minutes in each.items():
        sections[section] = sections.get(section, 0) + minutes
    return sections


def faults(page: str) -> list[str]:
    """Return the parts of a page that are in no chapter, or take other minutes."""
    found, chapters = [], {}
    for text in re.split("^## ", page, flags=re.MULTILINE):
        linked = re.match(r".*\((\d\d_\w+\.ipynb)\)\n", text)
        if not linked:
            continue
        file = linked[1]
        chapters[file] = measured = parts(NOTEBOOKS / file)
        heads = (NOTEBOOKS / file).read_text().casefold()
        results = re.search(r"\*\*Minutes:\*\* (.*)\.\n", text)[1]
        for part in results.split("; "):
            name, minutes = re.fullmatch(r"(.*) \((\d+)\)", part).groups()
            if abs(measured.get(name, 99) - int(minutes)) > 1.5:
                found.append(f"{file}: {part}, measured {measured.get(name)}")
        for name in re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", text):
            if not re.search(rf'"##+ [^"\n]*{re.escape(name.casefold())}', heads):
                found.append(f"{file}: there is no {name}")
        if text.count("? ") + text.count("?\n") < 3:
            found.append(f"{file}: three questions")
    files = [path.name for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))]
    return found + [file for file in files if file not in chapters]


def test_the_page_tells_what_the_chapters_are():
    assert faults(PAGE) == []


def test_planted_mistakes_are_seen():
    for right, wrong in (
        ("The first four processes (4)", "The first four processes (14)"),
        ("*Launchers*", "*Rockets*"),
        ("(11_pipeline_schedules.ipynb)", ""),
        ("The ring (", "The circle ("),
    ):
        assert right in PAGE
        assert len(faults(PAGE.replace(right, wrong))) == 1, wrong
