"""Wrong answers to the exercises of chapter 12, each with a word of its hint."""

from slips import slips

from ddp_course.chapters.ch12_precision import solutions

WRONG = slips(
    solutions,
    globals(),
    from_bits="""
    no_subnormals: what fp16 keeps of 3e-05
        1 + f) * 2.0 ** (e - bias) if e else f * 2.0 ** (1 - => 1 + f) * 2.0 ** (e -
        if "0" not in exponent => if False
    one_power_too_low: what fp16 keeps of
        (1 - bias) => -bias
    bias_of_float32: what fp16 keeps of 1
        (1 + f) * 2.0 ** (e - bias) if e else => (1 + f) * 2.0 ** (e - 127) if e else
    all_ones_is_inf: another fraction, is nan
        math.nan if f else math.inf => math.inf
    without_a_sign: what fp16 keeps of -2.5
        return -size if sign == "1" else size => return size
    fraction_as_decimal: what fp16 keeps of
        / 2 ** len => / 10 ** len
    infinity_has_no_sign: the sign is that of the infinity
        if sign == "1" else => if sign == "1" and "0" in exponent else
    """,
    master_step="""
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
    new_copies: change the tensors in place
        for k, p in enumerate(parameters):
            if p.grad is not None:
                masters[k] = masters[k] - lr * p.grad.float()
                p.data.copy_(masters[k])
    copied_without_a_gradient: leave both alone
        solutions.master_step(parameters, masters, lr)
        for p, m in zip(parameters, masters, strict=True):
            p.data.copy_(m)
    """,
    next_scale="""
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
    """,
    agreed_step="""
    known_to_one: by all ranks or by none
        dist. => mine = squares.isfinite(); squares.nan_to_num_(0, 0); dist.
        float(squares.sqrt()) => float(squares.sqrt()) if mine else math.inf
    clipped_before: First divide by the scale
        min(1.0, max_norm / norm) if norm => min(1.0, max_norm / (norm * scale)) if norm
    never_unscaled: First divide by the scale
        squares = torch.zeros => scale = 1.0; squares = torch.zeros
    own_norm: the norm of all ranks' gradients
        dist.all_reduce(squares) => total = squares.clone(); dist.all_reduce(total)
        float(squares.sqrt()) => float(squares.sqrt()) if total.isfinite() else math.inf
    steps_anyway: by all ranks or by none
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
    only_inf_is_seen: by all ranks or by none
        found = torch.tensor([float(any(g.isinf().any() for g in gradients))])
        dist.all_reduce(found)
        if found:
            return False
        clean = [g.nan_to_num() for g in gradients]
        return solutions.agreed_step(weights, clean, scale, max_norm, lr)
    """,
)
