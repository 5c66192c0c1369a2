"""The house has floors and no circles: who may import whom, read from the source.

Every import counts: also within a function, and by `import_module`. Only what is under
`if TYPE_CHECKING` is not there when the program runs.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from textwrap import indent

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddp_course"
FLOORS = [
    {
        "launch",
        "model",
        "generation",
        "data",
        "theory",
        "measure",
        "learners_copy",
        "coordinates",
        "gpt_config",
        "ledger",
        "planning",
        "spec",
    },
    {"collectives", "mesh", "mechanisms", "precision", "compression", "strategy"},
    {
        *("data_parallel", "zero", "tensor_parallel", "pipeline", "parameter_server"),
        *("communication_order", "local_sgd", "context_parallel", "experts"),
        "failures",
    },
    {"checkpoint", "parallelize", "train"},
    {"bench", "commands", "cli", "preload", "__main__"},
]
STRATEGIES = FLOORS[2]
BESIDE = {
    "chapters": {"chapters", "preload"},
    "lab": {"chapters", "lab", "commands", "cli"},
}  # who may import it


def name_of(path: Path) -> str:
    """Return "ddp_course.zero.naive" for a file; a folder's name for its __init__."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
BY_NAME = [name for name in MODULES if not name.endswith("__main__")]
ROOMS = {name.split(".")[1] for name in MODULES if "." in name}


def imported(source: str, by: str = "") -> set[str]:
    """Return the modules of ddp_course that a source text imports, wherever in it.

    A name put together at run time, f"{__name__}.{found}" in the module `by`, stands
    for all that it can be; a variable alone is what others ask for, and none of ours.
    """
    names = set()
    for node in running(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {name if name in MODULES else node.module for name in full}
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            for asked in (pattern(arg, by) for arg in node.args):
                names |= {name for name in BY_NAME if fnmatch(name, asked)}
    return names & MODULES.keys() - {by}


def pattern(name: ast.expr, by: str) -> str:
    """Return what is known of a text before it runs, and * for the rest of it."""
    if isinstance(name, ast.JoinedStr):
        return "".join(pattern(part, by) for part in name.values)
    if isinstance(name, ast.FormattedValue):
        return by if ast.unparse(name.value).endswith("__name__") else "*"
    return str(name.value) if isinstance(name, ast.Constant) else ""


def running(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below this one, but not what is for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if not (
            isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        ):
            yield child
            yield from running(child)


@cache
def graph() -> Mapping[str, set[str]]:
    return {name: imported(path.read_text(), name) for name, path in MODULES.items()}


def circle(imports: Mapping[str, set[str]]) -> list[str] | None:
    """Return modules of which each imports the next and the last the first, if any."""
    try:
        TopologicalSorter({k: v - {k} for k, v in imports.items()}).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def room(module: str) -> str:
    """Return the module or folder directly below ddp_course; "" for itself."""
    return module.partition(".")[2].partition(".")[0]


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


def test_a_floor_imports_only_from_lower_floors():
    wrong = {}
    for module, imports in graph().items():
        if room(module):
            wrong[module] = forbidden(room(module), {*map(room, imports)} - {""})
    assert {module: found for module, found in wrong.items() if found} == {}


def test_nothing_imports_in_a_circle():
    assert circle(graph()) is None


def rooms_of(imports: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return which folders each folder imports; the package's own init is no folder."""
    rooms: dict[str, set[str]] = {}
    for module, others in imports.items():
        beside = {room(other) for other in others} - {"", room(module)}
        rooms.setdefault(room(module), set()).update(beside)
    return {name: others for name, others in rooms.items() if name}


def test_rooms_import_no_room_in_a_circle():
    """Also where the files themselves form none."""
    assert circle(rooms_of(graph())) is None


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("ddp_course.bench.turns", "from ddp_course.commands.doctor import in_words"),
        ("ddp_course.lab.exercises", "def f():\n    import ddp_course.commands.train"),
    ],
)
def test_a_planted_circle_of_rooms_is_seen(file, source):
    planted = {**graph(), file: graph()[file] | imported(source, file)}
    assert circle(planted) is None, "these files form none"
    assert circle(rooms_of(planted))


def test_the_package_itself_starts_the_fork_server_and_no_more():
    """Every import of a part of the package runs its __init__ first."""
    assert {room(name) for name in graph()["ddp_course"]} == {"launch"}


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("launch", "from ddp_course.train import train"),
        ("launch", "import ddp_course.lab"),
        (
            "launch",
            "from importlib import import_module\nimport_module('ddp_course.cli')",
        ),
        ("data", "from ddp_course import bench"),
        ("train", "def f():\n    from ddp_course.lab.palette import INK"),
        ("commands", "import ddp_course.chapters.ch01_ranks"),
        ("lab", "from ddp_course.chapters.ch01_ranks import figures"),
        ("train", "if __name__ == '__main__':\n    import ddp_course.cli"),
        ("zero", "from ddp_course.data_parallel.naive import time"),
        ("launch", "import_module(f'ddp_course.commands.{name}')"),
    ],
)
def test_planted_imports_are_seen(name, source):
    assert forbidden(name, {room(module) for module in imported(source)})


@pytest.mark.parametrize(
    "source",
    [
        "from ddp_course.mechanisms.hooks import on_gradient",
        "def f():\n    import ddp_course.train",
        "import importlib\nimportlib.import_module('ddp_course.zero')",
        "import_module(f'{__name__}.{name}')",
    ],
)
def test_a_planted_circle_is_seen(source):
    begin = min(imported(source, "ddp_course.bench"))
    way = {**graph(), "planted": {begin}, begin: {*graph()[begin], "planted"}}
    assert "planted" in circle(way)
    assert not imported("if TYPE_CHECKING:\n" + indent(source, "    "))


def test_only_what_is_for_notebooks_imports_matplotlib():
    for name, path in MODULES.items():
        if room(name) not in BESIDE:
            assert "matplotlib" not in {
                alias.name.split(".")[0]
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Import)
                for alias in node.names
            }, path


def test_every_room_is_on_a_floor():
    assert {name for name in ROOMS if floor(name) is None} == set(BESIDE)


# ---- reading lists -------------------------------------------------------------------

FOLDERS = sorted({path.parent for path in MODULES.values()} - {PACKAGE})
READ_IN_ORDER = [path for path in FOLDERS if path.parent.name != "chapters"]


def not_listed(docstring: str, files: Iterable[str]) -> list[str]:
    """Return the files that no row of a reading list names.

    A row is indented, or has a name, two or more spaces, and a description.
    """
    rows = re.findall(r"^(?:    .*|[\w, ]+?\s{2,}.*)$", docstring, re.MULTILINE)
    words = set(re.findall(r"\w+", "\n".join(rows)))
    return sorted(set(files) - words)


@pytest.mark.parametrize("folder", READ_IN_ORDER, ids=lambda path: path.name)
def test_a_rooms_reading_list_names_every_file(folder):
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    assert not_listed(docstring, files) == []


def test_a_file_that_no_reading_list_names_is_seen():
    listed = "A room about naive things.\n\n    ring, tree  two files\nplan  one"
    assert not_listed(listed, ["ring", "tree", "plan"]) == []
    assert not_listed(listed, ["naive", "ring"]) == ["naive"]
