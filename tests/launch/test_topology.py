"""Who is who: every rank has one place, and the place says what torchrun would."""

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


def test_three_nodes_with_four_ranks_each():
    topology = Topology(nnodes=3, nproc_per_node=4)
    assert topology.world_size == 12
    assert str(topology) == "3 x 4 ranks"
    assert topology.place(6) == Place(6, 2, 1, topology)
    for rank in (-1, 12, 10**6):
        with pytest.raises(ValueError, match=rf"rank is {rank}; .*3 x 4.* 0 to 11"):
            topology.place(rank)
    with pytest.raises(ValueError, match="nnodes is 2.5; it must be a whole number, 1"):
        Topology(2.5)


def test_a_process_that_was_told_little_or_nothing_has_a_place():
    assert here({}) == Place(0, 0, 0, Topology(1, 1))
    assert here({"RANK": "3", "WORLD_SIZE": "4"}) == Topology(1, 4).place(3)


@pytest.mark.parametrize("message", ["SLURM", "OMPI", "PMI", "too little"])
def test_other_launchers_say_it_in_other_words(message):
    """As srun, Open MPI's and MPICH's mpirun do for rank 3 of 2 x 2."""
    words = {
        "SLURM": "SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=1 "
        "SLURM_NODEID=1 SLURM_STEP_NUM_NODES=2",
        "OMPI": "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 "
        "OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
        "PMI": "PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2",
        "too little": "SLURM_PROCID=0",  # in a batch script, which is no rank
    }
    environ = dict(word.split("=") for word in words[message].split())
    place = (
        Topology(1, 1).place(0) if message == "too little" else Topology(2, 2).place(3)
    )
    assert here(environ) == place
    mine = Topology(1, 8).place(5)  # what is said in our words is what counts
    assert here({**environ, **mine.environment()}) == mine


@pytest.mark.parametrize(
    ("rank", "local_rank", "node", "per_node"), [(3, 3, 0, 4), (5, 1, 1, 2)]
)
def test_nodes_of_different_size_are_refused(rank, local_rank, node, per_node):
    """torchrun allows 4 ranks on one node and 2 on another: a world of 6."""
    environ = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 6}
    environ |= {"LOCAL_WORLD_SIZE": per_node, "GROUP_RANK": node}
    environ = {k: str(v) for k, v in (environ | {"GROUP_WORLD_SIZE": 2}).items()}
    with pytest.raises(ValueError, match=rf"WORLD_SIZE is 6, but .* and {per_node} r"):
        here(environ)
