"""A rank's process, from fork to exit: prepare, call the function, send the result.

Each step is a function of a few lines.
"""

import ast
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

from ddp_course.launch import calls, lines, rendezvous, stacks, strict
from ddp_course.launch.deadlock import default_store, entry_key
from ddp_course.launch.packing import pack_value, unpack_call
from ddp_course.launch.scratch import NamedFile, OpenFile
from ddp_course.launch.topology import here

# Seconds that a rank stays alive after its function has returned and its collectives
# have ended, so that slower peers do not lose their connection to it. A peer that waits
# even longer for a message from this rank gets an error.
STAY = 2.0


@dataclass
class Pipes:
    """The rank's connections to the launcher."""

    result: Connection
    stdout: Connection
    stderr: Connection
    stacks: Connection  # where faulthandler writes


@dataclass
class Orders:
    """The launcher's orders to a rank; only `env` and `listener` differ by rank."""

    call: OpenFile | NamedFile  # the packed function and its arguments
    store: OpenFile | NamedFile  # the file of the FileStore in which the ranks meet
    notes: OpenFile | NamedFile  # the last collectives that the ranks called
    listener: socket.socket | None  # rank 0: the socket bound to MASTER_PORT
    backend: str
    threads: int
    init: bool
    env: dict[str, str] = field(default_factory=dict)


def main(orders: Orders, pipes: Pipes) -> None:
    """Run as a rank: call the function, send its result, exit. Never returns."""
    _isolate_process()
    _redirect(pipes)
    started = time.monotonic()
    labels: dict[str, str] = {}
    try:
        _apply_orders(orders)
        fn, args, labels = unpack_call(Path(orders.call.path).read_bytes())
        if orders.init:
            _join_process_group(orders)
        started = time.monotonic()
        value = fn(*args)
        seconds = time.monotonic() - started
        report = {"status": "ok", "value": pack_value(value)}
        with contextlib.suppress(Exception):  # a store that has gone has no readers
            announce_return()
    except BaseException as error:
        seconds, report = time.monotonic() - started, _describe(error, labels)
    _flush()
    send_frame(pipes.result.fileno(), pickle.dumps({**report, "seconds": seconds}))
    if report["status"] == "ok":
        calls.finish()
        time.sleep(STAY)  # usually the launcher kills this process here
    os._exit(0)  # at once: the peers of a failed rank notice that it has gone


def announce_return() -> None:
    """Announce to waiting peers that this rank calls no further collective."""
    if dist.is_initialized():
        store, key = default_store(), entry_key(dist.get_rank())
        last = ast.literal_eval(store.get(key).decode()) if store.check([key]) else {}
        store.set(key, repr({"returned": True, "circle": last.get("circle", [])}))


def _flush() -> None:
    """Flush the output buffers of Python and C: `os._exit` would not."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # `fn` may have closed it
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def send_frame(fd: int, payload: bytes) -> None:
    """Write `payload`, preceded by its length in 8 bytes, to the file descriptor."""
    view = memoryview(len(payload).to_bytes(8, "big") + payload)
    while view:
        view = view[os.write(fd, view) :]


def _isolate_process() -> None:
    """Protect this process from the stop button; let it end when the launcher ends."""
    gc.enable()  # the fork server, which imported PyTorch, has switched it off
    os.setpgid(0, 0)  # own group: the launcher can kill the rank's children with it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    server = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        # The fork server lives while any process holds this descriptor open; a rank
        # that hangs must not keep it alive.
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = server._forkserver_address = None
    _die_with_parent()
    _end_children_with_this_process()
    threading.Thread(target=_watch_launcher, name="watch launcher", daemon=True).start()
    if sys.platform == "linux":  # DataLoader forks its workers, as under torchrun
        mp.set_start_method("fork", force=True)


def _die_with_parent() -> None:
    """Ask Linux to end this process when the thread that forked it ends."""
    if sys.platform == "linux":
        mp._prctl_pr_set_pdeathsig(signal.SIGKILL)


def _end_children_with_this_process() -> None:
    """Let DataLoader workers end with this process, however it ends.

    Only children of the main thread end so: Linux would end any other child together
    with the thread that forked it.
    """
    by_main: list[bool] = []

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
    """Send all output, also that of C++, to the launcher; dump stacks on SIGUSR1."""
    for pipe, fd in ((pipes.stdout, 1), (pipes.stderr, 2)):
        os.dup2(pipe.fileno(), fd)
        pipe.close()
    kind = {"buffering": 1, "encoding": "utf-8", "errors": "backslashreplace"}
    sys.stdout = open(1, "w", closefd=False, **kind)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, **kind)  # noqa: SIM115
    faulthandler.enable(pipes.stacks.fileno())
    faulthandler.register(signal.SIGUSR1, pipes.stacks.fileno(), all_threads=True)


def _apply_orders(orders: Orders) -> None:
    """Set the environment and the number of threads, and install the slow lines."""
    os.environ.clear()
    os.environ.update(orders.env)
    dist.set_debug_level_from_env()  # torch last read it in the fork server
    torch.set_num_threads(orders.threads)
    rendezvous.use_bound_port(orders.listener)
    lines.install()
    strict.wrap_batches()
    calls.install(Path(orders.notes.path), here().rank)


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
        timeout=datetime.timedelta(days=1),  # the launcher has its own deadline
        **options,
    )
    # `init_process_group` does not wait for all: a rank whose `fn` returns at once
    # could leave before the last peer has connected to it.
    dist.barrier()


def _describe(error: BaseException, labels: dict[str, str]) -> dict[str, Any]:
    """Return the fields of a `RankReport` that describe an exception."""
    parsed = traceback.TracebackException.from_exception(error)
    stacks.drop_launcher(parsed)
    frames = [(f.filename, f.lineno, f.line) for f in parsed.stack]
    text = "".join(parsed.format_exception_only()).strip()
    if isinstance(error, SyntaxError):  # its text would begin with the file's name
        text = f"{type(error).__name__}: {error.msg}"
    return {
        "status": "exited" if isinstance(error, SystemExit) else "raised",
        "error": text,
        "traceback": stacks.relabel("".join(parsed.format()), labels),
        "where": stacks.innermost(frames, labels),
    }
