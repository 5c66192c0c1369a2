"""`site` and `notebooks`: the authors' tools, which only a clone of the course has."""

from __future__ import annotations

import runpy
from argparse import Namespace

from ddp_course.commands import CommandError, chapters

TOOLS = {"site": "docs/make_site.py", "notebooks": "tools/clean_notebooks.py"}


def command(told: Namespace) -> int:
    """Run the tool in the clone that we stand in, or that holds this package."""
    script = chapters.course() / TOOLS[told.name]
    if not script.is_file():
        raise CommandError(f"`{told.name}` is for a clone of the course's repository")
    return runpy.run_path(str(script))["command"](told)
