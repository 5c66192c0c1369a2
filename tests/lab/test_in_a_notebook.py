"""All of the lab in a real notebook: each cell shows one thing, and is stored small.

That nbval finds the same outputs again, all chapters show.
"""

import nbclient
import nbformat
import pytest

from ddp_course.commands.execute import ThisPython
from ddp_course.lab import tell

STUB = """
from ddp_course.chapters import show_solution
from ddp_course.chapters.ch00_start_here.exercises import *
from ddp_course.chapters.ch01_ranks.exercises import *
from ddp_course.chapters.ch01_ranks.figures import *
from ddp_course.lab import *
def peer_on_next_node(rank, nnodes, nproc_per_node):
    raise NotImplementedError
check_peer_on_next_node(peer_on_next_node)
"""
WRONG = """
def node_group():
    import torch.distributed as dist
    return dist.new_group([dist.get_rank()])
check_node_group(node_group)
"""
CRASHING = """
def global_rank(node_rank, local_rank, nproc_per_node):
    return node_rnk * nproc_per_node + local_rank
check_global_rank(global_rank)
"""
RIGHT = """
def my_slice(batch, rank, world_size):
    return batch.chunk(world_size)[rank]
check_my_slice(my_slice)
"""
CELLS = {
    STUB: "○ **peer_on_next_node: not attempted yet.**",
    WRONG: "rank 0 called `new_group([0])` while rank 1 called `new_group([1])`",
    CRASHING: "`global_rank(0, 0, 4)` raised `NameError: name 'node_rnk'",
    RIGHT: "✓ **my_slice: passed.**",
    "show_source(peer_on_next_node)": "`this notebook`\n\n```python\ndef peer_on",
    "show_solution('node_group')": "`ddp_course/chapters/ch01_ranks/solutions.py`",
    "show_diff(cluster, groups)": "<pre style=",
    "Prediction('How many?', 3).compare(measured=4, theory=4)": "| theory | 4 | 1 |",
    "gallery(cluster, [dict(nnodes=1, nproc_per_node=2)] * 2)": "src='data:image/svg",
    "explore(cluster, nnodes=(1, 8), nproc_per_node=(1, 8))": "interactive(children=",
    "plot_losses({'1 process': [3, 2], '4 ranks': [3, 2]})": "1 process: from 3 to 2",
}


@pytest.mark.kernel
@pytest.mark.timeout(900)
def test_every_cell_shows_one_thing(tmp_path):
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(code.strip()) for code in CELLS]
    folder = tmp_path / "notebooks"
    for file in (
        "notebooks/glossary.md",
        "images/course_map.svg",
    ):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).touch()
    client = nbclient.NotebookClient(
        notebook,
        kernel_manager_class=ThisPython,
        timeout=400,
        startup_timeout=400,
        store_widget_state=False,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    for cell, expected in zip(notebook.cells, CELLS.values(), strict=True):
        (output,) = cell.outputs  # one value, nothing printed, no traceback
        assert output.output_type in ("execute_result", "display_data"), output
        assert "image/png" not in output.data, "a plot is stored twice"
        assert expected in "".join(map(str, output.data.values()))
    assert ", in line 2: `return node_rnk *" in str(notebook.cells[2].outputs)
    assert "widgets" not in notebook.metadata
    assert len(nbformat.writes(notebook)) < 100_000


def test_a_long_text_is_told_in_lines_that_fit(capsys):
    tell("three words here " * 12 + "\n" + "x" * 120)
    *lines, last = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 96 and len(lines) == 3
    assert last == "x" * 120  # a path or an address stays whole
