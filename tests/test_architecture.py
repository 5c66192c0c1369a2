"""The house has floors: who may import whom, read from the source with `ast`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddp_course"
FLOORS = [
    {"launch", "model", "data", "theory", "measure"},
    {"collectives", "mesh", "mechanisms"},
    {"data_parallel", "zero", "tensor_parallel", "pipeline"},
    {"checkpoint", "layouts", "train"},
    {"bench", "commands", "cli"},
]
STRATEGIES = FLOORS[2]
BESIDE = {
    "chapters": {"chapters"},
    "lab": {"chapters", "lab", "commands", "cli"},
}  # who may import it


def room(path: Path) -> str:
    """Return the module or folder directly below ddp_course that `path` belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_entrance(node: ast.AST) -> bool:
    """`if __name__ == "__main__":` is for who comes from outside, above all floors."""
    return (
        isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
    )


def imported(source: str) -> set[str]:
    """Return the rooms of ddp_course that a source text imports from."""
    names = set()
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not is_entrance(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {
        name.split(".")[1] for name in names if name.startswith("ddp_course.")
    } & rooms()


def rooms() -> set[str]:
    return {room(path) for path in PACKAGE.rglob("*.py")} - {"__init__"}


def floor(name: str) -> int | None:
    return next((i for i, names in enumerate(FLOORS) if name in names), None)


def forbidden(name: str, imports: set[str]) -> list[str]:
    """Return what the room `name` must not import, with the reason."""
    wrong = []
    for other in sorted(imports - {name}):
        if other in BESIDE:
            if name not in BESIDE[other]:
                wrong.append(f"{name} imports {other}, which is for notebooks only")
        elif name in BESIDE:
            continue
        elif floor(other) is None or floor(name) is None:
            wrong.append(f"{name} imports {other}: which floor is that?")
        elif name in STRATEGIES and other in STRATEGIES:
            wrong.append(f"strategy {name} imports strategy {other}")
        elif floor(other) > floor(name):
            wrong.append(f"{name} imports {other}, which is on a higher floor")
    return wrong


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_a_floor_imports_only_from_lower_floors(path):
    if path == PACKAGE / "__init__.py":
        return
    assert forbidden(room(path), imported(path.read_text())) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("launch", "from ddp_course.train import train"),
        ("launch", "import ddp_course.lab"),
        ("data", "from ddp_course import bench"),
        ("train", "def f():\n    from ddp_course.lab.palette import INK"),
        ("commands", "from ddp_course.chapters import rooms"),
        ("lab", "from ddp_course.chapters.ch01_ranks import figures"),
        ("train", "if __name__ != '__main__':\n    import ddp_course.cli"),
        ("train", "def f():\n  if __name__ == '__main__':\n    import ddp_course.cli"),
    ],
)
def test_planted_imports_are_seen(name, source):
    assert forbidden(name, imported(source))


def test_only_what_is_for_notebooks_imports_matplotlib():
    for path in PACKAGE.rglob("*.py"):
        if room(path) not in BESIDE:
            assert "matplotlib" not in {
                alias.name.split(".")[0]
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Import)
                for alias in node.names
            }, path


def test_every_room_is_on_a_floor():
    assert {name for name in rooms() if floor(name) is None} == set(BESIDE)
