"""The exercises of chapter 12: bits, copies, a scale, and a step of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ddp_course.chapters.ch12_precision import solutions
from ddp_course.lab.answers import Answer
from ddp_course.lab.exercises import exercise, shown
from ddp_course.lab.judge import Case, Draw, same_as, same_on_ranks
from ddp_course.lab.values import equal_values
from ddp_course.precision import FORMATS, bits_of

# ---- from_bits ---------------------------------------------------------------------

NUMBERS = (1.0, -2.5, 0.1, 60000.0, 3e-5, -7e-6, 2.0**-14, 0.0)
SPECIAL = {
    "0 11111 0000000000": "the largest exponent, with a fraction of 0, is inf",
    "1 11111 0000000000": "the sign is the sign of the infinity",
    "0 11111 0000000001": "the largest exponent, with another fraction, is nan",
    "1 00000 0000000000": "it is -0.0: the sign is the sign of the zero",
    "0 00000 0000000001": "an exponent of 0 means 0 + F / 2^f, not 1 + F / 2^f, with "
    "the power of exponent 1",
}
BITS = {
    bits_of(number, FORMATS[name]): f"it is {number:g}, rounded to {name}"
    for name in ("fp16", "bf16", "fp32", "fp8 e5m2")
    for number in NUMBERS
} | SPECIAL


@exercise("from_bits", solution=solutions.from_bits)
def check_from_bits(answer: Answer) -> str:
    """`from_bits(sign, exponent, fraction)`: the number that these bits mean.

    Which two exponents have a special meaning?

    Read exponent and fraction as whole numbers, and divide the fraction by two to the
    power of its length. The bias is the number whose bits are a 0 and then ones. An
    exponent of all zeros has no leading one, and the same power as exponent 1. All
    ones: inf, or nan.
    """

    def why(case: Case) -> str:
        sign, exponent, fraction = case.args.values()
        because = (
            f"the exponent has {len(exponent)} bits and the fraction {len(fraction)}"
        )
        because = BITS.get(f"{sign} {exponent} {fraction}", because)
        returned = f"returned {shown(case.got)}; expected {shown(case.wanted)}"
        return f"{returned}, because {because}."

    hints = {"right": why, "fits": why}
    same_as(answer, solutions.from_bits, _bits, cases=300, exact=True, hints=hints)
    return (
        "300 numbers, in four real formats and in others with 1 to 11 exponent bits, "
        "inf of both signs, nan, and the smallest positive number of float16"
    )


def _bits(d: Draw) -> tuple[str, str, str]:
    if d.case < len(BITS):
        sign, exponent, fraction = list(BITS)[d.case].split()
        return sign, exponent, fraction
    e, f = d.same.randint(1, 8), d.same.randint(1, 23)
    if d.case % 5 == 0:  # more bits, up to float64's
        e, f = d.same.randint(9, 11), d.same.randint(24, 52)
    if d.case % 25 == 0:
        e, f = 11, 52
    ends = ["0" * e, "1" * e, None, None, None]
    exponent = d.same.choice(ends) or "".join(d.own.choices("01", k=e))
    fraction = d.same.choice(["0" * f, "".join(d.own.choices("01", k=f))])
    return d.same.choice("01"), exponent, fraction


# ---- master_step -------------------------------------------------------------------


WARM_UP = 8, 11  # cases: lr is 0, as in the first step of many schedules


@exercise("master_step", solution=solutions.master_step)
def check_master_step(answer: Answer) -> str:
    """`master_step(parameters, masters, lr)`: a step of SGD on copies in 32 bits.

    Where do small steps add up, and with which numbers does the model compute
    afterwards?

    Convert each gradient to 32 bits before you multiply. Subtract in place from the
    copy. Then write the rounded copy into the parameter, also in place. A parameter
    without a gradient keeps its numbers, and so does its copy.
    """
    hints = {"in_place": wrong_master, "kept": wrong_master}
    # With lr a power of two no product is rounded: every bit of the sum can be judged.
    for exact, lrs in ((False, (1e-3, 0.3)), (True, (0.25, 1.0))):
        same_as(
            *(answer, solutions.master_step, partial(_parameters, lrs=lrs)),
            cases=40,
            exact=exact,
            hints=hints,
        )
    return (
        "80 steps in bfloat16 and float16, with five learning rates: the parameters "
        "are the rounded copies, in their own storage; some had no gradient, some "
        "were empty or strided"
    )


def _parameters(
    d: Draw, lrs: Sequence[float]
) -> tuple[list[nn.Parameter], list[Tensor], float]:
    types = torch.bfloat16, torch.float16
    mixed, none = d.case % 5 == 2, d.case % 10 == 4  # both types; no gradient at all
    parameters, masters = [], []
    for k in range(d.same.randint(2 if d.case < 9 else 1, 4)):
        dtype = types[(d.case + k * mixed) % 2]
        shape = d.same.choice([(2, 2), (3,), (), (0,)])
        numbers = d.tensor(shape, torch.float32, strided=True) / 512
        parameter = nn.Parameter(numbers.to(dtype))
        if not none and (d.same.random() < 0.7 or not parameters):
            strided = d.case % 4 < 2
            gradient = d.tensor(shape, torch.float32, strided=strided) / 300
            parameter.grad = gradient.to(dtype)
            if d.case % 10 == 9 and shape:  # this step does not check for inf
                parameter.grad[:1] = math.inf
        parameters.append(parameter)
        # Without a gradient copy and parameter differ by 1: overwriting one is seen.
        masters.append(parameter.detach().float() + 2.0**-14 + (parameter.grad is None))
    lr = 0.0 if d.case in WARM_UP else d.same.choice(lrs)
    return parameters, masters, lr


def wrong_master(case: Case) -> str:
    """Describe the first wrong parameter, copy or gradient."""
    names = "parameters", "masters"
    olds = zip(*(case.args[name] for name in names), strict=True)
    news = zip(*(case.after[name] for name in names), strict=True)
    rights = zip(*(case.right[name] for name in names), strict=True)
    untyped = "changed the type of a tensor: parameters stay in 16 bits, copies in 32."
    alone = "changed a parameter that has no gradient, or its copy; leave both alone."
    for old, (parameter, master), (right, copy) in zip(olds, news, rights, strict=True):
        if parameter.dtype != right.dtype or master.dtype != copy.dtype:
            return untyped
        if parameter.requires_grad != right.requires_grad:
            return "froze a parameter; leave `requires_grad` as it is."
        if not equal_values(parameter.grad, right.grad):
            return "changed the gradients; leave them as they are."
        if right.grad is None and not (
            equal_values(parameter, right) and equal_values(master, copy)
        ):
            return alone
        if not equal_values(master, copy):
            unchanged = " (It was not changed.)" if equal_values(master, old[1]) else ""
            return (
                f"left {shown(master)} in `masters`; expected {shown(copy)}. Is it lr "
                "times the gradient, computed in 32 bits and taken from the copy? "
                f"Always change the tensors in place.{unchanged}"
            )
        if not equal_values(parameter, right, exact=True):
            return (
                f"left {shown(parameter)} in `parameters`; expected the copies, "
                f"rounded: {shown(right)}."
            )
    return "changed the lists; change the tensors in place."


# ---- next_scale --------------------------------------------------------------------


@exercise("next_scale", solution=solutions.next_scale)
def check_next_scale(answer: Answer) -> str:
    """`next_scale(scale, clean, found, interval)`: the new scale, and the new count.

    When does the count of clean steps restart at 0?

    After an inf: half the scale, and a count of 0. Otherwise add 1 to the count; if it
    reaches the interval: twice the scale, and a count of 0.
    """

    def why(case: Case) -> str:
        because = (
            f"now {case.args['clean'] + 1} steps in a row are clean, of "
            f"{case.args['interval']}"
        )
        if case.args["found"]:
            because = "an inf was found"
        returned = f"returned {shown(case.got)}; expected {shown(case.wanted)}"
        return f"{returned}, because {because}."

    hints = {"right": why, "fits": why}
    same_as(answer, solutions.next_scale, _scale, cases=200, exact=True, hints=hints)
    return (
        "200 steps, a third of them with inf, for scales from 2^-20 to 2^30, not only "
        "powers of two"
    )


def _scale(d: Draw) -> tuple[float, int, bool, int]:
    interval = d.same.choice([1, 2, 3, 7, 2000, 100_000])
    clean = d.same.choice([0, interval - 1, d.same.randrange(interval)])
    scale = d.same.choice([1.0, 1.0, 3.0, 0.7]) * 2.0 ** d.same.randint(-20, 30)
    return scale, clean, d.same.random() < 0.3, interval


# ---- agreed_step -------------------------------------------------------------------

FEW = (
    "called {called}, and wrote {written:,} bytes; at most two all_reduces, with "
    "two numbers in all, are needed."
)
WEIGHTS = (
    "left the weights {got_in_place}; expected {wanted_in_place}. First divide by the "
    "scale, then take the norm of all ranks' gradients, then clip if it is above "
    "`max_norm`; change the weights in place."
)


def _wrong_verdict(case: Case) -> str:
    """Describe a wrong verdict; finite gradients may have a sum that is inf."""
    found = f"returned {shown(case.got)}; expected {shown(case.wanted)}"
    if case.wanted is True and case.got is False:
        return (
            f"{found}: no gradient of any rank is inf or nan. In 32 bits, sums and "
            "squares of large gradients may be inf."
        )
    return f"{found}: return whether all ranks step (True) or none (False)."


STEP = {
    "right": _wrong_verdict,
    "in_place": WEIGHTS,
    "kept": WEIGHTS,
}
SPECIAL_NUMBERS = (math.inf, -math.inf, math.nan, 1e20)  # ranks step with 1e20
EVERYWHERE, LARGE = 4, 7  # cases: inf on all ranks; large numbers, whose sum is inf
UNCLIPPED = 17  # case: max_norm is inf
NEARLY = 12  # case: the norm is only 0.2 % above max_norm
NAN_ON_LAST = 18  # case: one nan, on the last rank; gloo's MAX keeps only rank 0's nan


@exercise("agreed_step", solution=solutions.agreed_step)
def check_agreed_step(answer: Answer) -> str:
    """`agreed_step(weights, gradients, scale, max_norm, lr)`: all ranks step, or none.

    Each rank has shards. Which two facts does no rank know by itself?

    Divide your gradients by the scale. Add up their squares in float64, in which no
    square of a float32 overflows, then over the ranks. The root is the norm of all
    gradients; it is finite only if every gradient of every rank is. If it is finite,
    subtract lr times the gradients from the weights, in place, scaled down if the norm
    is above `max_norm`. A rank without shards takes part, too.
    """
    same_on_ranks(
        *(answer, solutions.agreed_step, _shards),
        worlds=(2, 3, 1),
        cases=19,
        watch=["collectives", "bytes", "storage"],
        free=["gradients"],
        most_calls=2,
        hints=STEP | dict.fromkeys(("few", "least", "library", "bytes"), FEW),
        hint="Every rank calls the same all_reduce, even a rank without gradients.",
    )
    return (
        "57 cases on 1, 2 and 3 real ranks: inf or nan anywhere on one rank holds all "
        "ranks back; all clip by the same norm, that of the unscaled gradients"
    )


def _shards(d: Draw) -> tuple[list[Tensor], list[Tensor], float, float, float]:
    """Return shards of weights and gradients, scale, max_norm and lr.

    In every third case a gradient of one rank has one of SPECIAL_NUMBERS; in case
    EVERYWHERE all ranks have an inf, in case NAN_ON_LAST the last rank has a nan, and
    in case LARGE all numbers are finite but a tensor's sum is not. `max_norm` lies
    above or below the norm of all ranks' gradients; in case NEARLY a little below; in
    case UNCLIPPED it is inf.
    """
    everyones = [_gradients(Draw(d.case, r, d.n)) for r in range(d.n)]
    norm = math.sqrt(sum(g.square().sum() for gs in everyones for g in gs))
    gradients, scale = everyones[d.rank], d.same.choice([1024.0, 8.0, 0.25])
    max_norm = norm * (0.95, 0.1, 1.5)[d.case % 3] + 0.001
    max_norm = math.inf if d.case == UNCLIPPED else max_norm
    max_norm = 0.998 * norm if d.case == NEARLY else max_norm
    owner, special = d.same.randrange(d.n), SPECIAL_NUMBERS[(d.case // 3 + d.n) % 4]
    special = math.inf if d.case == EVERYWHERE else special
    if d.case == NAN_ON_LAST:
        owner, special = d.n - 1, math.nan
    scale = 1024.0 if d.case == LARGE else scale
    full = [gradient for gradient in gradients if len(gradient)]
    has_special = d.case % 3 == 1 or d.case == NAN_ON_LAST
    if has_special and full and (d.rank == owner or d.case == EVERYWHERE):
        chosen = d.own.choice(full)
        chosen[d.own.randrange(len(chosen))] = special
        if d.case == LARGE:
            chosen.fill_(2.0**127 / scale)
    weights = [torch.ones_like(gradient) for gradient in gradients]
    gradients = [gradient * scale for gradient in gradients]
    return weights, gradients, scale, max_norm, d.same.choice([0.5, 0.125])


def _gradients(d: Draw) -> list[Tensor]:
    """Return one to three gradients; from case 2 on, one rank has none.

    From case 2 on gradients can be empty. In case 3 they are so large that the byte
    count shows whether a rank sends them.
    """
    shapes = [(2,), (1,), (3,), (0,), (2, 3)][: 3 if d.case < 2 else 5]
    if d.case == 3:
        shapes = [(4500,), (4000,)]
    shapes = d.own.choices(shapes, k=d.own.choice([1, 2, 3]))
    without = d.same.randrange(d.n) == d.rank and d.n > 1 and d.case >= 2
    shapes = [] if without else shapes
    return [d.tensor(s, torch.float32, strided=True) / 500 for s in shapes]
