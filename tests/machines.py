"""Two machines, as near as one machine gets to them; and a free port."""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from typing import NamedTuple


class Machine(NamedTuple):
    """What stands before a command to run it there, its address, its interface."""

    prefix: tuple[str, ...]
    address: str
    interface: str


@contextlib.contextmanager
def two_machines() -> Iterator[list[Machine]]:
    """Two network namespaces joined by a cable.

    Where namespaces are not allowed, both are this machine.
    """
    names = [f"ddp{os.getpid()}{side}" for side in "ab"]
    cable = [f"v{os.getpid()}{side}"[:15] for side in "ab"]
    allowed = shutil.which("ip") and os.geteuid() == 0

    def ip(*words: str) -> bool:
        return subprocess.run(["ip", *words], capture_output=True).returncode == 0

    if not (allowed and ip("netns", "add", names[0])):
        yield [Machine((), "127.0.0.1", "lo")] * 2
        return
    try:
        assert ip("netns", "add", names[1])
        assert ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        machines = []
        for number, (name, end) in enumerate(zip(names, cable, strict=True), 1):
            address = f"10.213.7.{number}"
            assert ip("link", "set", end, "netns", name)
            assert ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            assert ip("-n", name, "link", "set", end, "up")
            assert ip("-n", name, "link", "set", "lo", "up")
            machines.append(Machine(("ip", "netns", "exec", name), address, end))
        yield machines
    finally:
        for name in names:
            ip("netns", "del", name)


def free_port() -> int:
    """Return a port that is free, and that nobody gets who asks for any port.

    Linux gives those the ports from 32768 on; torchrun opens ours seconds later.
    Processes that run tests side by side have neighbouring ids: they begin 97 ports
    apart, so that none takes what another has found free.
    """
    for port in range(20_000 + 97 * os.getpid() % 10_000, 32_768):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port from 30000 to 32767 is free")


def rendezvous_on(machines: list[Machine], number: int, port: int) -> list[str]:
    """Return torchrun's arguments for one of the machines; they meet on the first."""
    return [
        "--nnodes=2",
        "--rdzv-backend=c10d",
        "--rdzv-id=test",
        f"--rdzv-endpoint={machines[0].address}:{port}",
        f"--local-addr={machines[number].address}",
        f"--rdzv-conf=is_host={int(number == 0)}",  # both have one host name
    ]
