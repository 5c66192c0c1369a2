"""Floor 4: the commands of `ddp-course`; `cli.py` only parses the command line.

chapters      find the notebooks that a reader names
execute       run one notebook in this Python; report the first failure and its place
run           `run`
author        `notebooks` and `site`: the authors' tools, which only a clone has
train         `train`, and a rank that torchrun starts
train_options  the options of `train`, checked without PyTorch
plan          `plan`
plan_layouts  `plan --gpu`
proofs        start ranks, and check that they agree
doctor        `doctor`: cores, memory, GPUs, and the limits that a container sets
report        `doctor --report`: the text to send when asking for help
copy          the learner's copy: create it, refresh it, find where the learner stopped
lab_options   JupyterLab's address, port and folder, checked without PyTorch
lab           `lab`: start JupyterLab, print its address, stop it
bench         `bench`
bench_figure  the figure of `bench --figure`
progress      `progress`
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class CommandError(Exception):
    """An error that the reader can correct: printed as one line, without traceback."""


def check_file(file: Path | None, kinds: Sequence[str] = ()) -> None:
    """Raise CommandError if a file cannot be written, before its contents are computed.

    `kinds` are the endings that its name may have; an empty sequence allows any.
    """
    if file is None:
        return
    folder, wrong = file.absolute().parent, None
    if not folder.is_dir():
        wrong = f"there is no folder {folder}; create it, or name another file"
    elif file.is_dir():
        wrong = "it is a folder; name a file"
    elif not os.access(file if file.exists() else folder, os.W_OK):
        wrong = "permission denied"
    elif kinds and file.suffix.lower() not in kinds:
        wrong = f"its name must end in {', '.join(kinds)}"
    if wrong:
        raise CommandError(f"cannot write {file}: {wrong}")


def tell(problem: object) -> None:
    """Print one problem, in one line, to stderr."""
    print(f"ddp-course: {problem}", file=sys.stderr, flush=True)


def write(file: Path | None, content: Any) -> None:
    """Write `content` to a file as JSON; without a file, do nothing.

    Raises CommandError if the file cannot be written, as on a full disk.
    """
    try:
        if file is not None:
            file.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise CommandError(f"cannot write {file}: {error.strerror}") from None
