"""The way out: the same functions under torchrun, on two machines.

Chapter 01 runs one on one machine, and test_train_torchrun.py kills ranks there.
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import descendants, end, none_left
from machines import free_port, rendezvous_on, two_machines

pytestmark = [
    pytest.mark.endurance,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        "DDP_COURSE_ENDURANCE" not in os.environ,
        reason="PyTorch's agents are tested here, ours in test_train_torchrun.py",
    ),
]

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
    """Wait for all agents and return what rank 0 printed; leave nothing running."""
    try:
        output = [agent.communicate(timeout=240) for agent in agents]
    finally:
        for agent in (a for a in agents if a.poll() is None):
            for pid in [*descendants(agent.pid), agent.pid]:
                with contextlib.suppress(ProcessLookupError):
                    end(pid)
    for agent, (_, err) in zip(agents, output, strict=True):
        assert agent.returncode == 0, err[-3000:]
    return "".join(out for out, _ in output).splitlines()


def test_two_agents_meet_and_restart(tmp_path):
    """Two machines with two ranks each; a rank of the second one fails, twice.

    Each agent counts its own restarts, so the counters of the two machines differ from
    what the ranks could agree on by themselves.
    """
    port, failures = free_port(), 2
    with two_machines() as machines:
        agents = [
            torchrun(
                *rendezvous_on(machines, number, port), "--nproc-per-node=2",
                "--max-restarts=3", "--monitor-interval=0.1",
                "-m", "ddp_course.launch",
                "torchrun_functions:fail_in_the_first_attempts",
                str(tmp_path), "3", str(failures),
                prefix=machine.prefix, GLOO_SOCKET_IFNAME=machine.interface,
            )
            for number, machine in enumerate(machines)
        ]  # fmt: skip
        lines = answers(*agents)
    assert [line.rsplit(",", 1)[0] for line in lines] == [
        f"[rank {rank}] returned ({failures}, 6" for rank in range(4)
    ]


FAILS = "import os, time; time.sleep(0.2); os.environ['RANK'] == '1' and 1 / 0; "
FAILS += "time.sleep(600)"
TALKS = """
import os, pathlib, time
if {number} == 2:  # else PyTorch is not needed
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
while True:
    {number} == 2 and dist.all_reduce(torch.ones(1))
    pathlib.Path(__file__).with_name("talks " + os.environ["RANK"]).touch()
    time.sleep(0.01)
"""


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("how", ["restarts are exhausted", "SIGTERM"])
def test_no_rank_outlives_its_agent(how, number, tmp_path):
    """Nor ranks of the other machine, which only notice that their peers are gone."""
    signalled = how == "SIGTERM"
    (tmp_path / "rank.py").write_text(
        TALKS.format(number=number) if signalled else FAILS
    )
    with two_machines() as machines:
        meeting = [["--standalone"]]
        if number == 2:
            port = free_port()
            meeting = [rendezvous_on(machines, agent, port) for agent in range(2)]
        run = f"--max-restarts={1 - signalled}", "--nproc-per-node=2"
        agents = [
            torchrun(
                *where, *run, "--monitor-interval=0.1", str(tmp_path / "rank.py"),
                prefix=machine.prefix * (number == 2),
                GLOO_SOCKET_IFNAME=machine.interface if number == 2 else "lo",
            )
            for where, machine in zip(meeting, machines, strict=False)
        ]  # fmt: skip
        seen: set[int] = set()
        deadline = time.monotonic() + 100
        while any(a.poll() is None for a in agents) and time.monotonic() < deadline:
            seen |= {pid for agent in agents for pid in descendants(agent.pid)}
            if len(list(tmp_path.glob("talks*"))) == 2 * number:
                agents[-1].terminate()
            time.sleep(0.05)
        left = [agent.pid for agent in agents if agent.poll() is None]
        for pid in [*left, *(seen if left else ())]:
            with contextlib.suppress(ProcessLookupError):
                end(pid)
        ends = [agent.communicate()[1] for agent in agents]
    assert not left, ends
    assert all(agent.returncode for agent in agents), ends[0][-3000:]
    assert none_left(list(seen))
    assert signalled or "ZeroDivisionError" in "".join(ends)
