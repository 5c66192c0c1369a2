"""What happens inside a rank: prepare the process, call the function, send the result.

This is the whole life of a rank, from the fork to the exit. The steps have names;
each is a function of a few lines.
"""

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ddp_course.launch import lines, rendezvous, stacks, strict
from ddp_course.launch.deadlock import say_returned
from ddp_course.launch.packing import pack_value, unpack_call
from ddp_course.launch.scratch import NamedFile, OpenFile
from ddp_course.launch.topology import here

# A rank that is done stays until all are, so that no peer loses it; but if a peer still
# waits for a message from it, that is an error, and it should be told soon.
STAY = 2.0


@dataclass
class Pipes:
    """The rank's connections to the launcher."""

    result: Connection  # both ways: the result; and a word that all ranks are done
    stdout: Connection
    stderr: Connection
    stacks: Connection  # where faulthandler writes


@dataclass
class Orders:
    """What the launcher tells a rank; the same for all ranks but `env`."""

    call: OpenFile | NamedFile  # the packed function and its arguments
    store: OpenFile | NamedFile  # where the ranks meet
    listener: socket.socket | None  # rank 0: the socket bound to MASTER_PORT
    backend: str
    threads: int
    init: bool
    env: dict[str, str] = field(default_factory=dict)


def main(orders: Orders, pipes: Pipes) -> None:
    """Live as a rank. Never returns."""
    _live_and_die_alone()
    _redirect(pipes)
    started = time.monotonic()
    labels: dict[str, str] = {}
    try:
        _settle(orders)
        fn, args, labels = unpack_call(Path(orders.call.path).read_bytes())
        if orders.init:
            _join_process_group(orders)
        started = time.monotonic()
        value = fn(*args)
        seconds = time.monotonic() - started
        report = {"status": "ok", "value": pack_value(value)}
        say_returned()
    except BaseException as error:
        seconds, report = time.monotonic() - started, _describe(error, labels)
    _flush()
    send_frame(pipes.result.fileno(), pickle.dumps({**report, "seconds": seconds}))
    if report["status"] == "ok":
        time.sleep(STAY)  # most often the launcher ends us here, when all are done
    os._exit(0)  # straight out: the peers of one that failed notice it at once


def _flush() -> None:
    """Write out what Python and C have kept back: `os._exit` would not."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the reader may have closed it
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def send_frame(fd: int, payload: bytes) -> None:
    """Write `payload`, preceded by its length in 8 bytes, to the file descriptor."""
    view = memoryview(len(payload).to_bytes(8, "big") + payload)
    while view:
        view = view[os.write(fd, view) :]


def _live_and_die_alone() -> None:
    """Be immune to the notebook's stop button, and die when the notebook dies."""
    gc.enable()  # the server, of which this is a fork, did without while it imported
    os.setpgid(0, 0)  # own group: the launcher can end the rank's children with it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    server = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        # The server lives while anyone holds this; a rank that hangs must not.
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = server._forkserver_address = None
    _die_with_parent()
    _let_children_die_with_us()
    threading.Thread(target=_watch_launcher, name="watch launcher", daemon=True).start()
    if sys.platform == "linux":  # DataLoader workers: fork, as under torchrun
        mp.set_start_method("fork", force=True)


def _die_with_parent() -> None:
    """Ask Linux to end this process when the thread that forked it ends."""
    if sys.platform == "linux":
        mp._prctl_pr_set_pdeathsig(signal.SIGKILL)


def _let_children_die_with_us() -> None:
    """Let DataLoader workers, too, end with this process, however it ends."""
    by_main: list[bool] = []  # only the main thread lives as long as the process

    def before() -> None:
        by_main.append(threading.current_thread() is threading.main_thread())

    def in_child() -> None:
        if by_main.pop():
            _die_with_parent()

    os.register_at_fork(
        before=before, after_in_parent=by_main.pop, after_in_child=in_child
    )


def _watch_launcher() -> None:
    connection.wait([parent_process().sentinel])
    os.killpg(0, signal.SIGKILL)


def _redirect(pipes: Pipes) -> None:
    """Send all output, C++'s too, to the launcher; be ready to say where we are."""
    for pipe, fd in ((pipes.stdout, 1), (pipes.stderr, 2)):
        os.dup2(pipe.fileno(), fd)
        pipe.close()
    kind = {"buffering": 1, "encoding": "utf-8", "errors": "backslashreplace"}
    sys.stdout = open(1, "w", closefd=False, **kind)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, **kind)  # noqa: SIM115
    faulthandler.enable(pipes.stacks.fileno())
    faulthandler.register(signal.SIGUSR1, pipes.stacks.fileno(), all_threads=True)


def _settle(orders: Orders) -> None:
    """Take over the environment, the threads and the device that were decided."""
    os.environ.clear()
    os.environ.update(orders.env)
    dist.set_debug_level_from_env()  # it was read when torch was imported, long ago
    torch.set_num_threads(orders.threads)
    rendezvous.use_bound_port(orders.listener)
    lines.install()
    strict.wrap_batches()


def _join_process_group(orders: Orders) -> None:
    place = here()
    options = {}
    device = torch.device(os.environ["DDP_COURSE_DEVICE"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if "nccl" in orders.backend:
            options["device_id"] = device
    dist.init_process_group(
        orders.backend,
        store=dist.FileStore(orders.store.path, place.world_size),
        rank=place.rank,
        world_size=place.world_size,
        timeout=datetime.timedelta(days=1),  # the launch has a deadline of its own
        **options,
    )
    # Joining is no barrier: a rank that returned at once would leave before the last
    # one has connected to it.
    dist.barrier()


def _describe(error: BaseException, labels: dict[str, str]) -> dict[str, Any]:
    """Return what a `RankReport` tells about an exception, as plain strings."""
    told = traceback.TracebackException.from_exception(error)
    stacks.drop_launcher(told)
    frames = [(f.filename, f.lineno, f.line) for f in told.stack]
    what = "".join(told.format_exception_only()).strip()
    if isinstance(error, SyntaxError):  # Python tells the file first
        what = f"{type(error).__name__}: {error.msg}"
    return {
        "status": "exited" if isinstance(error, SystemExit) else "raised",
        "error": what,
        "traceback": stacks.relabel("".join(told.format()), labels),
        "where": stacks.innermost(frames, labels),
    }
