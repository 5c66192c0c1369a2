"""Which chapters there are, and what a reader calls them: 00, all, a path."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from ddp_course.commands import CommandError

PACKAGE = Path(__file__).resolve().parents[1]
FOLDER = "ddp-course"  # a learner's copy, if it was given no other name; see `copy`
RECORD = ".ddp-course.json"  # in it


def folder() -> Path:
    """Return the folder of the chapters: of the copy or clone we stand in, or `course`.

    Raises CommandError if there is none.
    """
    found = (place for place in _around() if _holds_chapters(place))
    return (next(found, None) or course()) / "notebooks"


def course() -> Path:
    """Return the folder of the course itself, which is nobody's copy.

    It is the clone we stand in, or that of the package, or what a wheel has brought.
    """
    for place in (*_around(), PACKAGE.parent, *_from_a_wheel()):
        if _holds_chapters(place) and not (place / RECORD).exists():
            return place
    raise CommandError(
        "there are no chapters here nor beside the package; "
        "run it in a clone of the course's repository"
    )


def _holds_chapters(place: Path) -> bool:
    return any((place / "notebooks").glob("00_*.ipynb"))


def _from_a_wheel() -> list[Path]:
    """Return where pip has put the notebooks of an installed wheel, if it has."""
    try:
        files = metadata.files("ddp-course") or []
    except metadata.PackageNotFoundError:
        files = []
    found = (Path(file.locate()) for file in files if file.name.startswith("00_"))
    return [path.resolve().parents[1] for path in found if path.suffix == ".ipynb"]


def copy_around() -> Path | None:
    """Return the learner's copy that we stand in; None if we stand in none."""
    return next((p for p in _around() if (p / RECORD).is_file()), None)


def _around() -> list[Path]:
    """Return the folder in which we stand, and those above it."""
    return [Path.cwd(), *Path.cwd().parents]


def find(names: list[str]) -> list[Path]:
    """Return the notebooks that `names` mean, each one once, in the order of `names`.

    A name is a number (`0`, `00`), a title (`00_start_here`), the path of a notebook,
    or `all`. Raises CommandError that lists the chapters if there is none of that name.
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
        f"there is no chapter {name!r}; there are {known}; 'all' and paths work, too"
    )
