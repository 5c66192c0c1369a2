"""The exercises of chapter 08: a schedule, a layer, a checkpoint, a limit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.chapters.ch08_fsdp import solutions
from ddp_course.collectives import all_gather_single, barrier, reduce_scatter_single
from ddp_course.lab.answers import Answer, code, on_ranks, one_line
from ddp_course.lab.exercises import exercise, expect, living_bytes
from ddp_course.measure import TorchCollectives, label, resident

# ---- my_schedule -------------------------------------------------------------------

OPS = ("gather", "forward", "free", "backward", "reduce")


@exercise("my_schedule", solution=solutions.my_schedule)
def check_my_schedule(answer: Answer) -> str:
    """`my_schedule(units, prefetch, keep)`: what a rank does in a step, in order."""
    cases = list(itertools.product((3, 1, 2, 5), (0, 1, 3), (False, True)))
    for units, prefetch, keep in cases:
        where = f"For {units} units, prefetch = {prefetch} and keep = {keep},"
        got = answer(units, prefetch, keep)
        _judge_form(where, got, units)
        _judge_computing(where, got, units)
        most = _judge_memory(where, got, units, prefetch, keep)
        _judge_sending(where, got, units, keep)
        allowed = units if keep else min(units, 1 + prefetch)
        expect(
            most <= allowed,
            f"{where} {most} units are whole at a time; {allowed} are enough: free a "
            "unit before the next one is gathered.",
        )
    return (
        f"{len(cases)} steps, in each of which every unit was whole when it was "
        "computed with, no more units than needed were whole, and nothing was sent "
        "twice"
    )


def _judge_form(where: str, got: Any, units: int) -> None:
    fine = isinstance(got, list) and all(
        isinstance(op, tuple)
        and len(op) == 2
        and op[0] in OPS
        and type(op[1]) is int
        and 0 <= op[1] < units
        for op in got
    )
    expect(
        fine,
        f"{where} your function returned {code(one_line(got))}; expected a list of "
        f"pairs (what, unit), where what is one of {', '.join(OPS)}.",
    )


def _judge_computing(where: str, got: list[tuple[str, int]], units: int) -> None:
    """Look at the order of forward and backward."""
    order = [op for op in got if op[0] in ("forward", "backward")]
    wanted = [("forward", k) for k in range(units)]
    wanted += [("backward", k) for k in range(units)[::-1]]
    expect(
        order == wanted,
        f"{where} the order of computing is {code(one_line(order))}; forward goes from "
        "the first unit to the last, backward the other way, each once.",
    )


def _judge_memory(
    where: str, got: list[tuple[str, int]], units: int, prefetch: int, keep: bool
) -> int:
    """Follow what is whole, through the step; return how many at most."""
    whole: set[int] = set()
    most = 0
    for what, unit in got:
        if what == "gather":
            expect(
                unit not in whole,
                f"{where} unit {unit} is gathered while it is whole: sent for nothing.",
            )
            whole.add(unit)
        elif what == "free":
            expect(unit in whole, f"{where} unit {unit} is freed, but it is not whole.")
            whole.remove(unit)
        elif what in ("forward", "backward"):
            expect(
                unit in whole,
                f"{where} {what} of unit {unit} computes with parameters that are not "
                "there: they were freed, or never gathered.",
            )
            forward = what == "forward"
            ahead = range(unit, unit + prefetch + 1)
            ahead = ahead if forward else range(unit - prefetch, unit + 1)
            wanted = {k for k in ahead if 0 <= k < units}
            if keep:
                wanted |= set(range(unit + 1))
            expect(
                whole >= wanted,
                f"{where} during {what} of unit {unit} the units {sorted(whole)} are "
                f"whole or on the way; expected {sorted(wanted)}: the next "
                f"{prefetch} in the order of {what} are gathered ahead.",
            )
            expect(
                whole <= wanted,
                f"{where} during {what} of unit {unit} the units {sorted(whole)} are "
                f"whole; {sorted(whole - wanted)} need not be: free a unit as soon as "
                "it was used, and gather no further ahead.",
            )
        most = max(most, len(whole))
    expect(
        not whole,
        f"{where} the units {sorted(whole)} are whole when the step has ended; between "
        "steps each rank has shards only.",
    )
    return most


def _judge_sending(
    where: str, got: list[tuple[str, int]], units: int, keep: bool
) -> None:
    """Count messages, and look whether gradients leave as soon as they are there."""
    gathers = [unit for what, unit in got if what == "gather"]
    for unit in range(units):
        times = 1 if keep else 2
        expect(
            gathers.count(unit) == times,
            f"{where} unit {unit} is gathered {gathers.count(unit)} times; expected "
            f"{times}"
            + (": it stays from forward to backward." if keep else " times."),
        )
        reduced = got.count(("reduce", unit))
        expect(
            reduced == 1,
            f"{where} the gradients of unit {unit} are reduced {reduced} times; "
            "expected once, after its backward.",
        )
        at, back = got.index(("reduce", unit)), got.index(("backward", unit))
        later = [op for op in got[back + 1 : at] if op[0] == "backward"]
        expect(
            back < at and not later,
            f"{where} the gradients of unit {unit} are reduced "
            + ("before they are there." if at < back else "only after others' backward")
            + ": they leave when they are complete, to make room.",
        )


# ---- sharded_linear ----------------------------------------------------------------

WIDTHS = (6, 12, 24)  # the layers are 6 -> 12 and 12 -> 24
ROWS = 3


@exercise("sharded_linear", solution=solutions.sharded_linear)
def check_sharded_linear(answer: Answer) -> str:
    """`sharded_linear(x, shard, gather, reduce_scatter, world_size)`: x @ weight.T."""
    hint = "Write a torch.autograd.Function that saves x and the shard."
    for n in (2, 3, 1):
        real = on_ranks(_two_layers, answer, world_size=n, hint=hint)
        for rank, told in enumerate(real):
            where = f"On {n} real ranks, on rank {rank},"
            if isinstance(told, str):
                expect(False, f"{where} {told}")
            _judge_layers(where, told, n)
    return (
        "1, 2 and 3 real ranks, two layers: the numbers of one process, two gathers "
        "and one reduce-scatter for each layer, and no whole weight between forward "
        "and backward"
    )


def _weights() -> list[Tensor]:
    """Return the whole weights: small integers, so that no sum is ever rounded."""
    dice = torch.Generator().manual_seed(0)
    shapes = zip(WIDTHS[1:], WIDTHS, strict=False)
    return [torch.randint(-3, 4, s, generator=dice).float() for s in shapes]


def _input(rank: int) -> Tensor:
    dice = torch.Generator().manual_seed(1 + rank)
    return torch.randint(-3, 4, (ROWS, WIDTHS[0]), generator=dice).float()


class _Tools:
    """The gather and the reduce-scatter that the reader's function is given."""

    def __init__(self) -> None:
        self.gathers = self.reduces = 0

    def gather(self, shard: Tensor) -> Tensor:
        self.gathers += 1
        n, shard = dist.get_world_size(), shard.detach()
        whole = torch.empty(n * len(shard), *shard.shape[1:])
        all_gather_single(whole, shard.contiguous())
        return label(whole, "communication buffers")

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        self.reduces += 1
        n, whole = dist.get_world_size(), whole.detach().contiguous()
        own = torch.empty(len(whole) // n, *whole.shape[1:])
        reduce_scatter_single(own, whole)
        return own


def _two_layers(sharded_linear: Callable) -> dict[str, Any] | str:
    """On every rank: two layers, forward and backward, and what is kept in between."""
    rank, n, tools = dist.get_rank(), dist.get_world_size(), _Tools()
    shards = [w.chunk(n)[rank].clone().requires_grad_() for w in _weights()]
    before = [shard.detach().clone() for shard in shards]
    x, saved = _input(rank).requires_grad_(), []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    barrier()
    hidden, outputs, before_all = x, 0, living_bytes()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        for shard in shards:
            hidden = sharded_linear(
                hidden, shard, tools.gather, tools.reduce_scatter, n
            )
            if not isinstance(hidden, Tensor):
                return f"your function returned {code(one_line(hidden))}, no tensor."
            outputs += hidden.untyped_storage().nbytes()
    kept = resident()["communication buffers"]
    more = living_bytes() - before_all
    gathers = tools.gathers
    if not hidden.requires_grad:
        return (
            "what your function returns has no way back to the shard (`requires_grad` "
            "is False): backward cannot reach it. Write a torch.autograd.Function, and "
            "give it the shard."
        )
    with TorchCollectives() as torchs:
        hidden.square().sum().backward()
    return {
        "output": hidden.detach(),
        "grads": [shard.grad for shard in shards],
        "x": x.grad,
        "kept": kept,
        "more": more - outputs,
        "saved": saved,
        "gathers": (gathers, tools.gathers - gathers),
        "reduces": tools.reduces,
        "left": resident()["communication buffers"],
        "others": [call.op for call in torchs.calls],
        "untouched": all(map(torch.equal, before, [s.detach() for s in shards])),
    }


def _alone(n: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return outputs and gradients of x by rank, and the mean gradients of weights."""
    weights = [w.requires_grad_() for w in _weights()]
    inputs = [_input(rank).requires_grad_() for rank in range(n)]
    outputs = [x @ weights[0].T @ weights[1].T for x in inputs]
    sum(y.square().sum() for y in outputs).backward()
    return (
        [y.detach() for y in outputs],
        [x.grad for x in inputs],
        [w.grad / n for w in weights],
    )


def _judge_layers(where: str, told: dict[str, Any], n: int) -> None:
    rank = int(where.split("rank ")[-1].rstrip(","))
    outputs, x_grads, means = _alone(n)
    expect(
        torch.equal(told["output"], outputs[rank]),
        f"{where} the output is not x @ weight.T, with the whole weight.",
    )
    expect(
        told["kept"] == 0,
        f"{where} {told['kept']} bytes of gathered weights are alive after forward; a "
        "rank would have all layers' weights at the end of it. Do not save the weight: "
        "gather it again in backward.",
    )
    wholes = {tuple(w.shape) for w in _weights()}
    wholes |= {shape[::-1] for shape in wholes}
    for shape in told["saved"]:
        expect(
            n == 1 or shape not in wholes,
            f"{where} autograd keeps a tensor of shape {shape}, as large as the whole "
            "weight. Save x and the shard only.",
        )
    least = min(w.nbytes for w in _weights())
    expect(
        n == 1 or told["more"] < least,
        f"{where} {told['more']} bytes more than the outputs are alive after forward; "
        f"the smaller of the whole weights has {least}. Who keeps a copy of it?",
    )
    forward, backward = told["gathers"]
    expect(
        (forward, backward) == (2, 2),
        f"{where} two layers gathered {forward} times in forward and {backward} times "
        "in backward; expected twice and twice, once for each layer.",
    )
    expect(
        told["x"] is not None and torch.equal(told["x"], x_grads[rank]),
        f"{where} the gradient of x is not grad @ weight: the layers before this one "
        "need it.",
    )
    expect(
        told["reduces"] == 2,
        f"{where} two layers called reduce_scatter {told['reduces']} times; expected "
        "once for each: the gradient of the whole weight, from all ranks' rows.",
    )
    for k, (got, mean) in enumerate(zip(told["grads"], means, strict=True)):
        own = mean.chunk(n)[rank]
        sums = got is not None and n > 1 and torch.equal(got, own * n)
        why = (
            "this is the sum over the ranks; divide by their number"
            if sums
            else "it is the mean of all ranks' gradients, of this rank's rows"
        )
        expect(
            got is not None and got.shape == own.shape and torch.allclose(got, own),
            f"{where} the gradient of the shard of layer {k} is not right: {why}.",
        )
    expect(
        told["left"] == 0,
        f"{where} {told['left']} bytes of gathered weights are alive after backward.",
    )
    expect(told["untouched"], f"{where} your function changed the shard.")
    expect(
        not told["others"],
        f"{where} your function called `{(told['others'] or [''])[0]}` of PyTorch; "
        "`gather` and `reduce_scatter` are enough.",
    )


# ---- who_reads_what ----------------------------------------------------------------


@exercise("who_reads_what", solution=solutions.who_reads_what)
def check_who_reads_what(answer: Answer) -> str:
    """`who_reads_what(numel, saved, rank, ranks)`: (file, first, last), in order."""
    cases = 0
    for numel, saved, ranks in itertools.product(
        (12, 10, 1, 5, 97, 0), (4, 1, 3), (1, 2, 3, 4)
    ):
        length = -(-numel // saved)
        files = [
            list(range(numel))[k * length : (k + 1) * length] for k in range(saved)
        ]
        for rank in range(ranks):
            call = answer.call(numel, saved, rank, ranks)
            got = answer(numel, saved, rank, ranks)
            _judge_reads(call, got, files)
            mine = -(-numel // ranks)
            wanted = list(range(numel))[rank * mine : (rank + 1) * mine]
            read = [x for file, a, b in got for x in files[file][a:b]]
            _judge_elements(call, read, wanted)
            cases += 1
    return (
        f"{cases} ranks, from 1, 3 or 4 files: each reads the elements of its own "
        "shard, in order, and nothing else"
    )


def _judge_reads(call: str, got: Any, files: list[list[int]]) -> None:
    fine = isinstance(got, list) and all(
        isinstance(read, tuple) and len(read) == 3 and all(type(k) is int for k in read)
        for read in got
    )
    expect(
        fine,
        f"{call} returned {code(one_line(got))}; expected a list of (file, first, "
        "last).",
    )
    for read in got:
        file, first, last = read
        expect(
            0 <= file < len(files),
            f"{call} reads from file {file}, which is not there.",
        )
        held = len(files[file])
        expect(
            first < last,
            f"{call} has {code(repr(read))}, which reads nothing; leave it out.",
        )
        expect(
            first >= 0 and last <= held,
            f"{call} has {code(repr(read))}, but file {file} has the elements 0 to "
            f"{held - 1} of its own: count them from the file's beginning, and there "
            "is no padding in it.",
        )


def _judge_elements(call: str, read: list[int], wanted: list[int]) -> None:
    shown = f"{wanted[0]} to {wanted[-1]}" if wanted else "none at all"
    missing = sorted(set(wanted) - set(read))
    expect(
        not missing,
        f"{call} does not read element {missing[:1]}; this rank's shard has the "
        f"elements {shown} of the flat tensor.",
    )
    expect(
        len(read) <= len(wanted),
        f"{call} reads {len(read)} elements; this rank's shard has {len(wanted)} "
        f"({shown}). Whoever reads everything needs the memory for everything.",
    )
    expect(
        read == wanted,
        f"{call} reads the right elements in another order: {code(one_line(read))}; "
        "they must come as they lie in the shard.",
    )


# ---- ranks_needed ------------------------------------------------------------------

CASES = (
    # units, memory, activations
    ([100, 100, 100, 100], 4000, 500),
    ([100, 100, 100, 100], 1900, 500),
    ([100, 100, 100, 100], 1700, 500),
    ([100, 100, 100, 100], 1699, 500),
    ([50, 300, 20, 200, 10], 3000, 0),
    ([300, 20, 200], 4000, 0),
    ([7, 5, 3], 200, 3),
    ([1001], 9000, 0),
    ([1001], 8023, 0),
    ([10, 10], 120 + 16 * 2, 0),
    ([10, 10], 10**6, 0),
    ([400, 100, 100, 400], 6000, 1000),
)


@exercise("ranks_needed", solution=solutions.ranks_needed)
def check_ranks_needed(answer: Answer) -> str:
    """`ranks_needed(units, memory, activations)`: the least number, or None."""
    for units, memory, activations in CASES:
        got = answer(list(units), memory, activations)
        wanted = solutions.ranks_needed(list(units), memory, activations)
        if got == wanted and type(got) is type(wanted):
            continue
        call = answer.call(units, memory, activations)
        expect(
            got is None or type(got) is int and 1 <= got <= 1024,
            f"{call} returned {code(one_line(got))}; expected a number of ranks, 1 to "
            "1024, or None.",
        )
        expect(
            got is None or wanted is not None,
            f"{call} returned {code(one_line(got))}, but no number of ranks is enough: "
            "what is whole, gradients and activations do not get less with more ranks.",
        )
        needs = _needs(units, activations, wanted if got is None else got)
        expect(
            got is not None,
            f"{call} returned `None`, but {wanted} ranks are enough: each needs "
            f"{needs} of {memory} bytes.",
        )
        expect(
            got > wanted,
            f"{call} returned {got}, but with {got} a rank needs {needs} bytes and has "
            f"{memory}.",
        )
        expect(
            False,
            f"{call} returned {got}, but {wanted} are enough: each needs "
            f"{_needs(units, activations, wanted)} of {memory} bytes.",
        )
    return (
        f"{len(CASES)} models, among them some that fit on no number of ranks: the "
        "least that is enough"
    )


def _needs(units: tuple[int, ...] | list[int], activations: int, ranks: int) -> str:
    """Write the bytes of a rank, part by part."""
    pairs = [units] if len(units) == 1 else list(zip(units, units[1:], strict=False))
    parts = {
        "shards": sum(16 * -(-unit // ranks) for unit in units),
        "two whole units": 4 * max(map(sum, pairs)),
        "gradients": 4 * max(units),
        "activations": activations,
    }
    told = " + ".join(f"{nbytes:,} ({name})" for name, nbytes in parts.items())
    return f"{sum(parts.values()):,} = {told}"
