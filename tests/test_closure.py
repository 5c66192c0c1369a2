"""What a reader must trust to trust one module: the files that its imports lead to.

`from package import name` leads to the file that defines the name, not to the package's
`__init__`. Imports inside of functions count, those under TYPE_CHECKING do not.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ddp_course"
NAIVE, READABLE, FULL = (2, 250), (8, 1_200), (20, 3_500)  # files, lines

BARS = {
    "launch.api": FULL,
    "launch.naive": NAIVE,
    "collectives.naive": NAIVE,
    "collectives.tree": READABLE,
    "collectives.ring": READABLE,
    "collectives.halving_doubling": READABLE,
    "collectives.hierarchical": READABLE,
    "collectives.runtime": READABLE,
    "collectives.communicator": READABLE,
    "data_parallel.naive": NAIVE,
    "data_parallel.flat": NAIVE,
    "data_parallel.bucketed": READABLE,
    "data_parallel.ddp": FULL,
    "zero.naive": NAIVE,
    "zero.offloaded_optimizer": NAIVE,
    "zero.stage1": READABLE,
    "zero.stage2": READABLE,
    "zero.zero_redundancy_optimizer": FULL,
    "zero.sharded_gradient_optimizer": FULL,
    "zero.stage3_naive": NAIVE,
    "zero.stage3_simple": READABLE,
    "zero.stage3": FULL,
    "tensor_parallel.naive": NAIVE,
    "tensor_parallel.layers": READABLE,
    "tensor_parallel.gpt": FULL,
    "context_parallel.naive": NAIVE,
    "context_parallel.ulysses": NAIVE,
    "context_parallel.ring": READABLE,
    "context_parallel.gpt": FULL,
    "experts.naive": NAIVE,
    "experts.balance": NAIVE,
    "experts.segments": NAIVE,
    "experts.gathered": NAIVE,
    "experts.dispatch": READABLE,
    "experts.gpt": FULL,
    "failures.rates": NAIVE,
    "failures.interval": NAIVE,
    "failures.digests": NAIVE,
    "pipeline.by_hand": NAIVE,
    "pipeline.runtime": READABLE,
    "generation": READABLE,
    "pipeline.decoding": READABLE,
    "pipeline.pipeline_parallel": FULL,
    "parameter_server.naive": NAIVE,
    "parameter_server.hogwild": NAIVE,
    "parameter_server.central": READABLE,
    "compression.naive": NAIVE,
    "compression.powersgd": READABLE,
    "compression.sign": READABLE,
    "compression.sparse": READABLE,
    "compression.blocks": READABLE,
    "local_sgd.naive": NAIVE,
    "local_sgd.local": READABLE,
    "local_sgd.local_sgd": FULL,
    "communication_order.naive": NAIVE,
    "communication_order.ordered": READABLE,
    "communication_order.scheduled": FULL,
    "train": (70, 10_000),
}


def file_of(module: str) -> Path | None:
    path = PACKAGE.parent / Path(*module.split("."))
    both = path.with_suffix(".py"), path / "__init__.py"
    return next((each for each in both if each.exists()), None)


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """Yield (module, name or None) for every import of this package in a file."""
    package = path.relative_to(PACKAGE.parent).parts[:-1]
    tree = ast.parse(path.read_text())
    for_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for line in branch.body
        for node in ast.walk(line)
    }
    for node in (n for n in ast.walk(tree) if id(n) not in for_types):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


def defining(module: str, name: str | None, seen: frozenset = frozenset()) -> Path:
    """Return the file that defines `name` of `module`."""
    if name and (inner := file_of(f"{module}.{name}")):
        return inner
    path = file_of(module)
    if path and name and path.name == "__init__.py" and (module, name) not in seen:
        for other, its_name in imports(path):
            if its_name == name:
                return defining(other, name, seen | {(module, name)})
    return path


def closure(module: str) -> dict[Path, int]:
    """Return all files that a module leads to, with their numbers of lines."""
    todo, found = [file_of(module)], {}
    while todo:
        path = todo.pop()
        if path not in found:
            found[path] = path.read_text().count("\n")
            pairs = [p for p in imports(path) if p[0].split(".")[0] == PACKAGE.name]
            todo += filter(None, (defining(*pair) for pair in pairs))
    return found


@pytest.mark.parametrize("rung", BARS)
def test_a_rung_can_be_read_alone(rung):
    found = closure(f"ddp_course.{rung}")
    files, lines = BARS[rung]
    names = "\n".join(f"{n:6} {path.relative_to(PACKAGE)}" for path, n in found.items())
    assert (len(found) <= files, sum(found.values()) <= lines) == (True, True), (
        f"{rung} leads to {len(found)} files with {sum(found.values())} lines; its bar "
        f"is {files} and {lines}:\n{names}"
    )
