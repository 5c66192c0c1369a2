"""`doctor --report`: what to send when asking for help, and nothing that is private.

No names of people, machines or folders; of variables the names, never the values.
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

TELLING = re.compile(  # variables that change how ranks or kernels run
    "(GLOO|NCCL|TORCH|OMP|MKL|CUDA|MASTER|SLURM|PMI|OMPI|JUPYTER|DDP_COURSE)_?.*"
    "|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|TMPDIR|LANG|LC_ALL|PYTHON.*|.*_proxy",
    re.IGNORECASE,
)


def command(_: object = None) -> int:
    """Print the report; 0 if ranks run here, else 1."""
    machine = this_machine()
    told = [f"ddp-course {ddp_course.__version__}, as the doctor sees this machine"]
    rows = facts(machine) | system()
    told += [f"{name}: {value}" for name, value in rows.items()]
    code = 0
    try:
        told += [*advice(machine), prove_all_reduce()]
    except (CommandError, LaunchError, OSError) as error:
        told.append(f"The ranks failed: {error}")
        code = 1
    print("\n".join(without_names(line) for line in told))
    print("(Send all of this, the command that you typed, and what it answered.)")
    return code


def system() -> dict[str, str]:
    """Return what else of this machine decides how ranks run: name -> a few words."""
    names = sorted(name for name in os.environ if TELLING.fullmatch(name))
    return {
        "system": f"{platform.platform()} {platform.machine()}",
        "kind": ", ".join(kinds()) or "nothing special",
        "files open at most": files(),
        "temporary files": f"{in_words(shutil.disk_usage(tempfile.gettempdir()).free)} "
        f"free; the folder's name has {len(tempfile.gettempdir())} characters",
        "network": ", ".join(name for _, name in socket.if_nameindex()),
        "own name": "known" if _resolves() else "unknown to this machine",
        "notebooks": "in a copy" if copy_around() else "not in a copy",
        "variables set": ", ".join(names) or "none",
    }


def kinds(root: Path = Path("/")) -> list[str]:
    """Return what kind of place this is, as far as it can be seen."""
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
    """Return how many files a process may have open, and could have if it asked."""
    try:
        import resource
    except ImportError:  # Windows
        return "unknown"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"{soft} (ulimit -n), {hard} if asked for"


def _resolves() -> bool:
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return False
    return True


def without_names(text: str) -> str:
    """Return the text without this user's name, this machine's, and folders."""
    text = re.sub(r"(?<![\w.:/])(?!/dev/shm\b)(/[\w.+@-]+){2,}", "<path>", text)
    names = {socket.gethostname(), socket.getfqdn(), Path.home().name}
    with suppress(KeyError, OSError):
        names.add(getpass.getuser())
    for name in sorted(filter(None, names), key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<name>", text)
    return text
