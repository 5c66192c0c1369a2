"""The exercises of chapter 08: a schedule, a layer, a limit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.chapters.ch08_fsdp import solutions
from ddp_course.collectives import all_gather_single, barrier, reduce_scatter_single
from ddp_course.lab.answers import Answer, code, one_line
from ddp_course.lab.exercises import (
    exercise,
    judge,
    judge_ranks,
    living_bytes,
    shown,
)
from ddp_course.lab.judge import AGAIN, Case, Draw, same_as
from ddp_course.lab.values import equal_values, fits
from ddp_course.measure import TorchCollectives, label, resident

# ---- my_schedule -------------------------------------------------------------------

OPS = ("gather", "forward", "free", "backward", "reduce")
SCHEDULE = {
    "pairs": "your function returned {got}; expected a list of pairs (what, unit), "
    "where what is one of {ops}.",
    "in_order": "the order of computing is {order}; forward goes from the first unit "
    "to the last, backward the other way, each once.",
}
DURING = {
    "kept": "unit {unit} is freed between its forward and its backward; with keep it "
    "stays whole, and is not gathered again.",
    "not_for_nothing": "unit {unit} is gathered while it is whole: sent for nothing.",
    "was_whole": "unit {unit} is freed, but it is not whole.",
    "right_after": "unit {unit} is freed after {what_before} of unit {unit_before}; "
    "free it right after it was used, before anything else is gathered or computed.",
    "there": "{what} of unit {unit} needs parameters that are not there: they were "
    "freed, or never gathered.",
    "ahead": "during {what} of unit {unit} the units {whole} are whole or on the way; "
    "expected {wanted}: the next {prefetch} in the order of {what} are gathered ahead.",
    "few": "during {what} of unit {unit} the units {whole} are whole; {more} need not "
    "be: free a unit as soon as it was used, and gather no further ahead.",
    "first": "unit {unit} is gathered after unit {before}, which is needed later; "
    "messages go one after the other, so gather the unit that is needed first, first.",
    "freed_first": "unit {unit} is still whole when its gradients are reduced; free it "
    "first, to have room for the gradients.",
}
AT_THE_END = {
    "shards": "the units {whole} are whole when the step has ended; between steps each "
    "rank has shards only.",
    "gathered": "unit {unit} is gathered {times} times; expected {wanted}: a unit "
    "stays from forward to backward if it is kept, and is gathered again if not.",
    "reduced": "the gradients of unit {unit} are reduced {reduces} times; expected "
    "once, after its backward.",
    "soon": "the gradients of unit {unit} are reduced {when}: reduce them as soon as "
    "they are complete, to free their memory.",
}


@exercise("my_schedule", solution=solutions.my_schedule)
def check_my_schedule(answer: Answer) -> str:
    """`my_schedule(units, prefetch, keep)`: what a rank does in a step, in order.

    Forward and backward do the same in opposite orders. Which units must be whole
    before unit k computes, and which of them are whole already?

    Keep the set of whole units, and write one function for both orders: among this unit
    and the next `prefetch` in the order, gather those that are not whole; compute;
    free, except in forward with `keep`; and in backward reduce.
    """
    cases = list(itertools.product((3, 1, 2, 5, 12), (0, 1, 3, 11), (False, True)))
    cases.append((1100, 1, False))
    for units, prefetch, keep in cases:
        where = f"For {units} units, prefetch = {prefetch} and keep = {keep},"
        got = answer(units, prefetch, keep)
        facts = {"pairs": _are_pairs(got, units), "in_order": True}
        facts |= {"got": code(one_line(got)), "ops": ", ".join(OPS)}
        judge(where, facts, SCHEDULE)
        ops = [tuple(op) for op in got]
        order = [op for op in ops if op[0] in ("forward", "backward")]
        wanted = [("forward", k) for k in range(units)]
        wanted += [("backward", k) for k in range(units)[::-1]]
        facts |= {"in_order": order == wanted, "order": code(one_line(order))}
        judge(where, facts, SCHEDULE)
        whole: set[int] = set()
        for facts in _each_op(ops, whole, units, prefetch, keep):
            judge(where, facts, DURING)
        for facts in _each_unit(ops, whole, units, keep):
            judge(where, facts, AT_THE_END)
    return (
        f"{len(cases)} steps: each unit was whole when it computed, no more units "
        "than needed were whole, and nothing was sent twice"
    )


def _are_pairs(got: Any, units: int) -> bool:
    return isinstance(got, list) and all(
        isinstance(op, (tuple, list))
        and len(op) == 2
        and op[0] in OPS
        and type(op[1]) is int
        and 0 <= op[1] < units
        for op in got
    )


def _each_op(
    ops: list[tuple[str, int]], whole: set[int], units: int, prefetch: int, keep: bool
) -> Iterator[dict[str, Any]]:
    """Yield facts about each operation; track the gathered units in `whole`."""
    forward, before, pairs = True, -1, itertools.pairwise([("", -1), *ops])
    for (what_before, unit_before), (what, unit) in pairs:
        facts: dict[str, Any] = dict.fromkeys(DURING, True)
        facts |= {"what_before": what_before, "unit_before": unit_before}
        facts |= {"what": what, "unit": unit, "prefetch": prefetch, "before": before}
        if what == "gather":
            late = before >= 0 and (unit < before) == forward
            facts |= {"not_for_nothing": unit not in whole, "first": not late}
            whole.add(unit)
            before = unit
        elif what == "free":
            facts |= {"was_whole": unit in whole, "kept": not (keep and forward)}
            whole.discard(unit)
            computed = what_before in ("forward", "backward")
            facts["right_after"] = computed and unit_before == unit
        elif what == "reduce":
            facts["freed_first"] = unit not in whole
        else:
            forward, before = what == "forward" and unit < units - 1, -1
            ahead = range(unit, unit + prefetch + 1)
            ahead = ahead if what == "forward" else range(unit - prefetch, unit + 1)
            wanted = {k for k in ahead if 0 <= k < units}
            wanted |= set(range(unit + 1)) if keep else set()
            facts |= {"there": unit in whole, "ahead": whole >= wanted}
            facts |= {"few": whole <= wanted, "whole": sorted(whole)}
            facts |= {"wanted": sorted(wanted), "more": sorted(whole - wanted)}
        yield facts


def _each_unit(
    ops: list[tuple[str, int]], whole: set[int], units: int, keep: bool
) -> Iterator[dict[str, Any]]:
    """Yield facts about each unit's messages, and about units that stay gathered."""
    for unit in range(units):
        times, reduced = ops.count(("gather", unit)), ops.count(("reduce", unit))
        facts = {"whole": sorted(whole), "shards": not whole, "unit": unit}
        facts |= {"times": times, "wanted": 1 if keep else 2, "reduced": reduced == 1}
        facts["reduces"] = reduced
        facts["gathered"] = times == facts["wanted"]
        at = ops.index(("reduce", unit)) if reduced else -1
        back = ops.index(("backward", unit))
        later = [op for op in ops[back + 1 : at] if op[0] == "backward"]
        early = "before its backward" if at < back else "only after others' backward"
        yield facts | {"soon": back < at and not later, "when": early}


# ---- sharded_linear ----------------------------------------------------------------

WIDTHS = (8, 12, 12, 12)  # two of the three layers are square, and of equal shape
ROWS = 3
LAYERS = (  # (description, dtype, frozen tensor, forward passes, backwards of each)
    ("with three layers", torch.float32, "", 1, 1),
    ("with three layers of float64 and a strided x, twice", torch.float64, "", 2, 1),
    ("with an x that is frozen", torch.float32, "x", 1, 1),
    ("with a first shard that is frozen", torch.float32, "shard", 1, 1),
    ("with an x of one row", torch.float32, "", 1, 1),
    ("with an x that has no rows on the last rank", torch.float32, "", 1, 1),
    ("with one forward and two backwards", torch.float32, "", 1, 2),
)
LINEAR = {
    "tensor": "got {got} from your function, no tensor.",
    "way_back": "has no way back to the shard from what your function returns "
    "(`requires_grad` is False): backward cannot reach it. Write a "
    "torch.autograd.Function, and give it the shard.",
    "output": "has an output that is not x @ weight.T, with the whole weight.",
    "freed": "has {kept} bytes of gathered weights alive after forward; at its end all "
    "layers' weights would be alive. Do not save the weight: gather it again in "
    "backward.",
    "saved": "does not let go: autograd keeps a tensor of shape {shape}, as large as "
    "the whole weight. Save x and the shard only.",
    "copy": "has {more} bytes more than the outputs alive after forward; the smallest "
    "whole weight has {least}. Which variable keeps a copy of a weight?",
    "gathers": "gathered {gathered} times in forward and {again} times in backward; "
    "expected three times in forward and in each backward, once for each layer.",
    "x": "has a wrong gradient of x: it is grad @ weight, and the layers before this "
    "one need it.",
    "reduces": "called reduce_scatter {reduced} times; expected once for each layer "
    "and backward: the gradient of the whole weight, from all ranks' rows.",
    "frozen": "has a gradient of a frozen tensor.",
    "mean": "has a wrong gradient of the shard of layer {layer}: {why}.",
    "left": "has {left_over} bytes of gathered weights alive after backward.",
    "gradient_kept": "has changed the gradient that its `backward` was given; another "
    "part of a model may need it, too. Divide a tensor of your own.",
    "untouched": "has a changed shard: your function must not change it.",
    "ours": "called `{others}` of PyTorch; `gather` and `reduce_scatter` are enough.",
}


@exercise("sharded_linear", solution=solutions.sharded_linear)
def check_sharded_linear(answer: Answer) -> str:
    """`sharded_linear(x, shard, gather, reduce_scatter, world_size)`: x @ weight.T.

    What can forward save for backward, if no whole weight may live that long?

    Save x and the shard. In backward, gather once more for the gradient of x: the
    output's gradient times the weight. The weight's gradient is the output's gradient,
    transposed, times x; reduce-scatter it, and divide by the number of ranks.
    """
    hint = (
        "Write a torch.autograd.Function that saves x and the shard. Every rank "
        "gathers and reduces, also one whose x is zero or has no rows."
    )
    judge_ranks(LINEAR, _all_layers, answer, hint=hint)
    return (
        "1, 2 and 3 real ranks, three layers: the numbers of one process, two gathers "
        "and one reduce-scatter for each layer, and no whole weight between forward "
        "and backward"
    )


def _all_layers(sharded_linear: Callable) -> Iterator[dict[str, Any]]:
    """Run all hard cases on this rank, one after the other."""
    return (_three_layers(sharded_linear, *case) for case in LAYERS)


def _numbers(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return small whole numbers; in float64, thirds, which narrower types round."""
    dice = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-3, 4, shape, generator=dice).to(dtype)
    return numbers / 3 if dtype == torch.float64 else numbers


class _Tools:
    """The gather and the reduce-scatter that the reader's function is given."""

    def __init__(self) -> None:
        self.gathers = self.reduces = 0

    def gather(self, shard: Tensor) -> Tensor:
        self.gathers += 1
        n, shard = dist.get_world_size(), shard.detach()
        whole = shard.new_empty(n * len(shard), *shard.shape[1:])
        all_gather_single(whole, shard.contiguous())
        return label(whole, "communication buffers")

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        self.reduces += 1
        n, whole = dist.get_world_size(), whole.detach().contiguous()
        own = whole.new_empty(len(whole) // n, *whole.shape[1:])
        reduce_scatter_single(own, whole)
        return own


def _three_layers(
    sharded_linear: Callable,
    case: str,
    dtype: torch.dtype,
    frozen: str,
    passes: int,
    backwards: int,
) -> dict[str, Any]:
    """Run three layers forward and backward; record the tensors kept in between."""
    rank, n, tools = dist.get_rank(), dist.get_world_size(), _Tools()
    shapes = enumerate(itertools.pairwise(WIDTHS))
    weights = [_numbers(k, dtype, b, a).requires_grad_() for k, (a, b) in shapes]
    rows = 1 if "one row" in case else ROWS
    inputs = [_numbers(9 + r, dtype, rows, WIDTHS[0]) for r in range(n)]
    if "strided" in case:
        inputs = [one.T.contiguous().T for one in inputs]
    if "no rows" in case:
        inputs[-1] = inputs[-1][:0]
    if frozen == "x" and n > 1:  # the last rank has nothing but zeros
        inputs[-1] = torch.zeros(ROWS, WIDTHS[0], dtype=dtype)
    shards = [w.detach().chunk(n)[rank].clone().requires_grad_() for w in weights]
    x, saved = inputs[rank].clone().requires_grad_(frozen != "x"), []
    shards[0].requires_grad_(frozen != "shard")
    facts: dict[str, Any] = {"case": case, "tensor": True, "way_back": True}

    def note(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    for number in range(passes):
        barrier()
        # Hooks would be passed other tensor objects: the second pass has no hooks.
        noted = torch.autograd.graph.saved_tensors_hooks(note, lambda t: t)
        hidden, outputs, before, gathers = x, 0, living_bytes(), tools.gathers
        with TorchCollectives() as before_backward, nullcontext() if number else noted:
            for shard in shards:
                hidden = sharded_linear(
                    hidden, shard, tools.gather, tools.reduce_scatter, n
                )
                if not isinstance(hidden, Tensor):
                    return facts | {"tensor": False, "got": code(one_line(hidden))}
                outputs += hidden.untyped_storage().nbytes()
        facts["kept"] = resident()["communication buffers"]
        facts["more"] = living_bytes() - before - outputs
        facts["gathered"] = tools.gathers - gathers
        if not hidden.requires_grad:
            return facts | {"way_back": False}
        gradient = _gradient(hidden)
        unchanged = gradient.clone()
        with TorchCollectives() as torch_log:
            for k in range(backwards):
                hidden.backward(gradient, retain_graph=k < backwards - 1)
        facts["again"] = tools.gathers - gathers - facts["gathered"]
    for whole in inputs:
        whole.requires_grad_()
        for _ in range(passes * backwards):
            output = _together(whole, weights)
            output.backward(_gradient(output))
    wholes = {tuple(w.shape) for w in weights} | {tuple(w.T.shape) for w in weights}
    large = [shape for shape in saved if n > 1 and shape in wholes]
    others = [*before_backward.calls, *torch_log.calls]
    least = min(w.nbytes for w in weights)
    wanted = _together(inputs[rank].detach(), weights)
    left = resident()["communication buffers"]
    facts |= {"output": equal_values(hidden, wanted), "freed": facts["kept"] == 0}
    facts |= {"saved": not large, "shape": large[0] if large else ""}
    facts |= {"copy": n == 1 or facts["more"] < least, "least": least}
    facts |= {"left": left == 0, "left_over": left, "reduced": tools.reduces}
    facts |= {
        "gathers": bool(frozen)
        or (facts["gathered"], facts["again"]) == (3, 3 * backwards),
        "x": frozen == "x" or equal_values(x.grad, inputs[rank].grad),
        "reduces": bool(frozen) or tools.reduces == 3 * passes * backwards,
        "frozen": (x if frozen == "x" else shards[0]).grad is None or not frozen,
        "mean": True,
        "gradient_kept": torch.equal(gradient, unchanged),
        "untouched": all(map(torch.equal, shards, (w.chunk(n)[rank] for w in weights))),
        "ours": not others,
        "others": others[0].op if others else "",
    }
    for k in range(frozen == "shard", len(shards)):
        own, got = weights[k].grad.chunk(n)[rank] / n, shards[k].grad
        if not equal_values(got, own):
            sums = n > 1 and equal_values(got, own * n)
            why = "this is the sum over the ranks; divide by their number"
            if not sums:
                why = "expected the mean of all ranks' gradients of this rank's shard"
            if passes * backwards > 1 and not sums:
                why += ", and a second backward adds to it"
            return facts | {"mean": False, "layer": k, "why": why}
    return facts


def _together(x: Tensor, weights: list[Tensor]) -> Tensor:
    """Return what all layers make of x, with whole weights."""
    for weight in weights:
        x = x @ weight.T
    return x


def _gradient(hidden: Tensor) -> Tensor:
    """Return a gradient of `hidden`; for one row it is a number that is expanded."""
    if len(hidden) == 1:
        return hidden.new_ones(()).expand_as(hidden)
    return 2 * hidden.detach()


# ---- ranks_needed ------------------------------------------------------------------

CASES = (
    # (elements of the units, bytes of memory, bytes of activations)
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
    ([1024], 8 * 1024 + 16, 0),  # needs 1024 ranks, one per element
    ([1025], 8 * 1025 + 16, 0),  # needs 1025 ranks, one too many
    ([300, 20, 200], 3700, 3),
)


@exercise("ranks_needed", solution=solutions.ranks_needed)
def check_ranks_needed(answer: Answer) -> str:
    """`ranks_needed(units, memory, activations)`: the least number of ranks, or None.

    For a number of ranks, can you say whether the model fits? Which parts of the memory
    shrink with more ranks?

    Try 1, 2, 3 and so on. For each, add up: 16 bytes per element of this rank's shards,
    each shard rounded up; 4 bytes per element of the largest pair of neighbours; 4 per
    element of the largest unit; the activations. The first sum within `memory` decides.
    """
    hints = {"fits": _wrong_number, "right": _wrong_number}
    same_as(answer, solutions.ranks_needed, _units, cases=120, hints=hints)
    return "120 models, some of which fit on no number of ranks"


def _units(d: Draw) -> tuple[list[int], int, int]:
    """Return units, memory and activations; the memory is just enough, or too small.

    The largest unit need not belong to the largest pair of neighbours.
    """
    if d.case < len(CASES):
        units, memory, activations = CASES[d.case]
        return [*units], memory, activations + d.number // AGAIN
    most = 400 if d.case < 100 else 3 * 10**9
    count = 1200 if d.case == 99 else d.same.randint(1, 6)
    units = [d.same.randint(1, most) for _ in range(count)]
    activations = d.same.choice([0, 3, 500])
    ranks = d.same.choice([1, 2, 3, 5, 8, 64, 1024])
    enough = sum(_parts(units, activations, ranks).values())
    return units, enough - d.same.choice([0, 0, 1, 4, 300]), activations


def _wrong_number(case: Case) -> str:
    """Describe whether the number is too small, too large, or no number of ranks."""
    units, memory, activations = case.args.values()
    got, wanted = case.got, case.wanted
    if got is not None and not (fits(got, 1) and 1 <= got <= 1024 and got == int(got)):
        return f"returned {shown(got)}; expected a number of ranks, 1 to 1024, or None."
    if got is not None and wanted is None:
        return (
            f"returned {shown(got)}, but no number of ranks is enough: whole units, "
            "gradients and activations do not shrink with more ranks."
        )
    if got is not None and got < wanted:
        needs = _needs(units, activations, got)
        begin = f"returned {got}, but with {got} a rank needs {needs} bytes"
        return f"{begin} and has {memory}."
    needs = _needs(units, activations, wanted)
    return (
        f"returned {shown(got)}, but {wanted} are enough: each needs {needs} of "
        f"{memory} bytes."
    )


def _parts(units: list[int], activations: int, ranks: int) -> dict[str, int]:
    """Return the bytes of a rank, part by part."""
    pairs = [units] if len(units) == 1 else list(zip(units, units[1:], strict=False))
    return {
        "shards": sum(16 * -(-unit // ranks) for unit in units),
        "two whole units": 4 * max(map(sum, pairs)),
        "gradients": 4 * max(units),
        "activations": activations,
    }


def _needs(units: list[int], activations: int, ranks: int) -> str:
    """Return a text with the bytes of a rank: in total, and part by part."""
    parts = _parts(units, activations, ranks)
    terms = " + ".join(f"{nbytes:,} ({name})" for name, nbytes in parts.items())
    return f"{sum(parts.values()):,} = {terms}"
