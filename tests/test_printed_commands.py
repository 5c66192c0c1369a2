"""Every command line that the course prints can be typed: README, chapters, pages."""

import json
import re
import shlex
from pathlib import Path

import pytest

from ddp_course.cli import parser
from ddp_course.commands import CommandError

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"(?:ddp-course|-m ddp_course)((?: [\w.:/<>*-]+)+)")
PLACES = {"FOLDER": "a", "NAME": "a", "NN": "00", "$SLURM_JOB_ID": "1"}


def texts() -> dict[str, str]:
    """Return what a reader sees of README, pages and notebooks, by file."""
    found = {path.name: path.read_text() for path in ROOT.glob("notebooks/*.md")}
    found |= {name: (ROOT / name).read_text() for name in ("README.md",)}
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
    rows = re.findall(r"^\| `(--[^`]+)` \|", text, re.M)
    lines = [words.strip() for words in LINE.findall(re.sub(" +", " ", joined))]
    return [*lines, *(f"train {row}" for row in rows)]


def wrong_with(line: str, capsys: pytest.CaptureFixture) -> str | None:
    """Return the answer to a command line that cannot be typed, or None.

    A command or option that is only mentioned, without its value, is not wrong.
    """
    words = [PLACES.get(word, word) for word in shlex.split(line)]
    try:
        told = parser().parse_args(words)
        told.before(told)
    except CommandError as error:
        return str(error)
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


@pytest.mark.parametrize(
    "text",
    [
        "| `--local-steps 8 --outer nesterov` | runs one rank |",
        "type `ddp-course train --strategy zero1`",
        "```\ntorchrun --nnodes 2 \\\n    -m ddp_course train --zero 4\n```",
        "`ddp-course fly`",
    ],
)
def test_a_planted_one_that_cannot_is_seen(text, capsys):
    (line,) = commands(text)
    assert wrong_with(line, capsys)
