"""A notebook that was moved says what it misses, and where that is."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from IPython import get_ipython
from IPython.display import Markdown, display

from ddp_course import learners_copy


def say_what_is_missing() -> None:
    """In a kernel, show what `missing` says of its folder; elsewhere do nothing."""
    if hasattr(get_ipython(), "kernel"):
        with suppress(OSError):
            if told := missing(Path.cwd()):
                display(Markdown(told))


def missing(folder: Path) -> str:
    """Return what a chapter in `folder` would miss, and where it is; "" if nothing."""
    wanted = {
        "its pictures": folder.parent / "images/course_map.svg",
        "the pages that it links to": folder / "glossary.md",
    }
    lost = [what for what, file in wanted.items() if not file.is_file()]
    if not lost:
        return ""
    told = f"If this is a chapter of the course, {' and '.join(lost)} are not here. "
    if course := learners_copy.course():
        told += f"They are in `{course}`. "
    return f"{told}`ddp-course lab` opens a copy of the course that has all of it."
