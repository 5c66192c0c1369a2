"""Another user of this machine, a real one, connects to ranks: they refuse."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from ddp_course.launch import RankError, spawn
from ddp_course.launch.rendezvous import listening_socket
from ddp_course.launch.strangers import (
    StrangerError,
    check_peers,
    connections,
    far_user,
)

ENDURANCE = bool(os.environ.get("DDP_COURSE_ENDURANCE"))
NOBODY = 65534
AS_NOBODY = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
AS_NOBODY += [sys.executable, "-I", "-c"]
CONNECT = "import socket, sys, time; "
CONNECT += "c = socket.create_connection(sys.argv[1:3]); time.sleep(60)"


def another_user() -> bool:
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        return False
    return subprocess.run([*AS_NOBODY, ""], cwd="/").returncode == 0


pytestmark = pytest.mark.skipif(not another_user(), reason="nobody else is here")


@pytest.mark.parametrize(
    ("host", "listen"),
    [
        ("127.0.0.1", listening_socket),
        ("::1", partial(socket.create_server, ("::1", 0), family=socket.AF_INET6)),
        ("127.0.0.1", partial(socket.create_server, ("", 0), dualstack_ipv6=True,
                              family=socket.AF_INET6)),
    ],
    ids=["IPv4", "IPv6", "both"],
)  # fmt: skip
def test_a_connection_belongs_to_who_has_its_other_end(host, listen):
    with listen() as listener:
        address = host, listener.getsockname()[1]
        with socket.create_connection(address) as own, listener.accept()[0] as there:
            for end in (own, there):
                both = end.getsockname(), end.getpeername()
                assert far_user(*both) == os.getuid()
                assert both in connections()
            check_peers()
        command = [*AS_NOBODY, CONNECT, *map(str, address)]
        with subprocess.Popen(command, cwd="/") as stranger, listener.accept()[0] as it:
            assert far_user(it.getsockname(), it.getpeername()) == NOBODY
            with pytest.raises(StrangerError, match="user id 65534"):
                check_peers()
            check_peers(known=connections())
            stranger.kill()
    assert far_user((host, 1), (host, 2)) is None  # nobody's


def met_by_a_stranger(late: float) -> None:
    """Make a group, in which rank 1 comes late; meanwhile another user connects."""
    module, listener, kept = dist.distributed_c10d, listening_socket(), []

    class WithAStranger(module.ProcessGroupGloo):
        def __init__(self, *args, **options):
            command = [*AS_NOBODY, CONNECT, *map(str, listener.getsockname())]
            subprocess.Popen(command, cwd="/")
            kept.append(listener.accept())  # as gloo does
            super().__init__(*args, **options)

    if dist.get_rank() == 0:
        module.ProcessGroupGloo = WithAStranger
    else:
        time.sleep(late)
    dist.new_group([0, 1])


@pytest.mark.parametrize("late", [0, 60])
def test_ranks_refuse_to_go_on_with_a_stranger(late):
    """Also those who wait in C++, where nothing can be raised, for one to come."""
    with pytest.raises(RankError, match="rank 0: .*another user .*user id 65534"):
        spawn(met_by_a_stranger, late, world_size=2, output="none", timeout=30)


# ---- at full length: a race for the place of a peer ----------------------------------

RACE = """
import socket, struct, sys
def listeners():
    rows = (line.split() for line in open("/proc/net/tcp").readlines()[1:])
    return {int(row[1][-4:], 16) for row in rows if row[3] == "0A"}
seen, kept = listeners(), []
print("ready", flush=True)
while True:
    for port in listeners() - seen:
        seen.add(port)
        for number in range(3):  # gloo wants to hear which of its peers this is
            try:
                peer = socket.create_connection(("127.0.0.1", port), 1)
                peer.sendall(struct.pack("<q", number))
                peer.setblocking(False)
                kept.append(peer)
            except OSError:
                pass
    for peer in kept:
        try:
            if heard := peer.recv(1000):
                print("heard", len(heard), flush=True)
        except OSError:
            pass
"""


def add_ranks() -> float:
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


def ends_of_launches(seconds: float) -> None:
    """Print how launches end while another user races for their connections."""
    with subprocess.Popen([*AS_NOBODY, RACE], cwd="/", stdout=subprocess.PIPE) as racer:
        assert racer.stdout.readline() == b"ready\n"
        ends, deadline = [], time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                ends.append(spawn(add_ranks, world_size=2, output="none", timeout=5))
            except RankError as error:
                ends.append("another user" in str(error))
        racer.kill()
        print([ends.count(end) for end in ([1.0, 1.0], True)], len(ends))
        print(racer.stdout.read())


@pytest.mark.endurance
@pytest.mark.skipif(not ENDURANCE, reason="only with DDP_COURSE_ENDURANCE=1")
def test_who_wins_the_race_for_a_peers_place_hears_nothing(record_property):
    """In a network of its own, in which no rank of another test is."""
    here = f"import sys; sys.path[:0] = {sys.path!r}; import test_strangers as t; "
    run = [sys.executable, "-c", f"{here}t.ends_of_launches(20)"]
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", 'ip link set lo up; "$@"', "sh", *run],
        capture_output=True,
        text=True,
        timeout=120,
    )
    counts, heard = done.stdout.splitlines()[-2:]
    summed, told, launches = map(int, re.findall(r"\d+", counts))
    record_property("launches", launches)
    record_property("refused a stranger", told)
    assert told > 0 and summed + told == launches, done
    assert heard == "b''", done
