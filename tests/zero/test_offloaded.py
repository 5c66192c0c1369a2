"""States on the host: the same training, the plan's bytes, and the time it costs."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from fsdp_cases import GPT, batch
from on_ranks import launched
from refusals import refused
from torch import nn

from ddp_course.chapters.ch08_fsdp import imagined_gpu, offload_runs
from ddp_course.chapters.ch08_fsdp.imagined_gpu import BACKWARD, FORWARD
from ddp_course.chapters.ch08_fsdp.offload_runs import run_each, seconds_by_formula
from ddp_course.launch import Link, Links, spawn
from ddp_course.measure import MemoryLog
from ddp_course.mechanisms import host_memory
from ddp_course.mechanisms.host_memory import HostMemory, Lane
from ddp_course.model import build_gpt
from ddp_course.zero import (
    FullyShardedDataParallel,
    OffloadedOptimizer,
    full_state_dict,
    metered,
    offloaded,
)
from ddp_course.zero.units import unit_plan

STEPS = 3


def trained(**options) -> dict[str, torch.Tensor]:
    """Return the whole state after three steps of stage 3 with AdamW."""
    model = FullyShardedDataParallel(build_gpt(GPT, 0), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for k in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2):  # gradients add up
            (model(*batch(k))[1] / 2).backward()
        optimizer.step()
    return full_state_dict(model)


def in_both_places() -> tuple:
    host = HostMemory()
    on_device = trained(**metered.module())
    on_host = trained(**offloaded.module(host))
    same = [name for name in on_device if torch.equal(on_device[name], on_host[name])]
    return len(on_device) - len(same), host.to_device.nbytes, host.to_host.nbytes


def lost() -> int:
    """Plant: gradients arrive as zeros."""
    add = offloaded.HostStorage.add_gradient
    zeros = mock.patch.object(
        offloaded.HostStorage, "add_gradient", lambda flat, mean: add(flat, mean * 0)
    )
    with zeros:
        return in_both_places()[0]


two_ranks = launched(2, in_both_places, lost, links=Links(host=Link(0, 50e6)))


def test_on_the_host_it_is_the_same_training_and_the_bytes_of_the_plan(two_ranks):
    shards = sum(unit.nbytes // 2 for unit in unit_plan(build_gpt(GPT, 0), 2))
    passes = 2 * STEPS
    for differ, fetched, stored in two_ranks["in_both_places"]:
        assert differ == 0
        assert fetched == 2 * passes * shards  # for forward, and for backward
        assert stored == passes * shards
    assert all(two_ranks["lost"])


# ---- ZeRO-Offload --------------------------------------------------------------------


class Tied(nn.Module):
    """Three layers; the last two share a weight, the first is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.layers[0].requires_grad_(False)
        self.layers[2].weight = self.layers[1].weight

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


def steps(make) -> tuple[list[torch.Tensor], nn.Module]:
    model = Tied()
    optimizer = make(model)
    dice = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.randn(4, 8, generator=dice)).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], model


def plain(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def equal(cls) -> bool:
    def make(model):
        return cls(model.parameters(), torch.optim.AdamW, HostMemory(), lr=0.1)

    pairs = zip(steps(plain)[0], steps(make)[0], strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


class Overwrites(OffloadedOptimizer):
    """Plant: the second backward of a step replaces the first."""

    def _leave(self, master, parameter):
        master.grad = None
        super()._leave(master, parameter)


class ForgetsToReturn(OffloadedOptimizer):
    """Plant: the new parameters stay on the host."""

    def step(self):
        self.optimizer.step()


def test_zero_offload_is_the_same_training_bit_by_bit():
    assert equal(OffloadedOptimizer)
    assert not equal(Overwrites)
    assert not equal(ForgetsToReturn)


def kept_on_the_device(cls) -> int:
    """Return how many parameters have a gradient after backward."""
    model = Tied()
    cls(model.parameters(), torch.optim.SGD, HostMemory(), lr=0.1)
    with MemoryLog(model) as log:
        model(torch.ones(4, 8)).backward()
    assert log.moments
    return sum(p.grad is not None for p in model.parameters())


class Copies(OffloadedOptimizer):
    """Plant: the gradient stays on the device, too."""

    def _leave(self, master, parameter):
        gradient = parameter.grad
        super()._leave(master, parameter)
        parameter.grad = gradient


test_what_is_no_link_is_refused = refused(
    (lambda: HostMemory(3), "link is 3; it must be a Link, or None"),
)


def test_no_gradient_stays_on_the_device():
    assert kept_on_the_device(OffloadedOptimizer) == 0
    assert kept_on_the_device(Copies) == 3


def test_a_step_of_zero_offload_copies_each_parameter_out_and_back():
    host = HostMemory()
    steps(lambda m: OffloadedOptimizer(m.parameters(), torch.optim.AdamW, host))
    nbytes = sum(p.nbytes for p in Tied().parameters() if p.requires_grad)
    assert host.to_device.nbytes == STEPS * nbytes
    assert host.to_host.nbytes == 2 * STEPS * nbytes  # two backwards in a step


# ---- time ----------------------------------------------------------------------------

BANDWIDTH = 25e6
IN_TIME = (
    host_memory,
    imagined_gpu,
    offload_runs,
)  # modules that sleep and read clocks


def seconds_of_matrices(model: nn.Module) -> float:
    """Return how long the imagined GPU computes a row's products, both ways."""
    layers = (m for m in model.modules() if isinstance(m, nn.Linear))
    return sum(m.weight.numel() for m in layers) * (FORWARD + BACKWARD)


def least_seconds() -> dict[str, float]:
    """Return the least seconds of each way of `offload_runs`, on one rank."""
    computing = 4 * seconds_of_matrices(build_gpt("1m").blocks[0])
    assert BACKWARD == 2 * FORWARD
    least = {"all on the GPU": computing, **seconds_by_formula(computing, BANDWIDTH)}
    # By the formula a unit's gradients leave together; ours leave one by one, earlier.
    return least | {"ZeRO-Offload": 0.9 * least["ZeRO-Offload"]}


def too_fast(runs) -> list[str]:
    return [
        name for name, least in least_seconds().items() if runs[name].seconds < least
    ]


class Clock:
    """A clock that goes on only while somebody sleeps, so that runs take exact times.

    It has one time for all threads: what happens in two at once takes their sum.
    """

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def by_the_clock(wait=Lane.wait) -> dict:
    """Run each way in the time of a Clock, but for the one that uses two threads."""
    clock = Clock()
    with ExitStack() as stack:
        for module in IN_TIME:
            stack.enter_context(mock.patch.object(module, "time", clock))
        stack.enter_context(mock.patch.object(Lane, "wait", wait))
        runs = run_each()
    del runs["one unit ahead"]
    return runs


def hurried() -> dict:
    """Plant: nobody waits for the host."""
    return by_the_clock(wait=lambda lane: None)


def while_copying() -> dict[str, bool]:
    """Return for two ways whether some copy is under way while a product is."""
    found = {}
    for name in ("nothing ahead", "one unit ahead"):
        waits, computes = [], []
        device = SimpleNamespace(sleep=noted(time.sleep, computes))
        with (
            mock.patch.object(Lane, "wait", noted(Lane.wait, waits)),
            mock.patch.object(imagined_gpu, "time", device),
            mock.patch.object(offload_runs, "WAYS", {name: offload_runs.WAYS[name]}),
        ):
            run_each()
        found[name] = any(a < d and c < b for a, b in waits for c, d in computes)
    return found


def noted(function, times: list):
    """Return `function`; each call notes when it began and ended."""

    def call(*args):
        begin = time.perf_counter()
        function(*args)
        times.append((begin, time.perf_counter()))

    return call


ONE = {"world_size": 1, "output": "none", "links": Links(host=Link(0, BANDWIDTH))}


def test_steps_take_the_seconds_of_the_formula_and_the_plant_does_not():
    least = least_seconds()
    head = seconds_of_matrices(build_gpt("1m")) - least["all on the GPU"]
    runs = spawn(by_the_clock, **ONE)[0]
    for name in ("all on the GPU", "nothing ahead"):
        assert runs[name].seconds == pytest.approx(least[name] + head)
    most = least["ZeRO-Offload"] / 0.9
    assert least["ZeRO-Offload"] < runs["ZeRO-Offload"].seconds < most
    planted = spawn(hurried, **ONE)[0] | {"one unit ahead": runs["nothing ahead"]}
    assert too_fast(planted) == ["nothing ahead", "ZeRO-Offload"]


def test_no_step_is_faster_than_the_formula_and_all_train_alike():
    runs = spawn(run_each, **ONE)[0]
    assert too_fast(runs) == []
    states = [run.state for run in runs.values()]
    for state in states[1:]:
        assert all(torch.equal(state[name], states[0][name]) for name in states[0])


def test_the_next_unit_is_fetched_while_one_computes():
    found = spawn(while_copying, **ONE)[0]
    assert found == {"nothing ahead": False, "one unit ahead": True}
