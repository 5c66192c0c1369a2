"""`progress`: print the progress of one learner, or of an anonymous class.

In the learner's copy, each check appends its verdict to a file (`lab/progress.py`).
"""

from __future__ import annotations

import json
import secrets
from argparse import Namespace
from collections import Counter
from contextlib import suppress
from pathlib import Path

import ddp_course
from ddp_course.commands import CommandError
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
KEYS = {"ddp_course", "exercises"}  # a report has no name, no time, no folder


def command(args: Namespace) -> int:
    """Print the learner's progress, write it as a report, or count many reports."""
    if args.collect:
        print("\n".join(collected(args.collect)))
        return 0
    found = reached(_copy())
    if args.report:
        report = {"ddp_course": ddp_course.__version__, "exercises": found}
        file = write_report(args.report, json.dumps(report, indent=1) + "\n")
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
    """Return the learner's copy around the working directory, or in it."""
    inside = Path(FOLDER).absolute()
    copy = copy_around() or (inside if (inside / RECORD).is_file() else None)
    if copy is None:
        raise CommandError(
            f"there is no copy of the course here, nor in {FOLDER}/; create one with "
            "`ddp-course lab`"
        )
    return copy


def write_report(place: Path, text: str) -> Path:
    """Write a report to a new file; return the file. No report replaces another.

    `place` is the folder of a class, in which the file gets a random name, or a file
    with a name that ends in `.json`. Raises CommandError if it cannot be written. A
    missing folder is not created, because other learners could not write to it.
    """
    named = place.suffix == ".json" and not place.is_dir()
    file = place.absolute()
    if not named:
        file /= f"{secrets.token_hex(8)}.json"
    if file.parent.exists() and not file.parent.is_dir():
        raise CommandError(f"{file.parent} is a file; name a folder for reports")
    if not file.parent.exists():
        raise CommandError(
            f"there is no folder {file.parent}; the teacher who collects the reports "
            f"creates it with: mkdir -m 1733 {file.parent}"
        )
    try:
        with file.open("x") as new:
            file.chmod(0o644)  # the teacher must read it, whatever the umask
            new.write(text)
    except FileExistsError:
        raise CommandError(
            f"{file} exists already, and reports are never overwritten; name a folder "
            "or a new file"
        ) from None
    except OSError as error:
        with suppress(OSError):  # remove an incomplete report
            file.unlink()
        raise CommandError(f"cannot write {file}: {error.strerror}") from None
    return file


def collected(folder: Path) -> list[str]:
    """Return a table: how many reports in `folder` have each status, per exercise."""
    read = {file.name: _report(file) for file in sorted(folder.glob("*.json"))}
    reports = [report for report in read.values() if report is not None]
    if not reports:
        raise CommandError(
            f"there are no reports in {folder}; learners write them there with: "
            f"ddp-course progress --report {folder}"
        )
    lines = [f"{name}: not a report" for name, report in read.items() if report is None]
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
    """Return the status of each exercise in a report; None if the file is no report."""
    try:
        content = json.loads(file.read_bytes())
        found = content["exercises"]
        valid = content.keys() == KEYS and {*found.values()} <= {*STATUSES}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return found if valid else None
