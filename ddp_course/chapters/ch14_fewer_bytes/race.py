"""The data of one figure: loss over bytes and over time, for every method.

    python -m ddp_course.chapters.ch14_fewer_bytes.race       (half an hour of a core)

The course's GPT is trained. One process plays four ranks; tests prove that real ranks
compute the same, so these are their curves, on a machine of any speed. They are stored
beside this file, with the date, the bytes of a step by the formulas of `theory`, and
the CPU time that a step and a compressor took. The time of a step on any link follows,
as if nothing overlapped:

    step = computing + encoding + bytes / bandwidth
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from ddp_course.compression import PowerSGD, TopK, compressor, play
from ddp_course.data import load_corpus, shard
from ddp_course.local_sgd import DiLoCo, LocalSGD, simulate_training
from ddp_course.mechanisms.agreement import digest
from ddp_course.model import build_gpt
from ddp_course.theory import local_sgd_bytes
from ddp_course.theory.compression import compressed_bytes

GPT = "1m"
RANKS, ROWS, STEPS, LR, EVERY = 4, 16, 200, 1e-3, 8
STORED = Path(__file__).with_suffix(".json")
LINKS = {"100 MB/s": 1e8, "1 GB/s": 1e9, "10 GB/s, as in a machine": 1e10}
COMPRESSORS = ("fp16", "int8", "sign", "topk:0.01", "randomk:0.01")
COMPRESSORS += ("powersgd:4", "powersgd:1")
LOCAL = {"ddp": None, "local sgd": LocalSGD, "diloco": DiLoCo}
OTHERS = {
    "topk:0.01, no feedback": partial(TopK, 0.01, feedback=False),
    "powersgd:1, start=2": partial(PowerSGD, 1, start=2),
}
METHODS = ("ddp", *COMPRESSORS, *OTHERS, "local sgd", "diloco")


def losses(method: str, seed: int, steps: int = STEPS, preset: Any = GPT) -> list:
    """Return the mean loss of all ranks before each step, in nats per character."""
    corpus, build = load_corpus(), partial(build_gpt, preset, seed)

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        batch = corpus.batch(step, ROWS, model.config.block_size, seed)
        return model(*(shard(t, rank, RANKS) for t in batch))[1]

    if method in LOCAL:
        kind = LOCAL[method] or partial(LocalSGD, warmup=steps)  # always warm-up: DDP

        def wrap(model: nn.Module) -> LocalSGD:
            return kind(AdamW(model.parameters(), LR), model, EVERY)

        return simulate_training(build, wrap, loss, RANKS, steps).losses
    return compressed(method, build(), loss, steps)


def compressed(method: str, model: nn.Module, loss: Callable, steps: int) -> list:
    """Return the losses with compressed gradients; all ranks share one model."""
    optimizer, losses = AdamW(model.parameters(), LR), []
    ranks, parameters = compressors(method), list(model.parameters())
    for step in range(steps):
        each = [loss(model, step, rank) for rank in range(RANKS)]
        gradients = [torch.autograd.grad(one, parameters) for one in each]
        mean = play(ranks, gradients)[0]
        for parameter, gradient in zip(parameters, mean, strict=True):
            parameter.grad = gradient
        optimizer.step()
        losses.append(sum(one.item() for one in each) / RANKS)
    return losses


def compressors(method: str) -> list:
    """Return a compressor for each rank."""
    make = OTHERS.get(method, partial(compressor, method))
    return [make() for _ in range(RANKS)]


def step_bytes(method: str, preset: Any = GPT) -> float:
    """Return rank 0's mean bytes per step; uncompressed first steps do not count."""
    shapes = [tuple(p.shape) for p in build_gpt(preset).parameters()]
    if method in ("local sgd", "diloco"):
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        return float(local_sgd_bytes(RANKS, 4 * numel, EVERY, EVERY)) / EVERY
    name = "none" if method == "ddp" else method.partition(",")[0]
    return compressed_bytes(name, shapes, RANKS)


def cpu_seconds(method: str, preset: Any = GPT, turns: int = 7) -> dict[str, float]:
    """Return a rank's CPU seconds: "compute" for the step, "encode" to compress.

    First steps that a method sends uncompressed do not count.
    """
    model, took = build_gpt(preset), {"compute": [], "encode": []}
    optimizer, parameters = AdamW(model.parameters(), LR), list(model.parameters())
    x, y = load_corpus().batch(0, ROWS // RANKS, model.config.block_size)
    ranks = None if method in LOCAL else compressors(method)
    warmup = getattr(ranks[0], "start", 0) if ranks else 0
    for turn in range(warmup + turns):
        start = time.process_time()
        gradients = torch.autograd.grad(model(x, y)[1], parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        took["compute"].append(time.process_time() - start)
        start = time.process_time()
        if ranks is not None:
            play(ranks, [gradients] * RANKS)
        if turn >= warmup:
            took["encode"].append((time.process_time() - start) / RANKS)
    return {name: min(seconds) for name, seconds in took.items()}


# ---- what was measured ---------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """The measurements of one method.

    Attributes:
        losses: the loss before each step, averaged over all seeds.
        bytes: bytes that rank 0 sends in a step.
        compute: CPU seconds of a rank for its part of a step.
        encode: CPU seconds of a rank to compress and decompress.
    """

    losses: list[float]
    bytes: float
    compute: float
    encode: float

    def seconds(self, bandwidth: float) -> float:
        """Return the seconds of a step on links of this bandwidth, without overlap."""
        return self.compute + self.encode + self.bytes / bandwidth

    def loss_at(self, step: int) -> float:
        """Return the mean loss of the ten steps up to `step`, counted from 1."""
        return fmean(self.losses[max(0, step - 10) : step])

    def pays_below(self, ddp: Way) -> float:
        """Return the bandwidth, B/s, above which this method is slower than DDP."""
        return (ddp.bytes - self.bytes) / self.encode if self.encode else inf


def ways() -> dict[str, Way]:
    """Return the measurements of every method by name, DDP first."""
    rows, found = stored()["methods"], {}
    compute = min(row["compute"] for row in rows.values())  # the same for all methods
    for name, row in rows.items():
        curve = [fmean(each) for each in zip(*row["losses"].values(), strict=True)]
        encode = 0.0 if name in LOCAL else row["encode"]
        found[name] = Way(curve, row["bytes"], compute, encode)
    return found


def table() -> dict[str, list[float]]:
    """Return {method: per seed, the mean loss of the last ten steps minus DDP's}."""
    rows = stored()["methods"]
    last = {
        name: [fmean(curve[-10:]) for curve in row["losses"].values()]
        for name, row in rows.items()
    }
    return {
        name: [a - b for a, b in zip(each, last["ddp"], strict=True)]
        for name, each in last.items()
    }


def stored() -> dict[str, Any]:
    """Return the stored settings, and the measurements in "methods": {method: row}."""
    return json.loads(STORED.read_text()) if STORED.exists() else {"methods": {}}


def text() -> str:
    """Return a checksum of the corpus, which differs between versions of Python."""
    return digest(load_corpus().tokens)


def measure(seeds: list[int]) -> None:
    """Measure the missing results; store each at once, so that a run can be resumed."""
    torch.set_num_threads(1)
    for seed in seeds:
        for method in METHODS:
            results = stored()
            row = results["methods"].setdefault(method, {"losses": {}})
            if str(seed) in row["losses"]:
                continue
            row["losses"][str(seed)] = [round(x, 4) for x in losses(method, seed)]
            row |= {"bytes": step_bytes(method), **cpu_seconds(method)}
            how = {"date": date.today().isoformat(), "torch": torch.__version__}
            how["text"] = text()
            write(results | how | {"steps": STEPS, "ranks": RANKS, "rows": ROWS})


def write(results: dict[str, Any]) -> None:
    """Store the measurements, one line per method."""
    rest = {name: value for name, value in results.items() if name != "methods"}
    rows = (f"{json.dumps(n)}: {json.dumps(r)}" for n, r in results["methods"].items())
    text = ",\n".join(rows)
    STORED.write_text(json.dumps(rest)[:-1] + f', "methods": {{\n{text}\n}}}}\n')


if __name__ == "__main__":
    measure([int(word) for word in sys.argv[1:]] or [0, 1, 2])
