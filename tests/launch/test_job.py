"""The arguments of a launch: checked, with a clear word, before anything starts."""

import functools
import math
import multiprocessing
import os
import threading
import time
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_course import launch
from ddp_course.launch import LaunchArgumentError, Link, Links, api, job, parent, server
from ddp_course.launch.job import Job

# "spawn" in a test's name means that it starts ranks; none of these does.
launch_it = launch.spawn


def planned(fn=print, args=(), **changes) -> Job:
    """The job that `spawn(fn, *args, **changes)` would launch."""
    with mock.patch.object(api, "Launch") as launch:
        launch_it(fn, *args, check=False, **({"output": "none"} | changes))
    return launch.call_args.args[0]


# ---- what is refused ---------------------------------------------------------------


class Started(Exception):
    """A process was about to be started."""


@pytest.fixture
def nothing_starts(monkeypatch):
    """Raise `Started` when a rank, or the fork server, is about to start."""

    def start(*_):
        raise Started

    monkeypatch.setattr(server, "start", start)
    monkeypatch.setattr(server, "warm", start)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    before = multiprocessing.active_children()
    yield
    assert multiprocessing.active_children() == before


WHOLE = {"world_size": (1, 64), "nnodes": (1, 64), "nproc_per_node": (1, 64)}
WHOLE |= {"threads": (1, 1024)}
REFUSED = [
    # arguments, and what the message must hold: the value, and what can be
    *(
        ({name: value}, [f"{name} is {value!r}", f"{low} to {high}"])
        for name, (low, high) in WHOLE.items()
        for value in (low - 1, high + 1, 4.0, 2.5, math.nan, True, "4", [4])
    ),
    *(
        ({"timeout": value}, [f"timeout is {value!r}", "seconds above 0"])
        for value in (0, 0.0, -1, math.nan, math.inf, -math.inf, "10", None, True)
    ),
    (
        {"world_size": 8, "nnodes": 3, "nproc_per_node": 4},
        ["world_size is 8", "nnodes * nproc_per_node", "3 * 4 = 12"],
    ),
    ({"world_size": 8, "nproc_per_node": 4}, ["world_size is 8", "1 * 4 = 4"]),
    ({"nnodes": 3}, ["4 ranks", "3 nodes"]),
    ({"nnodes": 16, "nproc_per_node": 16}, ["nnodes * nproc_per_node is 256"]),
    ({"timeout": 10**400}, ["timeout is 1000", "a finite number of seconds"]),
    ({"threads": None}, ["threads is None", "whole number"]),
    ({"output": "loud"}, ["output is 'loud'", "'rank'", "'live'", "'none'"]),
    ({"output": None}, ["output is None", "'none'"]),
    ({"backend": "nccI"}, ["backend is 'nccI'", "'gloo'", "'nccl'"]),
    ({"device": "cuda"}, ["device is 'cuda'", "no GPU", "'cpu'"]),
    ({"env": {"A": 1}}, ["env['A'] is 1", "strings"]),
    ({"env": {1: "A"}}, ["env[1] is 'A'", "strings"]),
    ({"env": {"A": b"x"}}, ["env['A'] is b'x'", "strings"]),
    ({"env": {"A=B": "x"}}, ["env", "A=B"]),
    ({"env": {"": "x"}}, ["env", "''"]),
    ({"env": {"A": "x\0y"}}, ["env", "A"]),
    ({"env": ["A=1"]}, ["env is ['A=1']"]),
    *(
        ({"env": {name: "0"}}, [f"{name!r}] is '0'", f"begin with {own} are the laun"])
        for name, own in {
            "RANK": "RANK",
            "MASTER_PORT": "MASTER_",
            "LOCAL_RANK": "LOCAL_",
            "WORLD_SIZE": "WORLD_SIZE",
            "LOCAL_CACHE": "LOCAL_",
        }.items()
    ),
    ({"links": Link(latency=1e-3)}, ["links is Link(", "Links"]),
    ({"links": 3}, ["links is 3", "Links"]),
    ({"may_fail": [4]}, ["may_fail is 4", "0 to 3"]),
    ({"may_fail": "2"}, ["may_fail is '2'", "whole number"]),
    ({"may_fail": 1}, ["may_fail is 1", "a list of ranks, such as [1]"]),
    *(
        ({"fn": what}, [f"fn is {repr(what)[:50]}", "it must be a function"])
        for what in (4, None, "train", [print], list(range(10_000)))
    ),
    ({"fn": None}, ["spawn(f), not spawn(f())"]),
]


@pytest.mark.parametrize(
    ("how", "words"), REFUSED, ids=lambda x: str(x)[:50].replace("\0", "0")
)
def test_bad_arguments_are_named_before_anything_starts(
    how, words, nothing_starts, capsys
):
    how = {"fn": print} | how
    with pytest.raises(LaunchArgumentError) as caught:
        launch_it(**how)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert [word for word in words if word not in message] == []
    assert "\n" not in message and len(message) < 300
    assert capsys.readouterr() == ("", ""), "it told where the ranks run; none does"


def of_two(a, b, *, c=3):
    return a, b, c


@functools.wraps(of_two)
def decorated(*args):
    return of_two(*args, 2)


@pytest.mark.parametrize(
    ("fn", "args", "words"),
    [
        (os.getpid, (4,), ["getpid(4), which fails: ", "world_size=4"]),
        (of_two, (1,), ["of_two(1), which fails: missing a required argument: 'b'"]),
        (of_two, (1, 2, 3), ["of_two(1, 2, 3), which fails: too many positional"]),
        (functools.partial(of_two, 1), (2, 3), ["every rank would call partial(2, 3)"]),
        (of_two, (list(range(10_000)),), ["of_two([0, 1, 2,", "...), which fails"]),
        (
            of_two,
            (np.zeros((9, 9)),),
            ["of_two(array([[0., 0., 0., 0., 0., 0., 0., 0., 0.], "],
        ),
    ],
)
def test_arguments_that_do_not_fit_the_function_are_refused(
    fn, args, words, nothing_starts
):
    with pytest.raises(LaunchArgumentError) as caught:
        launch_it(fn, *args)
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    assert "\n" not in message and len(message) < 300


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (of_two, (1, 2)),
        (functools.partial(of_two, c=1), (1, 2)),
        (decorated, (1,)),  # it adds the second argument itself
        (int.from_bytes, (b"1", "big")),
        (dict, ([],)),  # written in C, and it does not name its parameters
    ],
)
def test_arguments_that_fit_the_function_are_accepted(fn, args):
    assert planned(fn, args).args == args


@pytest.mark.parametrize("fork_server_runs", [False, True])
def test_good_arguments_would_have_started_something(
    fork_server_runs, nothing_starts, monkeypatch
):
    """The guard of the tests above does go off, at both of its places."""
    if fork_server_runs:
        monkeypatch.setattr(server, "warm", lambda: None)
    with pytest.raises(Started):
        launch_it(print, world_size=2, output="none")


# ---- what is decided ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "nnodes", "per_node"),
    [
        ({}, 1, 4),
        ({"world_size": 64}, 1, 64),
        ({"nnodes": 2}, 2, 2),
        ({"nproc_per_node": 3}, 1, 3),
        ({"world_size": 12, "nnodes": 3}, 3, 4),
        ({"world_size": 12, "nnodes": 3, "nproc_per_node": 4}, 3, 4),
    ],
)
def test_the_shape_of_the_cluster(asked, nnodes, per_node):
    topology = planned(**asked).topology
    assert (topology.nnodes, topology.nproc_per_node) == (nnodes, per_node)


def test_what_was_given_is_taken_as_it_is():
    for timeout in (1e-3, 1, 120.0, 10**9, np.float64(2.5)):
        assert planned(timeout=timeout).timeout == timeout
    env, slow = {"A": "1"}, Links(between=Link(latency=1.0))
    its_job = planned(env=env, links=slow)
    env["A"] = "2"
    assert its_job.env == {"A": "1"} and its_job.links is slow
    assert planned().links == Links()
    assert f"1 to {job.MAX_WORLD_SIZE}" in " ".join(launch.spawn.__doc__.split())


numbers = st.none() | st.integers(-2, 70)


@given(numbers, numbers, numbers)
def test_a_shape_is_either_as_asked_or_refused(world_size, nnodes, per_node):
    try:
        its_job = planned(world_size=world_size, nnodes=nnodes, nproc_per_node=per_node)
    except LaunchArgumentError:
        possible = [
            (n, p)
            for n in range(1, 65)
            for p in range(1, 64 // n + 1)
            if world_size in (None, n * p) and nnodes in (None, n)
        ]
        assert (nnodes, per_node) not in possible or world_size not in (
            None,
            nnodes * per_node,
        )
        return
    assert 1 <= its_job.world_size <= 64
    assert world_size in (None, its_job.world_size)
    assert nnodes in (None, its_job.topology.nnodes)
    assert per_node in (None, its_job.topology.nproc_per_node)


# ---- what a rank finds in its environment ------------------------------------------


def test_a_rank_finds_what_torchrun_would_set(monkeypatch):
    monkeypatch.setenv("OF_THE_NOTEBOOK", "seen")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "8")
    monkeypatch.setenv("RANK", "77")
    monkeypatch.setenv("TMPDIR", "/tmp")
    its_job = planned(
        nnodes=3, nproc_per_node=4, threads=2, env={"MINE": "yes", "TMPDIR": "/x"}
    )
    environment = parent.environment(its_job, 6, "12345")
    expected = {
        "RANK": "6",
        "LOCAL_RANK": "2",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "12",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "12345",
        "OMP_NUM_THREADS": "2",
        "OF_THE_NOTEBOOK": "seen",
        "MINE": "yes",
        "TMPDIR": "/x",  # what is given goes above all else
    }
    assert {name: environment[name] for name in expected} == expected
    left = [n for n in environment if n.startswith(("TORCHELASTIC_", "PET_"))]
    assert left == [], "a rank would take itself for one of torchrun's"
    assert os.environ["RANK"] == "77", "the notebook's own environment was changed"


def test_a_rank_finds_no_variable_that_another_thread_sets_for_the_fork_server():
    its_job, begun = planned(), threading.Event()

    def warm():
        with server.STARTING, server._server_environment():
            begun.set()
            time.sleep(0.2)

    thread = threading.Thread(target=warm)
    thread.start()
    begun.wait()
    environment = parent.environment(its_job, 0, "1")
    thread.join()
    assert server.IN_SERVER not in environment
