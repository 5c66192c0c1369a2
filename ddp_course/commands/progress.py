"""`progress`: how far a learner is, or a class of which nobody's name is known.

In the learner's copy, checks note their verdicts (`lab/progress.py`), one to a line.
"""

from __future__ import annotations

import json
import secrets
from argparse import Namespace
from collections import Counter
from pathlib import Path

import ddp_course
from ddp_course.commands import CommandError, check_file, write
from ddp_course.learners_copy import (
    FOLDER,
    RECORD,
    STATUSES,
    copy_around,
    exercises,
    reached,
    summary,
)

SIGNS = dict(zip((None, *STATUSES), "·○✗✓", strict=True))
KEYS = {"ddp_course", "exercises"}  # of a report: no name, no time, no folder


def command(told: Namespace) -> int:
    """Print the learner's progress, write it as a report, or count many reports."""
    if told.collect:
        print("\n".join(collected(told.collect)))
        return 0
    found = reached(_copy())
    if told.report:
        file = told.report
        if file.is_dir():  # a class shares it: nobody's name, nobody's file
            file /= f"{secrets.token_hex(8)}.json"
        check_file(file)
        write(file, {"ddp_course": ddp_course.__version__, "exercises": found})
        print(f"Your progress, without your name: {file}")
        return 0
    for chapter, names in exercises().items():
        done = "   ".join(f"{SIGNS[found.get(name)]} {name}" for name in names)
        print(f"{chapter:<22}  {done}")
    print(
        f"\n✓ passed   ✗ not yet   ○ run, not attempted   · not run\n{summary(found)}"
    )
    return 0


def _copy() -> Path:
    """Return the learner's copy that we stand in, or beside."""
    beside = Path(FOLDER).absolute()
    copy = copy_around() or (beside if (beside / RECORD).is_file() else None)
    if copy is None:
        raise CommandError(
            f"there is no copy of the course here, nor one in {FOLDER}/; "
            "`ddp-course lab` makes it"
        )
    return copy


def collected(folder: Path) -> list[str]:
    """Return lines: in how many reports of a folder has each exercise passed?"""
    files = sorted(folder.glob("*.json"))
    read = {file.name: _report(file) for file in files}
    reports = [report for report in read.values() if report is not None]
    if not reports:
        raise CommandError(f"there are no reports in {folder}")
    lines = [f"{name} is no report" for name, report in read.items() if report is None]
    columns = {"passed": "passed", "not yet": "not yet"}
    columns |= {"not attempted yet": "not attempted", None: "not run"}
    heads = "".join(f"{head:>15}" for head in columns.values())
    lines.append(f"{f'{len(reports)} reports':<26}{heads}")
    for chapter, names in exercises().items():
        lines.append(chapter)
        for name in names:
            counts = Counter(report.get(name) for report in reports)
            numbers = "".join(f"{counts[status]:>15}" for status in columns)
            lines.append(f"  {name:<24}{numbers}")
    return lines


def _report(file: Path) -> dict[str, str] | None:
    """Return what a report says of each exercise; None if it is no report."""
    try:
        told = json.loads(file.read_bytes())
        found = told["exercises"]
        right = told.keys() == KEYS and {*found.values()} <= {*STATUSES}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return found if right else None
