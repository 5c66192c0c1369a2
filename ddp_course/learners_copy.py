"""Find the course and a learner's copy of it, and read which exercises have passed.

`ddp-course lab` makes the copy (`commands/copy.py`). In the copy, each check appends
its verdict as one line to a file (`lab/progress.py`); `ddp-course progress` reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
FOLDER = "ddp-course"  # the copy's folder, unless the learner names another
RECORD = ".ddp-course.json"  # in the copy: the digest of each file when it was copied
FILE = ".progress.jsonl"  # in the copy: lines such as ["swap", "passed"]
STATUSES = ("not attempted yet", "not yet", "passed")  # from worst to best


# ---- folders -------------------------------------------------------------------------


def course() -> Path | None:
    """Return the folder of the course itself, never a copy; None if there is none.

    It is the clone around the working directory, or the clone that holds this package,
    or the folder into which pip has put a wheel's notebooks.
    """
    for place in (*around(), PACKAGE.parent, *_folders_of_a_wheel()):
        if holds_chapters(place) and not (place / RECORD).exists():
            return place
    return None


def copy_around() -> Path | None:
    """Return the learner's copy that holds the working directory, or None."""
    return next((place for place in around() if (place / RECORD).is_file()), None)


def around() -> list[Path]:
    """Return the working directory and all folders above it."""
    return [Path.cwd(), *Path.cwd().parents]


def holds_chapters(place: Path) -> bool:
    """Return whether a folder has the course's notebooks."""
    return any((place / "notebooks").glob("00_*.ipynb"))


def _folders_of_a_wheel() -> list[Path]:
    try:
        files = metadata.files("ddp-course") or []
    except metadata.PackageNotFoundError:
        files = []
    found = (Path(file.locate()) for file in files if file.name.startswith("00_"))
    return [path.resolve().parents[1] for path in found if path.suffix == ".ipynb"]


# ---- progress ------------------------------------------------------------------------


def reached(copy: Path) -> dict[str, str]:
    """Return the best status of each exercise that was checked in this copy."""
    found: dict[str, str] = {}
    with suppress(FileNotFoundError):
        for line in (copy / FILE).read_bytes().split(b"\n"):
            with suppress(ValueError, TypeError):  # an incomplete or edited line
                name, status = json.loads(line)
                if better(status, found.get(name)):
                    found[name] = status
    return found


def better(status: str, than: str | None) -> bool:
    """Return whether `status` is valid and better than `than` (None: no status yet)."""
    return status in STATUSES[STATUSES.index(than) + 1 if than else 0 :]


def exercises() -> dict[str, list[str]]:
    """Return the names of the exercises of each chapter, read from their sources."""
    rooms = sorted(PACKAGE.glob("chapters/ch*/exercises.py"))
    names = (re.findall(r'^@exercise\("(\w+)"', r.read_text(), re.M) for r in rooms)
    return dict(zip((room.parent.name[2:] for room in rooms), names, strict=True))


def remaining(found: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (exercise, chapter) for each exercise that has not passed, in order."""
    every = [
        (name, chapter) for chapter, names in exercises().items() for name in names
    ]
    return [(name, chapter) for name, chapter in every if found.get(name) != "passed"]


def summary(found: Mapping[str, str]) -> str:
    """Return a line that says how many exercises have passed, and which is next."""
    total, left = sum(map(len, exercises().values())), remaining(found)
    text = f"{total - len(left)} of {total} exercises have passed. "
    return text + (f"Next: {left[0][0]}, in {left[0][1]}." if left else "All of them!")
