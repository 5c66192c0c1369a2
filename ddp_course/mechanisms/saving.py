"""What is written to a disk: whole or not there; and what is read is what was written.

A process can be ended at any moment, also in the middle of writing. So a file is
written under another name, flushed to the disk, and only then given its own: a rename
happens completely or not at all. Of what bears its name all is there. Files of several
ranks are written into a folder that is given its name when all have written.

And a disk may return something else. So what is written is *sealed* with its
fingerprint, which is computed again when it is read. Reading runs no code that is in a
file (`weights_only`): it may come from anybody. Chapters 05 and 08.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ddp_course.mechanisms.agreement import described

WRITING = ".being-written-"  # how the names of unfinished files and folders begin


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read, or continued; every rank raises it."""


def seal(value: Any) -> dict[str, Any]:
    """Return a value, of any depth, beside its fingerprint."""
    return {"fingerprint": fingerprint(value), "value": value}


def unsealed(sealed: Mapping[str, Any]) -> Any:
    """Return what was sealed; raise CheckpointError if it is not the same any more."""
    if fingerprint(sealed["value"]) != sealed["fingerprint"]:
        raise CheckpointError(
            "something in it is not what was written: its fingerprint is another one"
        )
    return sealed["value"]


def fingerprint(value: Any) -> str:
    """Return 32 hexadecimal digits that change with any name, number, type or shape."""
    leaves, structure = pytree.tree_flatten(value)

    words = [described(x) if isinstance(x, Tensor) else repr(x) for x in leaves]
    return hashlib.blake2b(f"{structure} {words}".encode(), digest_size=16).hexdigest()


def write_whole(state: Any, path: Path) -> None:
    """Save `state` as `path`: completely, or not at all, whenever the process ends."""
    unfinished = path.with_name(f"{WRITING}{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # the bytes are on the disk ...
        rename(unfinished, path)  # ... before they get their name
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def rename(unfinished: Path, path: Path) -> None:
    """Give what is complete its name."""
    unfinished.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name, too, is on the disk
    finally:
        os.close(folder)


def left_overs(folder: Path) -> list[Path]:
    """Return what nobody will complete: who wrote it, on this machine, has ended."""
    return [path for path in folder.glob(f"{WRITING}*") if not _is_written(path)]


def _is_written(path: Path) -> bool:
    pid = path.name.removeprefix(WRITING).partition("-")[0]
    if not pid.isdigit() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)  # sends nothing, and tells whether that process is there
    except OSError as error:
        return isinstance(error, PermissionError)  # it is, and somebody else's
    return True


def read(path: Path, version: int, mmap: bool = False) -> dict[str, Any]:
    """Return what `write_whole` has written, a dict with its "format", on the CPU.

    With `mmap`, tensors are read when they are used. Raises CheckpointError.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        found = state["format"]
    except Exception as error:  # whatever is in that file
        problem = str(error).splitlines()[0] if str(error) else repr(error)
        raise CheckpointError(f"{path} cannot be read ({problem})") from None
    if found != version:
        raise CheckpointError(
            f"{path} has format {found}; this version reads format {version}"
        )
    return state
