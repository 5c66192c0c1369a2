"""Beside the floors: a folder ("room") for each chapter, with its notebook's name.

chNN_topic/exercises.py   the checks of the exercises, each an `Exercise`
chNN_topic/solutions.py   their solutions, which `show_solution` shows
chNN_topic/figures.py     the drawings; `IMAGES` says which are files of `images/`:
                          {"01_rendezvous.svg": rendezvous}

The other files of a room belong to its chapter only; code that two rooms share is in
`ddp_course.lab`. `python -m ddp_course.chapters` redraws `images/`, which a test
compares byte by byte.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from IPython.display import Markdown

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.exercises import Exercise


def rooms() -> list[str]:
    """Return the names of all rooms, in the order of the chapters."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in found if name.startswith("ch"))


def modules() -> Iterator[ModuleType]:
    """Import and yield every module of every room."""
    for room in rooms():
        package = importlib.import_module(f"{__name__}.{room}")
        for module in pkgutil.iter_modules(package.__path__):
            yield importlib.import_module(f"{package.__name__}.{module.name}")


def all_exercises() -> dict[str, Exercise]:
    """Return every exercise of the course by its name."""
    things = (thing for module in modules() for thing in vars(module).values())
    return {thing.name: thing for thing in things if isinstance(thing, Exercise)}


def hint(name: str, step: int = 1) -> Markdown:
    """Show a hint for the exercise `name`; step 2 explains nearly everything."""
    return _exercise(name).hint(step)


def show_solution(name: str) -> Markdown:
    """Show a solution of the exercise `name`."""
    return _exercise(name).solution()


def _exercise(name: str) -> Exercise:
    known = all_exercises()
    if name not in known:
        exercises = ", ".join(known)
        raise ValueError(f"no exercise is called {name!r}; there are {exercises}")
    return known[name]


def images() -> dict[str, Callable[[], Drawing]]:
    """Return {file of `images/`: function that draws it}, collected from all chapters.

    Raises ValueError if two modules draw the same file.
    """
    found: dict[str, Callable[[], Drawing]] = {}
    for module in modules():
        for name, draw in getattr(module, "IMAGES", {}).items():
            if name in found:
                raise ValueError(
                    f"{module.__name__} draws {name}, as another module does"
                )
            found[name] = draw
    return found


def write_images(folder: Path) -> list[Path]:
    """Draw every image of the course into `folder`, and return their paths."""
    folder.mkdir(exist_ok=True)
    for name, draw in images().items():
        draw().save(folder / name)
    return [folder / name for name in images()]
