"""The learner's copy of the course: notebooks to run, change and keep.

`lab` opens it: by default the folder `ddp-course` where one stands. A learner's words
are never overwritten. What is new in the course replaces what the learner has left as
it was; where both have changed a notebook, the new one lies beside theirs, as
`05_ddp_internals.new.ipynb`. Outputs are nobody's words: who only ran a notebook has
not changed it. The course itself, a clone say, stays as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import nbformat
from nbformat.sign import NotebookNotary

from ddp_course.commands import CommandError, chapters
from ddp_course.learners_copy import FOLDER, RECORD, copy_around


def learners_copy(name: str | None) -> tuple[Path, list[str]]:
    """Make or refresh the copy in the folder `name`; return it, and what to say of it.

    Without a name: the copy that we stand in, or `ddp-course` in this folder. Raises
    CommandError if the folder holds something else or cannot be written.
    """
    here = Path.cwd()
    folder = here / name if name else copy_around() or here / FOLDER
    strange = folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))
    if strange and not (folder / RECORD).is_file():
        raise CommandError(
            f"{folder} is there, and is no copy that `ddp-course lab` has made; name "
            "another folder: ddp-course lab FOLDER"
        )
    try:
        new = refresh(chapters.course(), folder)
    except OSError as error:
        raise CommandError(f"cannot write your copy of the course: {error}") from None
    return folder, [f"Your copy of the course: {folder}", *(f"  {w}" for w in new)]


def refresh(original: Path, folder: Path) -> list[str]:
    """Bring the copy in `folder` up to date; return a sentence for what is to be seen.

    `original` has the folders `notebooks` and `images`.
    """
    record_file, sentences = folder / RECORD, []  # what was copied, as it was then
    folder.mkdir(parents=True, exist_ok=True)
    record_file.touch()  # a copy from now on, if this is interrupted
    try:
        record = json.loads(record_file.read_text())
    except ValueError:
        record = {}
    first = not record
    for path in sorted([*original.glob("notebooks/*"), *original.glob("images/*")]):
        name = path.relative_to(original).as_posix()
        if path.suffix not in (".ipynb", ".md", ".svg"):
            continue
        mine, new = folder / name, words(path)
        copied, record[name] = record.get(name), new
        theirs = words(mine) if mine.exists() else None
        if theirs == new or (theirs is not None and theirs != copied == new):
            continue  # nothing is new, whatever the learner has written
        if theirs in (None, copied):
            _write(path, mine)
            if not first:
                sentences.append(f"{name} is new")
        else:
            beside = mine.with_suffix(f".new{mine.suffix}")
            _write(path, beside)
            sentences.append(f"{name} has your changes; the new one is {beside.name}")
    unfinished = record_file.with_suffix(".new")
    unfinished.write_text(json.dumps(record, indent=1) + "\n")
    unfinished.replace(record_file)
    return sentences


def words(path: Path) -> str:
    """Return a digest of what somebody has written in a file: outputs do not count."""
    data = path.read_bytes()
    if path.suffix == ".ipynb":
        try:
            cells = json.loads(data)["cells"]
            told = [[cell["cell_type"], "".join(cell["source"])] for cell in cells]
            data = json.dumps(told).encode()
        except (ValueError, KeyError, TypeError):
            pass  # no notebook any more: all of it is somebody's words
    return hashlib.sha256(data).hexdigest()


def _write(source: Path, target: Path) -> None:
    """Copy a file: completely, or not at all; Jupyter trusts a notebook's figures."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copyfile(source, unfinished)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    if target.suffix == ".ipynb":
        NotebookNotary().sign(nbformat.read(target, as_version=4))
