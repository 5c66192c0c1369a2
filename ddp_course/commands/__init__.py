"""Floor 3: what the commands of `ddp-course` do; `cli.py` only reads what was typed.

chapters   which notebooks there are, and what a reader calls them
execute    run one notebook in this Python; say what failed and where
run        `run`
author     `notebooks` and `site`: the authors' tools, which a clone has
asked      what `train` was asked for, checked without PyTorch
train      `train`, and a rank of torchrun that trains
plan       `plan`
proofs     ranks that really run, and agree
doctor     `doctor`: cores, memory, GPUs, and what a container leaves of them
report     `doctor --report`: what to send when asking for help
lab        `lab`: JupyterLab, its port, its address, its end
bench      `bench`; its figure is in bench_figure
progress   `progress`
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class CommandError(Exception):
    """Something that the reader can put right: told in one line, no traceback."""


def check_file(file: Path | None, kinds: Sequence[str] = ()) -> None:
    """Raise CommandError for a file that cannot be written, before the work for it.

    `kinds` are the endings that it may have; none are all.
    """
    if file is None:
        return
    folder, wrong = file.absolute().parent, None
    if not folder.is_dir():
        wrong = f"there is no folder {folder}"
    elif file.is_dir():
        wrong = "it is a folder"
    elif not os.access(file if file.exists() else folder, os.W_OK):
        wrong = "permission denied"
    elif kinds and file.suffix.lower() not in kinds:
        wrong = f"its name must end in {', '.join(kinds)}"
    if wrong:
        raise CommandError(f"cannot write {file}: {wrong}")


def tell(problem: object) -> None:
    """Write one problem, in one line, to stderr."""
    print(f"ddp-course: {problem}", file=sys.stderr, flush=True)


def write(file: Path | None, content: Any) -> None:
    """Write `content` as JSON, if a file is given; CommandError if the disk is full."""
    try:
        if file is not None:
            file.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise CommandError(f"cannot write {file}: {error.strerror}") from None
