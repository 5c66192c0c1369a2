"""Sources are shown as they are in the file, and differences as they are."""

import ast
import functools
import html
import re
from pathlib import Path

import pytest
from IPython.display import Markdown

import ddp_course
from ddp_course.chapters.ch01_ranks.exercises import check_global_rank
from ddp_course.lab import Drawing, Prediction, show_diff, show_source
from ddp_course.lab import palette as palette_module
from ddp_course.lab.palette import darker, lighter
from ddp_course.lab.source import COLORS, without_docstrings
from ddp_course.launch import Topology, topology

ROOT = Path(ddp_course.__file__).parents[1]


IN, OUT = (f'<span style="background-color:{COLORS[sign]}">' for sign in "+-")


def fenced(markdown):
    """The contents of all code fences."""
    return re.findall(r"^(`{3,})python\n(.*?)\n\1$", markdown.data, re.S | re.M)


def code(markdown):
    (found,) = fenced(markdown)
    return found[1]


def test_a_function_below_its_file():
    shown = show_source(darker)
    assert isinstance(shown, Markdown)
    assert shown.data == (
        "`ddp_course/lab/palette.py`\n\n"
        "```python\n"
        'def darker(color: str, amount: float = 0.45) -> str:\n'
        '    """Return `color` mixed with black: the edge of a block."""\n'
        '    return _mix(color, "#000000", amount)\n'
        "```"
    )  # fmt: skip


def test_some_functions_are_shown_and_the_whole_is_folded():
    shown = show_source(darker, Topology, only="place places", docstring=False).data
    some, fold = shown.split("<details>")
    assert some.index("def darker(") < some.index("def place(") < some.index("places(")
    assert "class Topology" not in some
    assert fold.startswith("<summary>all of <code>Topology</code></summary>\n\n```")
    assert "@dataclass" in fold and fold.endswith("```\n\n</details>")
    assert '"""' not in fold
    with pytest.raises(AttributeError, match="nothing"):
        show_source(Topology, only="nothing")


def test_a_method_is_dedented():
    shown = code(show_source(Topology.places))
    assert shown.startswith("def places(self)")
    assert shown in (
        "\n".join(line[4:] for line in Path(topology.__file__).read_text().splitlines())
    )


@pytest.mark.parametrize(
    "thing", [Topology.world_size, Topology(2, 3).place, functools.partial(darker, "x")]
)
def test_properties_bound_methods_and_partials(thing):
    [shown] = ast.parse(code(show_source(thing))).body
    assert isinstance(shown, ast.FunctionDef)


def test_a_class_and_a_module():
    assert code(show_source(Topology)).startswith("@dataclass(frozen=True)\nclass Topo")
    text = Path(topology.__file__).read_text().rstrip()
    assert code(show_source(topology)) == text
    assert show_source(ddp_course).data.startswith("`ddp_course/__init__.py`\n")


def test_a_check_is_shown_as_the_function_it_was():
    assert '@exercise("global_rank"' in code(show_source(check_global_rank))


def test_one_heading_for_neighbours():
    shown = show_source(darker, lighter, Topology.place, Topology.places)
    assert len(fenced(shown)) == 4
    files = re.findall(r"^`(ddp_course\S+)`$", shown.data, re.M)
    assert files == ["ddp_course/lab/palette.py", "ddp_course/launch/topology.py"]


def test_a_function_of_another_library():
    from torch.nn.parallel import DistributedDataParallel

    shown = show_source(DistributedDataParallel.no_sync)
    assert shown.data.startswith("`torch/nn/parallel/distributed.py`\n")


def test_a_function_of_a_notebook(monkeypatch):
    def cell():
        return 1

    monkeypatch.setattr(cell, "__module__", "__main__")
    assert show_source(cell).data.startswith("`this notebook`")


def test_without_docstrings_it_is_the_same_program():
    for file in sorted(ROOT.glob("ddp_course/lab/**/*.py")):
        text = file.read_text()
        bare = without_docstrings(text)
        program, same = ast.parse(text), ast.parse(bare)
        for node in ast.walk(program):
            body = getattr(node, "body", None)
            if isinstance(body, list) and len(body) > 1 and _is_docstring(node):
                del body[0]
        assert ast.dump(program) == ast.dump(same), file
        lines = iter(text.splitlines())  # lines were only taken away
        assert all(line in lines for line in bare.splitlines()), file


def _is_docstring(node):
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    first = node.body[0]
    return (
        isinstance(node, kinds)
        and isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )


def test_a_docstring_that_is_all_there_is_stays():
    from ddp_course.lab.exercises import Hint

    assert "text describes" in code(show_source(Hint, docstring=False))


def test_no_docstring():
    assert '"""' not in code(show_source(Topology, docstring=False))
    lines = code(show_source(Topology, docstring=False)).splitlines()
    assert lines[1:3] == ["class Topology:", "    nnodes: int = 1"]  # no gap is left


def fence_inside():
    """Show:

    ```python
    x = 1
    ```
    """


def test_a_fence_in_the_source_does_not_end_the_fence():
    shown = show_source(fence_inside)
    assert "````python\n" in shown.data
    assert code(shown).endswith('"""')


@pytest.mark.parametrize("thing", [len, int, 3, "x", Topology(1, 1), None, [].append])
def test_what_has_no_source(thing):
    with pytest.raises(TypeError, match="source to show"):
        show_source(thing)
    with pytest.raises(TypeError, match="source to show"):
        show_diff(darker, thing)


def test_nothing_to_show():
    with pytest.raises(TypeError, match="pass a function"):
        show_source()


def test_no_line_numbers_and_nothing_printed(capsys):
    shown = show_source(Drawing).data + show_diff(darker, lighter).data
    assert not re.search(r"^\s*\d+[ :|]", shown, re.M)
    assert capsys.readouterr().out == ""


def test_a_difference():
    assert show_diff(darker, lighter, docstring=False).data == (
        "`darker` → `lighter` in `ddp_course/lab/palette.py`\n\n"
        '<pre style="word-break:normal">'
        f"{OUT}-def darker(color: str, amount: float = 0.45) -&gt; str:</span>\n"
        f'{OUT}-    return _mix(color, "#000000", amount)</span>\n'
        f"{IN}+def lighter(color: str, amount: float = 0.55) -&gt; str:</span>\n"
        f'{IN}+    return _mix(color, "#FFFFFF", amount)</span></pre>'
    )


def price(amount):
    return f"${amount:<3} & ${amount}"


def test_a_difference_is_neither_html_nor_a_formula():
    shown = show_diff(price, better).data
    assert 'f"&#36;{amount:&lt;3} &amp; &#36;{amount}"' in shown


def naive(x):
    a = 1
    b = 2
    c = 3
    return x + a + b + c


def better(x):
    a = 1
    b = 2
    c = 3
    return x + sum((a, b, c))


def test_a_difference_gives_back_both():
    (found,) = re.findall("<pre[^>]*>(.*)</pre>", show_diff(naive, better).data, re.S)
    lines = html.unescape(re.sub("</?span[^>]*>", "", found)).splitlines()
    before = "\n".join(line[1:] for line in lines if line[0] in " -")
    after = "\n".join(line[1:] for line in lines if line[0] in " +")
    assert (before, after) == (code(show_source(naive)), code(show_source(better)))


def test_no_difference():
    shown = show_diff(naive, naive).data
    assert shown.startswith("`naive` → `naive` in ")
    assert shown.endswith(": the same source.")


def test_two_files():
    assert show_diff(darker, Prediction).data.startswith(
        "`darker` → `Prediction` in `ddp_course/lab/palette.py` → "
        "`ddp_course/lab/predict.py`\n"
    )
    assert palette_module.darker is darker
