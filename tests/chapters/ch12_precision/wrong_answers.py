"""Wrong answers to the exercises of chapter 12, each with a word of its hint."""

import math

import torch
import torch.distributed as dist

from ddp_course.chapters.ch12_precision import solutions

# from_bits


def _number(sign, whole, fraction, power):
    size = (whole + int(fraction, 2) / 2 ** len(fraction)) * 2.0**power
    return -size if sign == "1" else size


def no_subnormals(sign, exponent, fraction):
    bias = 2 ** (len(exponent) - 1) - 1
    return _number(sign, 1, fraction, int(exponent, 2) - bias)


def one_power_too_low(sign, exponent, fraction):
    if "1" in exponent:
        return solutions.from_bits(sign, exponent, fraction)
    return _number(sign, 0, fraction, 1 - 2 ** (len(exponent) - 1))


def bias_of_float32(sign, exponent, fraction):
    if "0" not in exponent or "1" not in exponent:
        return solutions.from_bits(sign, exponent, fraction)
    return _number(sign, 1, fraction, int(exponent, 2) - 127)


def all_ones_is_inf(sign, exponent, fraction):
    if "0" not in exponent:
        return -math.inf if sign == "1" else math.inf
    return solutions.from_bits(sign, exponent, fraction)


def without_a_sign(sign, exponent, fraction):
    return solutions.from_bits("0", exponent, fraction)


def fraction_as_decimal(sign, exponent, fraction):
    """Reads the digits after the point as those of a decimal number."""
    if "0" not in exponent:
        return solutions.from_bits(sign, exponent, fraction)
    f, bias = int(fraction, 2) / 10 ** len(fraction), 2 ** (len(exponent) - 1) - 1
    size = (bool(int(exponent, 2)) + f) * 2.0 ** (max(1, int(exponent, 2)) - bias)
    return -size if sign == "1" else size


def infinity_has_no_sign(sign, exponent, fraction):
    number = solutions.from_bits(sign, exponent, fraction)
    return number if "0" in exponent else abs(number)


# master_step


def _each(parameters, masters):
    pairs = zip(parameters, masters, strict=True)
    return [(p, m) for p, m in pairs if p.grad is not None]


def never_copied_back(parameters, masters, lr):
    for p, m in _each(parameters, masters):
        m -= lr * p.grad.float()


def steps_the_parameters(parameters, masters, lr):
    for p, m in _each(parameters, masters):
        p.data -= lr * p.grad
        m.copy_(p.data)


def multiplied_in_16_bits(parameters, masters, lr):
    for p, m in _each(parameters, masters):
        m -= (lr * p.grad).float()
        p.data.copy_(m)


def new_copies(parameters, masters, lr):
    for k, p in enumerate(parameters):
        if p.grad is not None:
            masters[k] = masters[k] - lr * p.grad.float()
            p.data.copy_(masters[k])


def none_without(parameters, masters, lr):
    for p, m in zip(parameters, masters, strict=True):
        m -= lr * p.grad.float()


def one_step_behind(parameters, masters, lr):
    for p, m in _each(parameters, masters):
        p.data.copy_(m)
        m -= lr * p.grad.float()


def added(parameters, masters, lr):
    for p, m in _each(parameters, masters):
        m += lr * p.grad.float()
        p.data.copy_(m)


def gradients_scaled(parameters, masters, lr):
    for p, m in _each(parameters, masters):
        m -= p.grad.float() * lr
        p.grad *= lr
        p.data.copy_(m)


def copied_without_a_gradient(parameters, masters, lr):
    solutions.master_step(parameters, masters, lr)
    for p, m in zip(parameters, masters, strict=True):
        p.data.copy_(m)


def from_what_is_rounded(parameters, masters, lr):
    for p, m in _each(parameters, masters):
        m.copy_(p.data.float() - lr * p.grad.float())
        p.data.copy_(m)


def all_are_rounded(parameters, masters, lr):
    solutions.master_step(parameters, masters, lr)
    for p, m in _each(parameters, masters):
        m.copy_(p.data)


# next_scale


def never_resets(scale, clean, found, interval):
    if found:
        return scale / 2, clean
    return solutions.next_scale(scale, clean, found, interval)


def grows_too_late(scale, clean, found, interval):
    if not found and clean == interval:
        return scale * 2, 0
    return (scale / 2, 0) if found else (scale, clean + 1)


def goes_on_counting(scale, clean, found, interval):
    new, _ = solutions.next_scale(scale, clean, found, interval)
    return new, 0 if found else clean + 1


def never_shrinks(scale, clean, found, interval):
    return solutions.next_scale(scale, clean, False, interval)


def never_grows(scale, clean, found, interval):
    return (scale / 2, 0) if found else (scale, clean + 1)


def halves_once(scale, clean, found, interval):
    """A second inf in a row changes nothing."""
    if found and clean == 0:
        return scale, 0
    return solutions.next_scale(scale, clean, found, interval)


def grows_by_one(scale, clean, found, interval):
    new, count = solutions.next_scale(scale, clean, found, interval)
    return (scale + 1 if new > scale else new), count


# agreed_step


def _step(weights, gradients, factor):
    for w, g in zip(weights, gradients, strict=True):
        w -= factor * g


def _squares(gradients):
    return sum((g.double().square().sum() for g in gradients), torch.zeros(()).double())


def _step_clipped(weights, gradients, scale, max_norm, lr, norm):
    if math.isfinite(norm):
        _step(weights, gradients, lr / scale * min(1.0, max_norm / (norm or 1)))
    return math.isfinite(norm)


def known_to_one(weights, gradients, scale, max_norm, lr):
    squares = _squares([g / scale for g in gradients]).view(1)
    mine = bool(squares.isfinite())
    squares = squares.nan_to_num(0, 0)
    dist.all_reduce(squares)
    norm = squares.sqrt().item() if mine else math.inf
    return _step_clipped(weights, gradients, scale, max_norm, lr, norm)


def clipped_before(weights, gradients, scale, max_norm, lr):
    squares = _squares(gradients).view(1)
    dist.all_reduce(squares)
    norm = squares.sqrt().item()
    if not math.isfinite(norm):
        return False
    _step(weights, gradients, lr * min(1.0, max_norm / (norm or 1)) / scale)
    return True


def never_unscaled(weights, gradients, scale, max_norm, lr):
    return solutions.agreed_step(weights, gradients, 1.0, max_norm, lr)


def own_norm(weights, gradients, scale, max_norm, lr):
    own = _squares([g / scale for g in gradients]).view(1)
    total = own.clone()
    dist.all_reduce(total)
    norm = own.sqrt().item() if total.isfinite() else math.inf
    return _step_clipped(weights, gradients, scale, max_norm, lr, norm)


def steps_anyway(weights, gradients, scale, max_norm, lr):
    clean = [g.nan_to_num(0, 0, 0) for g in gradients]
    return solutions.agreed_step(weights, clean, scale, max_norm, lr)


def only_inf_is_seen(weights, gradients, scale, max_norm, lr):
    found = torch.tensor([float(any(g.isinf().any() for g in gradients))])
    dist.all_reduce(found)
    if found:
        return False
    clean = [g.nan_to_num() for g in gradients]
    return solutions.agreed_step(weights, clean, scale, max_norm, lr)


def silent_without_gradients(weights, gradients, scale, max_norm, lr):
    if not gradients:
        return True
    return solutions.agreed_step(weights, gradients, scale, max_norm, lr)


def largest_norm_of_a_rank(weights, gradients, scale, max_norm, lr):
    squares = _squares([g / scale for g in gradients]).view(1)
    squares = squares.nan_to_num(torch.inf, torch.inf)
    dist.all_reduce(squares, dist.ReduceOp.MAX)
    norm = squares.sqrt().item()
    return _step_clipped(weights, gradients, scale, max_norm, lr, norm)


def always_of_the_norm(weights, gradients, scale, max_norm, lr):
    """Small gradients are made larger, too."""
    squares = _squares([g / scale for g in gradients]).view(1)
    dist.all_reduce(squares)
    norm = squares.sqrt().item()
    if math.isfinite(norm):
        _step(weights, gradients, lr / scale * max_norm / (norm or 1))
    return math.isfinite(norm)


def mean_of_squares(weights, gradients, scale, max_norm, lr):
    """As DDP would: but these are other gradients, not others' opinions of the same."""
    squares = _squares([g / scale for g in gradients]).view(1)
    dist.all_reduce(squares)
    norm = (squares / dist.get_world_size()).sqrt().item()
    return _step_clipped(weights, gradients, scale, max_norm, lr, norm)


def everything_gathered(weights, gradients, scale, max_norm, lr):
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, gradients)
    squares = sum(_squares([g / scale for g in its]) for its in told)
    norm = squares.sqrt().item()
    return _step_clipped(weights, gradients, scale, max_norm, lr, norm)


WRONG = {
    "from_bits": {
        no_subnormals: "what fp16 keeps of 3e-05",
        one_power_too_low: "what fp16 keeps of",
        bias_of_float32: "what fp16 keeps of 1",
        all_ones_is_inf: "another fraction, is nan",
        without_a_sign: "what fp16 keeps of -2.5",
        fraction_as_decimal: "what fp16 keeps of",
        infinity_has_no_sign: "the sign is that of the infinity",
    },
    "master_step": {
        never_copied_back: "expected the copies, rounded",
        steps_the_parameters: "taken from the copy",
        multiplied_in_16_bits: "computed in 32 bits",
        new_copies: "change the tensors in place",
        none_without: "AttributeError",
        gradients_scaled: "leave them as they are",
        one_step_behind: "expected the copies, rounded",
        added: "taken from the copy",
        all_are_rounded: "in `masters`",
        copied_without_a_gradient: "leave both alone",
        from_what_is_rounded: "taken from the copy",
    },
    "next_scale": {
        never_resets: "an inf was found",
        grows_too_late: "in a row",
        goes_on_counting: "in a row",
        never_shrinks: "an inf was found",
        never_grows: "in a row",
        halves_once: "an inf was found",
        grows_by_one: "in a row",
    },
    "agreed_step": {
        known_to_one: "by all ranks or by none",
        clipped_before: "First divide by the scale",
        never_unscaled: "First divide by the scale",
        own_norm: "the norm of all ranks' gradients",
        steps_anyway: "by all ranks or by none",
        only_inf_is_seen: "by all ranks or by none",
        silent_without_gradients: "Every rank calls the same all_reduce",
        largest_norm_of_a_rank: "the norm of all ranks' gradients",
        always_of_the_norm: "if it is above `max_norm`",
        mean_of_squares: "the norm of all ranks' gradients",
        everything_gathered: "at most two all_reduces",
    },
}
