"""Names, choices and defaults stand in `spec.py`: nowhere are they listed again.

Functions stand in their rooms, in dictionaries by name; test_cli compares those with
`spec`. Chapters may choose some names to show.
"""

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from ddp_course import spec

PACKAGE = Path(__file__).parents[1] / "ddp_course"
CHOICES = [
    {*map(str, getattr(spec, name))}
    for name in (
        "ATTENTION",
        "COMPRESSORS",
        "DATA_PARALLEL",
        "MODELS",
        "OPTIMIZERS",
        "PLANNED",
        "RECOMPUTE",
        "SCHEDULES",
    )
]
DEFAULTS = {
    each.name: (each.default, each.metadata["choices"])
    for its in (spec.Training, spec.Layout)
    for each in fields(its)
    if each.metadata["choices"] and isinstance(each.default, str)
}


def listed(source: str) -> Iterator[str]:
    """Yield each list of three names of one choice, or two that are asked for by `in`.

    And each default of an argument that is another choice than in `spec`.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            yield from _too_many(node, 3)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
            yield from _too_many(node.comparators[0], 2)
        elif isinstance(node, ast.arguments):
            positional = [*node.posonlyargs, *node.args][::-1]
            pairs = [*zip(positional, node.defaults[::-1], strict=False)]
            pairs += zip(node.kwonlyargs, node.kw_defaults, strict=True)
            for arg, default in pairs:
                value = getattr(default, "value", None)
                known, choices = DEFAULTS.get(arg.arg, (value, ()))
                if value in choices and value != known:
                    yield f"line {arg.lineno}: {arg.arg}={value!r}; spec has {known!r}"


def _too_many(node: ast.AST, count: int) -> Iterator[str]:
    values = {getattr(each, "value", None) for each in getattr(node, "elts", ())}
    for choice in CHOICES:
        if len(found := values & choice) >= count:
            yield f"line {node.lineno} lists {sorted(found)}; take them from spec"


def test_no_choice_is_listed_twice():
    found = {
        str(path.relative_to(PACKAGE)): [*listed(path.read_text())]
        for path in PACKAGE.rglob("*.py")
        if path.name != "spec.py" and "chapters" not in path.parts
    }
    assert {file: its for file, its in found.items() if its} == {}


@pytest.mark.parametrize(
    "source",
    [
        'KNOWN = ("ring", "gathered", "ulysses")',
        'KNOWN = {"gpipe", "1f1b", "interleaved", "mine"}',
        'several = schedule in ("interleaved", "zero_bubble")',
        'def f(x, schedule="gpipe", *, n=1): ...',
        'def f(*, attention="ulysses"): ...',
    ],
)
def test_a_planted_list_or_default_is_seen(source):
    assert len([*listed(source)]) == 1


@pytest.mark.parametrize(
    "source",
    [
        'MADE = {"ring": f, "gathered": g, "ulysses": h}',
        'two = ["gpipe", "1f1b"]',
        'def f(x, schedule="1f1b", *, attention=None): ...',
    ],
)
def test_functions_by_name_and_the_same_default_are_none(source):
    assert [*listed(source)] == []
