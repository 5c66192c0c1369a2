"""The launcher inside a real Jupyter kernel: cells, the stop button, sudden death."""

import contextlib
import os
import re
import signal
import time

import pytest
from conftest import (
    alive,
    descendants,
    kernel_manager,
    names_in,
    none_left,
    wait_until_gone,
)

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(900)]


class Kernel:
    """A Jupyter kernel, and what its cells answer."""

    def __init__(self) -> None:
        self.manager = kernel_manager()(kernel_name="python3")
        self.start()

    def start(self) -> None:
        self.manager.start_kernel()
        self.connect()

    def connect(self) -> None:
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=240)

    @property
    def pid(self) -> int:
        return self.manager.provisioner.process.pid

    def begin(self, code: str) -> str:
        return self.client.execute(code)

    def finish(self, message_id: str, timeout: float = 240) -> tuple[str, str]:
        """Return what the cell printed, and its traceback (without colours)."""
        printed, trace = "", ""
        while True:
            message = self.client.get_iopub_msg(timeout=timeout)
            if message["parent_header"].get("msg_id") != message_id:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                printed += content["text"]
            elif kind == "execute_result":
                printed += content["data"]["text/plain"]
            elif kind == "error":
                trace = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return printed, trace

    def run(self, code: str) -> tuple[str, str]:
        return self.finish(self.begin(code))

    def close(self) -> None:
        self.client.stop_channels()
        with contextlib.suppress(RuntimeError):
            self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    kernel.run(
        "import os, time, torch, torch.distributed as dist\n"
        "from ddp_course.launch import parent, spawn\n"
        "parent.GRACE = 20  # on a busy machine, too, peers notice a failure in time\n"
        "print(spawn(dist.get_rank, world_size=2))"
    )
    yield kernel
    kernel.close()


# One line prints and receives: from the print on, a rank is in no other.
HANG = """\
def hang():
    print(os.getpid(), flush=True); dist.recv(torch.zeros(1), 1 - dist.get_rank())
spawn(hang, world_size=2, output="live", timeout=300)
"""


def begin_to_hang(kernel: Kernel) -> tuple[str, list[int]]:
    """Run the hanging cell until both ranks have printed their process ids."""
    message_id, printed = kernel.begin(HANG), ""
    while len(pids := re.findall(r"\] (\d+)\n", printed)) < 2:
        message = kernel.client.get_iopub_msg(timeout=240)
        if message["parent_header"].get("msg_id") == message_id:
            printed += message["content"].get("text", "")
    return message_id, [int(pid) for pid in pids]


def test_cells_functions_compute_and_print_in_rank_order_after_a_product_here(kernel):
    """A forked kernel would hang: OpenMP's threads do not survive a fork."""
    printed, trace = kernel.run(
        "torch.set_num_threads(2)\n"
        "(torch.ones(500, 500) @ torch.ones(500, 500)).exp()\n"
        "class Net(torch.nn.Module): pass\n"
        "def f(k):\n"
        "    print('hello from', dist.get_rank())\n"
        "    return Net(), (torch.ones(k, k) @ torch.ones(k, k)).sum().item()\n"
        "told = spawn(f, 300)\n"
        "print(all(isinstance(net, Net) for net, _ in told), {x for _, x in told})"
    )
    assert trace == ""
    assert printed == (
        "[rank 0] hello from 0\n[rank 1] hello from 1\n"
        "[rank 2] hello from 2\n[rank 3] hello from 3\nTrue {27000000.0}\n"
    )


def test_a_failure_shows_the_cells_lines_and_no_frame_of_the_launcher(kernel):
    """Chapter 00 shows what a deadlock shows."""
    _, trace = kernel.run(
        "def inner(x):\n"
        "    return x / 0  # the mistake\n"
        "def f():\n"
        "    if dist.get_rank() == 1:\n"
        "        inner(1)\n"
        "    dist.barrier()\n"
        "spawn(f)"
    )
    lines = trace.splitlines()
    assert lines[0] == "RankError: rank 1: ZeroDivisionError: division by zero"
    assert re.search(
        r"Cell In\[\d+\], line 2, in inner\n +return x / 0  # the mistake", trace
    )
    assert re.search(
        r"  rank 0: lost the connection .*, in Cell In\[\d+\], line 6", trace
    )
    for unwanted in ("ddp_course/launch", "ipykernel", "/tmp/", "multiprocessing"):
        assert unwanted not in trace
    assert len(lines) < 20
    _, trace = kernel.run("spawn(f, world_size=0)")
    assert trace == "LaunchArgumentError: world_size is 0; it can be 1 to 64"


def test_the_stop_button_pressed_once_and_hammered(kernel):
    for times in (1, 20):
        message_id, ranks = begin_to_hang(kernel)
        for _ in range(times):  # a press at an idle kernel can break its own loop
            if any(map(alive, ranks)):
                kernel.manager.interrupt_kernel()
                time.sleep(0.005)
        _, trace = kernel.finish(message_id)
        if times == 1:  # more presses may hit the kernel while it shows the first
            assert trace.startswith("RankInterrupted: stopped by hand")
            where = re.findall(r"in Cell In\[\d+\], line 2: .*dist.recv", trace)
            assert len(where) == 2
        assert none_left(ranks)
    for _ in range(10):  # presses that came late may interrupt the next cell, not break
        printed, trace = kernel.run("print(spawn(dist.get_rank, world_size=2))")
        if not trace:
            break
    assert printed == "[0, 1]\n"


def test_kernel_restart_leaves_no_rank(kernel):
    _, ranks = begin_to_hang(kernel)
    kernel.manager.restart_kernel(now=False)
    kernel.client.stop_channels()
    kernel.connect()
    assert none_left(ranks)
    assert kernel.run("print(1)") == ("1\n", "")


def test_killed_kernel_leaves_no_rank_no_worker_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    segments = names_in("/dev/shm")
    kernel = Kernel()
    kernel.run(
        "import os, time, torch, torch.distributed as dist\n"
        "from ddp_course.launch import spawn\n"
        "spawn(dist.get_rank, world_size=2)"
    )
    kernel.begin(
        "def hang():\n"
        "    data = torch.utils.data.DataLoader(list(range(8)), num_workers=2,"
        " persistent_workers=True)\n"
        "    keep = iter(data)\n"
        "    dist.recv(torch.zeros(1), src=1 - dist.get_rank())\n"
        "spawn(hang, world_size=2, timeout=300)"
    )
    deadline = time.monotonic() + 240
    expected = 2 + 2 + 4  # the servers (forks, resources), the ranks, their workers
    everything: list[int] = []
    while len(everything) < expected or not all(map(alive, everything)):
        assert time.monotonic() < deadline, everything
        everything = descendants(kernel.pid)
        time.sleep(0.5)
    os.kill(kernel.pid, signal.SIGKILL)
    assert none_left(everything)
    kernel.close()
    # PyTorch makes itself an empty folder for compiled code when it is imported.
    assert {x for x in names_in(tmp_path) if not x.startswith("torchinductor")} == set()
    assert wait_until_gone(names_in("/dev/shm") - segments, "/dev/shm") == set()
