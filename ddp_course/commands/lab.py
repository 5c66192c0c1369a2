"""`lab`: prove that ranks run here, then open JupyterLab on the learner's copy."""

from __future__ import annotations

import getpass
import os
import secrets
import signal
import socket
import sys
import webbrowser
from argparse import Namespace
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jupyter_core.paths import jupyter_runtime_dir
from rich.console import Console

from ddp_course.commands import chapters
from ddp_course.commands.copy import learners_copy, left_off
from ddp_course.commands.proofs import prove_training

OPTIONS = (
    "--no-browser",  # this command opens one itself, if there is one
    "--Application.log_level=ERROR",
    "--LabApp.custom_css=True",  # from this folder:
    f"--ServerApp.tornado_settings=static_custom_path={Path(__file__).parent}/jupyterlab",
)
NEWS = "@jupyterlab/apputils-extension:announcements"  # a popup that offers news
# Every user of the machine can connect to a kernel's ports and read code and outputs.
# So kernels use sockets in a private folder, unless the folder's name is longer than
# this: a socket's name has at most 107 characters, and Jupyter appends `kernel-`, 36
# characters and `-ipc-1`.
LONGEST = 55
PAGE = ".open-jupyterlab.html"
ENDINGS = ("SIGINT", "SIGTERM", "SIGHUP")  # Ctrl-C, a `kill`, a closed terminal


def command(args: Namespace) -> int:
    """Launch ranks as a test, then serve JupyterLab; return its exit code."""
    root, lines = chapters.course(), []
    (chapter,) = root.glob("notebooks/00_start_here.ipynb")
    if not args.here:
        root, lines = learners_copy(args.folder)
        chapter = left_off(root)
    with Console(stderr=True).status("4 processes and 1 process train the same GPT"):
        proof = prove_training()
    print("\n".join([*proof, *lines]), flush=True)
    if "JUPYTERHUB_SERVICE_PREFIX" in os.environ:
        print(f"JupyterLab already runs in this JupyterHub seat: open {chapter} there.")
        return 0
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # use this Python's kernel
    os.environ.setdefault("JUPYTER_TOKEN", secrets.token_hex(24))
    server = initialized(arguments(root, args.port, args.ip))
    for name in ENDINGS:  # stop at once; Jupyter's handler would ask for confirmation
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(number, lambda *_: server.stop(from_signal=True))

    def print_address() -> None:
        token = server.identity_provider.token
        url = address(server.connection_url, token, chapter.relative_to(root))
        print(f"JupyterLab: {url}")
        page = write_page(root, url).as_uri()
        print(open_or_say_how(page, server.port, not args.no_browser), flush=True)

    server.io_loop.add_callback(print_address)  # runs once the server listens
    try:
        server.start()
    finally:
        (root / PAGE).unlink(missing_ok=True)
    return 0


def initialized(options: list[str]) -> Any:
    """Return a JupyterLab server, ready to start."""
    from jupyterlab.labapp import LabApp

    def without_news(_: Any, page: dict[str, Any]) -> dict[str, Any]:
        page["disabledExtensions"] = [*page.get("disabledExtensions", ()), NEWS]
        return page

    server = LabApp.initialize_server(options)
    server.web_app.settings["page_config_hook"] = without_news
    return server


def write_page(folder: Path, url: str) -> Path:
    """Write a page that redirects to `url`, and that only its owner can read.

    The browser is started with this page, not with `url`: every user of the machine can
    read a program's arguments, and `url` contains the token. (The page is not in a
    hidden folder of the home folder, since Ubuntu's browsers cannot read those.)
    """
    page = folder / PAGE
    page.unlink(missing_ok=True)
    page.touch(mode=0o600)
    page.write_text(f'<meta http-equiv="refresh" content="0;url={escape(url)}">\n')
    return page


def arguments(folder: Path, port: int | None, ip: str) -> list[str]:
    """Return JupyterLab's arguments to serve `folder`, the parent of the notebooks.

    (The notebooks refer to ../images.) JupyterLab listens on `port`; with None, on its
    default port or the next free one.
    """
    options = [*OPTIONS, f"--ServerApp.ip={ip}", f"--ServerApp.root_dir={folder}"]
    if len(jupyter_runtime_dir()) < LONGEST:
        options.append("--KernelManager.transport=ipc")
    if port is not None:
        options += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # the usual user of a container
        options.append("--allow-root")
    return options


def address(server: str, token: str, notebook: Path) -> str:
    """Return the URL at which a browser shows `notebook`, with the token if any."""
    url = f"{server}lab/tree/{quote(notebook.as_posix())}"
    return f"{url}?{urlencode({'token': token})}" if token else url


def open_or_say_how(url: str, port: int, browser: bool) -> str:
    """Open `url` in a browser if there is one; return what the reader must do."""
    obstacle = no_display(os.environ, sys.platform)
    if browser and not obstacle and webbrowser.open(url):
        return (
            "Your browser opens this address now; if not, open it yourself. Ctrl-C "
            "here stops JupyterLab."
        )
    if obstacle:
        return f"{obstacle} {tunnel(port, os.environ)} Ctrl-C here stops JupyterLab."
    return "Open this address in a browser. Ctrl-C here stops JupyterLab."


def no_display(environ: Mapping[str, str], platform: str) -> str | None:
    """Return why no browser can be shown here, or None if one can."""
    if "SSH_CONNECTION" in environ or "SSH_TTY" in environ:
        return "This is an SSH session."
    if platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & environ.keys():
        return "There is no display here."
    return None


def tunnel(port: int, environ: Mapping[str, str]) -> str:
    """Return the ssh command with which the user's computer reaches this server."""
    # SSH_CONNECTION: the client's address and port, then the server's
    host = (environ.get("SSH_CONNECTION", "").split() or [""] * 4)[2]
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        user = "USER"
    command = f"ssh -L {port}:localhost:{port} {user}@{host or socket.gethostname()}"
    return f"On your own computer type `{command}`, then open the address there."
