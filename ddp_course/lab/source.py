"""Show the package's own source, and the difference between two versions.

Notebooks show the package's code instead of repeating it, so no definition exists
twice. Both functions return Markdown, which a cell displays if it ends with the call.
"""

from __future__ import annotations

import ast
import difflib
import functools
import html
import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from IPython.display import Markdown

COLORS = {"+": "rgba(46,160,67,0.25)", "-": "rgba(218,54,51,0.25)"}  # added, removed


def show_source(*objects: Any, docstring: bool = True, only: str = "") -> Markdown:
    """Show the source of functions, classes, methods or modules, below its file's name.

    With `docstring=False`, docstrings are left out. `only` names functions of the last
    object, a class or a module: these are shown, and the whole object is folded below
    them until the reader opens it. Raises TypeError for an object without Python
    source, such as `len`, or of another type.
    """
    if not objects:
        raise TypeError(
            "show_source() got no argument; pass a function, class, method or module"
        )
    *shown, whole = objects
    shown += [getattr(whole, name) for name in only.split()] or [whole]
    parts: list[str] = []
    file = None
    for thing in shown:
        if (its_file := _file(thing)) != file:
            file = its_file
            parts.append(f"`{file}`")
        parts.append(_fence("python", source(thing, docstring)))
    if only:
        title = f"<details><summary>all of <code>{_name(whole)}</code></summary>"
        parts += [title, _fence("python", source(whole, docstring)), "</details>"]
    return Markdown("\n\n".join(parts))


def show_diff(a: Any, b: Any, *, docstring: bool = True) -> Markdown:
    """Show the difference from the source of `a` to that of `b`: lines with - and +.

    Unchanged lines are shown, too.
    """
    before, after = (source(thing, docstring).splitlines() for thing in (a, b))
    every = max(len(before), len(after))
    lines = difflib.unified_diff(before, after, n=every, lineterm="")
    # Drop two lines with file names, and one with numbers such as "@@ -3,5 +3,7 @@".
    body = list(lines)[3:]
    files = list(dict.fromkeys([_file(a), _file(b)]))
    title = f"`{_name(a)}` → `{_name(b)}` in " + " → ".join(f"`{f}`" for f in files)
    if not body:
        return Markdown(f"{title}: the same source.")
    return Markdown(f"{title}\n\n{_colored(body)}")


def source(thing: Any, docstring: bool = True) -> str:
    """Return the source of `thing`, dedented, with or without docstrings."""
    thing = _plain(thing)
    try:
        text = inspect.getsource(thing)
    except (TypeError, OSError):
        raise TypeError(f"{_name(thing)} has no Python source to show") from None
    text = textwrap.dedent(text).rstrip()
    return text if docstring else without_docstrings(text)


def _plain(thing: Any) -> Any:
    """Return the function in a property, a bound method or a decorator's wrapper."""
    if isinstance(thing, property):
        thing = thing.fget
    if isinstance(thing, functools.partial):
        thing = thing.func
    thing = inspect.unwrap(getattr(thing, "__func__", thing))
    kinds = inspect.isroutine, inspect.isclass, inspect.ismodule
    if not any(is_kind(thing) for is_kind in kinds):
        raise TypeError(
            f"functions, classes, methods and modules have a source to show; an object "
            f"of type {type(thing).__name__} is none of them"
        )
    return thing


def _name(thing: Any) -> str:
    thing = _plain(thing)
    return getattr(thing, "__qualname__", None) or thing.__name__


def _file(thing: Any) -> str:
    """Return the path of the file that defines `thing`: "ddp_course/model.py"."""
    source(thing)  # raises a clear error if it has no source
    thing = _plain(thing)
    module = thing if isinstance(thing, ModuleType) else inspect.getmodule(thing)
    if module is None or module.__name__ == "__main__":
        return "this notebook"
    path = Path(inspect.getsourcefile(thing))
    depth = module.__name__.count(".") + (path.name == "__init__.py")
    return path.relative_to(path.parents[depth]).as_posix()


def without_docstrings(text: str) -> str:
    """Remove all docstrings, unless one is the whole body of a function or class."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(body, list) and len(body) > 1 and _has_docstring(node):
            first, last = body[0].lineno - 1, body[0].end_lineno
            if last < len(lines) and not lines[last].strip():
                last += 1  # the blank line after the docstring
            lines[first:last] = [None] * (last - first)
    return "\n".join(line for line in lines if line is not None)


def _has_docstring(node: ast.AST) -> bool:
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    return isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None


def _colored(lines: list[str]) -> str:
    """Return a difference as coloured HTML; JupyterLab does not colour diffs.

    The background colours are transparent, so that they suit light and dark themes.
    """
    parts = []
    for line in lines:
        text = html.escape(line, quote=False).replace("$", "&#36;")  # no formula
        color = COLORS.get(line[:1])
        style = f'<span style="background-color:{color}">'
        parts.append(f"{style}{text}</span>" if color else text)
    return (
        "\n".join(['<pre style="word-break:normal">' + parts[0], *parts[1:]]) + "</pre>"
    )


def _fence(language: str, text: str) -> str:
    """Enclose `text` in a code fence that is longer than any fence inside it."""
    longest = max((len(run) for run in re.findall("`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
