"""Tell the reader of a moved notebook which files it lacks, and where they are."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from IPython import get_ipython
from IPython.display import Markdown, display

from ddp_course import learners_copy


def say_what_is_missing() -> None:
    """Display the text of `missing` for this folder, if this is a notebook's kernel."""
    if hasattr(get_ipython(), "kernel"):
        with suppress(OSError):
            if text := missing(Path.cwd()):
                display(Markdown(text))


def missing(folder: Path) -> str:
    """Return a text about the files that a chapter in `folder` lacks; "" if none."""
    wanted = {
        "its pictures": folder.parent / "images/course_map.svg",
        "the pages that it links to": folder / "glossary.md",
    }
    lost = [what for what, file in wanted.items() if not file.is_file()]
    if not lost:
        return ""
    text = f"If this is a chapter of the course, {' and '.join(lost)} are not here. "
    if course := learners_copy.course():
        text += f"They are in `{course}`. "
    return f"{text}`ddp-course lab` opens a complete copy of the course."
