"""The fork server: a helper process that has imported PyTorch, so that ranks need not.

A fresh Python needs seconds to import PyTorch. A fork of a process that has imported it
already takes milliseconds. The notebook's own process must not be forked, though: it
has running threads (OpenMP's, ZeroMQ's), and a fork would copy their locks in whatever
state they are. So the standard library's `forkserver` keeps one clean process that
imports PyTorch, waits, and forks a rank on request.

The server imports no user code: every rank imports that from disk, so edited code is
never stale. The server does import those modules of the course that ranks train with,
which saves each rank a quarter of a second, and those that check exercises. When one of
these files is edited, a new server replaces the old one.
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

# The first optimizer or DDP of a process imports torch._dynamo and sympy; packing a
# result imports torch.utils.serialization.
PRELOAD = [
    "ddp_course",  # first: it switches off the garbage collector during these imports
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
TESTING = ["pytest", "hypothesis"]  # preloaded if the launcher has imported them
IN_SERVER = "DDP_COURSE_FORK_SERVER"  # set in the server's environment only
COURSE = Path(__file__).parents[1]
METHOD = "forkserver" if sys.platform == "linux" else "spawn"

# Only one thread at a time may use multiprocessing's tables of children.
STARTING = threading.RLock()
_preloaded: dict[str, None] = {}  # further modules to import, in order
_served: dict[str, int] = {}  # "version": the course's last edit before a server began


def warm(*modules: str) -> None:
    """Start the fork server in the background, unless it runs already; return at once.

    Importing the package calls this, so the server imports PyTorch while you read.
    Every server from now on imports `modules` after PyTorch.
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
        with _server_environment():
            resource_tracker.ensure_running()  # first, as starting it unblocks SIGINT
            with _without_interrupts():
                forkserver.ensure_running()


def _last_edit() -> int:
    """Return when a file of the course was last edited, in ns since 1970."""
    times = [0]
    for file in _imported():
        with contextlib.suppress(FileNotFoundError):  # an editor renames or locks files
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

    multiprocessing imports `__main__` again in a child, for the functions defined
    there. The launcher sends these functions by value instead: a script that ran again
    in the child would launch ranks again.
    """
    with STARTING:
        script = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            process.start()
        finally:
            sys.modules["__main__"] = script


def wait_for_end(process: BaseProcess, seconds: float) -> bool:
    """Wait up to `seconds` for `process` to end; return whether it has ended."""
    has_ended = bool(connection.wait([process.sentinel], seconds))
    if has_ended:
        with STARTING:
            process.join(1.0)  # takes no time: only fetches the exit code
    return has_ended


def release(process: BaseProcess) -> None:
    """Free the resources of a process that has ended."""
    with STARTING, contextlib.suppress(ValueError):  # the process has not ended
        process.close()


def _remove_socket(launcher: int) -> None:
    """Remove the fork server's socket if process `launcher` has died without doing so.

    Runs in the fork server at its exit.
    """
    deadline = time.monotonic() + 1.0  # a dying process closes its pipes before it ends
    while os.getppid() == launcher and time.monotonic() < deadline:
        time.sleep(0.01)
    if os.getppid() != launcher:
        folder = Path(forkserver._forkserver._forkserver_address).parent
        if folder.name.startswith("pymp-"):
            shutil.rmtree(folder, ignore_errors=True)


if IN_SERVER in os.environ:
    atexit.register(_remove_socket, os.getppid())


def _is_a_child() -> bool:
    """Return whether multiprocessing started this process, or is starting it now."""
    being_started = getattr(current_process(), "_inheriting", False)
    return IN_SERVER in os.environ or being_started or parent_process() is not None


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block SIGINT, so that Jupyter's stop button does not end the new server.

    The stop button signals the whole process group.
    """
    old = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


@contextlib.contextmanager
def _server_environment() -> Iterator[None]:
    """Set variables that importing PyTorch reads: one thread per pool, no CUDA call."""
    settings = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        IN_SERVER: "1",
        "PYTHONSAFEPATH": "1",  # import no random.py from the current folder
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # CUDA does not survive a fork
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
