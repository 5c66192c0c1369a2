"""Imagined GPUs: every way to name one is noted, also in files."""

import pickle

import pytest
import torch
from torch import nn

from ddp_course.lab.imagined_gpus import ImaginedGPUs

WAYS = {
    "model.cuda()": lambda x: nn.Linear(1, 1).cuda(),
    "model.to": lambda x: nn.Linear(1, 1).to("cuda", torch.float64),
    "to(device)": lambda x: x.to(torch.device("cuda"), non_blocking=True),
    "to(device=)": lambda x: x.to(device="cuda"),
    "cuda(number)": lambda x: x.cuda(2),
    "to(number)": lambda x: x.to(2),
    "device=": lambda x: torch.zeros(3, device="cuda:2"),
    "like": lambda x: torch.randn_like(x, device="cuda"),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_gpu_that_is_named_is_noted(way):
    with ImaginedGPUs(3) as gpus:
        torch.cuda.set_device(2)
        got = WAYS[way](torch.ones(3))
    assert gpus.used == {2}
    tensor = next(got.parameters()) if isinstance(got, nn.Module) else got
    assert tensor.device.type == "cpu"
    assert gpus.number_of(tensor) == 2
    assert gpus.number_of(torch.ones(5)) is None


def test_what_is_not_put_anywhere_is_not_noted():
    with ImaginedGPUs(3) as gpus:
        nn.Linear(2, 2).to("cpu").double()(torch.ones(1, 2).to(torch.float64)).cpu()
        assert (torch.cuda.is_available(), torch.cuda.device_count()) == (True, 3)
    assert gpus.used == gpus.loaded == set()


def test_afterwards_all_is_as_before():
    before = torch.cuda.is_available, torch.cuda.set_device, torch.manual_seed
    with pytest.raises(RuntimeError, match="cuda:3; this machine has 3"):
        with ImaginedGPUs(3):
            torch.ones(1).to("cuda:3")
    assert before == (torch.cuda.is_available, torch.cuda.set_device, torch.manual_seed)
    assert torch.ones(1).to("cpu").device.type == "cpu"


def test_only_a_gpu_can_be_set():
    with ImaginedGPUs(1), pytest.raises(ValueError, match="cpu, which is not a GPU"):
        torch.cuda.set_device("cpu")


def test_a_block_for_a_device_ends():
    with ImaginedGPUs(3) as gpus:
        with torch.cuda.device(1):
            assert torch.cuda.current_device() == 1
        torch.ones(1).cuda()
    assert gpus.used == {0}


@pytest.mark.parametrize(
    ("map_location", "where"),
    [
        (None, {0}),  # where the tensors were when they were saved
        ("cpu", set()),
        ("cuda", {1}),
        ("cuda:2", {2}),
        (torch.device("cuda", 1), {1}),
        ({"cuda:0": "cuda:2"}, {2}),
        ({"cuda:1": "cuda:2"}, {0}),
        (lambda storage, location: storage, set()),
        (lambda storage, location: storage.cuda(1), {1}),
        (lambda storage, location: None, {0}),
    ],
)
def test_a_file_remembers_its_gpu(tmp_path, map_location, where):
    state = {"weight": torch.arange(3.0), "epoch": 1}
    with ImaginedGPUs(3):
        torch.save(state, tmp_path / "of_gpu_0")
        on_the_host = state["weight"].cpu()
        torch.save({"weight": on_the_host, "epoch": 1}, tmp_path / "of_the_host")
    for file, expected in (("of_gpu_0", where), ("of_the_host", None)):
        with ImaginedGPUs(3) as gpus:
            torch.cuda.set_device(1)
            got = torch.load(tmp_path / file, map_location=map_location)
        assert torch.equal(got["weight"], state["weight"])
        if expected is not None or map_location is None:
            assert gpus.loaded == (expected or set())


def test_what_was_loaded_to_the_host_is_sent_from_there(tmp_path):
    with ImaginedGPUs(2) as gpus:
        torch.save(torch.ones(2), tmp_path / "one")
        for place, where in (("cpu", set()), ("cuda:0", {0})):
            loaded = torch.load(tmp_path / "one", map_location=place)
            pickle.loads(pickle.dumps(loaded))  # as `broadcast_object_list` does
            assert gpus.loaded == where


def test_seeds_for_gpus_are_seeds_here():
    with ImaginedGPUs(1):
        torch.manual_seed(3)
        first = torch.rand(2)
        torch.cuda.manual_seed(3)
        assert torch.equal(first, torch.rand(2))
