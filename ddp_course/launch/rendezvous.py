"""How ranks find each other: by a store, a small dictionary that all ranks can reach.

Each rank writes its address into the store and reads the addresses of the others; from
then on they talk directly. PyTorch has three kinds of rendezvous: `env://` and `tcp://`
(a TCP server at MASTER_ADDR:MASTER_PORT, run by rank 0) and `file://` (a file that all
ranks can open).

Ranks of `spawn` meet in a file without a name, which leaves nothing on disk and needs
no port. MASTER_ADDR and MASTER_PORT are valid all the same: the launcher has bound that
port, and rank 0 serves a TCPStore on it if the program asks for one. Chapter 01.
"""

import datetime
import itertools
import os
import socket
import sys
import time
import uuid

import torch.distributed as dist


def listening_socket() -> socket.socket:
    """Return a socket that listens on a free port of this machine's loopback only.

    No other program can take the port between its choice and its use.
    """
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    return listener


def loopback_interface() -> str:
    """Return the network interface that gloo uses among the ranks of one machine."""
    return "lo0" if sys.platform == "darwin" else "lo"


def use_bound_port(listener: socket.socket | None) -> None:
    """Let env:// and tcp:// on MASTER_PORT use the socket that is already bound.

    PyTorch's own handlers still create the store; they only get `listener` instead of a
    new socket. `listener` is None on all ranks but rank 0.
    """
    module = sys.modules["torch.distributed.rendezvous"]
    original = module._create_c10d_store
    own_port = int(os.environ["MASTER_PORT"])
    meetings = itertools.count()
    connected: list[dist.Store] = []

    def create(hostname, port, rank, world_size, timeout, use_libuv=True):
        if port != own_port:
            return original(hostname, port, rank, world_size, timeout, use_libuv)
        if not connected:
            serves = {}
            if listener is not None:
                fd = os.dup(listener.fileno())
                serves = {"is_master": True, "master_listen_fd": fd}
            connected.append(
                dist.TCPStore(hostname, port, world_size, timeout=timeout, **serves)
            )
        # All process groups share one server: with two servers on one socket, each
        # would get only some of the ranks. Each group has its own prefix; without it,
        # a group would read another group's addresses.
        return dist.PrefixStore(f"meeting {next(meetings)}", connected[0])

    module._create_c10d_store = create


def agreed_store(
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: datetime.timedelta = datetime.timedelta(minutes=10),
) -> dist.Store:
    """Return a view of `store` with a prefix that only this attempt's ranks use.

    torchrun restarts all ranks when one fails, but keeps the store: new ranks would
    read the addresses of dead ranks and wait for them. torchrun's restart counter does
    not help: each machine has its own counter. So rank 0 draws a new name for the
    attempt. Every other rank writes a random number under the newest name that it sees,
    and continues only when rank 0 has echoed this number: a dead rank 0 cannot echo it.
    Raises TimeoutError if rank 0 does not answer within `timeout`.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        name = uuid.uuid4().hex
        store.set("attempt", name)
        for peer in range(1, world_size):
            store.set(f"{name}/echo/{peer}", store.get(f"{name}/hello/{peer}"))
    else:
        hello = uuid.uuid4().bytes
        name, echo = "", b""
        while echo != hello:
            known = store.check(["attempt"])  # `get` would wait with its own deadline
            newest = store.get("attempt").decode() if known else name
            if newest != name:
                name = newest
                store.set(f"{name}/hello/{rank}", hello)
            if store.check([f"{name}/echo/{rank}"]):
                echo = store.get(f"{name}/echo/{rank}")
            if echo != hello:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"rank 0 did not come to the rendezvous within {timeout}"
                    )
                time.sleep(0.01)
    return dist.PrefixStore(name, store)


def store_of_torchrun(timeout: datetime.timedelta) -> dist.Store:
    """Return this attempt's store, in a process that torchrun started."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        None if agent else world_size,
        is_master=not agent and rank == 0,
        timeout=timeout,
    )
    store = dist.PrefixStore("ddp_course", store)
    return agreed_store(store, rank, world_size, timeout)
