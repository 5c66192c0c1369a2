"""`doctor --report`: print a text to send when asking for help, with nothing private.

The text has no names of people, machines or folders. It has the names of environment
variables, but never their values.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import ddp_course
from ddp_course.commands import CommandError
from ddp_course.commands.doctor import advice, facts, in_words, this_machine
from ddp_course.commands.proofs import prove_all_reduce
from ddp_course.launch import LaunchError
from ddp_course.learners_copy import copy_around

RELEVANT = re.compile(  # variables that change how ranks or kernels run
    "(GLOO|NCCL|TORCH|OMP|MKL|CUDA|MASTER|SLURM|PMI|OMPI|JUPYTER|DDP_COURSE)_?.*"
    "|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|TMPDIR|LANG|LC_ALL|PYTHON.*|.*_proxy",
    re.IGNORECASE,
)


def command(_: object = None) -> int:
    """Print the report; return 0 if ranks run here, else 1."""
    machine = this_machine()
    lines = [f"ddp-course {ddp_course.__version__}, `ddp-course doctor --report`"]
    rows = facts(machine) | system()
    lines += [f"{name}: {value}" for name, value in rows.items()]
    code = 0
    try:
        lines += [*advice(machine), prove_all_reduce()]
    except (CommandError, LaunchError, OSError) as error:
        lines.append(f"The ranks failed: {error}")
        code = 1
    print("\n".join(without_names(line) for line in lines))
    print("(Send all of this, the command that you typed, and its output.)")
    return code


def system() -> dict[str, str]:
    """Return facts that affect how ranks run, in a few words each, by name."""
    names = sorted(name for name in os.environ if RELEVANT.fullmatch(name))
    return {
        "system": f"{platform.platform()} {platform.machine()}",
        "kind": ", ".join(kinds()) or "nothing special",
        "open files": files(),
        "temporary files": f"{in_words(shutil.disk_usage(tempfile.gettempdir()).free)} "
        f"free; the folder's name has {len(tempfile.gettempdir())} characters",
        "network": ", ".join(name for _, name in socket.if_nameindex()),
        "host name": "resolves" if _resolves() else "does not resolve",
        "notebooks": "in a copy" if copy_around() else "not in a copy",
        "variables set": ", ".join(names) or "none",
    }


def kinds(root: Path = Path("/")) -> list[str]:
    """Return the kinds of environment that this process runs in, such as "WSL"."""
    container = [root / ".dockerenv", root / "run/.containerenv"]
    seen = {
        "WSL": "microsoft" in platform.release().lower(),
        "container": any(file.exists() for file in container),
        "JupyterHub": "JUPYTERHUB_SERVICE_PREFIX" in os.environ,
        "conda": (Path(sys.prefix) / "conda-meta").is_dir(),
        "virtual environment": sys.prefix != sys.base_prefix,
        "SSH": "SSH_CONNECTION" in os.environ,
        "SLURM": "SLURM_JOB_ID" in os.environ,
    }
    return [name for name, is_so in seen.items() if is_so]


def files() -> str:
    """Return the soft and the hard limit of open files."""
    try:
        import resource
    except ImportError:  # Windows
        return "unknown"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"at most {soft} (ulimit -n), can be raised to {hard}"


def _resolves() -> bool:
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return False
    return True


def without_names(text: str) -> str:
    """Return the text without the user's name, the machine's name, and folders."""
    text = re.sub(r"(?<![\w.:/])(?!/dev/shm\b)(/[\w.+@-]+){2,}", "<path>", text)
    names = {socket.gethostname(), socket.getfqdn(), Path.home().name}
    with suppress(KeyError, OSError):
        names.add(getpass.getuser())
    for name in sorted(filter(None, names), key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<name>", text)
    return text
