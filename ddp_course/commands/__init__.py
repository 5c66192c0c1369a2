"""Floor 3: what the commands of `ddp-course` do; `cli.py` only reads what was typed.

chapters   which notebooks there are, and what a reader calls them
execute    run one notebook in this Python; say what failed and where
clean      the rules for a notebook in the repository, each with its remedy
notebooks  `run`, `notebooks --save`, `notebooks --check`
train      `train`, and a rank of torchrun that trains
plan       `plan`
machine    cores, memory, GPUs: what a container leaves of them
proofs     ranks that really run, and agree
doctor     `doctor`
server     the JupyterLab process: its port, its address, its end
jupyter    `lab`
"""

import sys


class CommandError(Exception):
    """Something that the reader can put right: told in one line, no traceback."""


def tell(problem: object) -> None:
    """Write one problem, in one line, to stderr."""
    print(f"ddp-course: {problem}", file=sys.stderr, flush=True)
