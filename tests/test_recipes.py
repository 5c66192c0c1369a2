"""The recipes of CONTRIBUTING.md, each carried out on a copy of the tree.

Each recipe's list of files is held against the files that the trial touches, and the
copy's own tests must pass with all four additions, and a new chapter, in it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from ddp_course import chapters
from ddp_course.launch.server import IN_SERVER

ROOT = Path(__file__).parents[1]
Edit = Callable[[str], str]


def append(text: str) -> Edit:
    return lambda before: before + text


def insert(anchor: str, text: str) -> Edit:
    """Insert `text` behind the only place where `anchor` stands."""

    def edit(before: str) -> str:
        assert before.count(anchor) == 1, (anchor, before.count(anchor))
        return before.replace(anchor, anchor + text)

    return edit


def add_cells(*cells) -> Edit:
    def edit(before: str) -> str:
        notebook = nbformat.reads(before, as_version=4)
        notebook.cells += cells
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        for count, cell in enumerate(code, start=1):
            cell.execution_count = count
        return nbformat.writes(notebook)

    return edit


def together(*edits: Edit) -> Edit:
    def edit(text: str) -> str:
        for each in edits:
            text = each(text)
        return text

    return edit


EXERCISE = {
    "ddp_course/chapters/ch01_ranks/solutions.py": append('''

def node_of(rank: int, nproc_per_node: int) -> int:
    """Return the node on which a rank runs: the nodes before it are full."""
    return rank // nproc_per_node
'''),
    "ddp_course/chapters/ch01_ranks/exercises.py": append('''

@exercise("node_of", solution=solutions.node_of)
def check_node_of(answer: Answer) -> str:
    """`node_of(rank, nproc_per_node)`: the node on which a rank runs.

    How many full nodes come before this rank's node?

    As many as `nproc_per_node` fits into the rank, without a remainder.
    """
    for p, cluster in PLACES:
        size = cluster.nproc_per_node
        why = f"each node has {size} ranks"
        expect_call(answer, p.rank, size, returns=p.node_rank, because=why)
    return SHAPES
'''),
    "tests/chapters/ch01_ranks/answers.py": append('''
ANSWERS |= answers(
    solutions,
    globals(),
    node_of="""
    counted_down:
        node = 0
        while (node + 1) * nproc_per_node <= rank:
            node += 1
        return node
    by_divmod:
        return divmod(rank, nproc_per_node)[0]
    the_remainder: each node has 4 ranks
        // => %
    always_four: each node has 3 ranks
        // nproc_per_node => // 4
    a_quotient: returned `0.0`
        // => /
    """,
)
'''),
    "notebooks/01_ranks.ipynb": add_cells(
        new_markdown_cell("**`node_of`**: on which node does a rank run?"),
        new_code_cell(
            "from ddp_course.chapters.ch01_ranks.exercises import check_node_of\n\n\n"
            "def node_of(rank, nproc_per_node):\n    raise NotImplementedError\n\n\n"
            "check_node_of(node_of)",
            metadata={"tags": ["nbval-ignore-output"]},
        ),
    ),
}
SCHEDULE = {
    "ddp_course/pipeline/schedules.py": append('''

def v_shaped(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return GPipe with two stages on each rank: r, and 2 * num_ranks - 1 - r.

    So rank 0 has the first stage and the last one.
    """
    p, m = num_ranks, num_microbatches
    check_counts(num_ranks=p, num_microbatches=m)
    rows = []
    for rank in range(p):
        own = rank, 2 * p - 1 - rank
        rows.append(_in_groups("F", own, [m]) + _in_groups("B", own[::-1], [m]))
    return Schedule("v_shaped", 2 * p, m, rows)


SCHEDULES.update(v_shaped=v_shaped)
'''),
    "ddp_course/spec.py": insert(
        "\nSCHEDULES = {\n", '    "v_shaped": ScheduleName("V-shaped", 2),\n'
    ),
    "tests/pipeline/test_schedules.py": insert(
        "\nORDERS = {\n",
        """\
    "v_shaped": [
        "0F0 0F1 0F2 3F0 3F1 3F2 3B0 3B1 3B2 0B0 0B1 0B2",
        "1F0 1F1 1F2 2F0 2F1 2F2 2B0 2B1 2B2 1B0 1B1 1B2",
    ],
""",
    ),
    "notebooks/11_pipeline_schedules.ipynb": add_cells(
        new_code_cell(
            "from ddp_course.pipeline import SCHEDULES\n\n"
            "print(SCHEDULES['v_shaped'](2, 4))"
        ),
    ),
}
AXIS = {
    "ddp_course/spec.py": together(
        insert(
            "        averaged=True,\n        rows=True,\n    ),\n",
            '    "pod": Axis("pods of ranks", "pods", averaged=True, rows=True),\n',
        ),
        insert(
            '    dp: int = option(1, AXES["dp"].about)\n',
            '    pod: int = option(1, AXES["pod"].about)\n',
        ),
    ),
    "ddp_course/pods/__init__.py": append(
        '"""Floor 2: pods of ranks, with slow links between them. Read:\n\n'
        '    axis    leave the model as it is\n"""\n'
    ),
    "ddp_course/pods/axis.py": append('''\
"""The axis pod: gradients are averaged along it and dp together."""

from ddp_course.spec import Layout
from ddp_course.strategy import Strategy


def strategy(layout: Layout) -> Strategy:
    """Return how the ranks along pod train: as those along dp do."""
    return Strategy()
'''),
    "tests/test_architecture.py": insert('"context_parallel"', ', "pods"'),
    "tests/pods/test_pods.py": append('''\
"""Pods train as one process does, each on rows of its own."""

from functools import partial

import pytest

from ddp_course.launch import spawn
from ddp_course.spec import SpecError, layout_for
from ddp_course.train import train


@pytest.mark.parametrize("options", [{"dp": 2}, {"tp": 2, "zero": 1}])
def test_two_pods_train_like_one_process(options):
    layout = layout_for(4, pod=2, **options)
    shares = [layout.share(rank)[0] for rank in range(4)]
    assert shares == ([0, 1, 2, 3] if layout.dp == 2 else [0, 0, 1, 1])
    with pytest.raises(SpecError, match="7 rows cannot be shared equally"):
        layout.check(batch_size=7)
    run = partial(train, steps=2, batch_size=4)
    alone = spawn(run, output="none")[0]
    for each in spawn(partial(run, pod=2, **options), output="none"):
        assert each.losses == pytest.approx(alone.losses)
'''),
    "README.md": insert(
        "ring attention |\n", "| `pods/` | pods of ranks with other rows |\n"
    ),
}
BUCKET = {
    "ddp_course/compression/ternary.py": append('''\
"""Each number as -1, 0 or 1 times the largest. After Wen et al. 2017, TernGrad."""

import torch
from torch import Tensor

from ddp_course.compression.exchange import Exchange
from ddp_course.compression.hook import Gathered, as_bytes


class Ternary(Gathered):
    """A compressor that sends one byte per number, and one float32 for all."""

    def __init__(self, feedback: bool = True, exchange: Exchange | None = None) -> None:
        super().__init__(feedback, exchange)

    def encode(self, v: Tensor, index: int) -> Tensor:
        """Return -1, 0 and 1 as bytes, and the scale."""
        scale = v.abs().max().float().view(1)
        return as_bytes((v / scale).round().to(torch.int8), scale)

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        """Return the scaled numbers."""
        scale = sent[-4:].clone().view(torch.float32)
        return (sent[:-4].view(torch.int8) * scale).to(like.dtype)
'''),
    "ddp_course/compression/named.py": together(
        insert(
            "from ddp_course.compression.sparse import RandomK, TopK\n",
            "from ddp_course.compression.ternary import Ternary\n",
        ),
        insert(
            "    {\n",
            '        "ternary": lambda exchange: Ternary(exchange=exchange),\n',
        ),
    ),
    "ddp_course/compression/__init__.py": insert(
        "    sign        one bit a number\n", "    ternary     -1, 0 or 1\n"
    ),
    "ddp_course/spec.py": insert('    "sign": None,\n', '    "ternary": None,\n'),
    "tests/compression/test_compressors.py": insert(
        'ALL += ("powersgd:1", "powersgd:3"', ', "ternary"'
    ),
    "ddp_course/theory/compression.py": insert(
        "METHODS: dict[str, Callable[..., int]] = {\n",
        '    "ternary": lambda shapes, d, n, rank, _: (n - 1) * (d + FLOAT32),\n',
    ),
    "notebooks/14_fewer_bytes.ipynb": add_cells(
        new_markdown_cell("Ternary numbers: one of -1, 0 and 1 for each."),
        new_code_cell(
            'from ddp_course.compression import compressor\n\ncompressor("ternary")'
        ),
    ),
}

CELLS = [
    new_markdown_cell(
        "# 99 What does a new chapter need? One folder and this page.\n\n"
        "**Time:** 1 minutes to read."
    ),
    new_code_cell(
        "from ddp_course.chapters.ch99_toy.exercises import check_twice\n\n"
        "check_twice(lambda number: number + number)"
    ),
    new_markdown_cell("The picture of this chapter is a lonely square, with a name."),
    new_code_cell(
        "from ddp_course.chapters.ch99_toy.figures import square\n\nsquare(40).title"
    ),
]
CHAPTER = {
    "ddp_course/chapters/ch99_toy/__init__.py": append(
        '"""Chapter 99: what is needed?"""\n'
    ),
    "ddp_course/chapters/ch99_toy/exercises.py": append('''\
"""The exercise of chapter 99."""

from ddp_course.chapters.ch99_toy import solutions
from ddp_course.lab.answers import Answer
from ddp_course.lab.exercises import exercise, expect_call


@exercise("twice", solution=solutions.twice)
def check_twice(answer: Answer) -> str:
    """`twice(number)`: the number and once more the number.

    How often is the number in it?

    It is there, and once more: a sum of two.
    """
    expect_call(answer, 3, returns=6, because="3 + 3 is 6")
    expect_call(answer, 2.5, returns=5.0, because="numbers need not be whole")
    return "two numbers, one of them not whole"
'''),
    "ddp_course/chapters/ch99_toy/solutions.py": append('''\
"""A solution of chapter 99's exercise."""


def twice(number):
    """Add it to itself."""
    return number + number
'''),
    "ddp_course/chapters/ch99_toy/figures.py": append('''\
"""The figure of chapter 99."""

from functools import partial

from ddp_course.lab import Drawing


def square(side: int) -> Drawing:
    """Draw a square of `side` pixels."""
    d = Drawing(side, side, title="A square")
    d.rect(2, 2, side - 4, side - 4)
    return d


IMAGES = {"99_square.svg": partial(square, 60)}
'''),
    "tests/chapters/ch99_toy/answers.py": append('''\
"""Answers to the exercise of chapter 99."""


def square(number):
    return number * number


def whole(number):
    return 2 * int(number)


def nothing(number):
    return None


def shifted(number):
    return 2 * number


ANSWERS = {
    "twice": {
        shifted: "",
        square: "because 3 + 3 is 6",
        whole: "need not be whole",
        nothing: "`None`",
    },
}
'''),
}
ROW = "| 99 | [toy](notebooks/99_toy.ipynb) | What does a new chapter need? |"
RECIPES = {
    "A new exercise": EXERCISE,
    "A new schedule": SCHEDULE,
    "A new mesh axis": AXIS,
    "A new way to average a bucket": BUCKET,
}


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_lists_the_files_that_it_touches(title):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (recipe,) = re.findall(rf"^## {title}\n(.*?)(?=^## )", text, re.M | re.S)
    steps = re.findall(r"^\d+\. `([^`]+)`", recipe, re.M)
    names = {"chNN_topic": "ch01_ranks", "AXIS": "pods", "NAME": "ternary"}
    for placeholder, name in names.items():
        steps = [step.replace(placeholder, name) for step in steps]
    steps = [step.replace("NN_topic", "01_ranks") for step in steps]
    assert sorted(steps) == sorted(RECIPES[title])


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """Return a copy of all files that git knows, with a chapter and four additions."""
    folder = tmp_path_factory.mktemp("tree")
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    listing = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True)
    for file in filter(lambda file: (ROOT / file).is_file(), listing.stdout.split()):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, folder / file)
    (last,) = re.findall(
        rf"^\| {max(chapters.rooms())[2:4]} \|.*",
        (ROOT / "README.md").read_text(),
        re.MULTILINE,
    )
    row = {"README.md": insert(last, f"\n{ROW}")}
    for files in (CHAPTER, row, *RECIPES.values()):
        for file, edit in files.items():
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(edit(path.read_text() if path.exists() else ""))
    nbformat.write(new_notebook(cells=CELLS), folder / "notebooks/99_toy.ipynb")
    return folder


def run(folder: Path, *command: str, **variables: str) -> str:
    """Run `python ...` on the copy; return what it printed."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-9000:] + done.stderr
    return done.stdout


def added_code(copy: Path, file: str) -> str:
    """Return the code of the cells that a recipe has added to a notebook."""
    before, after = (
        nbformat.read(folder / file, as_version=4).cells for folder in (ROOT, copy)
    )
    added = [c.source for c in after[len(before) :] if c.cell_type == "code"]
    assert added, file
    return "\n".join(added)


@pytest.mark.kernel
@pytest.mark.timeout(3000)
def test_a_chapter_and_all_four_recipes_work_on_a_copy_of_the_tree(copy):
    no_ranks = {IN_SERVER: "1"}
    drawn = run(copy, "-m", "ddp_course.chapters", **no_ranks)
    assert "images/99_square.svg" in drawn
    save = "-m", "ddp_course.cli", "notebooks", "--save", "99"
    assert "99_toy: stored" in run(copy, *save, **no_ranks)
    assert "✓ **twice: passed.**" in (copy / "notebooks/99_toy.ipynb").read_text()
    for file in {file for files in RECIPES.values() for file in files}:
        if file.endswith(".ipynb"):
            printed = run(copy, "-c", added_code(copy, file), **no_ranks)
            assert max(map(len, printed.splitlines()), default=0) <= 100, file
    chosen = (
        "[twice or 99 or up_to_date or node_of or v_shaped or pods or "
        "keep_no_more or fits_the_small or come_first or is_sent_once or "
        "bytes_are_the_formula or "
        "test_architecture or readme or test_plain_words or stands_in_the_package or "
        "house_rules or test_rooms"
    )
    rooms = ("exercises", "right_answers", "wrong_answers", "mutants", "figures")
    files = [
        *(f"chapters/test_{name}.py" for name in (*rooms, "rooms")),
        *("test_repository.py", "test_architecture.py"),
        *("test_plain_words.py", "test_cli.py", "pipeline/test_schedules.py"),
        "pipeline/test_schedules_checker.py",
        *("pipeline/test_pipeline_systems.py", "test_parallelize.py"),
        *("pods/test_pods.py", "compression/test_compressors.py"),
    ]
    results = run(
        copy,
        *("-m", "pytest", "-n", "0", "-v", "-k", chosen),
        *(f"tests/{file}" for file in files),
        "notebooks/99_toy.ipynb",
    )
    for seen in (
        "test_the_solution_passes[twice]",
        "test_an_untouched_stub_is_not_attempted_yet[twice]",
        "test_the_solution_is_shown[twice]",
        "test_two_hints_come_before_the_solution[twice]",
        "test_a_right_answer_in_another_style_passes[twice-shifted]",
        "test_a_wrong_answer_gets_its_hint[twice-whole]",
        "test_images_are_up_to_date",
        "test_every_chapter_is_whole",
        "test_notebooks_keep_the_house_rules[99_toy.ipynb]",
        "test_readme_lists_every_chapter_and_no_other",
        "test_a_floor_imports_only_from_lower_floors",
        "99_toy::ipynb::Cell 1",
        "test_the_solution_passes[node_of]",
        "test_a_judge_rejects_mutants_of_its_solution[node_of]",
        "test_two_ranks_and_three_microbatches[v_shaped]",
        "test_legal_for_every_number_of_ranks_and_microbatches[v_shaped]",
        "test_every_message_is_sent_once_and_received_once[v_shaped-True]",
        "test_ranks_do_what_the_schedule_says_and_keep_no_more[3-5]",
        "test_what_runs_on_any_backend_fits_the_small_model",
        "test_axes_with_other_rows_come_first_and_are_averaged",
        "test_two_pods_train_like_one_process[options1]",
        "test_bytes_are_the_formula_and_numbers_those_of_one_process",
    ):
        assert re.search(re.escape(seen) + " PASSED", results), (seen, results[-9000:])
