"""Find the chapters that a reader names: 00, all, or a path."""

from __future__ import annotations

import re
from pathlib import Path

from ddp_course import learners_copy
from ddp_course.commands import CommandError


def folder() -> Path:
    """Return the chapters' folder in the copy or clone around the working directory.

    Elsewhere, return the folder in `course()`. Raises CommandError if there is none.
    """
    found = filter(learners_copy.holds_chapters, learners_copy.around())
    return (next(found, None) or course()) / "notebooks"


def course() -> Path:
    """Return the folder of the course itself; raise CommandError if there is none."""
    if (found := learners_copy.course()) is None:
        raise CommandError(
            "the chapters are neither in this folder nor beside the package; run this "
            "in a clone of the course's repository"
        )
    return found


def find(names: list[str]) -> list[Path]:
    """Return the notebooks that `names` refer to, each once, in the order of `names`.

    A name is a number (`0`, `00`), a title (`00_start_here`), the path of a notebook,
    or `all`. For an unknown name, raises a CommandError that lists the chapters.
    """
    found = [notebook for name in names for notebook in _find_one(name)]
    return list(dict.fromkeys(found))


def _find_one(name: str) -> list[Path]:
    path = Path(name)
    if path.suffix == ".ipynb":
        if not path.is_file():
            raise CommandError(f"there is no file {name}")
        return [path.resolve()]
    chapters = sorted(folder().glob("[0-9][0-9]_*.ipynb"))
    if name == "all":
        return chapters
    number = f"{int(name):02d}" if re.fullmatch("[0-9]{1,2}", name) else None
    for chapter in chapters:
        if number == chapter.stem[:2] or name == chapter.stem:
            return [chapter]
    known = ", ".join(chapter.stem for chapter in chapters)
    raise CommandError(
        f"there is no chapter {name!r}; name one of {known}, a path, or 'all'"
    )
