"""The arguments of a launch: checked, with a clear word, before anything starts."""

from __future__ import annotations

import math
import multiprocessing
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_course import launch
from ddp_course.launch import LaunchArgumentError, Link, Links, job, parent, server
from ddp_course.launch.job import Job, plan

# "spawn" in a test's name means that it starts ranks; none of these does.
launch_it = launch.spawn

DEFAULTS = {
    "world_size": None,
    "nnodes": None,
    "nproc_per_node": None,
    "timeout": 120.0,
    "device": "auto",
    "backend": "auto",
    "share_gpus": False,
    "threads": 1,
    "init": True,
    "output": "rank",
    "max_lines": 500,
    "links": None,
    "env": None,
    "start_method": None,
}


def planned(fn=print, args=(), **changes) -> Job:
    """The job that `spawn(fn, *args, **changes)` would make."""
    return plan(fn, args, **(DEFAULTS | changes))


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
    monkeypatch.setattr("ddp_course.launch.devices._built_in", lambda _: False)
    before = multiprocessing.active_children()
    yield
    assert multiprocessing.active_children() == before


REFUSED = [
    # arguments, and what the message must hold: the value, and what can be
    ({"world_size": 0}, ["world_size is 0", "1 to 64"]),
    ({"world_size": -1}, ["world_size is -1", "1 to 64"]),
    ({"world_size": 65}, ["world_size is 65", "1 to 64"]),
    ({"world_size": 10**6}, ["world_size is 1000000", "1 to 64"]),
    ({"world_size": 4.0}, ["world_size is 4.0", "whole number", "1 to 64"]),
    ({"world_size": 2.5}, ["world_size is 2.5", "whole number", "1 to 64"]),
    ({"world_size": math.nan}, ["world_size is nan", "whole number"]),
    ({"world_size": True}, ["world_size is True", "whole number", "1 to 64"]),
    ({"world_size": False}, ["world_size is False", "whole number", "1 to 64"]),
    ({"world_size": "4"}, ["world_size is '4'", "whole number", "1 to 64"]),
    ({"world_size": [4]}, ["world_size is [4]", "whole number", "1 to 64"]),
    ({"nnodes": 0}, ["nnodes is 0", "1 to 64"]),
    ({"nnodes": -3}, ["nnodes is -3", "1 to 64"]),
    ({"nnodes": 1.0}, ["nnodes is 1.0", "whole number"]),
    ({"nnodes": "2"}, ["nnodes is '2'", "whole number"]),
    ({"nproc_per_node": 0}, ["nproc_per_node is 0", "1 to 64"]),
    ({"nproc_per_node": 100}, ["nproc_per_node is 100", "1 to 64"]),
    ({"nproc_per_node": True}, ["nproc_per_node is True", "whole number"]),
    (
        {"world_size": 8, "nnodes": 3, "nproc_per_node": 4},
        ["world_size is 8", "nnodes * nproc_per_node", "3 * 4 = 12"],
    ),
    ({"world_size": 8, "nproc_per_node": 4}, ["world_size is 8", "1 * 4 = 4"]),
    ({"world_size": 4, "nnodes": 3}, ["4 ranks", "3 nodes"]),
    ({"nnodes": 3}, ["4 ranks", "3 nodes"]),
    (
        {"nnodes": 16, "nproc_per_node": 16},
        ["nnodes * nproc_per_node is 256", "1 to 64"],
    ),
    ({"timeout": 0}, ["timeout is 0", "seconds above 0"]),
    ({"timeout": 0.0}, ["timeout is 0.0", "seconds above 0"]),
    ({"timeout": -1}, ["timeout is -1", "seconds above 0"]),
    ({"timeout": math.nan}, ["timeout is nan", "seconds above 0"]),
    ({"timeout": math.inf}, ["timeout is inf", "seconds above 0"]),
    ({"timeout": -math.inf}, ["timeout is -inf", "seconds above 0"]),
    ({"timeout": "10"}, ["timeout is '10'", "seconds above 0"]),
    ({"timeout": None}, ["timeout is None", "seconds above 0"]),
    ({"timeout": True}, ["timeout is True", "seconds above 0"]),
    ({"timeout": 10**400}, ["timeout is 1000", "seconds"]),
    ({"threads": 0}, ["threads is 0", "1 to 1024"]),
    ({"threads": -1}, ["threads is -1", "1 to 1024"]),
    ({"threads": 1.5}, ["threads is 1.5", "whole number"]),
    ({"threads": None}, ["threads is None", "whole number"]),
    ({"max_lines": -1}, ["max_lines is -1", "0 to"]),
    ({"max_lines": "all"}, ["max_lines is 'all'", "whole number"]),
    ({"output": "loud"}, ["output is 'loud'", "'rank'", "'live'", "'none'"]),
    ({"output": None}, ["output is None", "'none'"]),
    ({"backend": "nccI"}, ["backend is 'nccI'", "'gloo'", "'nccl'"]),
    ({"backend": None}, ["backend is None", "'auto'"]),
    ({"backend": "mpi"}, ["backend is 'mpi'", "'gloo'"]),
    ({"backend": "nccl"}, ["backend is 'nccl'", "GPU", "'gloo'"]),
    ({"device": "gpu"}, ["device is 'gpu'", "'cuda'"]),
    ({"device": "cuda"}, ["device is 'cuda'", "no GPU", "'cpu'"]),
    (
        {"start_method": "fork"},
        ["start_method is 'fork'", "'forkserver'", "'spawn'"],
    ),
    ({"env": {"A": 1}}, ["env['A'] is 1", "strings"]),
    ({"env": {1: "A"}}, ["env[1] is 'A'", "strings"]),
    ({"env": {"A": None}}, ["env['A'] is None", "strings"]),
    ({"env": {"A": b"x"}}, ["env['A'] is b'x'", "strings"]),
    ({"env": {"A=B": "x"}}, ["env", "A=B"]),
    ({"env": {"": "x"}}, ["env", "''"]),
    ({"env": {"A": "x\0y"}}, ["env", "A"]),
    ({"env": ["A=1"]}, ["env is ['A=1']"]),
    ({"links": Link(latency=1e-3)}, ["links is Link(", "Links"]),
    ({"links": 3}, ["links is 3", "Links"]),
]


@pytest.mark.parametrize(
    ("given_arguments", "words"), REFUSED, ids=lambda x: str(x)[:50].replace("\0", "0")
)
def test_bad_arguments_are_named_before_anything_starts(
    given_arguments, words, nothing_starts, capsys
):
    with pytest.raises(LaunchArgumentError) as caught:
        launch_it(print, **given_arguments)
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    assert "\n" not in message and len(message) < 300
    assert capsys.readouterr() == ("", ""), "it told where the ranks run; none does"


@pytest.mark.parametrize("not_a_function", [4, None, "train", [print], 3.0])
def test_what_cannot_be_called_is_named(not_a_function, nothing_starts):
    with pytest.raises(LaunchArgumentError) as caught:
        launch_it(not_a_function)
    assert f"fn is {not_a_function!r}; it must be a function" in str(caught.value)


def test_a_long_value_is_shortened(nothing_starts):
    with pytest.raises(LaunchArgumentError) as caught:
        launch_it(list(range(10_000)))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("fork_server_runs", [False, True])
def test_good_arguments_would_have_started_something(
    fork_server_runs, nothing_starts, monkeypatch
):
    """The guard of the tests above does go off, at both of its places."""
    if fork_server_runs:
        monkeypatch.setattr(server, "warm", lambda: None)
    with pytest.raises(Started):
        launch_it(print, world_size=2, output="none")


def test_errors_are_value_errors_too():
    with pytest.raises(ValueError):
        planned(world_size=0)


# ---- what is decided ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "nnodes", "per_node"),
    [
        ({}, 1, 4),
        ({"world_size": 1}, 1, 1),
        ({"world_size": 64}, 1, 64),
        ({"nnodes": 2}, 2, 2),
        ({"nnodes": 3, "nproc_per_node": 4}, 3, 4),
        ({"nproc_per_node": 3}, 1, 3),
        ({"world_size": 12, "nnodes": 3}, 3, 4),
        ({"world_size": 12, "nnodes": 3, "nproc_per_node": 4}, 3, 4),
        ({"world_size": 8, "nproc_per_node": 8}, 1, 8),
        ({"nnodes": 64, "nproc_per_node": 1}, 64, 1),
    ],
)
def test_the_shape_of_the_cluster(asked, nnodes, per_node):
    topology = planned(**asked).topology
    assert (topology.nnodes, topology.nproc_per_node) == (nnodes, per_node)


numbers = st.none() | st.integers(-2, 70)
junk = st.one_of(
    numbers,
    st.integers(),
    st.floats(),
    st.booleans(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
)


@given(numbers, numbers, numbers)
def test_a_shape_is_either_as_asked_or_refused(world_size, nnodes, per_node):
    try:
        made = planned(world_size=world_size, nnodes=nnodes, nproc_per_node=per_node)
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
    assert 1 <= made.world_size <= 64
    assert world_size in (None, made.world_size)
    assert nnodes in (None, made.topology.nnodes)
    assert per_node in (None, made.topology.nproc_per_node)


@given(
    st.sampled_from(
        ["world_size", "nnodes", "nproc_per_node", "timeout", "threads", "max_lines"]
    ),
    junk,
)
def test_nothing_but_a_launch_argument_error_ever_comes_out(name, value):
    try:
        made = planned(**{name: value})
    except LaunchArgumentError as error:
        assert name in str(error) or "ranks do not fit" in str(error)
        return
    assert 0 < made.timeout < math.inf
    for each in (made.world_size, made.threads, made.max_lines):
        assert type(each) is int and each >= 0


@pytest.mark.parametrize("timeout", [1e-3, 1, 120.0, 10**9, np.float64(2.5)])
def test_any_deadline_above_zero(timeout):
    assert planned(timeout=timeout).timeout == timeout


def test_later_changes_of_what_was_given_do_not_matter():
    env = {"A": "1"}
    made = planned(env=env)
    env["A"] = "2"
    assert made.env == {"A": "1"}


def test_no_links_are_free_links():
    assert planned().links == Links()
    slow = Links(between=Link(latency=1.0))
    assert planned(links=slow).links is slow


# ---- what a rank finds in its environment ------------------------------------------


def test_a_rank_finds_what_torchrun_would_set(monkeypatch):
    monkeypatch.setenv("OF_THE_NOTEBOOK", "seen")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "8")
    monkeypatch.setenv("RANK", "77")
    made = planned(nnodes=3, nproc_per_node=4, threads=2, env={"MINE": "yes"})
    environment = parent.environment(made, 6, "12345")
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
    }
    assert {name: environment[name] for name in expected} == expected
    left = [n for n in environment if n.startswith(("TORCHELASTIC_", "PET_"))]
    assert left == [], "a rank would take itself for one of torchrun's"
    assert os.environ["RANK"] == "77", "the notebook's own environment was changed"


def test_what_is_given_goes_above_all_else(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    made = planned(env={"OMP_NUM_THREADS": "3"})
    assert parent.environment(made, 0, "1")["OMP_NUM_THREADS"] == "3"


def test_the_sane_limit_is_the_one_of_the_docstring():
    assert f"1 to {job.MAX_WORLD_SIZE}" in " ".join(launch.spawn.__doc__.split())


@pytest.mark.parametrize("name", ["RANK", "MASTER_PORT", "LOCAL_RANK", "WORLD_SIZE"])
def test_what_the_launcher_sets_cannot_be_overridden(name):
    with pytest.raises(LaunchArgumentError, match=f"the launcher itself sets {name}"):
        launch.spawn(int, env={name: "0"})
