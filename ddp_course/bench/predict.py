"""A step of many layouts on real ranks, beside the step that `planning` predicts.

Messages are real, over emulated links within and between two nodes; in place of
computing, a rank sleeps as long as `planning.layer_seconds` says. So eight ranks fit on
two cores, and the bench tests how waits, messages, bubbles and overlap add up: the part
of a prediction that no data sheet gives. Chapter 18.
"""

from __future__ import annotations

import gc
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from queue import Queue

import torch
from torch import Tensor

from ddp_course.bench.emulated import kept_by
from ddp_course.bench.turns import Pair, Row, row
from ddp_course.collectives import barrier
from ddp_course.collectives.endpoint import Endpoint
from ddp_course.collectives.ring import around_the_ring
from ddp_course.coordinates import Mesh
from ddp_course.gpt_config import GPTConfig
from ddp_course.launch import Link, Links, spawn
from ddp_course.measure import Event, EventLog
from ddp_course.mesh import Axes, make_groups
from ddp_course.planning.accelerators import Accelerator, Cluster
from ddp_course.planning.step_time import (
    SUSTAINED,
    Candidate,
    Software,
    head_seconds,
    layer_seconds,
    predict,
)
from ddp_course.planning.workload import Workload

ABOUT = "A step of twenty layouts over emulated links, beside the predicted step."
MEASURED, PREDICTED = "measured", "predicted"
MEDIAN, ONE = "median of the ratios", "an exact prediction"
KEPT, FORESEEN = "kept by the rank that keeps most", "predicted memory"
WRONG, DRAWS = "three fastest wrong, by over 10 %", "draws of eight layouts"
INEXACT, EQUAL = "order of the three not exact", 0.10
PAIRS = (
    Pair(MEASURED, PREDICTED, 1.25, MEASURED, "predicted from FLOPs, bytes and links"),
    Pair(MEDIAN, ONE, 1.10),
    Pair(KEPT, FORESEEN, 1.05, KEPT, "predicted memory, in bytes"),
    Pair(WRONG, DRAWS, 0.1, WRONG, DRAWS),
    Pair(INEXACT, DRAWS, None, INEXACT, DRAWS),
)

SOFTWARE = Software(
    sequence_parallel=False, precision="mixed", data_outermost=True, frees=True
)
CONFIG = GPTConfig(64, 512, n_layer=8, n_head=8, d_model=128, tied=True)
GPT = Workload.of_gpt(CONFIG, rows=16)
FLOAT32 = replace(SOFTWARE, precision="fp32")  # for the real steps of `kept`
INSIDE, BETWEEN = 50e6, 8e6  # bytes/s
# A chip that computes 12 GFLOP/s and never waits for its memory: one step of the GPT on
# one rank takes 9.5 s.
CHIP = Accelerator(12e9, 64e6, 1e15, INSIDE, 1.0, matmul=1 / SUSTAINED)
CLUSTER = Cluster(CHIP, 8, node=4, network=BETWEEN, latency=0, reached=1, rails=False)
LINKS = Links(Link(0.0, INSIDE), Link(0.0, BETWEEN))


def cluster_here() -> Cluster:
    """Return the emulated cluster with the latency that messages have here.

    A message between processes takes time beyond its link: to wake the receiver, and
    to be copied. On eight ranks that share two cores this is about 1 ms.
    """
    run = partial(spawn, nnodes=2, nproc_per_node=4, links=LINKS, output="none")
    return replace(CLUSTER, latency=statistics.median(run(latency)))


def latency() -> float:
    """Return the seconds of a message of a few bytes, in a ring of four.

    One node measures at a time, since few ranks of a step send at the same moment.
    """
    axes, found = make_groups(Mesh({"dp": 2, "tp": 4})), []
    for turn in range(60):
        barrier()
        if turn % 2 == axes.index("dp"):
            start = time.perf_counter()
            around_the_ring(torch.zeros(8), axes.group("tp"))
            found.append((time.perf_counter() - start) / 6)  # 2 (N - 1) messages
    return statistics.median(found)


def dry_steps(candidates: Sequence[Candidate]) -> list[list[Event]]:
    """Return this rank's events of one step in each layout; called by all ranks."""
    found = []
    for candidate in candidates:
        axes = make_groups(Mesh({a: getattr(candidate, a) for a in ("dp", "pp", "tp")}))
        barrier()
        found.append(_Rank(candidate, axes).step())
    return found


def kept(candidates: Sequence[Candidate]) -> list[int]:
    """Return this rank's bytes at the peak of a real step; called by all ranks."""
    found = []
    for candidate in candidates:
        gc.collect()  # frees the previous model
        found.append(kept_by(candidate, CONFIG, GPT.rows).total)
    return found


def layouts() -> list[Candidate]:
    """Return twenty layouts of eight ranks: all meshes, tp inside a node."""
    found = []
    for pp in (1, 2, 4, 8):
        for tp in (1, 2, 4):
            for microbatch in (1, 2, 4):
                dp, rest = divmod(8, pp * tp)
                if dp and not rest and GPT.rows % (dp * microbatch) == 0:
                    found.append(Candidate(dp, pp, 1, tp, microbatch=microbatch))
    again = [c._replace(recompute="full") for c in found if c.microbatch == 2]
    return [*(c for c in found if c.microbatch < 4), *again][:20]


def bench(quick: bool) -> Iterator[Row]:
    """Yield each layout's time and memory, the median ratio, and wrong rankings."""
    chosen = layouts()[::4] if quick else layouts()
    turns = 1 if quick else 3
    run = partial(spawn, nnodes=2, nproc_per_node=4, links=LINKS, output="none")
    cluster = cluster_here()
    steps = [run(dry_steps, chosen, timeout=600) for _ in range(turns)]
    times, foreseen = [], []
    for k, layout in enumerate(chosen):
        measured = [took([rank[k] for rank in ranks]) for ranks in steps]
        times.append(statistics.median(measured))
        foreseen.append(predict(GPT, cluster, layout, SOFTWARE).seconds)
        case = f"{layout}, {layout.microbatch} rows"
        yield row(case, PAIRS[0], "seconds", times[-1], foreseen[-1], turns=turns)
    ratio = statistics.median(a / b for a, b in zip(times, foreseen, strict=True))
    yield row(f"{len(chosen)} layouts", PAIRS[1], "ratio", ratio, 1.0, turns=turns)
    memory = run(kept, chosen, timeout=900)
    for layout, *by_rank in zip(chosen, *memory, strict=True):
        foreseen_bytes = predict(GPT, cluster, layout, FLOAT32).ledger.total
        case = f"{layout}, {layout.microbatch} rows"
        yield row(case, PAIRS[2], "bytes", max(by_rank), foreseen_bytes)
    if not quick:
        for pair, equal in ((PAIRS[3], EQUAL), (PAIRS[4], 0.0)):
            wrong = wrong_draws(times, foreseen, equal)
            yield row("of 20 layouts", pair, "draws", wrong, 100, turns=turns)


def wrong_draws(
    times: Sequence[float],
    foreseen: Sequence[float],
    equal: float = 0.0,
    draws: int = 100,
) -> int:
    """Return in how many draws of eight layouts the three fastest are predicted wrong.

    A draw is wrong if one of the three layouts that are predicted fastest took longer
    than a layout that is predicted to be slower, by more than the share `equal` of the
    latter's time. With `equal=0` the order of the three has to be exact.
    """
    dice, wrong = random.Random(0), 0
    for _ in range(draws):
        left = sorted(dice.sample(range(len(times)), 8), key=foreseen.__getitem__)
        for _ in range(3):
            first = left.pop(0)
            if times[first] > (1 + equal) * min(times[k] for k in left):
                wrong += 1
                break
    return wrong


class _Rank:
    """A rank of a layout: it sleeps instead of computing; its messages are real."""

    def __init__(self, c: Candidate, axes: Axes) -> None:
        self.c, self.axes, self.log = c, axes, EventLog()
        alone = c._replace(dp=1, pp=1)
        self.forward, self.backward, _ = layer_seconds(GPT, CLUSTER, alone, SOFTWARE)
        self.layers = GPT.layers // c.pp
        self.microbatches = GPT.rows // (c.dp * c.microbatch)
        self.hidden = torch.zeros(
            c.microbatch * GPT.sequence * GPT.hidden, dtype=torch.bfloat16
        )
        self.pipeline = Endpoint(axes.group("pp"))
        self.tail = head_seconds(GPT, CLUSTER, c) if self.last else 0.0

    @property
    def first(self) -> bool:
        return self.axes.index("pp") == 0

    @property
    def last(self) -> bool:
        return self.axes.index("pp") == self.c.pp - 1

    def step(self) -> list[Event]:
        """Run 1F1B (fill, forward and backward in turn, drain), and average."""
        buckets, sent = Queue(), []
        averaging = threading.Thread(target=self.average, args=(buckets,))
        averaging.start()
        warm = min(self.microbatches, self.c.pp - 1 - self.axes.index("pp"))
        ahead = self.microbatches - warm
        order = ["F"] * warm + ["F", "B"] * ahead + ["B"] * warm
        backwards = 0
        with self.log.span("step"):
            for action in order:
                backwards += action == "B"
                done = buckets if backwards == self.microbatches else None
                sent += self.run_forward() if action == "F" else self.run_backward(done)
            buckets.put(None)
            averaging.join()
            for handle in sent:
                handle.wait()
        return self.log.events

    def run_forward(self) -> list:
        """Receive, compute all layers of this stage, and send."""
        self.receive(-1, self.first)
        self.compute("forward", self.forward)
        return self.send(1, self.last)

    def run_backward(self, buckets: Queue | None) -> list:
        """Receive a gradient, compute, queue each layer's bucket, and send."""
        self.receive(1, self.last)
        if self.tail:
            self.wait("backward", self.tail)
        self.compute("backward", self.backward, buckets)
        return self.send(-1, self.first)

    def compute(self, op: str, seconds: float, buckets: Queue | None = None) -> None:
        """Sleep for each part of each layer; with tp, all-reduce after each part."""
        parts = 2 if op == "forward" or self.c.recompute == "none" else 3
        for _ in range(self.layers):
            for _ in range(parts):
                self.wait(op, seconds / parts)
                if self.c.tp > 1:
                    with self.log.span("all_reduce", lane="communication"):
                        around_the_ring(self.hidden, self.axes.group("tp"))
            if buckets is not None:
                buckets.put(self.bucket())

    def wait(self, op: str, seconds: float) -> None:
        with self.log.span(op):
            time.sleep(seconds)

    def bucket(self) -> Tensor:
        """Return the gradients of one layer."""
        return torch.zeros(int(GPT.block) // self.c.tp, dtype=torch.bfloat16)

    def average(self, buckets: Queue) -> None:
        """All-reduce buckets along dp, in a thread, as they enter the queue."""
        while (bucket := buckets.get()) is not None:
            if self.c.dp > 1:
                with self.log.span("average", lane="communication"):
                    around_the_ring(bucket, self.axes.group("dp"))

    def receive(self, where: int, at_end: bool) -> None:
        if not at_end:
            arrived = torch.empty_like(self.hidden)
            self.pipeline.receive(arrived, self.pipeline.rank + where).wait()

    def send(self, where: int, at_end: bool) -> list:
        if at_end:
            return []
        return [self.pipeline.send(self.hidden.clone(), self.pipeline.rank + where)]


def took(ranks: Sequence[Sequence[Event]]) -> float:
    """Return the seconds from the first rank's start to the last rank's end."""
    steps = [event for events in ranks for event in events if event.op == "step"]
    return max(e.end for e in steps) - min(e.start for e in steps)
