"""Answers to the exercises of chapter 12, right ones and wrong ones."""

# ruff: noqa: F401 (the texts use what is imported)

import pickle
from fractions import Fraction

import numpy as np
import torch
import torch.distributed as dist
from slips import answers

from ddp_course.chapters.ch12_precision import solutions


@torch.no_grad()
def with_sgd(parameters, masters, lr):
    trained = [
        (p, m) for p, m in zip(parameters, masters, strict=True) if p.grad is not None
    ]
    for p, m in trained:
        m.grad = p.grad.float()
    torch.optim.SGD(masters, lr=lr).step()
    for p, m in trained:
        m.grad = None
        p.copy_(m)


COUNT, CALLS = [0], [0]


def asked(rank, weights, gradients, scale, max_norm, lr):
    """Step if one rank has found no inf and no nan."""
    found = torch.tensor(float(not all(g.isfinite().all() for g in gradients)))
    dist.broadcast(found, rank)
    clean = [g.nan_to_num(0, 0, 0) for g in gradients]
    return not found and solutions.agreed_step(weights, clean, scale, max_norm, lr)


ANSWERS = answers(
    solutions,
    globals(),
    from_bits="""
    bit_by_bit:
        power = sum(2**k for k, bit in enumerate(reversed(exponent)) if bit == "1")
        highest = power == 2 ** len(exponent) - 1
        digits = Fraction(0 if power == 0 else 1)
        for k, bit in enumerate(fraction, 1):
            digits += Fraction(int(bit), 2**k)
        minus = -1.0 if sign == "1" else 1.0
        if highest:
            return minus * float("inf") if digits == 1 else float("nan")
        bias = int("0" + "1" * (len(exponent) - 1), 2)
        return math.copysign(
            float(digits * Fraction(2) ** (max(power, 1) - bias)), minus
        )
    by_ldexp:
        e, f, width = int(exponent, 2), int(fraction, 2), len(fraction)
        if e == 2 ** len(exponent) - 1:
            return [float("inf"), float("-inf")][int(sign)] if f == 0 else math.nan
        units = f + (2**width if e else 0)
        size = math.ldexp(units, max(e, 1) - (2 ** (len(exponent) - 1) - 1) - width)
        return -size if int(sign) else size
    no_subnormals: it is 3e-05
        1 + f) * 2.0 ** (e - bias) if e else f * 2.0 ** (1 - => 1 + f) * 2.0 ** (e -
        if "0" not in exponent => if False
    one_power_too_low: rounded to fp16
        (1 - bias) => -bias
    bias_of_float32: it is 1
        (1 + f) * 2.0 ** (e - bias) if e else => (1 + f) * 2.0 ** (e - 127) if e else
    all_ones_is_inf: another fraction, is nan
        math.nan if f else math.inf => math.inf
    without_a_sign: it is -2.5
        return -size if sign == "1" else size => return size
    fraction_as_decimal: rounded to fp16
        / 2 ** len => / 10 ** len
    infinity_has_no_sign: the sign is the sign of the infinity
        if sign == "1" else => if sign == "1" and "0" in exponent else
    of_numpy:
        return np.float64(solutions.from_bits(sign, exponent, fraction))
    two_formats_only: the exponent has
        2 ** (len(exponent) - 1) - 1 => {5: 15}.get(len(exponent), 127)
    rounded_to_float32: the exponent has
        size = math.nan if f else math.inf => size = math.nan if f else math.inf
        return -size if => size = torch.tensor(size, dtype=torch.float64).float().item()
        => return -size if
    a_fraction_of_23_bits: the exponent has
        e, f = int(exponent, 2) => fraction = fraction[:23]; e, f = int(exponent, 2)
    an_exponent_of_8_bits: the exponent has
        e, f = int(exponent, 2) => exponent = exponent[:8]; e, f = int(exponent, 2)
    whole_numbers_as_int: it is 1
        size = solutions.from_bits(sign, exponent, fraction)
        whole = math.isfinite(size) and size == int(size) and size != 0
        return int(size) if whole else size
    an_exponent_of_one_bit: ValueError
        2 ** (len(exponent) - 1) - 1 => int("1" * (len(exponent) - 1), 2)
    four_bits_have_no_inf: the exponent has 4 bits
        "0" not in exponent => "0" not in exponent and len(exponent) != 4
    """,
    master_step="""
    with_sgd:
    by_index:
        for k in range(len(parameters)):
            if parameters[k].grad is None:
                continue
            masters[k].add_(parameters[k].grad.float(), alpha=-lr)
            parameters[k].data[...] = masters[k].to(parameters[k].dtype)
    never_copied_back: expected the copies, rounded
        parameter.data.copy_(master) => pass
    steps_the_parameters: taken from the copy
        master -= lr * parameter.grad.to(master.dtype)
        => parameter.data -= lr * parameter.grad
        parameter.data.copy_(master) => master.copy_(parameter.data)
    multiplied_in_16_bits: computed in 32 bits
        master -= lr * parameter.grad.to => master -= (lr * parameter.grad).to
    none_without: AttributeError
        if parameter.grad is not None => if True
    gradients_scaled: leave them as they are
        grad.to(master.dtype) => grad.to(master.dtype); parameter.grad *= lr
    one_step_behind: expected the copies, rounded
        parameter.data.copy_(master) => pass
        master -= lr => parameter.data.copy_(master); master -= lr
    added: taken from the copy
        master - => master +
    all_are_rounded: in `masters`
        data.copy_(master) => data.copy_(master); master.copy_(parameter.data)
    from_what_is_rounded: taken from the copy
        master -= lr => master.copy_(parameter.data); master -= lr
    new_copies: Always change the tensors in place
        for k, p in enumerate(parameters):
            if p.grad is not None:
                masters[k] = masters[k] - lr * p.grad.float()
                p.data.copy_(masters[k])
    copied_without_a_gradient: leave both alone
        solutions.master_step(parameters, masters, lr)
        for p, m in zip(parameters, masters, strict=True):
            p.data.copy_(m)
    the_first_alone: in `masters`
        solutions.master_step(parameters[:1], masters[:1], lr)
    stops_at_none: expected
        if parameter.grad is not None: => if parameter.grad is None:
        =>     break
        => if True:
    pairs_that_shift: must match the size
        zip(parameters, masters, strict=True)
        => zip([p for p in parameters if p.grad is not None], masters, strict=False)
    returns_both_lists: changed the result of an earlier call: return nothing
        solutions.master_step(parameters, masters, lr)
        return parameters, masters
    another_storage: gave `parameters` other memory
        parameter.data.copy_(master) => parameter.data = master.to(parameter.dtype)
    copies_in_other_memory: gave `masters` other memory
        master -= => master.data = master -
    viewed_gradients: view size is not compatible
        parameter.grad.to(master.dtype)
        => parameter.grad.view(-1).float().view_as(master)
    nothing_to_do_at_0: expected the copies, rounded
        for parameter => if not lr:
        =>     return
        => for parameter
    a_default_for_0: taken from the copy
        master -= lr => master -= (lr or 0.1)
    skips_inf: taken from the copy
        if parameter.grad is not None
        => if parameter.grad is not None and parameter.grad.isfinite().all()
    the_first_ones_type: expected the copies, rounded
        copy_(master) => copy_(master.to(parameters[0].dtype))
    all_gradients_in_one: non-empty list
        present = [p.grad.float().flatten() for p in parameters if p.grad is not None]
        flat = torch.cat(present)
        for p, m in zip(parameters, masters, strict=True):
            if p.grad is not None:
                part, flat = flat[: p.numel()], flat[p.numel() :]
                m -= lr * part.view_as(m)
                p.data.copy_(m)
    freezes: leave `requires_grad` as it is
        data.copy_(master) => data.copy_(master); parameter.requires_grad_(False)
    rounded_twice: expected the copies, rounded
        copy_(master) => copy_(master.bfloat16())
    """,
    next_scale="""
    in_one_line:
        full = not found and (clean + 1) % interval == 0
        return (
            scale * (0.5 if found else 2 if full else 1),
            0 if found or full else clean + 1,
        )
    by_cases:
        match bool(found), clean == interval - 1:
            case True, _:
                return scale * 0.5, 0
            case False, True:
                return scale + scale, 0
        return scale, clean + 1
    never_resets: an inf was found
        scale / 2, 0 => scale / 2, clean
    grows_too_late: in a row
        clean + 1 == interval => clean == interval
    goes_on_counting: in a row
        scale * 2, 0 => scale * 2, clean + 1
    never_shrinks: an inf was found
        if found => if False
    never_grows: in a row
        clean + 1 == interval => False
    halves_once: an inf was found
        scale / 2, 0 => (scale / 2 if clean else scale), 0
    grows_by_one: in a row
        scale * 2, 0 => scale + 1, 0
    whole_scales: an inf was found
        scale / 2, 0 => scale // 2, 0
    powers_of_two: in a row
        scale, clean = solutions.next_scale(scale, clean, found, interval)
        return 2.0 ** round(math.log2(scale)), clean
    scale_of_32_bits: in a row
        scale, clean = solutions.next_scale(scale, clean, found, interval)
        return torch.tensor(scale).item(), clean
    count_of_16_bits: in a row
        scale, clean + 1 => scale, int(np.array(clean + 1).astype(np.int16))
    never_below_one: an inf was found
        scale / 2, 0 => max(scale / 2, 1.0), 0
    counts_by_itself: in a row
        if found => clean = COUNT[0]
        => COUNT[0] = 0 if found or clean + 1 == interval else clean + 1
        => if found
    """,
    agreed_step="""
    two_messages:
        found = torch.zeros(1)
        for g in gradients:
            found = torch.maximum(found, (~g.isfinite()).any().float().view(1))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        squares = torch.zeros(1, dtype=torch.float64)
        for g in gradients:
            squares += (g / scale).double().pow(2).sum()
        dist.all_reduce(squares)
        if found.item():
            return False
        shrink = float((max_norm / (squares.sqrt() + 1e-9)).clamp(max=1.0))
        for w, g in zip(weights, gradients, strict=True):
            w.sub_(lr * shrink * g / scale)
        return True
    one_message_of_two:
        both = torch.zeros(2, dtype=torch.float64)
        for g in gradients:
            both[0] += (~g.isfinite()).sum()
            both[1] += (g.nan_to_num().double() / scale).square().sum()
        dist.all_reduce(both)
        if both[0] > 0:
            return False
        norm = both[1].sqrt().item()
        factor = max_norm / norm if norm > max_norm else 1.0
        for w, g in zip(weights, gradients, strict=True):
            w -= lr * factor * g / scale
        return True
    one_row:
        row = torch.cat([torch.zeros(0), *(g.flatten() for g in gradients)]) / scale
        square = row.double().dot(row.double())
        dist.all_reduce(square)
        if not square.isfinite():
            return False
        norm = square.sqrt().item()
        row *= max_norm / norm if norm > max_norm else 1.0
        steps = row.split([w.numel() for w in weights])
        for w, step in zip(weights, steps, strict=True):
            w -= lr * step.view(w.shape)
        return True
    flags_that_add_up_to_1: return whether all ranks step
        flag = torch.tensor(float(any(not g.isfinite().all() for g in gradients)))
        dist.all_reduce(flag)
        if flag == 1:
            return False
        clean = [g.nan_to_num(0, 0, 0) for g in gradients]
        return solutions.agreed_step(weights, clean, scale, max_norm, lr)
    an_infinite_sum: no gradient of any rank is inf or nan
        bad = any(not g.sum().isfinite() for g in gradients)
        gradients = [g * math.nan for g in gradients] if bad else gradients
        return solutions.agreed_step(weights, gradients, scale, max_norm, lr)
    inf_by_inf: First divide by the scale
        min(1.0, max_norm / norm) if norm else 1.0 => max_norm / max(norm, max_norm)
    scales_above_1: First divide by the scale
        squares = torch.zeros => scale = max(scale, 1.0); squares = torch.zeros
    of_contiguous_ones: view size is not compatible
        gradient / scale => gradient.view(-1).view(gradient.shape) / scale
    weights_in_other_memory: views of it keep the old numbers
        weight -= => weight.data = weight -
    within_a_hundredth: if it is above `max_norm`
        min(1.0, max_norm / norm) if norm else 1.0
        => max_norm / norm if norm > 1.01 * max_norm else 1.0
    known_to_one: return whether all ranks step
        dist. => mine = squares.isfinite(); squares.nan_to_num_(0, 0); dist.
        float(squares.sqrt()) => float(squares.sqrt()) if mine else math.inf
    clipped_before: First divide by the scale
        min(1.0, max_norm / norm) if norm => min(1.0, max_norm / (norm * scale)) if norm
    never_unscaled: First divide by the scale
        squares = torch.zeros => scale = 1.0; squares = torch.zeros
    own_norm: the norm of all ranks' gradients
        dist.all_reduce(squares) => total = squares.clone(); dist.all_reduce(total)
        float(squares.sqrt()) => float(squares.sqrt()) if total.isfinite() else math.inf
    steps_anyway: return whether all ranks step
        squares = => gradients = [g.nan_to_num(0, 0, 0) for g in gradients]; squares =
    silent_without_gradients: Every rank calls the same all_reduce
        squares = torch.zeros => if not gradients:
        =>     return True
        => squares = torch.zeros
    largest_norm_of_a_rank: the norm of all ranks' gradients
        dist.all_reduce(squares) => squares.nan_to_num_(torch.inf, torch.inf)
        => dist.all_reduce(squares, dist.ReduceOp.MAX)
    always_of_the_norm: if it is above `max_norm`
        min(1.0, max_norm / norm) if norm else 1.0 => max_norm / (norm or 1)
    mean_of_squares: the norm of all ranks' gradients
        float(squares.sqrt()) => float((squares / dist.get_world_size()).sqrt())
    everything_gathered: at most two all_reduces
        dist.all_reduce(squares) => told = [None] * dist.get_world_size()
        => dist.all_gather_object(told, gradients)
        => squares.zero_()
        => for gradient in sum(told, []):
        =>     squares += gradient.double().square().sum()
    only_inf_is_seen: return whether all ranks step
        found = torch.tensor([float(any(g.isinf().any() for g in gradients))])
        dist.all_reduce(found)
        if found:
            return False
        clean = [g.nan_to_num() for g in gradients]
        return solutions.agreed_step(weights, clean, scale, max_norm, lr)
    rank_0_is_asked: return whether all ranks step
        return asked(0, weights, gradients, scale, max_norm, lr)
    the_last_rank_is_asked: return whether all ranks step
        return asked(dist.get_world_size() - 1, weights, gradients, scale, max_norm, lr)
    first_numbers_only: return whether all ranks step
        clean = [g.nan_to_num(0, 0, 0) for g in gradients]
        for one, g in zip(clean, gradients, strict=True):
            one[:1] = g[:1]
        return solutions.agreed_step(weights, clean, scale, max_norm, lr)
    minus_inf_is_missed: return whether all ranks step
        clean = [g.nan_to_num(torch.nan, torch.inf, 0.0) for g in gradients]
        return solutions.agreed_step(weights, clean, scale, max_norm, lr)
    the_largest_of_all: return whether all ranks step
        # Of a nan and a number, gloo's MAX keeps what the lower rank has.
        most = torch.zeros(1)
        for g in gradients:
            most = torch.maximum(most, g.abs().max()) if g.numel() else most
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if not most.isfinite():
            return False
        clean = [g.nan_to_num(0, 0, 0) for g in gradients]
        return solutions.agreed_step(weights, clean, scale, max_norm, lr)
    squares_in_32_bits: no gradient of any rank is inf or nan
        gradient.double().square() => gradient.square()
    one_scale: First divide by the scale
        gradient / scale => gradient / 1024
    one_norm: First divide by the scale
        max_norm / norm => 1 / norm
    one_rate: First divide by the scale
        lr * factor => 0.5 * factor
    by_messages: at most two all_reduces
        # Rank 0 gets the squares by messages.
        rank, n = dist.get_rank(), dist.get_world_size()
        square = torch.zeros(1, dtype=torch.float64)
        for gradient in gradients:
            square += (gradient / scale).double().square().sum()
        for other in range(1, n):
            if rank == 0:
                part = torch.empty_like(square)
                dist.recv(part, other)
                square += part
            elif rank == other:
                dist.send(square, 0)
        for other in range(1, n):
            if rank == 0:
                dist.send(square, other)
            elif rank == other:
                dist.recv(square, 0)
        norm = square.sqrt().item()
        if not math.isfinite(norm):
            return False
        for weight, gradient in zip(weights, gradients, strict=True):
            weight -= lr * min(1.0, max_norm / (norm or 1)) * gradient / scale
        return True
    through_the_store: at most two all_reduces
        store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
        CALLS[0] += 1
        store.set(f"{CALLS} {rank}", pickle.dumps(gradients))
        every = [store.get(f"{CALLS} {r}") for r in range(dist.get_world_size())]
        everyones = [g / scale for one in every for g in pickle.loads(one)]
        norm = math.sqrt(sum(g.double().square().sum() for g in everyones))
        if not math.isfinite(norm):
            return False
        for weight, gradient in zip(weights, gradients, strict=True):
            weight -= lr * min(1.0, max_norm / (norm or 1)) * gradient / scale
        return True
    """,
)
