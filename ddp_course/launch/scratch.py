"""Files of a launch that leave nothing on disk, however the launch ends.

On Linux a file can exist in memory without a name (`memfd_create`): the kernel frees it
when the last process that has it open ends, even after `kill -9`. Other systems get a
file in a temporary folder, which the launcher removes.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing import reduction
from pathlib import Path
from typing import Any


class OpenFile:
    """A nameless file that child processes inherit as an open file descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @property
    def path(self) -> str:
        """A path by which only this process can open the file."""
        return f"/proc/self/fd/{self.fd}"

    def __reduce__(self) -> tuple[Any, tuple]:
        """Pickle as an open file descriptor, which gets a new number in the child."""
        return _open_received, (reduction.DupFd(self.fd),)


class NamedFile:
    """A file in the launch's temporary folder."""

    def __init__(self, path: str) -> None:
        self.path = path


def _open_received(descriptor: Any) -> OpenFile:
    return OpenFile(descriptor.detach())


@contextlib.contextmanager
def scratch_files(
    *names: str, in_memory: bool = hasattr(os, "memfd_create")
) -> Iterator[list[OpenFile | NamedFile]]:
    """Create an empty file for each name; remove the files when the block ends."""
    if in_memory:
        with contextlib.ExitStack() as closing:
            files = []
            for name in names:
                files.append(OpenFile(os.memfd_create(name)))
                closing.callback(os.close, files[-1].fd)
            yield files
    else:
        folder = Path(tempfile.mkdtemp(prefix="ddp-course-"))
        try:
            for name in names:
                (folder / name).touch()
            yield [NamedFile(str(folder / name)) for name in names]
        finally:
            shutil.rmtree(folder, ignore_errors=True)
