"""What a step of stage 3 sends and keeps, in which order, and what overlaps."""

import gc
import math
from unittest import mock

import torch
import torch.distributed as dist
from fsdp_cases import (
    EverythingAtOnce,
    KeptByAView,
    Naive,
    Ours,
    Replicated,
    Simple,
    fully_shard,
)
from on_ranks import launched
from sleeping import Sleep, wait_for_messages
from torch import nn

from ddp_course.launch import Link, Links, deadlock, spawn
from ddp_course.measure import (
    ByteMeter,
    EventLog,
    MemoryLog,
    SystemBytes,
    busy,
    label,
    overlap,
    resident,
)
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.zero.metered import LabelledStorage, MeteredMessages
from ddp_course.zero.units import unit_plan

GPT = GPTConfig(
    vocab_size=95, block_size=16, n_layer=4, n_head=2, d_model=46, tied=True
)


def stepping(sharded: nn.Module):
    """Return a function that makes a step, and the optimizer."""
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3, fused=True)
    x = torch.arange(32).view(2, 16) + dist.get_rank()

    def step() -> None:
        optimizer.zero_grad()
        sharded(x, x)[1].backward()
        optimizer.step()

    return step, optimizer


def labelled(model: nn.Module) -> nn.Module:
    """Return the naive version, with a label on what it gathers."""
    naive = Naive(model)
    label(naive.whole, "communication buffers")
    return naive


# ---- bytes sent ----------------------------------------------------------------------

SENDERS = {
    "ours": Ours,
    "simple": lambda m: Simple(m, exchange=MeteredMessages(), storage=LabelledStorage),
    "simple, PyTorch's": Simple,
    "root stays": lambda m: Ours(m, reshard_after_forward=None),
    "all stay": lambda m: Ours(m, reshard_after_forward=False),
    "bf16": lambda m: Ours(m, compute_dtype=torch.bfloat16),
    "bf16, summed in fp32": lambda m: Ours(
        m, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32
    ),
    "naive": labelled,
    "fully_shard": fully_shard,
    "fully_shard, all stay": lambda m: fully_shard(m, reshard_after_forward=False),
}


def sent() -> dict[str, tuple[int, int, int]]:
    """On every rank: bytes sent in a step, by the meter and by the system; messages.

    However late the others are, no rank asks in the store's file why: the system would
    count these bytes, too.
    """
    results = {}
    for name, wrap in SENDERS.items():
        step, _ = stepping(wrap(build_gpt(GPT)))
        step()
        with mock.patch.object(deadlock, "PATIENCE", math.inf):
            with ByteMeter() as meter, SystemBytes() as system:
                step()
        results[name] = meter.total_sent, system.written, meter.total_messages
    return results


# ---- bytes kept ----------------------------------------------------------------------


def kept() -> dict[str, object]:
    """On every rank: ledgers between steps, and at the peak."""
    wraps = {name: SENDERS[name] for name in ("ours", "simple", "all stay", "naive")}
    wraps |= {"fully_shard": fully_shard, "replicated": Replicated}
    wraps |= {"no prefetch": lambda m: Ours(m, prefetch=0)}
    wraps |= {"kept by a view": KeptByAView, "all at once": EverythingAtOnce}
    gc.collect()  # a sharded module and its hooks know each other
    results = {}
    for name, wrap in wraps.items():
        with MemoryLog() as log:  # from before the model: it sees all memory
            sharded = wrap(build_gpt(GPT))
            step, optimizer = stepping(sharded)
            step()
            before = len(log.moments)
            step()
            moments = log.moments[before:]
        peak = max((m.ledger for m in moments), key=lambda ledger: ledger.total)
        buffers = max(m.ledger["communication buffers"] for m in moments)
        between = resident(sharded, optimizer)
        results[name] = between, peak.total, buffers
        del sharded, step, optimizer, log, moments
        gc.collect()
    return results


N = 3  # sizes do not divide
measured = launched(N, sent, kept)


def test_bytes_sent_are_those_of_the_formula(measured):
    n, plan = N, unit_plan(build_gpt(GPT), N)
    one = (n - 1) * sum(unit.nbytes for unit in plan) // n  # of each gather or reduce
    root = (n - 1) * plan[0].nbytes // n
    for rank in measured["sent"]:
        metered = {name: result[0] for name, result in rank.items()}
        assert metered["ours"] == metered["simple"] == 3 * one
        assert metered["root stays"] == 3 * one - root
        assert metered["all stay"] == 2 * one
        assert metered["bf16"] == 3 * one / 2
        assert metered["bf16, summed in fp32"] == 2 * one
        for name in ("ours", "root stays", "all stay", "bf16"):
            written = rank[name][1]
            # gloo's headers: 144 bytes for each message, 0.3 to 0.5 % of these.
            assert 0 <= written - metered[name] <= 150 * rank[name][2], name
        # gloo's reduce-scatter is an all-reduce: once more as much. fully_shard pads
        # each parameter for itself.
        for name, times in (
            ("naive", 3),
            ("simple, PyTorch's", 4),
            ("fully_shard", 4),
            ("fully_shard, all stay", 3),
        ):
            assert times <= rank[name][1] / one < 1.07 * times, name


def test_between_steps_each_rank_keeps_its_part_and_the_peak_is_computed(measured):
    n = N
    root, *blocks = unit_plan(build_gpt(GPT), n)
    shards = sum(unit.nbytes for unit in (root, *blocks)) // n
    steps = 4 * len([*build_gpt(GPT).parameters()])  # AdamW's counters, float32
    padding = 4 * sum(u.flats[0].padding for u in (root, *blocks))
    block = max(unit.nbytes for unit in blocks)
    for rank in measured["kept"]:
        elements = sum(p.numel() for p in build_gpt(GPT).parameters())
        naive = rank["naive"][0]
        assert naive["parameters"] == naive["gradients"] == 4 * -(-elements // n)
        for name in ("ours", "simple", "all stay", "no prefetch"):
            ledger = rank[name][0]
            assert ledger["parameters"] == ledger["gradients"] == shards, name
            states = 2 * shards + steps - ledger["optimizer states"]
            assert states in (0, 2 * padding), name  # no rank but the last has padding
            assert ledger["communication buffers"] == 0, name
        # The root, the block that is computed, and another on its way there, or its
        # gradients on theirs.
        assert rank["ours"][2] == root.nbytes + 2 * block
        assert rank["no prefetch"][2] == root.nbytes + 2 * block
        assert rank["simple"][2] == root.nbytes + block  # nothing is under way
        assert rank["all stay"][2] == root.nbytes + 4 * block
        assert rank["naive"][2] == n * naive["parameters"]
        assert rank["ours"][1] < rank["naive"][1] - block
        assert rank["ours"][1] <= 1.05 * rank["fully_shard"][1]
        # The fakes: what they keep is seen.
        between = {name: result[0].total for name, result in rank.items()}
        assert between["replicated"] > between["ours"] + n * shards - 1
        assert rank["kept by a view"][1] > rank["ours"][1] + n * shards
        assert rank["all at once"][2] > rank["ours"][2] + block


# ---- the order of things -------------------------------------------------------------

LAYERS, SLEEP = 4, 0.02


class Sleeping(nn.Module):
    """A layer that computes for SLEEP seconds each way, on no core.

    Its forward lasts until all messages that were launched have ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(30, 30)

    def forward(self, x):
        y = Sleep.apply(self.inner(x), SLEEP, SLEEP)
        wait_for_messages()
        return y


def recorded(wrap) -> list:
    """Return the events of the third step of a model of sleeping layers."""
    model = nn.Sequential(nn.Linear(30, 30), *(Sleeping() for _ in range(LAYERS)))
    sharded, x = wrap(model), torch.ones(2, 30)
    for _ in range(2):
        sharded(x).sum().backward()
    with EventLog() as log:
        sharded(x).sum().backward()
    return log.events


def timelines() -> dict[str, list]:
    units = [f"{k + 1}" for k in range(LAYERS)]
    return {
        "ours": recorded(lambda m: Ours(m, units=units)),
        "no prefetch": recorded(lambda m: Ours(m, units=units, prefetch=0)),
        "far ahead": recorded(lambda m: Ours(m, units=units, prefetch=2)),
        "all at once": recorded(lambda m: EverythingAtOnce(m, units=units)),
    }


def launches(events) -> list[str]:
    """Return what was launched, in order: "gather 1", "reduce 1"."""
    launched = [e.detail for e in events if e.lane == "launch"]
    return [f"{what} {unit}" for detail in launched for what, unit in detail.items()]


def launched(events, unit: str) -> float:
    """Return when the first gather of a unit was launched."""
    gathers = (e for e in events if e.lane == "launch" and "gather" in e.detail)
    return next(e.start for e in gathers if str(e.detail["gather"]) == unit)


def forwards(events) -> dict:
    return {e.detail["unit"]: e for e in events if e.op == "forward"}


def hidden(events) -> float:
    """Return for how long gathers were under way while a unit computed, in seconds."""
    reduces = "reduce_scatter_single"
    return overlap([e for e in events if e.op != reduces], "compute", "communication")


def arrived_ahead(events) -> int:
    """Return how many units were gathered before the unit before was computed."""
    gathers = [e for e in events if e.op == "all_gather_single"]  # the first: the root
    units = zip(range(1, LAYERS), gathers[2:], strict=False)
    return sum(gather.end < forwards(events)[f"{k}"].end for k, gather in units)


def check_order(rank: dict[str, list]) -> None:
    """What is launched when, as one rank has recorded it."""
    gathers = [f"gather {unit}" for unit in ("root", 1, 2, 3, 4)]
    back = [gathers[0], gathers[4], gathers[3], "reduce 4", gathers[2], "reduce 3"]
    back += [gathers[1], "reduce 2", "reduce 1", "reduce root"]
    assert launches(rank["ours"]) == gathers + back
    assert launches(rank["no prefetch"])[:5] == gathers
    assert launches(rank["no prefetch"])[5:8] == [gathers[0], gathers[4], "reduce 4"]
    assert launches(rank["far ahead"])[5:9] == [gathers[k] for k in (0, 4, 3, 2)]
    assert launches(rank["all at once"])[:5] == gathers
    for k in range(1, LAYERS):
        for name in ("ours", "far ahead"):
            gather = launched(rank[name], f"{k + 1}")
            assert gather < forwards(rank[name])[f"{k}"].end, (name, k)
        gather = launched(rank["no prefetch"], f"{k + 1}")
        assert gather >= forwards(rank["no prefetch"])[f"{k}"].end
    early = launched(rank["all at once"], "4")
    assert early < forwards(rank["all at once"])["1"].end  # the fake
    assert launched(rank["ours"], "4") > forwards(rank["ours"])["2"].end


def test_gathers_are_launched_ahead_and_a_slow_link_is_hidden_behind_computation():
    slow = Link(latency=0.005)
    links = Links(inside=slow, between=slow)
    for rank in spawn(timelines, world_size=2, links=links, output="none"):
        check_order(rank)
        assert busy(rank["ours"], "communication") > 0.005 * (2 * LAYERS + 2)
        assert arrived_ahead(rank["ours"]) == LAYERS - 1
        assert arrived_ahead(rank["no prefetch"]) == 0 == hidden(rank["no prefetch"])
