"""A parameter server: the gain of asynchronous training, and the cost of pull and push.

Workers sleep instead of computing, and one of them four times as long (1 to 8 times, if
not quick): the seconds per gradient are compared with the formula. Then a worker pulls
16 MiB of weights and pushes 16 MiB of gradients; this is compared with bare `send` and
`recv`, and with PyTorch's `torch.distributed.rpc`, if available. Chapter 13.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc

from ddp_course.bench import steps
from ddp_course.bench.turns import Pair, Row, Timings, against, row, rows_of
from ddp_course.launch import spawn
from ddp_course.parameter_server import (
    ASYNCHRONOUS,
    SYNCHRONOUS,
    Record,
    Server,
    Worker,
    backup,
    bounded,
)
from ddp_course.theory import gradients_per_second

ABOUT = "A parameter server beside its formulas, and beside bare messages."
FORMULA, BARE = "formula", "send, recv"
WAYS = {"synchronous": SYNCHRONOUS, "asynchronous": ASYNCHRONOUS}
WAYS |= {"bounded": bounded(2), "backup": backup(1)}
GAIN = "asynchronous over synchronous"
PAIRS = (
    *against(FORMULA, dict.fromkeys(WAYS, 1.05) | {GAIN: 1.10}),
    *against(BARE, {"server": 1.2, "rpc": None}),
)
SECONDS, SLOWER, WORKERS = 0.1, 4, 3
NUMEL = 4 << 20  # 16 MiB

quietly = partial(spawn, output="none", device="cpu")


def bench(quick: bool) -> Iterator[Row]:
    """Yield a row for each rule, one for the gain, and one for each way to pull."""
    for slower in (SLOWER,) if quick else (1, 2, SLOWER, 8):
        yield from beside_formulas(slower, 6 if quick else 16)
    pulls = quietly(pull_and_push, 4 if quick else 40, world_size=2)
    yield from rows_of("16 MiB", PAIRS, pulls)


def beside_formulas(slower: int, turns: int) -> Iterator[Row]:
    """Yield a row per rule, one for the gain; the slowest worker runs `turns` times."""
    times = [SECONDS] * (WORKERS - 1) + [SECONDS * slower]
    predicted, measured = {}, {}
    for way, rule in WAYS.items():
        predicted[way] = 1 / gradients_per_second(way, times, rule.spare)
        count = turns if rule.synchronous else round(times[-1] / predicted[way] * turns)
        record = quietly(straggle, rule, count, slower, world_size=1 + WORKERS)[0]
        measured[way] = per_gradient(record, rule.bound)
    for seconds in (predicted, measured):
        seconds[GAIN] = seconds["asynchronous"] / seconds["synchronous"]
    for way in predicted:
        case = f"{WORKERS} workers, one {slower}x"
        yield row(case, Pair(way, FORMULA), "seconds", measured[way], predicted[way])


def per_gradient(record: Record, bound: float) -> float:
    """Return seconds per gradient, from the first pull to the last step.

    For bounded workers the time begins with the slowest worker's second gradient and
    ends with its last one: before that, the other workers get ahead.
    """
    steps = record.select("step")
    if bound < math.inf:
        slow = [k for k, step in enumerate(steps) if step.workers == (WORKERS,)]
        first, last = slow[1], slow[-1]
        return (steps[last].seconds - steps[first].seconds) / (last - first)
    return record.seconds / record.gradients


# ---- on the ranks --------------------------------------------------------------------


def straggle(rule: object, count: int, slower: int) -> Record | None:
    """Run workers that sleep, the last one longer; return the server's record."""
    weight, rank = nn.Parameter(torch.zeros(8)), dist.get_rank()
    if rank == 0:
        sgd = torch.optim.SGD([weight], lr=0.0)
        return Server([weight], sgd, rule, steps=count).serve()
    with Worker([weight]) as worker:
        while worker.pull():
            time.sleep(SECONDS * (slower if rank == WORKERS else 1))
            worker.push()
    return None


def pull_and_push(turns: int, numel: int = NUMEL) -> Timings:
    """Measure a pull and a push of rank 1, in several ways; both ranks call it."""
    ways = {BARE: bare(numel), "server": served(numel)}
    if rpc.is_available():
        ways["rpc"] = remote(numel)
    return steps.together(ways, turns, 60.0, 1, warm=4)


def this_side(server: Callable[[], object], worker: Callable[[], object]) -> Callable:
    """Return this rank's function; rank 0's returns after rank 1's has ended."""
    ended = torch.zeros(1)

    def server_side() -> None:
        server()
        dist.recv(ended, 1)

    def worker_side() -> None:
        worker()
        dist.send(ended, 0)

    return server_side if dist.get_rank() == 0 else worker_side


def bare(numel: int) -> Callable:
    """Return this rank's part of a pull, a push and a step by bare messages."""
    weight = nn.Parameter(torch.zeros(numel))
    gradient = weight.grad = torch.zeros(numel)
    weights, sgd = weight.detach(), torch.optim.SGD([weight], lr=0.1)

    def server() -> None:
        dist.send(weights, 1)
        dist.recv(gradient, 1)
        sgd.step()

    def worker() -> None:
        dist.recv(weights, 0)
        dist.send(gradient, 0)

    return this_side(server, worker)


def served(numel: int) -> Callable:
    """Return this rank's part of a pull, a push and a step of our parameter server."""
    weight = nn.Parameter(torch.zeros(numel))
    group = dist.new_group()  # separates its messages from the bench's
    if dist.get_rank() == 0:
        sgd, stepped = torch.optim.SGD([weight], lr=0.1), threading.Semaphore(0)
        after_step = lambda version: stepped.release()  # noqa: E731
        server = Server([weight], sgd, group=group, after_step=after_step)
        threading.Thread(target=server.serve, daemon=True).start()
        return this_side(stepped.acquire, lambda: None)
    worker = Worker([weight], group=group)

    def work() -> None:
        worker.pull()
        worker.push()

    return this_side(lambda: None, work)


kept: dict[str, object] = {}  # the objects that rank 0 serves by rpc


def remote(numel: int) -> Callable:
    """Return this rank's part of a pull, a push and a step by PyTorch's rpc."""
    rank, weight = dist.get_rank(), nn.Parameter(torch.zeros(numel))
    kept.update(weight=weight, sgd=torch.optim.SGD([weight], lr=0.1))
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2)  # starts serving calls
    gradient = torch.zeros(numel)

    def work() -> None:
        rpc.rpc_sync("rank0", remote_pull)
        rpc.rpc_sync("rank0", remote_push, (gradient,))

    return this_side(lambda: None, work)


def remote_pull() -> Tensor:
    """Return the weights; runs on rank 0."""
    return kept["weight"].detach()


def remote_push(gradient: Tensor) -> None:
    """Step the optimizer with `gradient`; runs on rank 0."""
    kept["weight"].grad = gradient
    kept["sgd"].step()
