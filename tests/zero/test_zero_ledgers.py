"""Bytes that are kept, bytes that are sent, collectives, overlap: all as computed."""

import gc
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from on_ranks import launched
from sleeping import Sleeping, check_phases, launched_early, send_after_backward
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from zero_cases import Naive, Replicated, Stage1, Stage2, of_reducer, pytorchs

from ddp_course.launch import spawn
from ddp_course.measure import (
    ByteMeter,
    EventLog,
    MemoryLog,
    SystemBytes,
    TorchCollectives,
    busy,
    label,
    overlap,
    resident,
)
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.zero import deal, shard_plan
from ddp_course.zero.stage2 import ReduceScatterAndFree

GPT = GPTConfig(block_size=8, n_layer=3, n_head=2, d_model=26)  # odd: 26,260 parameters
CAPS = {"bucket_cap_mb": 0.02}
ADAMW = {"lr": 1e-3}


def tokens() -> torch.Tensor:
    return torch.arange(16).view(2, 8) + dist.get_rank()


def step(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    opt.zero_grad()
    x = tokens()
    model(x, x)[1].backward()
    opt.step()


# ---- what is kept --------------------------------------------------------------------


class KeepsGrad(ReduceScatterAndFree):
    """Stage 2 that keeps what was sent."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.kept = {}

    def move(self, slot):
        super().move(slot)
        self.kept[slot.parameter] = label(slot.view.clone(), "gradients")


class KeepsBuckets(ReduceScatterAndFree):
    """Stage 2 whose buckets stay alive: somebody has a view of them."""

    def free(self, bucket):
        self.opened.discard(bucket)


MAKES = {
    "stage 1": Stage1,
    "stage 2": Stage2,
    "keeps grad": of_reducer(KeepsGrad),
    "keeps buckets": of_reducer(KeepsBuckets),
}
KEPT = ("parameters", "gradients", "optimizer states", "communication buffers")


def kept(make) -> tuple[dict, dict, dict]:
    """Return what is kept after the third backward, at most in it, and without it."""
    model = build_gpt(GPT)
    opt = make(model.parameters(), torch.optim.AdamW, **CAPS, **ADAMW)
    for _ in range(2):
        step(model, opt)
    opt.zero_grad()
    x = tokens()
    with MemoryLog(model, opt) as log:
        model(x, x)[1].backward()
    peaks = {kind: log.peak_of(kind) for kind in KEPT}
    now = dict(resident(model, opt))
    opt.zero_grad()
    return now, peaks, dict(resident(model, opt))


def ledgers() -> dict[str, tuple]:
    """On every rank: what is kept in each way to train."""
    results = {}
    for name, make in MAKES.items():
        results[name] = kept(make)
        gc.collect()  # the fakes are in cycles
    for name, make in {"naive": Naive, "plain": Replicated}.items():
        model = build_gpt(GPT)
        opt = make(model.parameters(), torch.optim.AdamW, **ADAMW)
        step(model, opt)
        results[name] = dict(resident(model, opt))
    return results


def states_of(plan, rank: int) -> int:
    """Return the bytes of AdamW's states: 8 for each element, and a step each."""
    pieces = [piece for bucket in plan for piece in bucket.pieces(rank)]
    return sum(8 * (piece.last - piece.first) + 4 for piece in pieces)


def test_what_is_kept_is_what_the_plan_says(measured):
    results = measured["ledgers"]
    n = len(results)
    model = build_gpt(GPT)
    psi = sum(p.nbytes for p in model.parameters())
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    # Autograd has computed both gradients of a layer when it hands over the first.
    largest = max(sum(p.nbytes for p in layer.parameters()) for layer in linear)
    plan = shard_plan(model.named_parameters(), n, 0.02)
    whole = sum(bucket.nbytes for bucket in plan)
    assert len(plan) > 4 and psi <= whole <= psi + 4 * (n - 1) * len(plan)
    sizes = [bucket.nbytes for bucket in plan]
    window = max(a + b for a, b in zip(sizes, sizes[1:], strict=False))
    alone = 8 * psi // 4 + 4 * len(list(model.parameters()))
    owners = deal([p.numel() for p in model.parameters()], [0] * n)
    for rank, got in enumerate(results):
        states = states_of(plan, rank)
        # Within the padding, and the steps, of 1/N of what one process has.
        assert abs(states - 2 * psi / n) <= (8 * n + 4 * 9) * len(plan)

        now, peaks, after = got["stage 1"]
        assert [now[kind] for kind in KEPT] == [whole, whole, states, 0]
        assert [after[kind] for kind in KEPT] == [whole, whole, states, 0]
        assert peaks["gradients"] <= whole + largest
        now, peaks, after = got["stage 2"]
        assert [now[kind] for kind in KEPT] == [whole, whole // n, states, 0]
        assert [after[kind] for kind in KEPT] == [whole, 0, states, 0]
        assert peaks["gradients"] <= whole // n + largest
        assert max(sizes) <= peaks["communication buffers"] <= window
        # The fakes.
        assert got["keeps grad"][0]["gradients"] > whole // n
        assert got["keeps grad"][1]["gradients"] > whole // n + largest
        assert got["keeps buckets"][0]["communication buffers"] == whole
        assert got["keeps buckets"][1]["communication buffers"] > window
        # Whole parameters: as even as they can be dealt out.
        mine = [p for p, owner in zip(model.parameters(), owners, strict=True)
                if owner == rank]  # fmt: skip
        own = 2 * sum(p.nbytes for p in mine) + 4 * len(mine)
        assert got["naive"]["optimizer states"] == own
        assert got["plain"]["optimizer states"] == alone
        assert got["plain"]["optimizer states"] > 1.9 * states
    pieces = sum(len(bucket.pieces(rank)) for bucket in plan for rank in range(n))
    kept = sum(got["stage 1"][0]["optimizer states"] for got in results)
    assert kept == 2 * psi + 4 * pieces  # nothing twice, and no padding


# ---- what is sent --------------------------------------------------------------------


def sent() -> dict[str, dict]:
    """On every rank: bytes and collectives of the fourth step."""
    results = {}

    def count(name, make, wrap=lambda model: model, **more):
        model = build_gpt("1m")
        replica = wrap(model)
        opt = make(replica.parameters(), torch.optim.AdamW, **more, **ADAMW)
        for _ in range(3):
            step(replica, opt)
        with ByteMeter() as meter, EventLog() as log, TorchCollectives() as calls:
            with SystemBytes() as system:
                step(replica, opt)
                dist.barrier()  # for what is still being written
        results[name] = {
            "meter": meter.total_sent,
            "system": system.written,
            "calls": [call.op for call in calls.calls],
            "ours": [e.op for e in log.events if e.lane == "communication"],
        }

    count("stage 1", Stage1, bucket_cap_mb=1)
    count("stage 2", Stage2, bucket_cap_mb=1)
    count("pytorch", pytorchs, DDP)
    count("naive", Naive)
    return results


def test_what_is_sent_is_twice_the_model_and_pytorch_sends_half_as_much_again(measured):
    results = measured["sent"]
    n = len(results)
    model = build_gpt("1m")
    psi = sum(p.nbytes for p in model.parameters())
    plan = shard_plan(model.named_parameters(), n, 1)
    whole = sum(bucket.nbytes for bucket in plan)
    once = Fraction(n - 1, n) * whole
    for got in results:
        for name in ("stage 1", "stage 2"):
            assert got[name]["meter"] == 2 * once, name
            assert got[name]["system"] == pytest.approx(float(2 * once), rel=0.005)
        ours = ["reduce_scatter_single"] * len(plan) + ["all_gather_single"] * len(plan)
        for name in ("stage 1", "stage 2"):
            assert got[name]["ours"] == ours
            assert set(got[name]["calls"]) <= {"barrier"}
        assert set(got["pytorch"]["calls"]) >= {"all_reduce", "broadcast"}
    for name in ("pytorch", "naive"):
        mean = sum(got[name]["system"] for got in results) / n
        assert mean == pytest.approx(3 * psi * (n - 1) / n, rel=0.01), name


measured = launched(3, ledgers, sent)


# ---- what overlaps -------------------------------------------------------------------

LAYERS = 5
EACH = {"bucket_cap_mb": 1e-5}  # a bucket for each parameter


def after_backward(*args, **options):
    """Everything is sent when backward has ended, in the same buckets."""
    optimizer = Stage1(*args, **options)
    send_after_backward(optimizer.engine)
    return optimizer


def recorded() -> dict[str, list]:
    """On every rank: the events of the third backward, in several ways."""
    results, x = {}, torch.ones(2, 4)
    for name, make, more in (
        ("stage 1", Stage1, EACH),
        ("stage 2", Stage2, EACH),
        ("one bucket", Stage1, {}),
        ("fake", after_backward, EACH),
    ):
        model = Sleeping()
        opt = make(model.parameters(), torch.optim.SGD, lr=0.1, **more)
        for _ in range(2):
            opt.zero_grad()
            model(x).sum().backward()
        opt.zero_grad()
        with EventLog() as log:
            model(x).sum().backward()
        results[name] = log.events
    return results


def test_communication_is_hidden_behind_backward():
    results = spawn(recorded, world_size=2, output="none")
    for rank in results:
        for name in ("stage 1", "stage 2"):
            assert launched_early(rank[name]) == LAYERS - 1, name
            assert overlap(rank[name], "compute", "communication") > 0, name
        for name in ("one bucket", "fake"):
            assert busy(rank[name], "communication") > 0
            assert launched_early(rank[name]) == 0, name
        assert overlap(rank["fake"], "compute", "communication") == 0
        check_phases(rank["stage 1"], list(range(LAYERS)))
