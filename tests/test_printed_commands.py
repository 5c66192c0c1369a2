"""Every command line that the course prints can be typed, and runs.

README, chapters, pages, CONTRIBUTING and the examples of `--help` print some. In a test
run the cheap ones run in this process. `DDP_COURSE_COMMANDS=all pytest -n 0
tests/test_printed_commands.py` gives all that can run on this machine to a shell, in a
learner's copy of the course or in the clone: about half an hour on two cores.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import pytest

from ddp_course.bench import benches
from ddp_course.chapters.ch19_failures import elastic_script
from ddp_course.cli import main, parser
from ddp_course.commands import CommandError
from ddp_course.commands.copy import learners_copy

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"(?:ddp-course|-m ddp_course)((?: [\w.:/<>*-]+)+)")
PLACES = {"FOLDER": "a", "NAME": "sign", "NN": "00", "$SLURM_JOB_ID": "1"}


def texts() -> dict[str, str]:
    """Return what a reader sees of README, pages and notebooks, by file."""
    found = {path.name: path.read_text() for path in ROOT.glob("notebooks/*.md")}
    names = "README.md", "CONTRIBUTING.md"
    found |= {name: (ROOT / name).read_text() for name in names}
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        found[path.name] = "\n".join("".join(cell["source"]) for cell in cells)
    return found


def commands(text: str) -> list[str]:
    """Return the command lines in a text; rows of README's table of training, too."""
    code = [
        *re.findall(r"`([^`\n]+)`", text),
        *re.findall(r"```\n(.+?)```", text, re.S),
    ]
    joined = "\n".join(code).replace("\\\n", " ")
    rows = table_rows("ddp-course train", text)
    lines = [words.strip() for words in LINE.findall(re.sub(" +", " ", joined))]
    return [*lines, *(f"train {row}" for row in rows)]


def table_rows(head: str, text: str) -> list[str]:
    """Return the code in the first column of the table under this head."""
    table = re.search(rf"^\| `{head}` \|.*?^$", text, re.M | re.S)
    return re.findall(r"^\| `([^`]+)` \|", table[0] if table else "", re.M)[1:]


def wrong_with(line: str, capsys: pytest.CaptureFixture) -> str | None:
    """Return the answer to a command line that cannot be typed, or None.

    A command or option that is only mentioned, without its value, is not wrong.
    """
    words = [PLACES.get(word, word) for word in shlex.split(line)]
    try:
        args = parser().parse_args(words)
        args.before(args)
    except CommandError as error:
        return None if words == ["bench"] else str(error)
    except SystemExit as ended:
        answer = capsys.readouterr().err
        mentioned = re.search("expected one argument|is required|required:", answer)
        return answer if ended.code and not mentioned else None
    return None


@pytest.mark.parametrize("name", texts())
def test_every_printed_command_can_be_typed(name, capsys):
    wrong = {line: wrong_with(line, capsys) for line in commands(texts()[name])}
    assert {line: answer for line, answer in wrong.items() if answer} == {}


def test_the_rows_of_training_are_among_them():
    lines = commands(texts()["README.md"])
    assert "train --dp 2 --tp 2 --pp 2 --zero 1" in lines
    assert sum(line.startswith("train ") for line in lines) >= 10


ROWS_OF_ONE_RANK = """
| `ddp-course train` | |
|:--|:--|
| `--local-steps 8 --outer nesterov` | runs one rank |

"""


@pytest.mark.parametrize(
    "text",
    [
        ROWS_OF_ONE_RANK,
        "type `ddp-course train --strategy zero1`",
        "```\ntorchrun --nnodes 2 \\\n    -m ddp_course train --zero 4\n```",
        "`ddp-course fly`",
    ],
)
def test_a_planted_one_that_cannot_is_seen(text, capsys):
    line = commands(text)[-1]
    assert wrong_with(line, capsys)


# ---- and runs ------------------------------------------------------------------------

PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:ddp-course|python|torchrun|pytest|pre-commit|git|pip|conda"
    r"|mkdir|ulimit|umask|export|unshare|ip|ssh|srun|sbatch|docker|accelerate) (?!=)"
)
# Lines that cannot run in a test, by their beginning, and why.
NOT_HERE = {
    "git clone": "a placeholder: the course has no public address yet",
    "python -m pip install": "downloads; CI's first step is such a line",
    "conda": "downloads",
    "pre-commit": "changes the clone's hooks",
    "accelerate": "another project's",
    "srun torchrun": "wants SLURM",
    "export SRUN_CPUS_PER_TASK": "wants SLURM",
    "mkdir -m": "only the beginning of a line",
    "ip link set": "changes the machine's network",
    "pytest": "tests would start tests",
    "DDP_COURSE_": "tests would start tests",
    "ddp-course notebooks --save": "writes into the clone",
    "ddp-course site": "tests/test_site.py makes a site",
}
CHEAP = "progress", "plan", "bench --list"
ALL = os.environ.get("DDP_COURSE_COMMANDS") == "all"
PROGRAM_PY = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(2)
dist.all_reduce(x)
assert x.tolist() == [dist.get_world_size()] * 2
dist.destroy_process_group()
"""


def printed() -> list[str]:
    """Return each line that a shell can take, once: code, fences, help, tables."""
    found: list[str] = []
    for text in texts().values():
        text = text.replace("\\\n", " ")
        blocks = re.findall(r"```\n(.+?)```", text, re.S)
        found += [line.strip() for block in blocks for line in block.splitlines()]
        found += re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    for head in ("ddp-course train", "ddp-course"):
        rows = table_rows(head, texts()["README.md"])
        found += [f"{head} {row}" for row in rows]
    for command in parser()._subparsers._group_actions[0].choices.values():
        examples = (command.epilog or "").partition("\n\n")[0]
        found += [line.strip() for line in examples.splitlines()[1:]]
    lines = (re.sub(" +", " ", line) for line in found if PROGRAM.match(line))
    return sorted({line for line in lines if not _mentioned(line)})


def _mentioned(line: str) -> bool:
    """Return whether a line only names a command, without what it needs to run."""
    if not line.startswith("ddp-course "):
        return False
    words = _placed(line).split()[1:]
    with suppress(SystemExit), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        return words == ["bench"] or not parser().parse_args(words)
    return "--help" not in words


def _placed(line: str) -> str:
    """Put values in the place of FOLDER, NN, ..., and of another machine's address."""
    for name, value in PLACES.items():
        line = re.sub(rf"(?<![\w.]){re.escape(name)}(?![\w_])", value, line)
    return re.sub(" (A:29400|ADDRESS:PORT) ", " localhost:29400 ", line)


def _is_cheap(line: str) -> bool:
    words = line.removeprefix("ddp-course ")
    return words != line and (words.startswith(CHEAP) or words.endswith("--help"))


def _not_here(line: str) -> str | None:
    return next((why for head, why in NOT_HERE.items() if line.startswith(head)), None)


def _in(folder: Path, line: str) -> str:
    """Return a line with a folder of this test in the place of that of a class."""
    return _placed(line).replace("/shared", f"{folder}")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A learner's copy, and beside it the files that the lines name."""
    folder = tmp_path_factory.mktemp("printed")
    with pytest.MonkeyPatch.context() as own:  # not the database of the user's Jupyter
        own.setenv("JUPYTER_DATA_DIR", f"{folder / 'jupyter'}")
        learners_copy(folder / "ddp-course")
    for name in ("monday", "our-class"):
        (folder / name).mkdir()
    (folder / "ddp-course/program.py").write_text(PROGRAM_PY)
    (folder / "ddp-course/my_script.py").write_text("print('it ran')")
    shutil.copy(elastic_script.__file__, folder / "ddp-course")
    (folder / "ddp-course/a").mkdir()
    return folder / "ddp-course"


def test_the_cheap_lines_run(copy, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    cheap = [line for line in printed() if _is_cheap(line)]
    cheap.sort(key=lambda line: ("--collect" in line, line))  # after the reports
    failed = {}
    for line in cheap:
        try:
            code = main(shlex.split(_in(copy.parent, line))[1:])
        except SystemExit as ended:
            code = ended.code
        if code:
            failed[line] = capsys.readouterr().err
    assert failed == {}
    assert len(cheap) >= 10


def test_every_line_runs_here_or_its_reason_is_known():
    lines = printed()
    for head in NOT_HERE:
        assert any(line.startswith(head) for line in lines), head
    assert "ddp-course train --tp 4" in lines
    assert "ddp-course doctor" in lines
    assert "ddp-course bench" not in lines


@pytest.mark.timeout(3600)
@pytest.mark.skipif(not ALL, reason="DDP_COURSE_COMMANDS=all runs them all")
@pytest.mark.parametrize(
    "line", [n for n in printed() if ALL and not (_is_cheap(n) or _not_here(n))] or [""]
)
def test_a_line_runs_as_printed(line, copy):
    binaries = Path(sys.executable).parent
    path = f"{binaries}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": f"{ROOT}"}
    in_clone = "notebooks" in line or "ddp_course.chapters" in line
    where = {"cwd": ROOT if in_clone else copy, "env": env, "shell": True}
    command = _in(copy.parent, line)
    if "ddp-course lab" in line:
        _lab_opens(command, where)
        return
    machines = 2 if "--nnodes 2" in line else 1
    started = [
        subprocess.Popen(command, **where, stderr=subprocess.PIPE, text=True)
        for _ in range(machines)
    ]
    ends = [process.communicate(timeout=1800)[1] for process in started]
    assert [p.returncode for p in started] == [0] * machines, ends


def _lab_opens(command: str, where: dict) -> None:
    """Start JupyterLab, ask for the page at the printed address, and stop it."""
    lab = subprocess.Popen(
        f"exec {command}", **where, stdout=subprocess.PIPE, text=True
    )
    try:
        lines = iter(lab.stdout.readline, "")
        address = next(line for line in lines if line.startswith("JupyterLab: "))
        page = urllib.request.urlopen(address.split()[1], timeout=60).read()
        assert b"JupyterLab" in page
    finally:
        lab.send_signal(signal.SIGINT)
        begun = time.monotonic()
        assert lab.wait(60) == 0, f"after {time.monotonic() - begun:.0f} s"


def test_every_bench_that_is_printed_exists():
    named = [line.split()[2] for line in printed() if "ddp-course bench " in line]
    assert {name for name in named if not name.startswith("-")} <= {*benches()}
