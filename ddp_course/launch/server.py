"""The fork server: a helper process that has imported PyTorch, so that ranks need not.

A fresh Python that imports PyTorch takes seconds before it can do anything. A fork of
a process which has imported it already takes milliseconds. The notebook's own process
must not be forked, though: it has running threads (OpenMP's, ZeroMQ's), and their
locks would be copied in whatever state they are. So the standard library's
`forkserver` keeps one clean process that imports, waits, and forks a rank on request.

The server imports nothing of the reader's: every rank imports that from disk, so edited
code is never stale. Of this course it imports what ranks train with, which would take
each of them a quarter of a second, and what checks of exercises are made of; when one
of these files was edited, it is replaced.
"""

import atexit
import contextlib
import os
import shutil
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from multiprocessing import (
    connection,
    current_process,
    forkserver,
    parent_process,
    resource_tracker,
)
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.multiprocessing as mp

# torch._dynamo and sympy are what the first optimizer or DDP of a process imports, and
# torch.utils.serialization what packs the result of every rank.
PRELOAD = [
    "ddp_course",  # first: it says that nobody looks for garbage while this goes on
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch._dynamo",
    "torch.utils.serialization.config",
    "cloudpickle",
    "numpy",
    "sympy",
]
TESTING = ["pytest", "hypothesis"]  # if the launcher has them, its ranks will want them
IN_SERVER = "DDP_COURSE_FORK_SERVER"  # set in the server's environment only
COURSE = Path(__file__).parents[1]
METHOD = "forkserver" if sys.platform == "linux" else "spawn"

# Only one thread at a time may use multiprocessing's tables of children.
STARTING = threading.RLock()
_preloaded: dict[str, None] = {}  # what the package wants to be imported, in order
_served: dict[str, int] = {}  # which version of the course the server has imported


def warm(*modules: str) -> None:
    """Start the fork server in the background, if it does not run yet. Returns at once.

    Called when the package is imported: the server imports PyTorch while you read, and
    these `modules` after it, from then on.
    """
    _preloaded.update(dict.fromkeys(modules))
    if METHOD != "forkserver" or _is_a_child():
        return
    with STARTING:
        edited = _last_edit()
        if _served.setdefault("version", edited) != edited:
            forkserver._forkserver._stop()
            _served["version"] = edited
        wanted = [*PRELOAD, *_preloaded]
        wanted += [name for name in TESTING if name in sys.modules]
        mp.get_context(METHOD).set_forkserver_preload(wanted)
        with _environment_of_the_server():
            resource_tracker.ensure_running()  # first: it unblocks SIGINT on its way
            with _without_interrupts():
                forkserver.ensure_running()


def _last_edit() -> int:
    """Return when the course was edited, in ns since 1970."""
    times = [0]
    for file in _imported():
        with contextlib.suppress(FileNotFoundError):  # an editor's lock, or renamed now
            times.append(file.stat().st_mtime_ns)
    return max(times)


def _imported() -> Iterator[Path]:
    """Yield the files of the course that the server may have imported."""
    for files in ("*.py", "*/*.py", "lab/draw/*.py"):
        yield from COURSE.glob(files)


def context() -> BaseContext:
    """Return the multiprocessing context that ranks are started with."""
    return mp.get_context(METHOD)


def start(process: BaseProcess) -> None:
    """Start `process`, without running this program's own main script again in it.

    multiprocessing makes `__main__` anew in a child, for functions that live there.
    Ours are sent by value, and a script that is run again would launch ranks again.
    """
    with STARTING:
        script = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            process.start()
        finally:
            sys.modules["__main__"] = script


def ended(process: BaseProcess, seconds: float) -> bool:
    """Wait up to `seconds` for `process` to end; tell whether it has."""
    has_ended = bool(connection.wait([process.sentinel], seconds))
    if has_ended:
        with STARTING:
            process.join(1.0)  # takes no time: it only fetches the exit code
    return has_ended


def forget(process: BaseProcess) -> None:
    """Let go of what is kept of a process that has ended."""
    with STARTING, contextlib.suppress(ValueError):  # ValueError: it has not ended
        process.close()


def _tidy(launcher: int) -> None:
    """In the fork server, when the notebook has died: remove the socket it left."""
    deadline = time.monotonic() + 1.0  # it closes its pipes a moment before it is dead
    while os.getppid() == launcher and time.monotonic() < deadline:
        time.sleep(0.01)
    if os.getppid() != launcher:
        folder = Path(forkserver._forkserver._forkserver_address).parent
        if folder.name.startswith("pymp-"):
            shutil.rmtree(folder, ignore_errors=True)


if IN_SERVER in os.environ:
    atexit.register(_tidy, os.getppid())


def _is_a_child() -> bool:
    """Whether this process was itself started by multiprocessing, or just is being."""
    being_started = getattr(current_process(), "_inheriting", False)
    return IN_SERVER in os.environ or being_started or parent_process() is not None


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Jupyter's stop button signals the whole process group: shield the new server."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


@contextlib.contextmanager
def _environment_of_the_server() -> Iterator[None]:
    """What must be set when PyTorch is imported: pools of one thread, no CUDA call."""
    settings = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        IN_SERVER: "1",
        "PYTHONSAFEPATH": "1",  # not a random.py of the current folder
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # a fork after a CUDA call is broken
    }
    old = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
