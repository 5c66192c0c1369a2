"""The way out: the same functions under torchrun, on one machine and on two."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.endurance, pytest.mark.timeout(300)]

HERE = Path(__file__).parent


def torchrun(*words: str, prefix: tuple[str, ...] = (), **env: str) -> subprocess.Popen:
    """Start torchrun in a folder from which the tests' functions can be imported."""
    command = [*prefix, sys.executable, "-m", "torch.distributed.run", *words]
    return subprocess.Popen(
        command,
        cwd=HERE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


def answers(*agents: subprocess.Popen) -> list[str]:
    """Wait for all agents and return what rank 0 printed."""
    told = [agent.communicate(timeout=240) for agent in agents]
    for agent, (_, err) in zip(agents, told, strict=True):
        assert agent.returncode == 0, err[-3000:]
    return "".join(out for out, _ in told).splitlines()


def test_the_same_function_runs_under_torchrun():
    function = "torchrun_functions:names"
    run = torchrun(
        "--nproc-per-node=3", "-m", "ddp_course.launch", function, "factor=10"
    )
    assert answers(run) == [f"[rank {r}] returned ({r}, {r}, 0, 30)" for r in range(3)]


def test_a_wrong_name_is_one_clear_line():
    run = torchrun("--nproc-per-node=1", "-m", "ddp_course.launch", "nowhere:f")
    _, err = run.communicate(timeout=120)
    assert run.returncode != 0
    assert "error: no module 'nowhere' (from 'nowhere:f')" in err


@pytest.mark.parametrize("repetition", range(2))
def test_restarts_work_every_time(repetition, tmp_path):
    run = torchrun(
        "--nproc-per-node=4", "--max-restarts=3", "--monitor-interval=0.1",
        "-m", "ddp_course.launch", "torchrun_functions:fail_in_the_first_attempts",
        str(tmp_path), str(repetition), "2",
    )  # fmt: skip
    assert answers(run) == [f"[rank {r}] returned (2, 6, '2')" for r in range(4)]


@contextlib.contextmanager
def two_machines():
    """Two network namespaces joined by a cable: as near to two machines as it gets.

    Yields (command prefix, address, interface) for each; where namespaces are not
    allowed, both are this machine.
    """
    names = [f"ddp{os.getpid()}{side}" for side in "ab"]
    cable = [f"v{os.getpid()}{side}"[:15] for side in "ab"]
    allowed = shutil.which("ip") and os.geteuid() == 0

    def ip(*words: str) -> bool:
        return subprocess.run(["ip", *words], capture_output=True).returncode == 0

    if not (allowed and ip("netns", "add", names[0])):
        yield [((), "127.0.0.1", "lo")] * 2
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
            machines.append((("ip", "netns", "exec", name), address, end))
        yield machines
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.mark.parametrize("failures", [0, 2])
def test_two_agents_meet_and_restart(failures, tmp_path):
    """Two machines with two ranks each; a rank of the second one fails twice.

    Each agent counts its own restarts, so the counters of the two machines differ from
    what the ranks could agree on by themselves.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with two_machines() as machines:
        agents = [
            torchrun(
                "--nnodes=2", "--nproc-per-node=2", "--max-restarts=3",
                "--monitor-interval=0.1", "--rdzv-backend=c10d", "--rdzv-id=test",
                f"--rdzv-endpoint={machines[0][1]}:{port}", f"--local-addr={address}",
                f"--rdzv-conf=is_host={int(number == 0)}",  # both have one host name
                "-m", "ddp_course.launch",
                "torchrun_functions:fail_in_the_first_attempts",
                str(tmp_path), "3", str(failures),
                prefix=prefix, GLOO_SOCKET_IFNAME=interface,
            )
            for number, (prefix, address, interface) in enumerate(machines)
        ]  # fmt: skip
        lines = answers(*agents)
    assert [line.rsplit(",", 1)[0] for line in lines] == [
        f"[rank {rank}] returned ({failures}, 6" for rank in range(4)
    ]
