"""Answers to the exercises of chapter 08, right ones and wrong ones."""

# ruff: noqa: F401 (the texts use what is imported)

import math

import torch
from slips import answers

from ddp_course.chapters.ch08_fsdp import solutions


class _WithSetup(torch.autograd.Function):
    """Written in two parts, as PyTorch has it since 2.0; computes only what it must."""

    @staticmethod
    def forward(x, shard, gather, reduce_scatter, world_size):
        return torch.einsum("bi,oi->bo", x, gather(shard))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])
        ctx.tools = inputs[2:]

    @staticmethod
    def backward(ctx, gradient):
        (x, shard), (gather, reduce_scatter, n) = ctx.saved_tensors, ctx.tools
        of_x = gradient @ gather(shard) if ctx.needs_input_grad[0] else None
        of_shard = None
        if ctx.needs_input_grad[1]:
            of_shard = reduce_scatter(gradient.T @ x).div_(n)
        return of_x, of_shard, None, None, None


in_two_parts = _WithSetup.apply


KEPT = {}  # what an answer keeps between two calls


class _Keeps:
    """Where a wrong answer hides a weight."""


class _AsIfAlone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, gather, reduce_scatter, n, frozen):
        ctx.save_for_backward(x, shard)
        ctx.tools = gather, reduce_scatter, n, frozen
        return x @ gather(shard).T

    @staticmethod
    def backward(ctx, gradient):
        (x, shard), (gather, reduce_scatter, n, frozen) = ctx.saved_tensors, ctx.tools
        weight = gather(shard).requires_grad_(frozen != "shard" or shard.requires_grad)
        x = x.detach().requires_grad_(frozen != "x" or x.requires_grad)
        with torch.enable_grad():
            out = x @ weight.T
        grads = torch.autograd.grad(out, (x, weight), gradient)
        return grads[0], reduce_scatter(grads[1]) / n, None, None, None, None


ANSWERS = answers(
    solutions,
    globals(),
    my_schedule="""
    as_small_steps:
        # One list of what is computed; what must be there is worked out for each.
        order = [("forward", k) for k in range(units)]
        order += [("backward", k) for k in range(units)[::-1]]
        whole, ops = [], []
        for what, unit in order:
            sign = 1 if what == "forward" else -1
            for k in range(unit, unit + sign * (prefetch + 1), sign):
                if k in range(units) and k not in whole:
                    whole.append(k)
                    ops.append(["gather", k])
            ops.append([what, unit])
            if what == "backward" or not keep:
                whole.remove(unit)
                ops.append(["free", unit])
            if what == "backward":
                ops.append(["reduce", unit])
        return ops
    as_two_queues:
        # What is computed and what is gathered are lists of their own; they are merged.
        forward, backward = range(units), range(units)[::-1]
        ops = []
        for what, order in (("forward", forward), ("backward", backward)):
            gathers = [] if keep and what == "backward" else list(order)
            for unit in order:
                reach = unit + prefetch if what == "forward" else unit - prefetch
                while (
                    gathers and (gathers[0] - reach) * (-1) ** (what == "backward") <= 0
                ):
                    ops.append(("gather", gathers.pop(0)))
                ops.append((what, unit))
                ops += [] if keep and what == "forward" else [("free", unit)]
                ops += [("reduce", unit)] if what == "backward" else []
        return ops
    farthest_first: gather the unit that is needed first
        order[k : k + 1 + prefetch] => order[k : k + 1 + prefetch][::-1]
    one_digit: the order of computing
        return ops => return [(what, int(f"{unit}"[-1])) for what, unit in ops]
    gathered_after_the_step: when the step has ended
        return ops => return [*ops, ("gather", 0)]
    two_ahead_at_most: prefetch = 3
        order[k : k + 1 + prefetch] => order[k : k + 1 + min(prefetch, 2)]
    everything_first: need not be
        not keep => False
        return ops => return sorted(ops, key=lambda op: op[0] != "gather")
    no_second_gather: not there
        whole.remove(unit) => pass
    always_one_ahead: need not be
        order[k : k + 1 + prefetch] => order[k : k + 2]
    never_ahead: gathered ahead
        order[k : k + 1 + prefetch] => order[k : k + 1]
    kept_all_the_same: need not be
        not keep => False
    gathered_whether_there_or_not: sent for nothing
        if ahead not in whole => if True
    never_freed: free a unit as soon as
        if free: => if False:
    reduced_at_the_end: only after others' backward
        ops.append(("reduce", unit)) => pass
        return ops
        => return ops + [("reduce", unit) for unit in list(range(units))[::-1]]
    never_reduced: reduced 0 times
        ops.append(("reduce", unit)) => pass
    backward_in_the_order_of_forward: backward the other way
        list(range(units))[::-1] => list(range(units))
    never_kept: stays whole
        not keep => True
    only_forward: backward the other way
        return ops => return [op for op in ops if op[0] != "backward"]
    reduced_before_it_is_freed: still whole when its gradients are reduced
        ops = solutions.my_schedule(units, prefetch, keep)
        for at in range(len(ops) - 1):
            if ops[at][0] == "free" and ops[at + 1][0] == "reduce":
                ops[at : at + 2] = ops[at + 1], ops[at]
        return ops
    gathers_before_it_frees: free it right after it was used
        ops = solutions.my_schedule(units, prefetch, keep)
        for at in range(len(ops) - 1):
            if ops[at][0] == "free" and ops[at + 1][0] == "gather":
                ops[at : at + 2] = ops[at + 1], ops[at]
        return ops
    in_8_bits: the order of computing is
        return ops => return [(what, unit % 256) for what, unit in ops]
    freed_too_late: need not be
        ops, waiting = [], []
        for op in solutions.my_schedule(units, prefetch, keep):
            if op[0] == "free":
                waiting.append(op)
                continue
            if op[0] in ("forward", "backward") and len(waiting) > 1:
                ops.append(waiting.pop(0))
            ops.append(op)
        return ops + waiting
    """,
    sharded_linear="""
    divided_before_it_is_summed:
        # As the package does it: small summands, no overflow in 16 bits.

        class Linear(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, shard):
                ctx.save_for_backward(x, shard)
                return x @ gather(shard).T

            @staticmethod
            def backward(ctx, gradient):
                x, shard = ctx.saved_tensors
                own = reduce_scatter((gradient / world_size).T @ x)
                return gradient @ gather(shard), own

        return Linear.apply(x, shard)
    in_two_parts:
    overwrites_the_gradient: a second backward adds
        class Linear => shard.grad = None
        => class Linear
    unfreezes_the_shard: a gradient of a frozen tensor
        class Linear => shard.requires_grad_()
        => class Linear
    plain_autograd: alive after forward
        class Linear => return x @ gather(shard).T
        => class Linear
    saves_the_weight: alive after forward
        ctx.save_for_backward => shard = gather(shard); ctx.save_for_backward
        x @ gather(shard).T => x @ shard.T
        grad @ gather(shard) => grad @ shard
    in_the_context: alive after forward
        ctx.save_for_backward => ctx.weight = gather(shard); ctx.save_for_backward
        x @ gather(shard).T => x @ ctx.weight.T
        grad @ gather(shard) => grad @ ctx.weight
    saves_a_copy: autograd keeps
        ctx.save_for_backward(x, shard)
        => shard = gather(shard); ctx.save_for_backward(x, shard.clone())
        x @ gather(shard).T => x @ shard.T
        grad @ gather(shard) => grad @ shard
    sum_of_ranks: divide by their number
        / world_size =>
    no_way_back_for_x: gradient of x
        return grad_x => return None
    own_rows_only: expected the mean
        return grad_x, reduce_scatter(grad.T @ x) => reduce_scatter(grad.T @ x)
        => rank = torch.distributed.get_rank()
        => return grad_x, (grad.T @ x).chunk(world_size)[rank]
    views_the_input: view size is not compatible
        return Linear.apply(x, shard)
        => return Linear.apply(x.view(-1).view(x.shape), shard)
    inputs_kept_by_shape: of the shard of layer
        ctx.save_for_backward(x, shard)
        => ctx.save_for_backward(shard); KEPT[x.shape] = x
        x, shard = ctx.saved_tensors
        => (shard,) = ctx.saved_tensors; x = KEPT[grad.shape[0], shard.shape[1]]
    silent_with_zeros: also one whose x is zero
        return grad_x, => if not x.any():
        =>     return grad_x, torch.zeros_like(shard)
        => return grad_x,
    waits_for_all: of PyTorch
        return x @ => torch.distributed.barrier(); return x @
    kept_after_backward: alive after backward
        grad_x = grad @ gather(shard)
        => sharded_linear.kept = gather(shard); grad_x = grad @ sharded_linear.kept
    fails_with_a_frozen_shard: One of the differentiated Tensors does not
        return _AsIfAlone.apply(x, shard, gather, reduce_scatter, world_size, "shard")
    fails_with_a_frozen_input: One of the differentiated Tensors does not
        return _AsIfAlone.apply(x, shard, gather, reduce_scatter, world_size, "x")
    a_copy_of_the_weight: Which variable keeps a copy
        _Keeps.weights = [*getattr(_Keeps, "weights", ()), gather(shard).clone()]
        again = iter([_Keeps.weights[-1], None])
        return solutions.sharded_linear(
            x,
            shard,
            lambda shard: (
                found if (found := next(again)) is not None else gather(shard)
            ),
            reduce_scatter,
            world_size,
        )
    through_a_clone: autograd keeps
        weight = gather(shard)
        rank = torch.distributed.get_rank()
        parts = list(weight.chunk(world_size))
        parts[rank] = shard
        return x @ torch.cat(parts).T
    one_row_squeezed: of a 0-d tensor
        return Linear.apply(x, shard) => return Linear.apply(x, shard).squeeze()
    scales_the_gradient_in_place: changed the gradient that its `backward`
        reduce_scatter(grad.T @ x) / world_size
        => reduce_scatter(grad.div_(world_size).T @ x)
    scales_a_contiguous_gradient: changed the gradient that its `backward`
        reduce_scatter(grad.T @ x) / world_size
        => reduce_scatter(grad.contiguous().div_(world_size).T @ x)
    scales_the_gradient_and_back: more than one element of the written-to tensor
        return grad_x, reduce_scatter(grad.T @ x) / world_size
        => own = reduce_scatter(grad.div_(world_size).T @ x)
        => grad.mul_(world_size)
        => return grad_x, own
    silent_without_rows: or has no rows
        return grad_x, => if len(x) == 0:
        =>     return grad_x, torch.zeros_like(shard)
        => return grad_x,
    frees_x_after_one_backward: no attribute 'kept'
        ctx.save_for_backward(x, shard) => ctx.kept = x, shard
        x, shard = ctx.saved_tensors => x, shard = ctx.kept; del ctx.kept
    """,
    ranks_needed="""
    ranks_by_halving:
        # More ranks never need more: the least number is found by bisection.
        def fits(n):
            pairs = [a + b for a, b in zip(units, units[1:], strict=False)] or units
            whole = 4 * (max(pairs) + max(units))
            return 16 * sum(-(-k // n) for k in units) + whole + activations <= memory

        low, high = 1, 1024
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle + 1, high)
        return low if fits(low) else None
    first_that_fits:
        neighbours = [sum(units[k : k + 2]) for k in range(max(1, len(units) - 1))]
        left = memory - activations - 4 * max(neighbours) - 4 * max(units)
        shards = (sum(math.ceil(unit / n) for unit in units) for n in range(1, 1025))
        return next((n for n, each in enumerate(shards, 1) if 16 * each <= left), None)
    recursive: RecursionError
        def total(k):
            return units[k] + total(k + 1) if k < len(units) else 0

        total(0)
        return solutions.ranks_needed(units, memory, activations)
    in_32_bits: bytes and has
        shards + whole + gradients + activations
        => (shards + whole + gradients + activations) % 2**32
    in_float32: bytes
        shards + whole + gradients + activations
        => torch.tensor([shards, whole, gradients, activations]).float().sum().item()
    known_by_units_and_memory: Called again
        return KEPT.setdefault(
            (*units, memory), solutions.ranks_needed(units, memory, activations)
        )
    up_to_1023: but 1024 are enough
        most + 1 => most
    without_an_end: expected a number of ranks, 1 to 1024
        most + 1 => 5000
    never_alone: but 1 are enough
        1, => 2,
    shards_alone: bytes and has
        shards + whole + gradients => shards
    one_unit_whole: bytes and has
        4 * max(map(sum, pairs)) => 4 * max(units)
    two_largest_whole: are enough
        4 * max(map(sum, pairs)) => 4 * sum(sorted(units)[-2:])
    activations_divided: bytes and has
        + activations => + activations / ranks
    never_none: no number of ranks is enough
        return None => return 1024
    no_gradients: bytes and has
        + gradients =>
    no_padding: bytes and has
        sum(16 * -(-unit // ranks) for unit in units) => 16 * sum(units) / ranks
    below_and_not_at: are enough
        <= memory => < memory
    sorts_its_input: work on a copy
        found = solutions.ranks_needed(list(units), memory, activations)
        units.sort()
        return found
    all_divided_by_n: bytes and has
        need = 16 * sum(units) + activations
        return -(-need // memory)
    """,
)
