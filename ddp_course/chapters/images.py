"""The files of `images/`: every module of a room may name some, and what draws them.

    IMAGES = {"01_rendezvous.svg": rendezvous}  # in ch01_ranks/figures.py

After a change, write them anew with `python -m ddp_course.chapters.images`: a test
compares them byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ddp_course.chapters import modules
from ddp_course.lab.draw.drawing import Drawing


def images() -> dict[str, Callable[[], Drawing]]:
    """Return the call that draws it for every file of `images/`, found in the rooms.

    Raises ValueError if two modules draw the same file.
    """
    found: dict[str, Callable[[], Drawing]] = {}
    for module in modules():
        for name, draw in getattr(module, "IMAGES", {}).items():
            if name in found:
                raise ValueError(f"{module.__name__} draws {name}, and so did another")
            found[name] = draw
    return found


def write_images(folder: Path) -> list[Path]:
    """Draw every image of the course into `folder`, and return their paths."""
    folder.mkdir(exist_ok=True)
    for name, draw in images().items():
        draw().save(folder / name)
    return [folder / name for name in images()]


if __name__ == "__main__":
    for path in write_images(Path(__file__).parents[2] / "images"):
        print(f"images/{path.name}")
