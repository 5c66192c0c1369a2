"""Two emulated nodes for chapter 19: two agents of torchrun on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ddp_course.chapters.ch19_failures import elastic_script
from ddp_course.chapters.ch19_failures.elastic_script import train
from ddp_course.launch import spawn
from ddp_course.launch.parent import patient
from ddp_course.launch.rendezvous import loopback_interface

# torchrun waits 30 s for more nodes, and 15 s before it believes that one is dead.
QUICK = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt="
SILENT = 3.0  # seconds until a node is dead (`patient` adds more under load)
# Without this, the store's address is published in the first round only, and a node
# that comes later waits 60 s for it and fails, with all others (torch 2.13).
LATE_NODES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Nodes:
    """The agents of torchrun, one per node, by node name; the nodes share a folder."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self.folder, self.deadline = folder, time.monotonic() + timeout
        self.agents: dict[str, subprocess.Popen] = {}
        self.endpoint = f"127.0.0.1:{_free_port()}"
        self._seen = 0

    def start(self, name: str) -> None:
        """Start a node; node "a" hosts the rendezvous."""
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2"),
            *("--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.1"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={self.endpoint}"),
            *("--rdzv-id=chapter19", "--local-addr=127.0.0.1"),
            f"--rdzv-conf=is_host={int(name == 'a')},{QUICK}{round(patient(SILENT))}",
            *(elastic_script.__file__, str(self.folder)),
        ]
        more = {"NODE": name, "OMP_NUM_THREADS": "1", **LATE_NODES}
        more["GLOO_SOCKET_IFNAME"] = loopback_interface()
        with (self.folder / f"{name}.log").open("ab") as log:
            self.agents[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **more}
            )

    def allow(self, steps: int) -> None:
        """Let the ranks train until `steps` steps are done, and no further."""
        unfinished = self.folder / "allowed.new"
        unfinished.write_text(str(steps))
        unfinished.replace(self.folder / "allowed")

    def kill(self, name: str) -> None:
        """Kill a node: its agent first, which would otherwise restart the rank."""
        [pid] = {s["pid"] for s in self.starts()[-2:] if s["NODE"] == name}
        self.agents[name].kill()
        self.agents.pop(name).wait()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def starts(self) -> list[dict]:
        """Return what every rank that has started has noted (`note_start`)."""
        path = self.folder / "starts"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def next_ranks(self, world_size: int) -> list[dict]:
        """Wait until `world_size` more ranks have started; return what they noted."""

        def last() -> list[dict]:
            found = self.starts()[self._seen :][-world_size:]
            right = all(int(each["WORLD_SIZE"]) == world_size for each in found)
            nodes = {each["NODE"] for each in found}
            return found if right and len(nodes) == world_size else []

        found = self.wait_for(last, f"{world_size} ranks")
        self._seen = len(self.starts())
        return sorted(found, key=lambda each: each["NODE"])

    def steps(self) -> int:
        """Return the number of steps that the checkpoint contains."""
        path = self.folder / "checkpoint.pt"
        return len(torch.load(path)["record"]["losses"]) if path.exists() else 0

    def wait_for(self, condition: Callable, name: str) -> object:
        """Wait until the condition is true, and return its value.

        Raises RuntimeError if an agent fails before, or at the deadline.
        """
        while not (value := condition()):
            ended = [agent for agent in self.agents.values() if agent.poll()]
            if ended or time.monotonic() > self.deadline:
                logs = [path.read_text() for path in self.folder.glob("*.log")]
                why = "an agent failed" if ended else "the deadline passed"
                raise RuntimeError(f"{why} before {name}:\n" + "\n".join(logs)[-3000:])
            time.sleep(0.05)
        return value


@contextlib.contextmanager
def nodes(folder: Path, timeout: float) -> Iterator[Nodes]:
    """Yield `Nodes` that has no node yet; end all nodes and ranks after the block."""
    found = Nodes(folder, timeout)
    try:
        yield found
    finally:
        for agent in found.agents.values():
            agent.terminate()  # an agent passes the signal on to its ranks
        for agent in found.agents.values():
            try:
                agent.wait(10)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()


def leave_and_return(folder: Path, timeout: float = 600) -> tuple[list, dict]:
    """Let node b die after 4 steps of 12, and come back after 8.

    Returns, for each of the three phases, what the ranks noted (`note_start`); and the
    record of the last checkpoint.
    """
    with nodes(folder, timeout) as both:
        both.allow(0)
        both.start("a")
        both.start("b")
        phases = [both.next_ranks(2)]
        both.allow(4)
        both.wait_for(lambda: both.steps() == 4, "step 4")
        both.kill("b")
        both.allow(8)  # now rank 0 of node a communicates, and fails
        phases.append(both.next_ranks(1))
        both.wait_for(lambda: both.steps() == 8, "step 8")
        both.start("b")
        phases.append(both.next_ranks(2))
        both.allow(12)
        # Agents may wait five minutes for each other's end; the checkpoint is enough.
        both.wait_for(lambda: both.steps() == 12, "step 12")
    return phases, torch.load(folder / "checkpoint.pt")["record"]


def trained_in_parts(*parts: tuple[int, int]) -> dict:
    """Train in parts, each (ranks, steps done at its end); return the last record."""
    with tempfile.TemporaryDirectory() as folder:
        for ranks, steps in parts:
            record = spawn(train, Path(folder), steps, world_size=ranks)[0]
    return record


def _free_port() -> int:
    """Return a free port outside the range from which Linux chooses ports itself."""
    for port in range(20_000 + os.getpid() % 10_000, 32_768):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port from 20000 to 32767 is free")
