"""Who is who: every rank has one place, and the place says what torchrun would."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.agent.server import local_elastic_agent

from ddp_course.launch.topology import Place, Topology, here

topologies = st.builds(Topology, st.integers(1, 9), st.integers(1, 9))


def assert_it_is_torchruns_mapping(place_of, topology: Topology) -> None:
    """Fail unless `place_of(rank)` numbers ranks node by node, and each only once."""
    places = [place_of(rank) for rank in range(topology.world_size)]
    assert [place.rank for place in places] == list(range(topology.world_size))
    names = [(place.node_rank, place.local_rank) for place in places]
    assert names == [
        (node_rank, local_rank)
        for node_rank in range(topology.nnodes)
        for local_rank in range(topology.nproc_per_node)
    ]


def test_three_nodes_with_four_ranks_each():
    topology = Topology(nnodes=3, nproc_per_node=4)
    assert topology.world_size == 12
    assert str(topology) == "3 x 4 ranks"
    assert topology.place(0) == Place(0, 0, 0, topology)
    assert topology.place(6) == Place(6, 2, 1, topology)
    assert topology.place(11) == Place(11, 3, 2, topology)


@given(topologies)
def test_ranks_are_numbered_node_by_node(topology):
    assert_it_is_torchruns_mapping(topology.place, topology)
    for place in topology.places():
        n = topology.nproc_per_node
        assert place.rank == place.node_rank * n + place.local_rank
        assert place.world_size == topology.world_size


@pytest.mark.parametrize(
    "wrong",
    [
        lambda rank, t: Place(rank, rank // t.nnodes, rank % t.nnodes, t),  # dealt out
        lambda rank, t: Place(rank, *divmod(rank, t.nproc_per_node), t),  # swapped
        lambda rank, t: Place(rank, rank % t.nproc_per_node, 0, t),  # only one node
    ],
)
def test_wrong_mappings_are_caught(wrong):
    topology = Topology(3, 4)
    with pytest.raises(AssertionError):
        assert_it_is_torchruns_mapping(lambda rank: wrong(rank, topology), topology)


@given(topologies, st.data())
def test_same_node_is_an_equivalence_of_as_many_ranks_as_a_node_has(topology, data):
    a, b = (
        topology.place(data.draw(st.integers(0, topology.world_size - 1)))
        for _ in range(2)
    )
    assert a.same_node(a.rank)
    assert a.same_node(b.rank) == b.same_node(a.rank) == (a.node_rank == b.node_rank)
    neighbours = [r for r in range(topology.world_size) if a.same_node(r)]
    assert len(neighbours) == topology.nproc_per_node


@pytest.mark.parametrize("rank", [-1, 12, 10**6])
def test_a_rank_that_is_not_there_is_named_with_those_that_are(rank):
    with pytest.raises(ValueError, match=rf"rank is {rank}; .*3 x 4.* 0 to 11"):
        Topology(3, 4).place(rank)


@given(topologies, st.data())
def test_a_rank_finds_its_place_in_its_environment(topology, data):
    place = topology.place(data.draw(st.integers(0, topology.world_size - 1)))
    assert here(place.environment()) == place


def test_the_environment_is_torchruns():
    """The names are those that torchrun's agent gives to its workers."""
    agent = inspect.getsource(local_elastic_agent)
    environment = Topology(3, 4).place(6).environment()
    assert [name for name in environment if f'"{name}"' not in agent] == []
    assert environment == {
        "RANK": "6",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "12",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_NAME": "default",
        "ROLE_RANK": "6",
        "ROLE_WORLD_SIZE": "12",
    }


def test_a_process_that_nobody_launched_is_alone():
    assert here({}) == Place(0, 0, 0, Topology(1, 1))


def test_rank_and_world_size_suffice():
    assert here({"RANK": "3", "WORLD_SIZE": "4"}) == Topology(1, 4).place(3)


@pytest.mark.parametrize("local_world_size", ["4", "2"])
def test_nodes_of_different_size_are_refused_or_counted_right(local_world_size):
    """torchrun allows 4 ranks on one node and 2 on another: a world of 6."""
    environ = {
        "RANK": "3" if local_world_size == "4" else "5",
        "LOCAL_RANK": "3" if local_world_size == "4" else "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": local_world_size,
        "GROUP_RANK": "0" if local_world_size == "4" else "1",
        "GROUP_WORLD_SIZE": "2",
    }
    try:
        place = here(environ)
    except ValueError as error:
        assert "6" in str(error) and local_world_size in str(error)
    else:
        assert place.world_size == 6
        assert place.topology.nnodes == 2
