"""Links: how long a message takes, and that `send_over_link` takes that long."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_course.launch.links import VARIABLE, Link, Links, current_links, send_over_link
from ddp_course.launch.topology import Topology

latencies = st.floats(0, 10)
bandwidths = st.floats(1, 1e12) | st.just(math.inf)
any_link = st.builds(Link, latencies, bandwidths)
any_links = st.builds(Links, any_link, any_link, any_link)


def test_latency_and_bandwidth_add_up():
    ethernet = Link(latency=50e-6, bandwidth=1.25e9)
    assert ethernet.seconds(0) == 50e-6
    assert ethernet.seconds(1_250_000) == pytest.approx(50e-6 + 1e-3)
    assert Link().seconds(0) == Link().seconds(10**12) == 0.0
    assert current_links({}) == Links()


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        *(
            ({"latency": x}, f"{x!r} s.* finite and 0 or more")
            for x in (-1e-9, math.inf, math.nan)
        ),
        *(({"bandwidth": x}, f"{x!r} B/s.* above 0") for x in (0, -1, math.nan)),
        ({"latency": "1ms"}, "'1ms'; it must be a number"),
        ({"bandwidth": None}, "None; it must be a number"),
    ],
)
def test_impossible_links_are_named(how, problem):
    with pytest.raises(ValueError, match=f"{[*how][0]} is {problem}"):
        Link(**how)
    with pytest.raises(ValueError, match="^between is 10.0; it must be a Link, such "):
        Links(between=10.0)


@given(any_links)
def test_ranks_find_the_links_that_the_launcher_gave(given_links):
    assert current_links(given_links.environment()) == given_links


@pytest.mark.parametrize("kind", [np.float32, np.int64, Fraction])
def test_links_may_be_given_in_any_kind_of_number(kind):
    measured = Links(between=Link(kind(1), kind(8)))
    assert current_links(measured.environment()) == Links(between=Link(1.0, 8.0))


# ---- which link leads to whom ------------------------------------------------------

FAST, SLOW = Link(1e-6, 1e11), Link(1e-4, 1e9)


class AllInside(Links):
    """A planted mistake: every peer is taken for a neighbour."""

    def link_to(self, peer, place):
        return self.inside


class ByLocalRank(Links):
    """A planted mistake: it compares the wrong half of the name."""

    def link_to(self, peer, place):
        same = place.topology.place(peer).local_rank == place.local_rank
        return self.inside if same else self.between


def assert_links_lead_where_they_should(cluster: Links, topology: Topology) -> None:
    """Fail unless exactly the links between nodes are the slow ones."""
    n = topology.nproc_per_node
    for place in topology.places():
        for peer in range(topology.world_size):
            expected = FAST if place.rank // n == peer // n else SLOW
            assert cluster.link_to(peer, place) == expected


@given(st.integers(1, 4), st.integers(1, 4))
def test_links_inside_a_node_are_fast_and_between_nodes_slow(nnodes, per_node):
    topology = Topology(nnodes, per_node)
    assert_links_lead_where_they_should(Links(FAST, SLOW), topology)


@pytest.mark.parametrize("wrong", [AllInside, ByLocalRank])
def test_wrong_links_are_caught(wrong):
    with pytest.raises(AssertionError):
        assert_links_lead_where_they_should(wrong(FAST, SLOW), Topology(2, 2))


# ---- sending over a link -----------------------------------------------------------


@pytest.fixture
def diary(monkeypatch):
    """What rank 1 of 2 x 2 does when it sends: a list of ("sleep" or "send", what)."""
    done = []
    monkeypatch.setattr("time.sleep", lambda s: done.append(("sleep", s)))
    monkeypatch.setattr(
        "torch.distributed.send", lambda tensor, dst: done.append(("send", dst))
    )
    for name, value in Topology(2, 2).place(1).environment().items():
        monkeypatch.setenv(name, value)
    given_links = Links(inside=Link(0.001, 1e6), between=Link(0.5, 1e3))
    monkeypatch.setenv(VARIABLE, given_links.environment()[VARIABLE])
    return done


@pytest.mark.parametrize(
    ("tensor", "nbytes"),
    [
        (torch.zeros(1000), 4000),
        (torch.zeros(10, 50, dtype=torch.float64), 4000),
        (torch.zeros(7, dtype=torch.uint8), 7),
        (torch.zeros(0), 0),
        (torch.tensor(1.0, dtype=torch.bfloat16), 2),
    ],
)
def test_a_message_waits_for_its_link_and_then_goes(tensor, nbytes, diary):
    send_over_link(tensor, dst=0)
    send_over_link(tensor, dst=3)
    waited = [what for kind, what in diary if kind == "sleep"]
    assert [kind for kind, _ in diary] == ["sleep", "send"] * 2
    assert [what for kind, what in diary if kind == "send"] == [0, 3]
    assert waited == pytest.approx([0.001 + nbytes / 1e6, 0.5 + nbytes / 1e3])


def test_a_peer_that_is_not_there_is_named_before_anything_is_sent(diary):
    with pytest.raises(ValueError, match="rank is 4"):
        send_over_link(torch.zeros(1), dst=4)
    assert diary == []
