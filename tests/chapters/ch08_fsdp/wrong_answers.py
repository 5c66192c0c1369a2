"""Wrong answers to the exercises of chapter 08, each with a word of its hint."""

import torch

from ddp_course.chapters.ch08_fsdp import solutions

# my_schedule


def _step(units, prefetch, keep, **mistakes):
    """Return a step with the mistakes that are asked for."""
    ops, whole = [], set()

    def compute(what, order, free):
        for k, unit in enumerate(order):
            coming = order[k : k + 1 + prefetch]
            for ahead in coming[::-1] if "farthest" in mistakes else coming:
                if ahead not in whole or "twice" in mistakes:
                    ops.append(("gather", ahead))
                    whole.add(ahead)
            ops.append((what, unit))
            if free and ("never_free" not in mistakes):
                ops.append(("free", unit))
                whole.discard(unit)
            if what == "backward" and "reduce_late" not in mistakes:
                ops.append(("reduce", unit))

    compute("forward", list(range(units)), free=not keep)
    compute("backward", list(range(units))[::-1], free=True)
    if "reduce_late" in mistakes:
        ops += [("reduce", unit) for unit in range(units)[::-1]]
    return ops


def everything_first(units, prefetch, keep):
    gathers = [("gather", k) for k in range(units)]
    rest = [op for op in _step(units, prefetch, True) if op[0] != "gather"]
    return gathers + rest


def no_second_gather(units, prefetch, keep):
    seen, ops = set(), []
    for op in _step(units, prefetch, keep):
        if op[0] != "gather" or op[1] not in seen:
            ops.append(op)
        if op[0] == "gather":
            seen.add(op[1])
    return ops


def always_one_ahead(units, prefetch, keep):
    return _step(units, 1, keep)


def never_ahead(units, prefetch, keep):
    return _step(units, 0, keep)


def kept_all_the_same(units, prefetch, keep):
    return _step(units, prefetch, True)


def gathered_whether_there_or_not(units, prefetch, keep):
    return _step(units, prefetch, keep, twice=True)


def never_freed(units, prefetch, keep):
    return _step(units, prefetch, keep, never_free=True)


def reduced_at_the_end(units, prefetch, keep):
    return _step(units, prefetch, keep, reduce_late=True)


def never_reduced(units, prefetch, keep):
    return [op for op in _step(units, prefetch, keep) if op[0] != "reduce"]


def backward_in_the_order_of_forward(units, prefetch, keep):
    flip = {k: units - 1 - k for k in range(units)}
    return [
        (what, flip[unit] if what in ("backward", "reduce") else unit)
        for what, unit in _step(units, prefetch, keep)
    ]


def freed_too_late(units, prefetch, keep):
    ops, waiting = [], []
    for op in _step(units, prefetch, keep):
        if op[0] == "free":
            waiting.append(op)
            continue
        if op[0] in ("forward", "backward") and len(waiting) > 1:
            ops.append(waiting.pop(0))
        ops.append(op)
    return ops + waiting


def never_kept(units, prefetch, keep):
    return _step(units, prefetch, False)


def only_forward(units, prefetch, keep):
    return [op for op in _step(units, prefetch, keep) if op[0] != "backward"]


# sharded_linear


def _linear(saves="x", mean=True, x_grad=True, whole_grad=True, free=True):
    def sharded_linear(x, shard, gather, reduce_scatter, world_size):
        class Linear(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, shard):
                weight = gather(shard)
                ctx.save_for_backward(x, shard)
                if saves == "weight":
                    ctx.save_for_backward(x, weight)
                elif saves == "context":
                    ctx.weight = weight
                elif saves == "copy":
                    ctx.save_for_backward(x, weight.clone())
                return x @ weight.T

            @staticmethod
            def backward(ctx, grad):
                x, weight = ctx.saved_tensors
                if saves == "x":
                    weight = gather(weight)
                elif saves == "context":
                    weight = ctx.weight
                if not free:
                    KEPT.append(weight)
                own = reduce_scatter(grad.T @ x)
                if not whole_grad:
                    own = (grad.T @ x).chunk(world_size)[torch.distributed.get_rank()]
                if mean:
                    own = own / world_size
                return grad @ weight if x_grad else None, own

        return Linear.apply(x, shard)

    return sharded_linear


KEPT = []


def plain_autograd(x, shard, gather, reduce_scatter, world_size):
    return x @ gather(shard).T


def through_a_clone(x, shard, gather, reduce_scatter, world_size):
    weight = gather(shard)
    rank = torch.distributed.get_rank()
    parts = list(weight.chunk(world_size))
    parts[rank] = shard
    return x @ torch.cat(parts).T


def _named(function, name):
    function.__name__ = function.__qualname__ = name
    return function


saves_the_weight = _named(_linear(saves="weight"), "saves_the_weight")
in_the_context = _named(_linear(saves="context"), "in_the_context")
saves_a_copy = _named(_linear(saves="copy"), "saves_a_copy")
sum_of_ranks = _named(_linear(mean=False), "sum_of_ranks")
no_way_back_for_x = _named(_linear(x_grad=False), "no_way_back_for_x")
own_rows_only = _named(_linear(whole_grad=False), "own_rows_only")
kept_after_backward = _named(_linear(free=False), "kept_after_backward")


# ranks_needed


def _search(units, memory, activations, needs, most=1024):
    for ranks in range(1, most + 1):
        if needs(units, ranks) + activations <= memory:
            return ranks
    return None


def _pair(units):
    return max(map(sum, zip(units, units[1:], strict=False)), default=sum(units))


def all_divided_by_n(units, memory, activations):
    need = 16 * sum(units) + activations
    return -(-need // memory)


def shards_alone(units, memory, activations):
    return _search(
        units, memory, activations, lambda u, n: sum(16 * -(-k // n) for k in u)
    )


def one_unit_whole(units, memory, activations):
    def needs(u, n):
        return sum(16 * -(-k // n) for k in u) + 4 * max(u) + 4 * max(u)

    return _search(units, memory, activations, needs)


def two_largest_whole(units, memory, activations):
    def needs(u, n):
        whole = 4 * sum(sorted(u)[-2:])
        return sum(16 * -(-k // n) for k in u) + whole + 4 * max(u)

    return _search(units, memory, activations, needs)


def activations_divided(units, memory, activations):
    for n in range(1, 1025):
        shards = sum(16 * -(-k // n) for k in units)
        fixed = 4 * _pair(units) + 4 * max(units)
        if shards + fixed + activations / n <= memory:
            return n
    return None


def never_none(units, memory, activations):
    def needs(u, n):
        return sum(16 * -(-k // n) for k in u) + 4 * _pair(u) + 4 * max(u)

    return _search(units, memory, activations, needs) or 1024


def no_gradients(units, memory, activations):
    def needs(u, n):
        return sum(16 * -(-k // n) for k in u) + 4 * _pair(u)

    return _search(units, memory, activations, needs)


def no_padding(units, memory, activations):
    def needs(u, n):
        return 16 * sum(u) / n + 4 * _pair(u) + 4 * max(u)

    return _search(units, memory, activations, needs)


def below_and_not_at(units, memory, activations):
    def needs(u, n):
        return sum(16 * -(-k // n) for k in u) + 4 * _pair(u) + 4 * max(u)

    return _search(units, memory - 1, activations, needs)


# What harder inputs find out


class _Keeps:
    """Where a wrong answer hides a weight."""


def a_copy_of_the_weight(x, shard, gather, reduce_scatter, world_size):
    _Keeps.weights = [*getattr(_Keeps, "weights", ()), gather(shard).clone()]
    again = iter([_Keeps.weights[-1], None])
    return solutions.sharded_linear(
        x,
        shard,
        lambda shard: found if (found := next(again)) is not None else gather(shard),
        reduce_scatter,
        world_size,
    )


def two_ahead_at_most(units, prefetch, keep):
    return solutions.my_schedule(units, min(prefetch, 2), keep)


def never_alone(units, memory, activations):
    found = solutions.ranks_needed(units, memory, activations)
    return max(found, 2) if found else None


def farthest_first(units, prefetch, keep):
    return _step(units, prefetch, keep, farthest=True)


def reduced_before_it_is_freed(units, prefetch, keep):
    ops = solutions.my_schedule(units, prefetch, keep)
    for at in range(len(ops) - 1):
        if ops[at][0] == "free" and ops[at + 1][0] == "reduce":
            ops[at : at + 2] = ops[at + 1], ops[at]
    return ops


def one_digit(units, prefetch, keep):
    found = solutions.my_schedule(units, prefetch, keep)
    return [(what, int(f"{unit}"[-1])) for what, unit in found]


def gathered_after_the_step(units, prefetch, keep):
    return [*solutions.my_schedule(units, prefetch, keep), ("gather", 0)]


def overwrites_the_gradient(x, shard, gather, reduce_scatter, world_size):
    shard.grad = None
    return solutions.sharded_linear(x, shard, gather, reduce_scatter, world_size)


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


def fails_with_a_frozen_input(x, shard, gather, reduce_scatter, world_size):
    return _AsIfAlone.apply(x, shard, gather, reduce_scatter, world_size, "x")


def fails_with_a_frozen_shard(x, shard, gather, reduce_scatter, world_size):
    return _AsIfAlone.apply(x, shard, gather, reduce_scatter, world_size, "shard")


def unfreezes_the_shard(x, shard, gather, reduce_scatter, world_size):
    shard.requires_grad_()
    return solutions.sharded_linear(x, shard, gather, reduce_scatter, world_size)


def up_to_1023(units, memory, activations):
    return solutions.ranks_needed(units, memory, activations, most=1023)


def without_an_end(units, memory, activations):
    return solutions.ranks_needed(units, memory, activations, most=4999)


def sorts_its_input(units, memory, activations):
    found = solutions.ranks_needed(list(units), memory, activations)
    units.sort()
    return found


WRONG = {
    "my_schedule": {
        farthest_first: "what is needed first is gathered first",
        reduced_before_it_is_freed: "still whole when its gradients are reduced",
        one_digit: "the order of computing",
        gathered_after_the_step: "when the step has ended",
        two_ahead_at_most: "prefetch = 3",
        everything_first: "need not be",
        no_second_gather: "not there",
        always_one_ahead: "need not be",
        never_ahead: "gathered ahead",
        kept_all_the_same: "need not be",
        gathered_whether_there_or_not: "sent for nothing",
        never_freed: "free a unit as soon as",
        reduced_at_the_end: "only after others' backward",
        never_reduced: "reduced 0 times",
        backward_in_the_order_of_forward: "backward the other way",
        freed_too_late: "need not be",
        never_kept: "stays whole",
        only_forward: "backward the other way",
    },
    "sharded_linear": {
        overwrites_the_gradient: "a second backward adds",
        fails_with_a_frozen_shard: "One of the differentiated Tensors does not",
        fails_with_a_frozen_input: "One of the differentiated Tensors does not",
        unfreezes_the_shard: "a gradient of what is frozen",
        a_copy_of_the_weight: "Who keeps a copy of it?",
        plain_autograd: "alive after forward",
        through_a_clone: "autograd keeps",
        saves_the_weight: "alive after forward",
        in_the_context: "alive after forward",
        saves_a_copy: "autograd keeps",
        sum_of_ranks: "divide by their number",
        no_way_back_for_x: "gradient of x",
        own_rows_only: "it is the mean",
        kept_after_backward: "alive after backward",
    },
    "ranks_needed": {
        up_to_1023: "but 1024 ranks are enough",
        without_an_end: "expected a number of ranks, 1 to 1024",
        sorts_its_input: "work on a copy",
        never_alone: "but 1 are enough",
        all_divided_by_n: "bytes and has",
        shards_alone: "bytes and has",
        one_unit_whole: "bytes and has",
        two_largest_whole: "are enough",
        activations_divided: "bytes and has",
        never_none: "no number of ranks is enough",
        no_gradients: "bytes and has",
        no_padding: "bytes and has",
        below_and_not_at: "are enough",
    },
}
