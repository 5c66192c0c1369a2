"""Which GPU or CPU each rank gets: on machines with 0, 1, 2, 4 and 8 GPUs."""

import os
from unittest import mock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ddp_course.launch import device, devices
from ddp_course.launch.devices import Placement, choose
from ddp_course.launch.topology import Topology

GPUS = [0, 1, 2, 4, 8]
WORLDS = [1, 2, 3, 4, 8, 12]
shapes = st.builds(Topology, st.integers(1, 4), st.integers(1, 4))


def visible_devices(value: str | None):
    """Set CUDA_VISIBLE_DEVICES for a while (hypothesis dislikes monkeypatch)."""
    environ = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    if value is not None:
        environ["CUDA_VISIBLE_DEVICES"] = value
    return mock.patch.dict(os.environ, environ, clear=True)


def gpu_reached(environment: dict[str, str]) -> str:
    """The GPU that a rank with this environment computes on, as the driver names it."""
    index = torch.device(environment["DDP_COURSE_DEVICE"]).index
    return environment["CUDA_VISIBLE_DEVICES"].split(",")[index]


# ---- the choice --------------------------------------------------------------------


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("n", WORLDS)
def test_one_gpu_for_each_rank_if_there_are_enough_else_the_cpu(n, gpus):
    """Shared only when asked for, and then evenly and never over NCCL."""
    one = Topology(1, n)
    placement = choose(one, gpus=gpus)
    if n <= gpus:
        assert placement.gpus == tuple(range(n))
        assert placement.backend == "cpu:gloo,cuda:nccl"
    else:
        assert (placement.gpus, placement.backend) == ((), "gloo")
    on_cpu = choose(one, device="cpu", gpus=gpus)
    assert (on_cpu.gpus, on_cpu.backend) == ((), "gloo")
    shared = choose(one, share_gpus=True, gpus=gpus)
    load = [shared.gpus.count(gpu) for gpu in range(gpus)]
    assert sum(load) == (n if gpus else 0)
    if gpus:
        assert max(load) - min(load) <= 1, "the GPUs are not loaded evenly"
    if gpus and max(load) > 1:
        assert "nccl" not in shared.backend and "share" in shared.sentence
    for each in (placement, on_cpu, shared):
        sentence = each.sentence
        assert "\n" not in sentence and sentence.endswith(".")
        assert sentence.startswith(f"{n} rank{'s' * (n > 1)} ")
        assert each.backend in sentence
        assert ("on the CPU" in sentence) == (not each.gpus)
    if 0 < gpus < n:
        has = f"this machine has {gpus} GPU{'s' * (gpus > 1)}, too few"
        assert has in placement.sentence


def test_a_backend_by_name_and_the_gpus_that_pytorch_sees(monkeypatch):
    placement = choose(Topology(1, 2), backend="gloo", gpus=2)
    assert (placement.gpus, placement.backend) == ((0, 1), "gloo")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert choose(Topology(1, 2)).gpus == (0, 1)
    assert choose(Topology(1, 3)).gpus == ()


# ---- what is refused ---------------------------------------------------------------

REFUSED = [
    # arguments, GPUs of the machine, what the message must hold
    ({"device": "gpu"}, 8, ["device is 'gpu'", "'auto', 'cpu', 'cuda'"]),
    ({"device": "cuda:0"}, 8, ["device is 'cuda:0'", "'auto', 'cpu', 'cuda'"]),
    ({"device": 0}, 8, ["device is 0", "'auto', 'cpu', 'cuda'"]),
    ({"device": None}, 8, ["device is None", "'auto', 'cpu', 'cuda'"]),
    ({"backend": "ncl"}, 8, ["backend is 'ncl'", "'auto', 'gloo', 'strict', 'nccl'"]),
    ({"backend": None}, 8, ["backend is None", "'auto', 'gloo', 'strict', 'nccl'"]),
    ({"backend": "mpi"}, 8, ["backend is 'mpi'", "'auto', 'gloo', 'strict', 'nccl'"]),
    ({"backend": "strict", "device": "cuda"}, 8, ["backend is 'strict'", "the CPU"]),
    ({"device": "cuda"}, 0, ["device is 'cuda'", "no GPU", "'cpu'"]),
    ({"device": "cuda"}, 2, ["4 ranks", "has 2", "at most 2", "share_gpus=True"]),
    ({"backend": "nccl"}, 0, ["backend is 'nccl'", "has none", "'gloo'"]),
    ({"backend": "nccl"}, 2, ["backend is 'nccl'", "4 ranks", "at most 2", "'gloo'"]),
    (
        {"backend": "nccl", "device": "cpu"},
        8,
        ["backend is 'nccl'", "device is 'cpu'", "'gloo'"],
    ),
    ({"backend": "nccl", "share_gpus": True}, 2, ["'nccl'", "has 2", "'gloo'"]),
    # for its own reason: "this machine has 8, start at most 8" is none
    ({"backend": "nccl", "share_gpus": True}, 8, ["'nccl'", "share_gpus is True"]),
]


@pytest.mark.parametrize(("asked", "gpus", "words"), REFUSED)
def test_what_cannot_be_is_named_with_what_can(asked, gpus, words):
    with pytest.raises(ValueError) as caught:
        choose(Topology(1, 4), gpus=gpus, **asked)
    assert [word for word in words if word not in str(caught.value)] == []


@given(
    shapes,
    st.sampled_from(GPUS),
    st.sampled_from([*devices.DEVICES, "tpu"]),
    st.sampled_from([*devices.BACKENDS, "smoke signals"]),
    st.booleans(),
)
def test_every_combination_is_either_placed_or_refused(
    topology, gpus, dev, back, share
):
    try:
        placement = choose(
            topology, device=dev, backend=back, share_gpus=share, gpus=gpus
        )
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) > 20
        return
    assert len(placement.gpus) in (0, topology.world_size)
    assert all(0 <= gpu < gpus for gpu in placement.gpus)
    if len(set(placement.gpus)) < len(placement.gpus):
        assert share and "nccl" not in placement.backend
    if dev != "auto":
        assert bool(placement.gpus) == (dev == "cuda")


# ---- what a rank must know of it ---------------------------------------------------


def test_on_the_cpu_a_rank_hides_no_gpu():
    placement = choose(Topology(1, 4), gpus=2)
    for place in Topology(1, 4).places():
        assert placement.environment(place) == {"DDP_COURSE_DEVICE": "cpu"}


def test_an_emulated_node_sees_only_its_own_gpus():
    topology = Topology(nnodes=2, nproc_per_node=4)
    placement = choose(topology, gpus=8)
    with visible_devices(None):
        results = [placement.environment(place) for place in topology.places()]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in results] == (
        ["0,1,2,3"] * 4 + ["4,5,6,7"] * 4
    )
    assert [each["DDP_COURSE_DEVICE"] for each in results] == [
        f"cuda:{local_rank}" for _ in range(2) for local_rank in range(4)
    ]


class Forgetful(Placement):
    """A planted mistake: the caller's own CUDA_VISIBLE_DEVICES is overlooked."""

    def environment(self, place):
        with visible_devices(None):
            return super().environment(place)


class Unshifted(Placement):
    """A planted mistake: every node sees the GPUs of the whole machine."""

    def environment(self, place):
        return super().environment(place) | {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, sorted(set(self.gpus))))
        }


def assert_ranks_reach_their_gpus(topology, gpus, names, share, kind=Placement):
    """Fail unless each rank computes on the GPU that was meant for it.

    `names` is how the caller's CUDA_VISIBLE_DEVICES calls the GPUs; None: not set.
    """
    chosen = choose(topology, share_gpus=share, gpus=gpus)
    placement = kind(chosen.backend, chosen.gpus, chosen.sentence)
    with visible_devices(None if names is None else ",".join(names)):
        results = [placement.environment(place) for place in topology.places()]
    called = names or [str(gpu) for gpu in range(gpus)]
    assert [gpu_reached(each) for each in results] == [
        called[gpu] for gpu in placement.gpus
    ]
    if not share:
        for place, each in zip(topology.places(), results, strict=True):
            assert each["DDP_COURSE_DEVICE"] == f"cuda:{place.local_rank}"


names_of_gpus = st.one_of(
    st.none(),
    st.permutations([str(number) for number in range(16)]),
    st.permutations([f"GPU-{letter}" for letter in "abcdefghijklmnop"]),
)


@given(shapes, st.integers(1, 16), names_of_gpus, st.booleans())
def test_every_rank_reaches_its_gpu(topology, gpus, names, share):
    assume(share or topology.world_size <= gpus)
    assert_ranks_reach_their_gpus(topology, gpus, names and names[:gpus], share)


@pytest.mark.parametrize("wrong", [Forgetful, Unshifted])
def test_ranks_that_miss_their_gpu_are_caught(wrong):
    with pytest.raises(AssertionError):
        assert_ranks_reach_their_gpus(Topology(2, 2), 4, list("7654"), False, wrong)


# ---- which device a rank finds -----------------------------------------------------


@pytest.mark.parametrize("chosen", ["cpu", "cuda:0", "cuda:3"])
def test_a_rank_of_ours_uses_the_device_that_was_chosen(chosen, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    environ = {"DDP_COURSE_DEVICE": chosen, "LOCAL_RANK": "5"}
    assert device(environ) == torch.device(chosen)


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
def test_a_rank_of_torchrun_has_a_gpu_if_its_whole_node_has(
    per_node, gpus, monkeypatch
):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    for place in Topology(2, per_node).places():
        found = device(place.environment())
        if per_node <= gpus:
            assert found == torch.device("cuda", place.local_rank)
        else:
            assert found == torch.device("cpu")


SRUN = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_NUM_NODES": "1",
}


def test_a_rank_of_slurm_warns_if_it_leaves_a_gpu_alone(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.warns(UserWarning, match="rank 2 .* 4 ranks, .* 1 GPU.*=cuda:0"):
        assert device(SRUN) == torch.device("cpu")
    assert device(SRUN | {"DDP_COURSE_DEVICE": "cuda:0"}) == torch.device("cuda", 0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("gpus", [0, 4])
def test_a_rank_of_slurm_does_not_warn_without_a_reason(gpus, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert device(SRUN).type == ("cuda" if gpus else "cpu")


@pytest.mark.filterwarnings("error")
def test_a_rank_of_torchrun_on_a_small_machine_does_not_warn(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert device(Topology(1, 4).places()[2].environment()) == torch.device("cpu")


def test_a_process_that_nobody_launched_has_a_device(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert device({}) == torch.device("cpu")
