"""What the tests on GPUs run on ranks; on the CPU with DDP_COURSE_GPU_TESTS=cpu.

There messages go through a copy, as those of GPUs over gloo do; what pins memory, and
what asks the GPU's allocator or its streams, is left out.
"""

from __future__ import annotations

import gc
import os
from contextlib import AbstractContextManager, ExitStack, nullcontext
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from everything import COMPOSED, SMALL, everything, in_layouts, layouts
from torch import Tensor, nn

from ddp_course.collectives import endpoint, ring_all_reduce
from ddp_course.data import load_corpus
from ddp_course.data_parallel import DistributedDataParallel
from ddp_course.launch import device
from ddp_course.measure import EventLog, Ledger, MemoryLog, resident
from ddp_course.mechanisms.host_memory import HostMemory
from ddp_course.model import build_gpt
from ddp_course.precision import Autocast
from ddp_course.spec import SCHEDULES
from ddp_course.zero import (
    FullyShardedDataParallel,
    OffloadedOptimizer,
    ZeroRedundancyOptimizer,
    full_state_dict,
    offloaded,
    sharded_parts,
)
from ddp_course.zero.sharded_parts import OffloadedStorage

ASKED = os.environ.get("DDP_COURSE_GPU_TESTS")  # "cpu", or nothing
GPUS = 0 if ASKED == "cpu" else torch.cuda.device_count()
KIND = "cuda" if GPUS else "cpu"
WAYS = {  # what stands in results.json -> how the ranks are started
    "NCCL, 1 rank": {"world_size": 1, "backend": "nccl"},
    "gloo, 4 ranks share a GPU": {"world_size": 4, "share_gpus": True},
    "NCCL, a GPU for each rank": {"world_size": min(GPUS, 4), "backend": "nccl"},
}
if not GPUS:
    WAYS = {f"the CPU, {n} ranks": {"world_size": n} for n in (1, 4)}
elif GPUS == 1:
    del WAYS["NCCL, a GPU for each rank"]


def as_on_gpus() -> ExitStack:
    """Within the block, let the CPU take the ways of a GPU whose messages gloo has."""
    stack = ExitStack()
    if not GPUS:
        changes = {
            "ddp_course.collectives.endpoint.Endpoint.staged": lambda self, tensor: (
                True
            ),
            "ddp_course.zero.stage3._unusable": lambda *args, **options: None,
            "ddp_course.zero.sharded_parts.OffloadedStorage.PIN": False,
        }
        for name, value in changes.items():
            stack.enter_context(mock.patch(name, value))
    return stack


# ---- collectives, strategies ---------------------------------------------------------


def all_layouts(n: int) -> list[dict]:
    """Return all layouts but those that compress, and threads.

    A sign, or what is the largest, may be another one if a sum is rounded elsewhere.
    """
    threads = [{"threads": GPUS or 2}] * (n == 1)
    whole = [way for way in layouts(n) if "compress" not in way]
    return whole + COMPOSED * (n == 4) + threads


def all_of_it(n: int) -> tuple:
    with as_on_gpus():
        return everything(all_layouts(n))


def nothing_lands(n: int) -> tuple:
    """Plant: what has arrived on the CPU stays there."""
    with mock.patch.object(endpoint._Landing, "wait", lambda self: self.handle.wait()):
        with as_on_gpus():
            return everything([{"data_parallel": "average"}])


def beside_a_stream() -> list[float]:
    """Sum what a stream of its own has still to compute, in the group's thread."""
    stream = torch.cuda.Stream() if GPUS else None
    with torch.cuda.stream(stream) if GPUS else nullcontext(), as_on_gpus():
        x = torch.zeros(1 << 20, device=device())
        if GPUS:
            torch.cuda._sleep(200_000_000)  # some 100 ms, during which x is 0
        x += dist.get_rank() + 1
        ring_all_reduce(x, async_op=True).wait()
        return x[::4096].unique().tolist()


# ---- memory --------------------------------------------------------------------------


def batch() -> tuple[Tensor, Tensor]:
    x, y = load_corpus().batch(dist.get_rank(), 4, SMALL.block_size)
    return x.to(device()), y.to(device())


def allocated() -> int:
    """Return the bytes of all tensors, by the allocator; or count Python's objects."""
    gc.collect()
    if GPUS:
        return torch.cuda.memory_allocated()
    found = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    storages = [t.untyped_storage() for t in found]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def trained(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after a step."""
    model = build_gpt(SMALL, seed=0).to(device())
    if name == "ddp":
        model = DistributedDataParallel(model)
    if name == "zero3":
        model = FullyShardedDataParallel(model)
    kind = torch.optim.AdamW
    if name == "zero1":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, lr=1e-3)
    else:
        optimizer = kind(model.parameters(), lr=1e-3)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    x, y = batch()
    optimizer.zero_grad()
    loss = model(x, y)[1]
    loss.backward()
    optimizer.step()
    return loss.item()


def memory(name: str) -> tuple[int, int, int, int]:
    """Return bytes by the ledger and by the allocator: kept; and peaks of a step."""
    with as_on_gpus():
        trained(name)  # what libraries take once
        before = allocated()
        model, optimizer = trained(name)
        for group in optimizer.param_groups:
            for p in group["params"]:
                assert p.grad is not None or not p.numel()  # an object, to be counted
        kept = allocated() - before
        states = getattr(optimizer, "optim", optimizer).state.values()
        steps = sum(state["step"].nbytes for state in states)  # on the CPU
        ledger = resident(model, optimizer).total - steps * bool(GPUS)
        if not GPUS:
            return ledger, kept, 0, 0
        torch.cuda.reset_peak_memory_stats()
        with MemoryLog(model, optimizer) as log:
            step(model, optimizer)
        peak = torch.cuda.max_memory_allocated() - before
        return ledger, kept, log.peak.total - steps, peak


def forgotten(name: str) -> tuple[int, int, int, int]:
    """Plant: a ledger without the gradients."""

    true = resident

    def forgetful(*watched) -> Ledger:
        return Ledger({**true(*watched), "gradients": 0})

    with mock.patch(f"{__name__}.resident", forgetful):
        return memory(name)


# ---- time ----------------------------------------------------------------------------


def backward_events() -> list:
    with as_on_gpus(), EventLog() as log:
        model = DistributedDataParallel(build_gpt("1m", seed=0).to(device()))
        x, y = batch()
        model(x, y)[1].backward()
    return log.events


class Stream:
    """Stands for `torch.cuda`: what it does takes time that the host does not wait."""

    def __init__(self) -> None:
        self.ahead, stream = 0.0, self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.known = False

            def record(self) -> None:
                self.at = stream.ahead

            def synchronize(self) -> None:
                self.known = True

            def elapsed_time(self, other: Event) -> float:
                if not other.known:
                    raise RuntimeError("the stream has not come to this event")
                return 1000 * (other.at - self.at)

        self.Event = Event

    def current_device(self) -> int:
        return 0

    def synchronize(self) -> None:
        self.ahead = 0.0

    def device(self, number: int) -> nullcontext:
        return nullcontext()

    def _sleep(self, cycles: int) -> None:
        self.ahead += cycles / 1e9


# ---- precision -----------------------------------------------------------------------

# How far losses may be from the CPU's, as in `test_train_precision`.
FAR = {"bf16": 5e-3, "fp16": 5e-4, "bf16-pure": 8e-2}
Rounded = dict[str, dict[str, tuple[list[float], set[torch.dtype]]]]


def in_precisions(n: int) -> Rounded:
    """Train in every layout, by precision; return losses, and the parameters' types."""
    whole = {name for name, about in SCHEDULES.items() if not about.halves}
    some = [way for way in all_layouts(n) if way.get("schedule", "1f1b") in whole]
    found = {}
    with as_on_gpus():
        for name in ("fp32", *FAR):
            runs = in_layouts([{**layout, "precision": name} for layout in some])
            types = {run: {t.dtype for t in of[1].values()} for run, of in runs.items()}
            found[name] = {run: (runs[run][0], types[run]) for run in runs}
    return found


def in_full() -> Rounded:
    """Plant: an autocast that casts nothing."""
    with mock.patch.object(Autocast, "_type_for", lambda *args: None):
        return in_precisions(1)


def ill_rounded(mine: Rounded, right: Rounded) -> list[str]:
    """Return what is otherwise than on the CPU, or not rounded at all."""
    wrong = []
    for precision, far in FAR.items():
        runs = [mine[precision], right[precision], mine["fp32"]]
        for name, *each in zip(runs[0], *(run.values() for run in runs), strict=True):
            (losses, types), (wanted, its_types), (exact, _) = each
            gaps = [abs(a - b) for a, b in zip(losses, wanted, strict=True)]
            if losses == exact or types != its_types or not max(gaps) < far:
                wrong.append(name)
    return wrong


def types_in(block: AbstractContextManager) -> dict[str, torch.dtype]:
    """Return what operations give in a block of autocast, by PyTorch's name."""
    full = torch.rand(4, 4, device=KIND) + 0.1
    half = full.bfloat16()
    with block:
        of_one = ("exp", "log", "sum", "norm", "relu")
        found = {name: getattr(torch, name)(half) for name in of_one}
        of_rows = ("softmax", "log_softmax", "cumsum")
        found |= {name: getattr(torch, name)(half, -1) for name in of_rows}
        found |= {"linear": F.linear(full, full), "pow": half**2}
        found |= {"layer_norm": F.layer_norm(half, (4,)), "mixed": half + full}
        found |= {"group_norm": F.group_norm(half, 2), "softplus": F.softplus(half)}
        found |= {"mse_loss": F.mse_loss(half, half), "cat": torch.cat([full, half])}
    return {name: result.dtype for name, result in found.items()}


def scaled(scaler: object) -> tuple[float, list[float]]:
    """Take four steps, one of them with an inf; return the scale and the weights."""
    weights = nn.Parameter(torch.ones(3, device=KIND))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    for factor in (1.0, torch.inf, 1.0, 1.0):
        optimizer.zero_grad()
        scaler.scale((factor * weights).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    state = scaler.state_dict()
    return state.get("factor", state.get("scale")), weights.tolist()


# ---- copies, types -------------------------------------------------------------------


def sharded(
    whole: torch.dtype = torch.float32, **options
) -> tuple[list[float], dict[str, Tensor], dict[str, object]]:
    """Train with stage 3; return losses, the state, and where and what things are."""
    seen = {}
    with as_on_gpus():
        plain = build_gpt(SMALL, seed=0).to(device(), whole)
        plain.head.register_forward_hook(lambda *a: seen.update(logits=a[2].dtype))
        model = FullyShardedDataParallel(plain, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = [step(model, optimizer) for _ in range(3)]
        flat = model.units[-1].flats[0]
        seen |= {"shard": flat.shard.dtype, "home": flat.shard.device.type}
        seen |= {"pinned": bool(GPUS) and flat.shard.is_pinned()}
        return losses, {k: t.cpu() for k, t in full_state_dict(model).items()}, seen


def sharded_on_host() -> tuple:
    """Train with the storage that chapter 08 measures."""
    return sharded(**offloaded.module(HostMemory()))


def offloaded_steps(on_host: bool) -> list[Tensor]:
    """Return the parameters after three steps of SGD, here or on the host."""
    model, kind = build_gpt(SMALL, seed=0).to(device()), torch.optim.SGD
    if on_host:
        optimizer = OffloadedOptimizer(model.parameters(), kind, HostMemory(), lr=0.1)
    else:
        optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, optimizer)
    return [p.detach().cpu() for p in model.parameters()]


class Uncopied(OffloadedStorage):
    """Plant: a gradient's home is made, and nothing is copied there."""

    def add_gradient(self, mean: Tensor) -> None:
        self.keep(self.empty(mean.numel(), self.shard).zero_())


def planted_offload() -> tuple:
    with mock.patch.object(sharded_parts, "OffloadedStorage", Uncopied):
        return sharded(cpu_offload=True)
