"""Another user of this machine must not sit where a rank should.

gloo's ranks talk over TCP on the loopback interface, which everybody on the machine can
reach, and gloo asks nobody who he is. Who connects to a rank before its peer does, and
says the right number, takes that peer's place. But the kernel knows to whom the other
end of a connection belongs. So whenever ranks of `spawn` have connected, each asks it,
before any tensor is sent. Chapter 01.
"""

import contextlib
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

PATIENCE = 0.5  # seconds after which ranks that still connect look who is there
SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST = 4, 20, 1  # of linux/netlink.h
FAMILIES = socket.AF_INET, socket.AF_INET6
HEADER, ANY = 16, 0xFFFFFFFF
Address = tuple[Any, ...]  # host, port, and of IPv6 more
Ends = tuple[Address, Address]


class StrangerError(RuntimeError):
    """Another user's process has connected to this rank."""


def check_peers(known: Iterable[Ends] = ()) -> None:
    """Raise StrangerError if a new connection of this process is with another user's.

    New is what is not `known`: a rank may talk to a database of this machine, say. The
    kernel tells it on Linux, and of this machine. User 0, its administrator, is no
    stranger.
    """
    users = {far_user(*ends) for ends in connections() - {*known}}
    if strangers := users - {None, 0, os.getuid()}:
        raise StrangerError(
            f"another user of this machine (user id {min(strangers)}) has connected to "
            "this rank, and may have taken a peer's place; nothing of yours was sent. "
            "See notebooks/trouble.md for a network that nobody else can reach"
        )


def connections() -> set[Ends]:
    """Return both ends, ours first, of all TCP connections that this process has."""
    found = set()
    for path in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # not connected, or closed meanwhile
            if stat.S_ISSOCK(os.fstat(fd := int(path.name)).st_mode):
                with socket.socket(fileno=os.dup(fd)) as end:
                    tcp = end.family in FAMILIES and end.type == socket.SOCK_STREAM
                    if tcp:
                        found.add((end.getsockname(), end.getpeername()))
    return found


def far_user(near: Address, far: Address) -> int | None:
    """Return whose the far end of a connection is; None if nobody's on this machine.

    The question and the answer are those of sock_diag(7). IPv4 addresses may be written
    as IPv6 ones (::ffff:127.0.0.1), as sockets for both do.
    """
    ends = struct.pack("!HH", far[1], near[1])
    family = FAMILIES[":" in far[0]]
    for host, *_ in (far, near):
        ends += socket.inet_pton(family, host.partition("%")[0]).ljust(16, b"\0")
    ends += struct.pack("=III", 0, ANY, ANY)
    about = struct.pack("=BBxxI", family, socket.IPPROTO_TCP, ANY)
    size = HEADER + len(about + ends)
    header = struct.pack("=IHHII", size, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 0, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, SOCK_DIAG) as kernel:
            kernel.send(header + about + ends)
            answer = kernel.recv(4096)
    except (AttributeError, OSError):  # not Linux, or one that does not tell
        return None
    (kind,) = struct.unpack_from("=H", answer, 4)
    if kind != SOCK_DIAG_BY_FAMILY:  # an error: there is no such connection here
        return None
    return struct.unpack_from("=I", answer, HEADER + 4 + len(ends) + 12)[0]


def admit_no_stranger(tell: Callable[[StrangerError], Any]) -> None:
    """From now on, check whenever this process has connected a process group.

    Who waits for a peer whose place is taken would wait for ever, in C++, where nothing
    can be raised: then the error goes to `tell`, from another thread.
    """
    original = dist.distributed_c10d._new_process_group_helper

    def connected(*args: Any, **options: Any) -> Any:
        over, known = threading.Event(), connections()

        def look() -> None:
            while not over.wait(PATIENCE):
                try:
                    check_peers(known)
                except StrangerError as error:
                    tell(error)

        threading.Thread(target=look, daemon=True).start()
        try:
            return original(*args, **options)
        finally:
            over.set()
            check_peers(known)

    dist.distributed_c10d._new_process_group_helper = connected
