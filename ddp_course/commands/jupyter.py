"""`lab`: prove the machine, then open JupyterLab at chapter 00 of a learner's copy."""

from __future__ import annotations

import getpass
import os
import socket
import sys
import webbrowser
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from rich.console import Console

from ddp_course.commands import CommandError, chapters, server
from ddp_course.commands.copy import learners_copy
from ddp_course.commands.proofs import prove_training


def command(told: Namespace) -> int:
    """Prove the machine, run JupyterLab until Ctrl-C, and return its exit code."""
    port, ip = told.port, told.ip
    root, lines = chapters.course(), []
    if not server.is_free(port or 0, ip):
        free = server.next_free(port, ip)
        raise CommandError(f"port {port} is taken; type: ddp-course lab --port {free}")
    if not told.here:
        root, lines = learners_copy(told.folder)
    with Console(stderr=True).status("4 processes train a GPT beside one"):
        proof = prove_training()
    print("\n".join([*proof, *lines]), flush=True)
    (chapter,) = root.glob("notebooks/00_start_here.ipynb")
    if "JUPYTERHUB_SERVICE_PREFIX" in os.environ:
        print(f"JupyterLab runs already in this JupyterHub seat: open {chapter} in it.")
        return 0
    with server.running(root, port, ip) as jupyter:  # notebooks refer to ../images
        try:
            info = jupyter.info()
            url = address(info, chapter.relative_to(root))
            print(f"JupyterLab: {url}")
            print(open_or_say_how(url, info["port"], not told.no_browser), flush=True)
            return jupyter.wait()
        except KeyboardInterrupt:
            return jupyter.end()


def address(info: Mapping[str, Any], notebook: Path) -> str:
    """Return the address at which a browser shows `notebook`, token included."""
    url = f"{info['url']}lab/tree/{quote(notebook.as_posix())}"
    return f"{url}?{urlencode({'token': info['token']})}" if info["token"] else url


def open_or_say_how(url: str, port: int, browser: bool) -> str:
    """Open `url` in a browser if there is one; return what the reader is to do."""
    obstacle = no_display(os.environ, sys.platform)
    if browser and not obstacle and webbrowser.open(url):
        return "Your browser opens it now. Ctrl-C here ends it."
    if obstacle:
        return f"{obstacle} {tunnel(port, os.environ)} Ctrl-C here ends it."
    return "Open this address in a browser. Ctrl-C here ends it."


def no_display(environ: Mapping[str, str], platform: str) -> str | None:
    """Return why no browser can be shown here, or None if one can."""
    if "SSH_CONNECTION" in environ or "SSH_TTY" in environ:
        return "This is an SSH session."
    if platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & environ.keys():
        return "There is no display here."
    return None


def tunnel(port: int, environ: Mapping[str, str]) -> str:
    """Return what to type on one's own computer to reach the server on this one."""
    # SSH_CONNECTION: the client's address and port, then the server's
    host = (environ.get("SSH_CONNECTION", "").split() or [""] * 4)[2]
    command = f"ssh -L {port}:localhost:{port} {_user()}@{host or socket.gethostname()}"
    return f"On your own computer type `{command}`, then open the address there."


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        return "USER"
