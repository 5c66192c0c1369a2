"""Profiles of ranks: recorded by PyTorch, merged for Perfetto, read as events.

`torch.profiler` writes one trace per rank; each has its own process ids and its own
time 0. `merged` joins them into one trace: process r is rank r, all times count from
the earliest time 0, and no two ranks' arrows have the same number, else Perfetto would
connect them. (The ranks of one machine share a clock; hosts do not.)
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from ddp_course.measure import Event, EventLog, busy, overlap

STEP, COMPUTE, AVERAGE, WAIT = "step", "compute", "all_reduce", "wait"
GLOO = "gloo:all_reduce"  # gloo's event: from this rank's call to the end
NAMES = (STEP, COMPUTE, AVERAGE, WAIT, GLOO)
FAULTS = ("none", "late rank", "no overlap", "host")
LAYERS, WIDTH, ROWS = 4, 256, 512


def profiled(fault: str, folder: str) -> list[Event]:
    """Profile one step of this rank; write rank{r}.json, and return our own events.

    Args:
        fault: one of FAULTS. "late rank": rank 2 computes longer; "no overlap":
            gradients are sent when backward has ended; "host": the host does something
            else after each layer.
        folder: where the trace is written.
    """
    rank, log = dist.get_rank(), EventLog()
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    x = torch.randn(ROWS, WIDTH)
    _step(layers, x, fault, EventLog())  # warm-up
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        _step(layers, x, fault, log)
    profiler.export_chrome_trace(str(Path(folder) / f"rank{rank}.json"))
    return log.events


def _step(layers: list[nn.Linear], x: torch.Tensor, fault: str, log: EventLog) -> None:
    """Compute the layers, the last one first; average each gradient meanwhile."""
    under_way = []
    with record_function(STEP), log.span(STEP):
        for layer in reversed(layers):
            with record_function(COMPUTE), log.span(COMPUTE, lane=COMPUTE):
                layer(x).square().mean().backward()
                time.sleep(0.02)  # the time of a larger layer
                if fault == "late rank" and dist.get_rank() == 2:
                    time.sleep(0.03)
            if fault == "host":
                time.sleep(0.015)
            if fault != "no overlap":
                under_way.append(dist.all_reduce(layer.weight.grad, async_op=True))
        if fault == "no overlap":
            for layer in layers:
                with record_function(AVERAGE), log.span(AVERAGE, lane="communication"):
                    time.sleep(0.01)
                    dist.all_reduce(layer.weight.grad)
        for work in under_way:
            with record_function(WAIT), log.span(WAIT):
                work.wait()


def merged(folder: str | Path) -> dict[str, Any]:
    """Return one trace for Perfetto from all rank*.json in a folder.

    Raises ValueError if the folder has none.
    """
    traces = {}
    for path in sorted(Path(folder).glob("rank*.json")):
        traces[int(path.stem[4:])] = json.loads(path.read_text())
    if not traces:
        raise ValueError(f"folder is {str(folder)!r}; it has no rank0.json")
    base = min(trace.get("baseTimeNanoseconds", 0) for trace in traces.values())
    everything: list[dict[str, Any]] = []
    for place, (rank, trace) in enumerate(traces.items()):
        shift = (trace.get("baseTimeNanoseconds", 0) - base) / 1e3  # µs
        named = {"name": "process_name", "ph": "M", "pid": rank, "tid": 0}
        everything.append(named | {"args": {"name": f"rank {rank}"}})
        for event in trace["traceEvents"]:
            if event.get("ph") == "M" and event["name"].startswith("process"):
                continue
            moved = {"ts": event["ts"] + shift} if "ts" in event else {}
            if "id" in event:  # an arrow from forward to backward: renumber it
                moved["id"] = event["id"] * len(traces) + place
            everything.append(event | {"pid": rank} | moved)
    return {"traceEvents": everything, "displayTimeUnit": "ms"}


def events_of(trace: dict[str, Any]) -> list[Event]:
    """Return annotated spans and gloo's all-reduces as events; times in seconds."""
    lanes = {AVERAGE: "communication", GLOO: "communication"}
    return [
        Event(
            e["pid"],
            e["name"],
            e["ts"] / 1e6,
            (e["ts"] + e["dur"]) / 1e6,
            lane=lanes.get(e["name"], e["name"]),
        )
        for e in trace["traceEvents"]
        if e.get("cat") == "user_annotation" and e["name"] in NAMES
    ]


def shares(events: Sequence[Event]) -> tuple[float, float, float]:
    """Return three numbers that distinguish faults, over all ranks of a trace.

    The share of all steps in which communication runs and nothing computes; the share
    in which neither runs; and the longest of the ranks' mean all-reduce times, divided
    by the shortest.
    """
    step = busy(events, STEP)
    computes, sends = busy(events, COMPUTE), busy(events, "communication")
    both = overlap(events, COMPUTE, "communication")
    means = []
    for rank in sorted({event.rank for event in events}):
        calls = [e.seconds for e in events if e.rank == rank and e.op == GLOO]
        means.append(sum(calls) / len(calls))
    idle = step - (computes + sends - both)
    return (sends - both) / step, idle / step, max(means) / min(means)
