"""Answers as text: most wrong ones are slips, the solution with some text exchanged.

A line names the answer and words of its hint; what is wrong stands indented below it.
A right answer has no words, and most often another body than the solution:

    divides_first:
        dist.all_reduce(tensor.div_(dist.get_world_size()))

    the_sum: That is the sum
        tensor /= dist.get_world_size() =>
    always_the_first: rank 1 got
        return chunks[rank]
        => print(rank)
        => return chunks[0]
    on_rank_0_only: rank 1 has
        dist.reduce(tensor, 0)
    never_ends: have not returned after

`the_sum` and the next one exchange `old => new`, where lines that begin with `=>` go on
with the new text. Exchanges are made in order, each in the text that the one before has
left. Then come another body, and, with nothing below it, a function of the file.
"""

import ast
import inspect
import linecache
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType


def answers(solutions: ModuleType, own: dict, **texts: str) -> dict[str, dict]:
    """Return each exercise's answers, with their hints; `own`: the file's names.

    What is written in the texts sees the names of the solution and those in `own`.
    """
    return {
        name: dict(parse_answers(getattr(solutions, name), own, text))
        for name, text in texts.items()
    }


def parse_answers(
    solution: Callable, own: dict, text: str
) -> Iterator[tuple[Callable, str]]:
    """Yield the answers that `text` tells, each with words of its hint, "" if right."""
    for block in re.split(r"\n(?=\S)", textwrap.dedent(text).strip()):
        first, _, other = block.partition("\n")
        name, _, hint = first.partition(":")
        yield slip(solution, name, other, own) if other else own[name], hint.strip()


def slip(solution: Callable, name: str, other: str, own: dict) -> Callable:
    """Return `solution` under another name, with what is `other` in it."""
    source = textwrap.dedent(inspect.getsource(solution))
    other = textwrap.dedent(other)
    if "=>" in other:
        source = exchanged(source, name, other)
    else:
        first = ast.parse(source).body[0].body[0].lineno
        head = source.splitlines(keepends=True)[: first - 1]
        source = "".join(head) + textwrap.indent(other, "    ") + "\n"
    file = f"slip {name} of {solution.__name__}"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    names = vars(sys.modules[solution.__module__])
    namespace = {**own, **names, "__name__": "slips"}
    exec(compile(ast.parse(source), file, "exec"), namespace)
    namespace[solution.__name__].__name__ = name
    return namespace[solution.__name__]


def exchanged(source: str, name: str, changes: str) -> str:
    """Return `source` with every old text of `changes` exchanged for its new one.

    Each old one must be there once: a slip that changes nothing is no wrong answer. If
    a new one has several lines, they are as far to the right as the old one's line.
    """
    for change in re.split(r"\n(?!=>)", changes.strip()):
        old, *new = re.split(r"\s*=> ?", change)
        assert new, f"{name}: no => after {old!r}"
        assert source.count(old) == 1, f"{name}: {source.count(old)} times {old!r}"
        line = source[: source.index(old)].rpartition("\n")[2]
        indent = line[: len(line) - len(line.lstrip())]
        source = source.replace(old, f"\n{indent}".join(new))
    return source
