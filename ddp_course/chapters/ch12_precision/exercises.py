"""The exercises of chapter 12: bits, copies, a scale, and one decision for all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.chapters.ch12_precision import solutions
from ddp_course.collectives import barrier
from ddp_course.lab.answers import Answer, code, one_line
from ddp_course.lab.exercises import (
    equal,
    exercise,
    expect_call,
    judge,
    judge_ranks,
    shown,
)
from ddp_course.measure import TorchCollectives
from ddp_course.precision import FORMATS, bits_of

# ---- from_bits ---------------------------------------------------------------------

NUMBERS = (1.0, -2.5, 0.1, 60000.0, 3e-5, -7e-6, 2.0**-14, 0.0)
SPECIAL = {
    "0 11111 0000000000": "the largest exponent, with a fraction of 0, is inf",
    "1 11111 0000000000": "the sign is that of the infinity",
    "0 11111 0000000001": "the largest exponent, with another fraction, is nan",
    "0 00000 0000000001": "an exponent of 0 means 0 + F / 2^f, not 1 +, with the "
    "power of an exponent of 1",
}


@exercise("from_bits", solution=solutions.from_bits)
def check_from_bits(answer: Answer) -> str:
    """`from_bits(sign, exponent, fraction)`: the number that these bits mean.

    What are the two exponents that mean something else than all the others?

    Read both parts as whole numbers, the fraction over two to its length. The bias is
    what an exponent of a 0 and ones is, as a number. All zeros: no leading one, and the
    power that the smallest exponent above has. All ones: inf, or nan.
    """
    for name in ("fp16", "bf16", "fp32", "fp8 e5m2"):
        for number in NUMBERS:
            bits = bits_of(number, FORMATS[name]).split()
            wanted = float(FORMATS[name].round(torch.tensor(number).double()))
            because = f"it is what {name} keeps of {number:g}"
            expect_call(answer, *bits, returns=wanted, because=because)
    for bits, because in SPECIAL.items():
        wanted = solutions.from_bits(*bits.split())
        expect_call(answer, *bits.split(), returns=wanted, because=because)
    return (
        f"{len(NUMBERS)} numbers in four formats, inf of both signs, nan, and the "
        "smallest number that float16 has"
    )


# ---- master_step -------------------------------------------------------------------

STEPPED = {
    "same": "put another tensor into a list; change the tensors in place.",
    "types": "changed the type of a tensor: parameters stay in 16 bits, copies in 32.",
    "gradients": "changed the gradients; leave them as they are.",
    "alone": "changed a parameter that has no gradient, or its copy; leave both alone.",
    "copies": "left {masters} in `masters`; expected {right}. Is it lr times the "
    "gradient, computed in 32 bits and taken from the copy?",
    "back": "left {parameters} in `parameters`; expected the copies, rounded: "
    "{rounded}.",
}


@exercise("master_step", solution=solutions.master_step)
def check_master_step(answer: Answer) -> str:
    """`master_step(parameters, masters, lr)`: a step of SGD on copies in 32 bits.

    Where are small steps added up, and what does the model compute with afterwards?

    Bring each gradient to 32 bits first, and multiply then. Subtract in place from the
    copy. Write the copy, rounded, into the parameter, in place, too. A parameter
    without a gradient keeps its numbers, and so does its copy.
    """
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        for step, told in enumerate(_master_steps(answer, dtype)):
            judge(f"Step {step + 1} in {name}: your function", told, STEPPED)
    return (
        "three steps in bfloat16 and float16: no step was lost, and the parameters are "
        "the rounded copies; one had no gradient, and one was empty"
    )


def _master_steps(answer: Answer, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    values = torch.tensor([[1.0, -3.0], [0.3, 0.0]]), torch.ones(0), torch.ones(2)
    parameters = [nn.Parameter(v.to(dtype)) for v in values]
    masters = [p.detach().float() + 2.0**-14 for p in parameters]
    masters[2] += 1  # so that nobody rounds it back unseen
    right, rounded = [m.clone() for m in masters], [p.data.clone() for p in parameters]
    for step in range(3):
        gradients = [torch.full_like(p, 0.7 + step) for p in parameters[:2]]
        for k, gradient in enumerate(gradients):  # the third has none
            parameters[k].grad = gradient.clone()
            right[k] -= 1e-3 * gradient.float()
            rounded[k] = right[k].to(dtype)
        lists = [*parameters], [*masters]
        answer(*lists, 1e-3)
        same = zip(sum(lists, []), parameters + masters, strict=True)
        left = [p.grad for p in parameters]
        yield {
            "same": all(a is b for a, b in same),
            "types": {p.dtype for p in parameters} == {dtype}
            and {m.dtype for m in masters} == {torch.float32},
            "gradients": left[2] is None and all(map(equal, left, gradients)),
            "alone": equal(masters[2], right[2])
            and equal(parameters[2].data, rounded[2]),
            "copies": all(map(partial(torch.allclose, rtol=1e-6), masters, right)),
            "back": all(map(equal, (p.data for p in parameters), rounded)),
            "masters": shown([m.tolist() for m in masters]),
            "right": shown([m.tolist() for m in right]),
            "parameters": shown([p.tolist() for p in parameters]),
            "rounded": shown([r.tolist() for r in rounded]),
        }


# ---- next_scale --------------------------------------------------------------------

FOUND = (0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0)


@exercise("next_scale", solution=solutions.next_scale)
def check_next_scale(answer: Answer) -> str:
    """`next_scale(scale, clean, found, interval)`: the new scale, and the new count.

    When does the count of clean steps begin anew?

    After an inf: half the scale, and nothing counts any more. Otherwise this step
    counts, too; if that makes the interval full, twice the scale, and count from 0.
    """
    for interval in (1, 3):
        scale, clean = 1024.0, 0
        for found in FOUND:
            state = scale, clean, bool(found), interval
            because = f"{clean + 1} clean in a row now, of {interval}"
            if found:
                because = "an inf was found"
            wanted = solutions.next_scale(*state)
            expect_call(answer, *state, returns=wanted, because=because)
            scale, clean = wanted
    return f"{len(FOUND)} steps with inf in four of them, for two intervals"


# ---- agreed_step -------------------------------------------------------------------

SCALE = 1024.0
CASES = {  # each rank's gradients, before they were scaled; of three ranks at most
    "small gradients": ([[0.3, 0.0]], [[0.4], [0.0]], []),
    "large ones": ([[3.0], [0.0]], [[4.0]], [[12.0]]),
    "inf on rank 0": ([[math.inf, 1.0]], [[1.0]], [[1.0]]),
    "nan on the last rank": ([[1.0]], [[1.0]], [[math.nan]]),
    "gradients of zero": ([[0.0]], [], [[0.0, 0.0]]),
}
STEP = {
    "one": "returned {got}; expected {wanted}: whether the step was made, by all "
    "ranks or by none.",
    "right": "left weights of {weights}; expected {expected}. First divide by the "
    "scale, then take the norm of all ranks' gradients, then clip if it is above "
    "`max_norm`; change the weights in place.",
    "few": "called {calls}; at most two all_reduces of a number each are needed.",
}


@exercise("agreed_step", solution=solutions.agreed_step)
def check_agreed_step(answer: Answer) -> str:
    """`agreed_step(weights, gradients, scale, max_norm, lr)`: all ranks step, or none.

    Each rank has shards. Which two things can one rank alone not know?

    Divide your gradients by the scale. Add up their squares, then over the ranks: the
    root is the norm of all, and it is neither inf nor nan only if no gradient of any
    rank is. If so, take lr times the gradients from the weights, in place, scaled down
    if the norm is above `max_norm`. A rank without shards takes part, too.
    """
    hint = "Every rank calls the same all_reduce, also one without gradients."
    judge_ranks(STEP, _steps, answer, worlds=(3, 2, 1), hint=hint)
    return (
        f"{len(CASES)} cases on 1, 2 and 3 real ranks: inf or nan on one rank holds "
        "all of them back, and all clip by the one norm of gradients without the scale"
    )


def _steps(agreed_step: Callable) -> Iterator[dict[str, Any]]:
    """On every rank: each case, with what it should have come to."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for case, shards in CASES.items():
        shards = shards[3 - n :] if "last" in case else shards[:n]
        numbers = [x for its in shards for shard in its for x in shard]
        norm = math.sqrt(sum(x * x for x in numbers))
        wanted = math.isfinite(norm)
        factor = min(1.0, 1.0 / norm) if norm else 1.0
        mine = shards[rank]
        gradients = [torch.tensor(shard) * SCALE for shard in mine]
        weights = [torch.ones(len(shard)) for shard in mine]
        lists = [*weights], gradients
        barrier()
        with TorchCollectives() as torchs:
            got = agreed_step(*lists, SCALE, 1.0, 0.5)
        calls = [call.op for call in torchs.calls]
        step = 0.5 * factor if wanted else 0.0
        expected = [[1 - step * x if step else 1.0 for x in shard] for shard in mine]
        pairs = zip(weights, map(torch.tensor, expected), strict=True)
        few = len(calls) <= 2 and torchs.nbytes <= 32
        told = {"case": case, "calls": code(", ".join(calls) or "no collective")}
        told |= {"one": got is wanted, "got": code(one_line(got))}
        told |= {"wanted": code(str(wanted))}
        told["weights"] = shown([w.tolist() for w in weights])
        told["expected"] = shown([[round(x, 4) for x in shard] for shard in expected])
        told["right"] = all(torch.allclose(w, right, rtol=1e-4) for w, right in pairs)
        yield told | {"few": few and set(calls) <= {"all_reduce"}}
