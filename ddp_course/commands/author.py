"""`site` and `notebooks`: the authors' tools, which only a clone of the course has."""

from __future__ import annotations

import runpy
from argparse import Namespace

from ddp_course.commands import CommandError, chapters

TOOLS = {"site": "docs/make_site.py", "notebooks": "tools/clean_notebooks.py"}


def command(args: Namespace) -> int:
    """Run the tool of the clone around the working directory, or around this package.

    Raises CommandError if there is no clone.
    """
    script = chapters.course() / TOOLS[args.name]
    if not script.is_file():
        raise CommandError(
            f"`ddp-course {args.name}` needs a clone of the course's repository; run "
            "it in a clone"
        )
    return runpy.run_path(str(script))["command"](args)
