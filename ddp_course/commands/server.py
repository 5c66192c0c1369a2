"""The JupyterLab process: its port, its address, its end."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from jupyter_core.paths import jupyter_runtime_dir

from ddp_course.commands import CommandError, tell

PATIENCE = 120.0  # seconds until the server must be there; a cold disk can take 30
OPTIONS = (
    "--no-browser",  # `lab` opens one itself, if there is one
    "--ServerApp.log_level=WARN",
    "--LabApp.news_url=None",  # nothing is downloaded, and nobody is asked about it
    "--LabApp.check_for_updates_class="
    "jupyterlab.handlers.announcements.NeverCheckForUpdate",
)


def is_free(port: int, ip: str) -> bool:
    """Tell whether a server could listen on `port` of `ip`; 0 stands for any port.

    Raises CommandError if `ip` is no address of this machine, or the port reserved.
    """
    try:
        family, *_, address = socket.getaddrinfo(ip, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            if os.name == "posix":  # as Jupyter does: a port just given up is free
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except PermissionError:
        raise CommandError(
            f"port {port} is for administrators; take 1024 or above"
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise CommandError(f"{ip!r} is no address of this machine") from None
    return True


def next_free(port: int, ip: str) -> int:
    """Return the first free port above `port`, or the first of all."""
    return next(
        p for p in (*range(port + 1, 65536), *range(1024, port)) if is_free(p, ip)
    )


class Server:
    """A JupyterLab that runs, see `running`."""

    def __init__(self, process: subprocess.Popen, log: IO[bytes]) -> None:
        self.process = process
        self.log = log

    def info(self) -> dict[str, Any]:
        """Wait until the server is there; return what it says of itself.

        Raises CommandError with its last words if it ends before that.
        """
        file = Path(jupyter_runtime_dir()) / f"jpserver-{self.process.pid}.json"
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            code = self.process.poll()
            if code is not None:
                raise CommandError(f"JupyterLab ended at once ({code}):{self.words()}")
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
                return json.loads(file.read_text())
            time.sleep(0.05)
        raise CommandError(
            f"JupyterLab is not there after {PATIENCE:g} s:{self.words()}"
        )

    def wait(self) -> int:
        """Wait until the server ends, and return its exit code."""
        code = self.process.wait()
        if code:
            tell(f"JupyterLab ended ({code}):{self.words()}")
        return code if code >= 0 else 128 - code  # ended by a signal: as a shell says

    def end(self) -> int:
        """End the server with its kernels, and return its exit code."""
        for number in _ENDINGS:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C would leave kernels
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its kernels notice that and end themselves
        return self.wait()

    def words(self, lines: int = 8) -> str:
        """Return the last lines that the server wrote, each on a line of its own."""
        self.log.seek(0)
        text = self.log.read().decode(errors="replace")
        return "".join(f"\n  {line}" for line in text.splitlines()[-lines:])


@contextlib.contextmanager
def running(root: Path, port: int | None, ip: str) -> Iterator[Server]:
    """Run a JupyterLab that shows the folder `root`; it ends when the block is left.

    It takes `port`, or with None Jupyter's usual one or the next that is free.
    """
    command = [sys.executable, "-m", "jupyterlab", *OPTIONS, f"--ServerApp.ip={ip}"]
    command.append(f"--ServerApp.root_dir={root}")
    if port is not None:
        command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # the usual user of a container
        command.append("--allow-root")
    with tempfile.TemporaryFile() as log, _every_end_is_an_interrupt():
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "JUPYTER_PREFER_ENV_PATH": "1"},  # this Python's kernel
            start_new_session=True,  # Ctrl-C is for us; we end the server in good order
        )
        server = Server(process, log)
        try:
            yield server
        finally:
            if process.poll() is None:
                server.end()


@contextlib.contextmanager
def _every_end_is_an_interrupt() -> Iterator[None]:
    """Let a closed terminal and a `kill` end this program as Ctrl-C does."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    ignored = [
        n for n in _ENDINGS[1:] if signal.getsignal(n) == signal.SIG_IGN
    ]  # nohup
    before = {n: signal.signal(n, interrupt) for n in _ENDINGS if n not in ignored}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_ENDINGS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if hasattr(signal, name)
]
