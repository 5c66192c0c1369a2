"""The learner's copy of the course: notebooks to run, change and keep.

`lab` opens the copy, by default the folder `ddp-course` in the working directory. What
a learner has written is never overwritten. A new version of a file replaces the
learner's if the learner has not changed it; if both have changed a notebook, the new
version is written beside it, as `05_ddp_internals.new.ipynb`. Only cells' sources
count: running a notebook does not change it. The original course is never changed.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import nbformat
from ipykernel.ipkernel import IPythonKernel
from nbformat.sign import NotebookNotary

from ddp_course.commands import CommandError, chapters
from ddp_course.commands.lab_options import copy_folder
from ddp_course.learners_copy import RECORD, reached, remaining

COPIED = ("README.md", "LICENSE", "notebooks/*.ipynb", "notebooks/*.md", "images/*.svg")


def learners_copy(name: str | None) -> tuple[Path, list[str]]:
    """Create or refresh the copy in the folder `name`; return it, and lines to print.

    Without a name, `copy_folder` chooses the folder. Raises CommandError if the folder
    holds something else or cannot be written.
    """
    folder = copy_folder(name)
    try:
        changes = refresh(chapters.course(), folder)
    except OSError as error:
        raise CommandError(f"cannot write your copy of the course: {error}") from None
    return folder, [f"Your copy of the course: {folder}", *(f"  {c}" for c in changes)]


def refresh(original: Path, folder: Path) -> list[str]:
    """Update the copy in `folder` from `original`; return a line for each change."""
    record_file, changes = folder / RECORD, []
    folder.mkdir(parents=True, exist_ok=True)
    if not record_file.exists():  # first, so that an interrupted copy is known
        record_file.touch()
    try:
        record = json.loads(record_file.read_text())
    except ValueError:
        record = {}
    before = dict(record)
    for path in sorted(path for form in COPIED for path in original.glob(form)):
        name = path.relative_to(original).as_posix()
        target, new = folder / name, digest_of(path)
        copied, record[name] = record.get(name), new
        present = digest_of(target) if target.exists() else None
        if present == new or (present is not None and present != copied == new):
            continue  # nothing new in the course: keep the learner's file
        if present in (None, copied):
            _write(path, target)
            if before:
                changes.append(f"{name} is new")
        else:
            beside = target.with_suffix(f".new{target.suffix}")
            _write(path, beside)
            changes.append(f"{name} has your changes; the new one is {beside.name}")
    if record != before:  # `left_off` reads the last update's time from this file
        unfinished = record_file.with_suffix(".new")
        unfinished.write_text(json.dumps(record, indent=1) + "\n")
        unfinished.replace(record_file)
    return changes


def left_off(copy: Path) -> Path:
    """Return the notebook to open: the one that the learner saved last.

    If none was saved since the copy was created or updated, return the chapter of the
    first exercise that has not passed.
    """
    updated = (copy / RECORD).stat().st_mtime_ns
    notebooks = sorted(copy.glob("notebooks/[0-9][0-9]_*.ipynb"))
    latest = max(notebooks, key=lambda path: path.stat().st_mtime_ns)
    if latest.stat().st_mtime_ns > updated:
        return latest
    following = [chapter for _, chapter in remaining(reached(copy))][:1]
    return next((n for n in notebooks if n.stem in following), notebooks[0])


def digest_of(path: Path) -> str:
    """Return a digest of a file, or of a notebook's cells without outputs."""
    data = path.read_bytes()
    if path.suffix == ".ipynb":
        try:
            cells = json.loads(data)["cells"]
            sources = [[cell["cell_type"], "".join(cell["source"])] for cell in cells]
            data = json.dumps(sources).encode()
        except (ValueError, KeyError, TypeError):
            pass  # no longer a valid notebook: hash the whole file
    return hashlib.sha256(data).hexdigest()


def _write(source: Path, target: Path) -> None:
    """Copy a file, completely or not at all; sign notebooks so that figures are shown.

    JupyterLab shows no JavaScript or SVG of a notebook that it does not trust.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    data = source.read_bytes()
    if source.suffix == ".ipynb":
        data = _as_this_kernel_saves_it(data)
    try:
        unfinished.write_bytes(data)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    if target.suffix == ".ipynb":
        NotebookNotary().sign(nbformat.read(target, as_version=4))


def _as_this_kernel_saves_it(data: bytes) -> bytes:
    """Return a notebook with the metadata that this kernel would write into it.

    JupyterLab would add this metadata when it opens the notebook, and then ask whether
    to save changes that the learner has not made.
    """
    notebook = json.loads(data)
    notebook["metadata"]["language_info"] = IPythonKernel.language_info
    return (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode()
