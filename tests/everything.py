"""Everything that the package runs on ranks, to be run over any backend and compared.

The collectives are found, not listed: a new one is called here, or fails here.
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from inspect import isfunction, signature
from pkgutil import iter_modules

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course import collectives
from ddp_course.communication_order import ScheduledDataParallel, priority
from ddp_course.data import load_corpus
from ddp_course.launch import device
from ddp_course.mechanisms.whole_state import full_state_dict
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.pipeline import SCHEDULES, PipelineParallel
from ddp_course.spec import COMPRESSORS, DATA_PARALLEL, OUTER
from ddp_course.tensor_parallel import tensor_parallel
from ddp_course.train import largest_difference, train

SMALL = GPTConfig(block_size=8, n_layer=2, n_head=4, d_model=16)
ELSEWHERE = ("call", "shared_memory", "naive")  # what others are made of; CPU only
CASES = ((1, torch.int64, False), (5, torch.bfloat16, True), (1009, torch.int64, False))
RUNG = ["tensor", "group"]  # what a function that is read first takes
WHOLE = {  # what is as long as the others' tensors together
    "all_gather_single": {"output"},
    "reduce_scatter_single": {"input"},
    "all_to_all_single": {"output", "input"},
}
Trained = tuple[list[float], dict[str, Tensor]]  # losses, the plain model's state


# ---- collectives ---------------------------------------------------------------------


def found() -> dict[str, Callable]:
    """Return every collective, and every function that is read before it, by name."""
    of_all = {f"{name}_all_reduce": f for name, f in collectives.ALGORITHMS.items()}
    del of_all["shared_memory_all_reduce"]
    for module in iter_modules(collectives.__path__):
        inside = import_module(f"{collectives.__name__}.{module.name}")
        for name, function in vars(inside).items():
            if isfunction(function) and function.__module__ == inside.__name__:
                takes = [*signature(function).parameters]
                if name[0] != "_" and ("async_op" in takes or takes == RUNG):
                    of_all[f"{module.name}.{name}"] = function
    kept = {n: f for n, f in of_all.items() if n.split(".")[0] not in ELSEWHERE}
    naively = partial(collectives.broadcast, algorithm="naive")
    return kept | {"rooted.broadcast, naive": naively}


def all_collectives() -> dict[str, list[Tensor]]:
    """Call each on this rank, with each root, also `async_op`; return what came out."""
    return {
        f"{name}, {numel} x {dtype}, root {root}": called(name, function, one, root, at)
        for name, function in found().items()
        for numel, dtype, at in CASES
        for one in [torch.arange(numel, device=device()).to(dtype) % 20]
        for root in roots(function)
    }


def roots(function: Callable) -> range:
    has_one = {"src", "dst"} & {*signature(function).parameters}
    return range(dist.get_world_size() if has_one else 1)


def called(
    name: str, function: Callable, one: Tensor, root: int, async_op: bool
) -> list[Tensor]:
    """Call a collective with what its parameters ask for. KeyError for a new one."""
    me, n = dist.get_rank(), dist.get_world_size()
    one = one + 10 * me
    many = [one + k for k in range(n)]
    whole = WHOLE.get(name.split(".")[-1], ())
    can = {
        "tensor": one,
        "tensor_list": [torch.zeros_like(one) for _ in many],
        "input_list": many,
        "scatter_list": many if me == root else None,
        "gather_list": [torch.zeros_like(one) for _ in many] if me == root else None,
        "input": torch.cat(many) if "input" in whole else one,
        "output": torch.zeros_like(torch.cat(many) if "output" in whole else one),
        "src": root,
        "dst": root,
        "async_op": async_op,
    }
    splits = {"output_split_sizes", "input_split_sizes"}
    left = {"op", "group", "algorithm", "variant"} | splits  # as they are
    arguments = {p: can[p] for p in signature(function).parameters if p not in left}
    work = function(**arguments)
    if work is not None:
        work.wait()
    return [*tensors(arguments.values())]


def tensors(values) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value.cpu()
        elif isinstance(value, list):
            yield from tensors(value)


# ---- strategies ----------------------------------------------------------------------

COMPOSED = [
    {"zero": 3, "shard": 2},
    {"tp": 2},
    {"zero": 1, "pp": 2},
    {"zero": 2, "tp": 2, "pp": 2},
]


def layouts(n: int) -> list[dict]:
    """Return all ways to average, ZeRO's stages and the schedules of `n` ranks."""
    fit = [{"data_parallel": name} for name in DATA_PARALLEL]
    fit += [{"zero": stage} for stage in (1, 2, 3)]
    fit += [{"local_steps": 1, "outer": name} for name in OUTER]
    if n > 1:
        fit += [{"tp": n}] * (SMALL.n_head % n == 0)
        stages = {name: SCHEDULES[name](n, n).num_stages for name in SCHEDULES}
        fits = [name for name in SCHEDULES if stages[name] <= SMALL.n_layer + 2]
        fit += [{"pp": n, "schedule": name} for name in fits]
        compressed = [
            name if a is None else f"{name}:1" for name, a in COMPRESSORS.items()
        ]
        fit += [{"compress": words} for words in compressed]
    return fit


def in_layouts(some: list[dict]) -> dict[str, Trained]:
    """Train in each layout, on this rank."""
    how = {"clip": 0.5, "keep_state": True}
    runs = {str(layout): train(2, 12, SMALL, **how, **layout) for layout in some}
    return {name: (run.losses, run.state) for name, run in runs.items()}


def steps(make: Callable[..., nn.Module], **options) -> Trained:
    """Make this rank's part of the model and train it, with all rows on each rank."""
    model = make(build_gpt(SMALL, seed=0).to(device()), **options)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(2):
        x, y = (t.to(device()) for t in load_corpus().batch(step, 4, SMALL.block_size))
        optimizer.zero_grad()
        if isinstance(model, PipelineParallel):
            loss = model.step(x, y)
        else:
            loss = model(x, y)[1]
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: t.cpu() for name, t in full_state_dict(model).items()}


def divided(n: int) -> dict[str, Trained]:
    """Train, on this rank, what `train` does not: sequence parallelism; one stage."""
    own = {"sequence parallel": steps(tensor_parallel, sequence_parallel=True)}
    for name in SCHEDULES if n == 1 else ():
        own[f"{name}, 1 rank"] = steps(PipelineParallel, schedule=name)
    return own


def scheduled() -> Trained:
    """Train layer by layer, for two steps before there is an order, and two by it."""
    model, losses = build_gpt(SMALL, seed=0).to(device()), []
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = ScheduledDataParallel(model, sgd, priority(4096))
    for step in range(4):
        x, y = (t.to(device()) for t in load_corpus().batch(step, 4, SMALL.block_size))
        loss = wrapped(x, y)[1]
        loss.backward()
        wrapped.step()
        losses.append(loss.item())
    return losses, {name: t.cpu() for name, t in model.state_dict().items()}


def everything(some: list[dict]) -> tuple[dict[str, list[Tensor]], dict[str, Trained]]:
    """Run it all on this rank: collectives, and training in `some` layouts."""
    n = dist.get_world_size()
    others = divided(n) if SMALL.n_head % n == 0 else {}
    others["in order"] = scheduled()
    return all_collectives(), in_layouts(some) | others


def differences(mine: tuple, right: tuple, tolerance: float = 1e-5) -> list[str]:
    """Return the names of what differs; everything, if nothing was run."""
    (called, trained), (as_called, as_trained) = mine, right
    wrong = [] if called and trained else ["nothing was run"]
    wrong += [*(called.keys() ^ as_called), *(trained.keys() ^ as_trained)]
    for name in called.keys() & as_called.keys():
        if not all(map(torch.equal, called[name], as_called[name])):
            wrong.append(name)
    for name in trained.keys() & as_trained.keys():
        (losses, state), (wanted, reference) = trained[name], as_trained[name]
        gaps = [abs(a - b) for a, b in zip(losses, wanted, strict=True)]
        if not max(*gaps, largest_difference(state, reference)) < tolerance:
            wrong.append(name)
    return wrong
