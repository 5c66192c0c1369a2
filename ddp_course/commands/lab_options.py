"""The options of `ddp-course lab`, checked without PyTorch before ranks start."""

from __future__ import annotations

import errno
import os
import socket
from argparse import Namespace
from pathlib import Path

from ddp_course.commands import CommandError
from ddp_course.learners_copy import FOLDER, RECORD, copy_around


def check_typed(args: Namespace) -> None:
    """Raise CommandError for an address, a port or a folder that cannot be used."""
    if not is_free(args.port or 0, args.ip):
        free = next_free(args.port, args.ip)
        raise CommandError(
            f"port {args.port} is taken; type: ddp-course lab --port {free}"
        )
    if not args.here:
        copy_folder(args.folder)


def copy_folder(name: str | None) -> Path:
    """Return the folder of the learner's copy, which may not exist yet.

    Without a name, it is the copy around the working directory, or the working
    directory's subfolder `ddp-course`. Raises CommandError if the folder holds
    something else.
    """
    here = Path.cwd()
    folder = here / name if name else copy_around() or here / FOLDER
    occupied = folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))
    if occupied and not (folder / RECORD).is_file():
        raise CommandError(
            f"{folder} exists, and is not a copy that `ddp-course lab` created; name "
            "another folder: ddp-course lab FOLDER"
        )
    return folder


def is_free(port: int, ip: str) -> bool:
    """Return whether a server could listen on `port` of `ip`; 0 stands for any port.

    Raises CommandError if this machine does not have address `ip`, or `port` is
    reserved.
    """
    try:
        family, *_, address = socket.getaddrinfo(ip, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            if os.name == "posix":  # as Jupyter does: a port just closed is free
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except PermissionError:
        why = f"port {port} is reserved for administrators; use 1024 or above"
        raise CommandError(why) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise CommandError(
            f"{ip!r} is not an address of this machine; use localhost, or 0.0.0.0 for "
            "all of its addresses"
        ) from None
    return True


def next_free(port: int, ip: str) -> int:
    """Return the first free port above `port`, or else the first free one."""
    ports = (*range(port + 1, 65536), *range(1024, port))
    return next(p for p in ports if is_free(p, ip))
