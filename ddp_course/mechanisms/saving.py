"""Checkpoint files that are complete or absent, and are verified when they are read.

A process can be ended at any moment, also in the middle of writing. So a file is
written under a temporary name, flushed to the disk, and renamed: a rename happens
completely or not at all, so a file with its final name is complete. The files of
several ranks are written into a folder that is renamed when all ranks have written.

A disk may return other bytes than were written. So a value is *sealed* with its
fingerprint, which is computed again when it is read. Reading never runs code from the
file (`weights_only`), as a file may come from a stranger. Chapters 05 and 08.
"""

import hashlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ddp_course.mechanisms.agreement import describe

WRITING = ".being-written-"  # the prefix of unfinished files and folders


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read, or continued; every rank raises it."""


def seal(value: Any) -> dict[str, Any]:
    """Return a (nested) value together with its fingerprint."""
    return {"fingerprint": fingerprint(value), "value": value}


def unseal(sealed: Mapping[str, Any]) -> Any:
    """Return the sealed value; raise CheckpointError if it has changed."""
    if fingerprint(sealed["value"]) != sealed["fingerprint"]:
        raise CheckpointError(
            "it is damaged: the fingerprint of its contents is not the one that was "
            "written"
        )
    return sealed["value"]


def fingerprint(value: Any) -> str:
    """Return 32 hexadecimal digits that change with any name, number, type or shape."""
    leaves, structure = pytree.tree_flatten(value)
    words = [describe(x) if isinstance(x, Tensor) else repr(x) for x in leaves]
    return hashlib.blake2b(f"{structure} {words}".encode(), digest_size=16).hexdigest()


def write_whole(state: Any, path: Path) -> None:
    """Save `state` as `path`, completely or not at all, whenever the process ends."""
    unfinished = path.with_name(unfinished_name())
    try:
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # the bytes are on the disk ...
        rename(unfinished, path)  # ... before they get their name
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def unfinished_name() -> str:
    """Return a new temporary name; processes in several containers may share an id."""
    return f"{WRITING}{os.getpid()}-{secrets.token_hex(8)}"


def rename(unfinished: Path, path: Path) -> None:
    """Rename a complete file or folder to its final name, durably."""
    unfinished.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # flushes the name, too
    finally:
        os.close(folder)


def find_abandoned(folder: Path) -> list[Path]:
    """Return unfinished files that no other process of this machine is writing."""
    return [path for path in folder.glob(f"{WRITING}*") if not _in_progress(path)]


def _in_progress(path: Path) -> bool:
    pid = path.name.removeprefix(WRITING).partition("-")[0]
    if not pid.isdigit() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)  # sends no signal; raises if there is no such process
    except OSError as error:
        return isinstance(error, PermissionError)  # another user's process
    return True


def read_whole(path: Path, version: int, mmap: bool = False) -> dict[str, Any]:
    """Return the dict that `write_whole` has written, with its tensors on the CPU.

    With `mmap`, tensors are read when they are used. Raises CheckpointError for a file
    that cannot be read, or whose "format" is not `version`.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        found = state["format"]
    except Exception as error:  # the file may contain anything
        problem = str(error).splitlines()[0] if str(error) else repr(error)
        raise CheckpointError(f"{path} cannot be read ({problem})") from None
    if found != version:
        raise CheckpointError(
            f"{path} has format {found}; this version reads format {version}"
        )
    return state
