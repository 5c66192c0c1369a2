"""`run`, `notebooks --save` and `--check`, on tiny notebooks made here."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import clean_notebooks
import nbformat
import pytest
from conftest import descendants, names_in, none_left
from jupyter_client import AsyncKernelManager, LocalProvisioner
from jupyter_client.connect import port_names
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from refusals import complaint

from ddp_course.cli import main
from ddp_course.commands import CommandError, chapters, execute
from ddp_course.lab.source import show_source, source

pytestmark = pytest.mark.timeout(1800)  # a busy machine starts a kernel in a minute
RAISES = {"tags": ["raises-exception"]}


def make(path: Path, *cells, **metadata) -> Path:
    """Write a notebook; a string is a code cell."""
    cells = [new_code_cell(c) if isinstance(c, str) else c for c in cells]
    nbformat.write(new_notebook(cells=cells, metadata=metadata), path)
    return path


# Names of chapters


@pytest.fixture
def clone(tmp_path, monkeypatch):
    (tmp_path / "notebooks/deep").mkdir(parents=True)
    for name in ("01_ranks", "00_start_here", "10_pipeline", "glossary"):
        make(tmp_path / f"notebooks/{name}.ipynb")
    monkeypatch.chdir(tmp_path / "notebooks/deep")
    return tmp_path


@pytest.mark.parametrize(
    ("names", "stems"),
    [
        ("00", "00_start_here"),
        ("0", "00_start_here"),
        ("01_ranks", "01_ranks"),
        ("10 1", "10_pipeline 01_ranks"),
        ("all", "00_start_here 01_ranks 10_pipeline"),
        ("00 all", "00_start_here 01_ranks 10_pipeline"),  # once only
        ("../glossary.ipynb", "glossary"),
    ],
)
def test_what_a_reader_calls_a_chapter(names, stems, clone):
    assert [path.stem for path in chapters.find(names.split())] == stems.split()


@pytest.mark.parametrize("name", ["02", "100", "start", "", "00_start", "x.ipynb"])
def test_what_is_no_chapter(name, clone):
    with pytest.raises(CommandError, match="there is no"):
        chapters.find([name])


# Clean: the rules without a kernel


def clean_notebook() -> nbformat.NotebookNode:
    """Return a notebook as `--save` stores it, with every kind of output."""
    cells = [
        new_markdown_cell("# A question?", id="title"),
        new_code_cell("print(1); 2", id="a", execution_count=1),
        new_code_cell("1 / 0", id="b", execution_count=2, metadata=RAISES),
        new_code_cell("", id="c"),
    ]
    two = new_output("execute_result", {"text/plain": "2"}, execution_count=1)
    cells[1].outputs = [stream("1\n"), two]
    error = {"ename": "ZeroDivisionError", "evalue": "?", "traceback": ["line"]}
    cells[2].outputs = [new_output("error", **error)]
    return new_notebook(cells=cells, metadata=clean_notebooks.METADATA)


def store(notebook, path: Path) -> Path:
    path.write_text(clean_notebooks.text_of(notebook))
    return path


def test_a_clean_notebook_is_clean(tmp_path):
    assert (
        clean_notebooks.complaints(store(clean_notebook(), tmp_path / "n.ipynb")) == []
    )


def stream(text: str, name: str = "stdout"):
    return new_output("stream", name=name, text=text)


def view(text: str = "IntSlider()"):
    return new_output("display_data", {"text/plain": text, clean_notebooks.VIEW: {}})


def traceback(line: str):
    return lambda nb: nb.cells[2].outputs[0].traceback.append(line)


def prints(text: str):
    return lambda nb: nb.cells[1].outputs[0].update(text=text)


def shows(*objects, stale: str = "", **options):
    """Append what `show_source` shows, with the line `stale` that its file lacks."""
    text = show_source(*objects, **options).data
    if stale:
        text = text.replace("\n```", f"\n    {stale}\n```")
    output = new_output("display_data", {"text/markdown": text})
    return lambda nb: nb.cells[1].outputs.append(output)


CURABLE = [
    ("metadata are not", lambda nb: nb.metadata.update(widgets={"state": {}})),
    ("metadata are not", lambda nb: nb.metadata.language_info.update(version="3.11.7")),
    ("metadata are not", lambda nb: nb.metadata.pop("kernelspec")),
    ("than its tags", lambda nb: nb.cells[1].metadata.update(execution={"busy": "1"})),
    ("than its tags", lambda nb: nb.cells[0].metadata.update(scrolled=True)),
    ("no id", lambda nb: nb.cells[1].pop("id")),
    ("no id", lambda nb: nb.cells[1].update(id="title")),
    ("output of a widget", lambda nb: nb.cells[1].outputs.append(view())),
    ("in pieces", lambda nb: nb.cells[1].outputs.append(stream("more\n"))),
    (
        "names folders",
        traceback(f"{Path(clean_notebooks.__file__).parent}/clean_notebooks.py:7"),
    ),
    ("names folders", traceback(f"{Path(nbformat.__file__).parent}/reader.py:7")),
]
INCURABLE = [
    ("top to bottom", lambda nb: nb.cells[1].update(execution_count=None)),
    ("top to bottom", lambda nb: nb.cells[2].update(execution_count=7)),
    ("cell 2 shows an error without", lambda nb: nb.cells[2].update(metadata={})),
    ("cell 2 has the tag", lambda nb: nb.cells[2].update(outputs=[])),
    ("absolute path: /home/ada/x.py", prints("in /home/ada/x.py, line 1")),
    ("absolute path: /tmp/ipykernel_7/8.py", prints("'/tmp/ipykernel_7/8.py'")),
    ("absolute path: C:\\Users", prints("C:\\Users\\ada")),
    ("absolute path: /Users/ada/c", traceback("File /Users/ada/c, line 1")),
    ("absolute path: /Users/ada/c", traceback("File \x1b[32m/Users/ada/c\x1b[39m")),
    ("another source than ddp_course/lab/source.py", shows(source, stale="return 1")),
    ("memory address: at 0x7fb2c4d0", prints("<function f at 0x7fb2c4d0>")),
]


@pytest.mark.parametrize(("complaint", "spoil"), CURABLE + INCURABLE)
def test_every_flaw_is_found_and_nothing_else_and_may_have_a_remedy(
    complaint, spoil, tmp_path
):
    notebook, path = clean_notebook(), tmp_path / "n.ipynb"
    spoil(notebook)
    found = clean_notebooks.complaints(store(notebook, path))
    assert len(found) == 1 and complaint in found[0]
    clean_notebooks.clean(notebook)
    nbformat.validate(notebook)
    text = clean_notebooks.text_of(notebook)
    cured = clean_notebooks.complaints(store(notebook, path)) == []
    assert cured == ((complaint, spoil) in CURABLE)
    clean_notebooks.clean(notebook)  # once is enough
    assert clean_notebooks.text_of(notebook) == text
    for same_everywhere in ("/proc/self/io", "and/or", "http://localhost/tmp/x"):
        notebook = clean_notebook()
        prints(same_everywhere)(notebook)
        assert clean_notebooks.complaints(store(notebook, path)) == []


@pytest.mark.parametrize("docstring", [True, False])
def test_the_source_that_its_file_has_now_is_clean(docstring, tmp_path):
    notebook = clean_notebook()
    shows(source, store, clean_notebooks.command, docstring=docstring)(notebook)
    shows(source, chapters, docstring=docstring, only="find course")(notebook)
    assert clean_notebooks.complaints(store(notebook, tmp_path / "n.ipynb")) == []


def test_every_rule_has_a_flaw_that_it_finds():
    for rule in clean_notebooks.RULES:
        assert [complaint for complaint, _ in CURABLE if complaint in rule], rule


def test_the_layout_of_the_file_counts(tmp_path):
    path = store(clean_notebook(), tmp_path / "n.ipynb")
    path.write_text(path.read_text().rstrip("\n"))
    assert "laid out" in clean_notebooks.complaints(path)[0]


def test_streams_are_joined_by_name_and_widgets_go_with_their_text():
    notebook = clean_notebook()
    error = stream("!\n", "stderr")
    notebook.cells[1].outputs = [stream("a\n"), error, view(), stream("b\n"), view()]
    clean_notebooks.clean(notebook)
    assert notebook.cells[1].outputs == [stream("a\nb\n"), error]


def test_check_tells_which_and_why(tmp_path, capsys):
    good = store(clean_notebook(), tmp_path / "good.ipynb")
    bad = make(tmp_path / "bad.ipynb", "1", widgets={})
    assert main(["notebooks", "--check", str(good)]) == 0
    assert main(["notebooks", "--check", str(good), str(bad)]) == 1
    output = capsys.readouterr().err.splitlines()
    assert len(output) == 2 and all(t.startswith("ddp-course: bad, ") for t in output)


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"nbformat": 3}', '"nbformat"', '{"nbformat": 4}']
    + ['{"nbformat": 4, "cells": [{"source": ""}]}'],
)
@pytest.mark.parametrize("command", ["run", "notebooks --save", "notebooks --check"])
def test_what_is_not_a_notebook_is_told(text, command, tmp_path, capsys):
    path = tmp_path / "n.ipynb"
    path.write_text(text)
    code, output = complaint([*command.split(), str(path)], capsys)
    assert code == 1 and output.startswith("ddp-course: n, not a notebook")
    assert path.read_text() == text


def test_a_chapter_that_cannot_be_read_is_told(tmp_path, capsys, monkeypatch):
    path = make(tmp_path / "n.ipynb", "1")

    def forbidden(self, **how):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", forbidden)
    code, output = complaint(["run", str(path)], capsys)
    assert code == 1
    assert output.startswith(f"ddp-course: n, cannot read {path}: Permission denied")


def test_a_cell_that_lacks_something_can_be_read(tmp_path):
    """As other programs may write it."""
    path = make(tmp_path / "n.ipynb", "1", new_markdown_cell("a"))
    bare = json.loads(path.read_text())
    bare["cells"] = [{"cell_type": kind} for kind in ("code", "markdown")]
    path.write_text(json.dumps(bare))
    assert "no id" in " ".join(clean_notebooks.complaints(path))
    notebook = execute.read_notebook(path)
    clean_notebooks.clean(notebook)
    nbformat.validate(notebook)


# Run: with a kernel


@pytest.fixture(autouse=True)
def not_a_terminal(monkeypatch):
    """Take away what makes rich believe in a terminal; CI services set it."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def failure_of(path: Path, capsys, *options: str) -> str:
    """Run a notebook that must fail; return the one line that says so."""
    before = path.read_bytes()
    code, output = complaint(["run", str(path), *options], capsys)
    assert (code, path.read_bytes()) == (1, before)
    return output.removeprefix("ddp-course: ").rstrip()


@pytest.mark.kernel
def test_run_what_passes_and_store_nothing(tmp_path, capsys):
    read = "assert open('data.txt').read() == 'here'"  # runs where the notebook is
    raises = new_code_cell("1 / 0", metadata=RAISES)
    text = new_markdown_cell("# Text")
    path = make(tmp_path / "good.ipynb", text, "x = 1", "", read, raises, "x + 1")
    (tmp_path / "data.txt").write_text("here")
    before = path.read_bytes()
    assert main(["run", str(path)]) == 0
    shown = capsys.readouterr()
    assert re.fullmatch(r"good: 4 cells ran in \d+\.\d s\n", shown.out)
    assert shown.err == ""
    assert path.read_bytes() == before
    assert names_in(tmp_path) == {"data.txt", "good.ipynb"}


@pytest.mark.kernel
def test_run_says_what_failed_and_where_for_every_chapter(tmp_path, capsys):
    divides = ["def half(x):\n    return x / 0", new_markdown_cell("text")]
    tagged = new_code_cell("2", metadata=RAISES)
    cells = {
        "here": ["x = 1", "y = 2\n\nz = y / 0  # no", "x"],
        "there": [*divides, "x = 1\nhalf(x)"],
        "syntax": ["x = 1\nx = = 2"],
        "long": ["raise ValueError('a\\n' * 999)"],
        "calm": ["1", tagged],
        "good": ["1"],
    }
    paths = [make(tmp_path / f"{name}.ipynb", *of) for name, of in cells.items()]
    assert main(["run", *map(str, paths)]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("good: 1 cells ran")
    output = shown.err.splitlines()
    assert len(output) == 5
    division = "ZeroDivisionError: division by zero"
    assert (
        output[0] == f"ddp-course: here, cell 2, line 3: `z = y / 0  # no`: {division}"
    )
    assert output[1] == f"ddp-course: there, cell 2, line 2: `half(x)`: {division}"
    assert output[2].startswith("ddp-course: syntax, cell 1, line 2: `x = = 2`: Syntax")
    assert output[3].endswith("...") and len(output[3]) < 400
    assert output[4].startswith("ddp-course: calm, cell 2: ")
    assert "but it did not" in output[4]


@pytest.mark.kernel
def test_run_names_the_line_on_which_a_rank_failed(tmp_path, capsys):
    path = make(
        tmp_path / "ranks.ipynb",
        "import torch.distributed as dist\nfrom ddp_course.launch import spawn",
        "def work():\n    if dist.get_rank() == 2:\n        raise KeyError('two')",
        "spawn(work)",
    )
    assert failure_of(path, capsys) == (
        "ranks, cell 3, through cell 2, line 3: `raise KeyError('two')`: "
        "RankError: rank 2: KeyError: 'two'"
    )


@pytest.mark.kernel
def test_run_ends_a_cell_that_takes_too_long_and_a_kernel_that_dies(tmp_path, capsys):
    slow = make(tmp_path / "slow.ipynb", "1", "import time; time.sleep(600)")
    for seconds in (1, 10, 60):  # a busy machine may need more for the first cell
        output = failure_of(slow, capsys, "--timeout", str(seconds))
        if output != f"slow, cell 1: still running after {seconds} s":
            break
    assert output == f"slow, cell 2: still running after {seconds} s"
    dead = make(tmp_path / "dead.ipynb", "import os; os.kill(os.getpid(), 9)")
    assert failure_of(dead, capsys) == "dead, cell 1: Kernel died"


@pytest.mark.kernel
def test_run_shows_a_bar_and_does_not_wait_for_widgets_for_ever(
    tmp_path, monkeypatch, capsys
):
    """nbclient's own Output widget loses about one reply in 50 such cells."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    cell = "from ipywidgets import interact\nfor x in range(5):\n"
    cell += "    interact(lambda a: a, a=x)"
    path = make(tmp_path / "n.ipynb", *[cell] * 20)
    assert main(["run", str(path), "--timeout", "120"]) == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert "n " in shown and "20/20" in shown


@pytest.mark.kernel
def test_run_uses_this_python_whatever_is_installed_also_in_a_long_folder(
    tmp_path, monkeypatch
):
    planted, folder = tmp_path / "jupyter/kernels/python3", tmp_path / ("long" * 20)
    planted.mkdir(parents=True)
    folder.mkdir()
    spec = {"argv": ["/bin/false"], "display_name": "x", "language": "python"}
    (planted / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    same = f"import sys; assert sys.executable == {sys.executable!r}"
    metadata = {"kernelspec": {"name": "julia", "display_name": "Julia"}}
    assert main(["run", str(make(tmp_path / "n.ipynb", same, **metadata))]) == 0
    assert names_in(folder) == set()


class ThroughPorts(AsyncKernelManager):
    """What Jupyter does by itself, and what must be seen to fail."""

    kernel_spec = execute.ThisPython.kernel_spec


@pytest.mark.kernel
def test_run_starts_its_kernel_whatever_ports_others_take(tmp_path, monkeypatch):
    launch, taken = LocalProvisioner.launch_kernel, contextlib.ExitStack()

    def launch_late(self, command, **options):
        """Launch the kernel when another program has all of its ports."""
        for name in port_names if self.parent.transport == "tcp" else ():
            other = taken.enter_context(socket.socket())
            other.bind((self.parent.ip, getattr(self.parent, name)))
        return launch(self, command, **options)

    monkeypatch.setattr(LocalProvisioner, "launch_kernel", launch_late)
    notebook = nbformat.read(make(tmp_path / "n.ipynb", "1 + 1"), as_version=4)
    with taken, tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr("tempfile.tempdir", short)
        assert execute.execute(notebook, tmp_path) is None
        assert names_in(short) == set()
        monkeypatch.setattr(execute, "ThisPython", ThroughPorts)
        failure = execute.execute(notebook, tmp_path)
    assert failure.error.startswith("Kernel died")


@pytest.mark.kernel
def test_run_can_be_stopped_and_leaves_no_kernel(tmp_path):
    """By Ctrl-C and by a `kill`, both at the same time, each in a run of its own."""
    running = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        flag = tmp_path / number.name
        code = f"open({str(flag)!r}, 'w').close()\nimport time; time.sleep(600)"
        path = make(tmp_path / f"{number.name}.ipynb", code)
        command = [sys.executable, "-m", "ddp_course.cli", "run", str(path)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        running[number] = flag, process
    deadline = time.monotonic() + 300
    for number, (flag, process) in running.items():
        while not flag.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        family = descendants(process.pid)
        process.send_signal(number)
        _, output = process.communicate(timeout=120)
        assert (process.returncode, output) == (130, "ddp-course: stopped\n")
        assert none_left(family)


# Save: with a kernel


@pytest.mark.kernel
def test_save_stores_clean_outputs_and_the_same_bytes_again(tmp_path, capsys):
    path = make(
        tmp_path / "all.ipynb",
        new_markdown_cell("# Everything"),
        "import sys\nfor i in range(3):\n    print(i, flush=True)\n"
        "    print('!', file=sys.stderr, flush=True)",
        "import ipywidgets\nfrom IPython.display import display\n"
        "display(ipywidgets.IntSlider())\nipywidgets.interact(lambda x: x, x=3)\n'end'",
        new_code_cell(
            "from ddp_course.launch import spawn\nimport json\njson.loads('{')",
            metadata={**RAISES, "execution": {"iopub.status.busy": "now"}},
        ),
        widgets={"state": {}},
        language_info={"name": "python", "version": "2.7"},
    )
    raw = json.loads(path.read_text())
    del raw["cells"][1]["id"]
    path.write_text(json.dumps(raw))
    assert main(["notebooks", "--save", str(path)]) == 0
    first = path.read_bytes()
    assert clean_notebooks.complaints(path) == []
    stored = nbformat.read(path, as_version=4)
    nbformat.validate(stored)
    assert stored.metadata == clean_notebooks.METADATA
    printed, widgets, raised = (cell.outputs for cell in stored.cells[1:])
    results = {"stdout": "0\n1\n2\n", "stderr": "!\n!\n!\n"}
    assert {o.name: o.text for o in printed} == results and len(printed) == 2
    assert [o.output_type for o in widgets] == ["execute_result"]
    assert stored.cells[3].metadata == RAISES and raised[0].ename == "JSONDecodeError"
    assert "json/__init__.py" in "".join(raised[0].traceback)
    assert b"now" not in first and b"jupyter.widget" not in first
    assert first.endswith(b"}\n") and not first.endswith(b"\n\n")
    assert stored.cells[1].id == "cell-1"
    assert stored.cells[2].id == raw["cells"][2]["id"]
    assert main(["notebooks", "--save", str(path)]) == 0
    assert path.read_bytes() == first
    assert capsys.readouterr().out.count("all: stored\n") == 1
    assert names_in(tmp_path) == {"all.ipynb"}


@pytest.mark.kernel
def test_save_stores_nothing_that_is_not_clean(tmp_path, capsys):
    path = make(tmp_path / "n.ipynb", "'/home/ada/' + 'data'", "object()")
    before = path.read_bytes()
    assert main(["notebooks", "--save", str(path)]) == 1
    output = capsys.readouterr().err
    assert "cell 1 shows an absolute path: /home/ada/data" in output
    assert "cell 2 shows a memory address" in output
    assert path.read_bytes() == before and names_in(tmp_path) == {"n.ipynb"}


@pytest.mark.parametrize("typed", ["notebooks --check", "site"])
def test_authors_tools_are_for_a_clone(typed, clone, capsys):
    assert main(typed.split()) == 1
    assert "needs a clone of the course's repository" in capsys.readouterr().err
