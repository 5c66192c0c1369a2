"""Wrong answers to the exercises of chapter 07, each with a word of its hint."""

import math

import torch
import torch.distributed as dist

from ddp_course.chapters.ch07_zero import solutions
from ddp_course.collectives import (
    all_gather_single,
    all_reduce,
    broadcast,
    reduce_scatter_single,
)

# my_pieces


def _pieces(numels, begin, end, in_the_row=False, empty=False):
    found, start = [], 0
    for k, numel in enumerate(numels):
        first, last = max(begin, start), min(end, start + numel)
        shift = 0 if in_the_row else start
        if first < last or empty:
            found.append((k, first - shift, max(first, last) - shift))
        start += numel
    return found


def _length(numels, world_size):
    return -(-sum(numels) // world_size)


def rounded_down(numels, rank, world_size):
    length = sum(numels) // world_size
    return _pieces(numels, rank * length, (rank + 1) * length)


def the_last_takes_the_rest(numels, rank, world_size):
    length = sum(numels) // world_size
    end = sum(numels) if rank == world_size - 1 else (rank + 1) * length
    return _pieces(numels, rank * length, end)


def the_first_take_one_more(numels, rank, world_size):
    length, more = divmod(sum(numels), world_size)
    begin = rank * length + min(rank, more)
    return _pieces(numels, begin, begin + length + (rank < more))


def whole_parameters(numels, rank, world_size):
    return [(k, 0, numels[k]) for k in range(rank, len(numels), world_size)]


def each_parameter_cut(numels, rank, world_size):
    found = []
    for k, numel in enumerate(numels):
        length = -(-numel // world_size)
        first, last = rank * length, min((rank + 1) * length, numel)
        if first < last:
            found.append((k, first, last))
    return found


def counted_in_the_row(numels, rank, world_size):
    length = _length(numels, world_size)
    return _pieces(numels, rank * length, (rank + 1) * length, in_the_row=True)


def empty_ones_too(numels, rank, world_size):
    length = _length(numels, world_size)
    return _pieces(numels, rank * length, (rank + 1) * length, empty=True)


def last_included(numels, rank, world_size):
    length = _length(numels, world_size)
    pieces = _pieces(numels, rank * length, (rank + 1) * length)
    return [(k, first, last - 1) for k, first, last in pieces]


def always_rank_0(numels, rank, world_size):
    return _pieces(numels, 0, _length(numels, world_size))


def from_behind(numels, rank, world_size):
    length = _length(numels, world_size)
    return _pieces(numels, rank * length, (rank + 1) * length)[::-1]


# sharded_step


def _part(weights, momentum):
    begin = dist.get_rank() * len(momentum)
    return weights[begin : begin + len(momentum)]


def _mean(gradient, momentum):
    mean = torch.empty_like(momentum)
    reduce_scatter_single(mean, gradient)
    return mean / dist.get_world_size()


def _stepped(weights, mean, momentum, lr, beta):
    """The rest of the step, with the mean gradient of this rank's part."""
    momentum.mul_(beta).add_(mean)
    _part(weights, momentum).sub_(lr * momentum)
    all_gather_single(weights, _part(weights, momentum).clone())


def all_reduced(weights, gradient, momentum, lr, beta):
    mean = gradient / dist.get_world_size()
    all_reduce(mean)
    _stepped(weights, _part(mean, momentum), momentum, lr, beta)


def by_gloo(weights, gradient, momentum, lr, beta):
    mean = gradient / dist.get_world_size()
    dist.all_reduce(mean)
    _stepped(weights, _part(mean, momentum), momentum, lr, beta)


def the_momentum_travels(weights, gradient, momentum, lr, beta):
    mean = _mean(gradient, momentum)
    momentum.mul_(beta).add_(mean)
    everything = torch.empty_like(weights)
    all_gather_single(everything, momentum)
    weights -= lr * everything
    all_gather_single(weights, _part(weights, momentum).clone())


def the_sum(weights, gradient, momentum, lr, beta):
    total = _mean(gradient, momentum) * dist.get_world_size()
    _stepped(weights, total, momentum, lr, beta)


def nothing_gathered(weights, gradient, momentum, lr, beta):
    momentum.mul_(beta).add_(_mean(gradient, momentum))
    _part(weights, momentum).sub_(lr * momentum)


def gathered_before(weights, gradient, momentum, lr, beta):
    momentum.mul_(beta).add_(_mean(gradient, momentum))
    all_gather_single(weights, _part(weights, momentum).clone())
    _part(weights, momentum).sub_(lr * momentum)


def a_new_momentum(weights, gradient, momentum, lr, beta):
    _stepped(weights, _mean(gradient, momentum), momentum.clone(), lr, beta)


def no_momentum(weights, gradient, momentum, lr, beta):
    mean = _mean(gradient, momentum)
    _stepped(weights, mean, torch.zeros_like(momentum), lr, beta)


def the_own_gradient(weights, gradient, momentum, lr, beta):
    _stepped(weights, _part(gradient, momentum), momentum, lr, beta)


def the_gradient_is_scaled(weights, gradient, momentum, lr, beta):
    gradient /= dist.get_world_size()
    mean = _mean(gradient, momentum) * dist.get_world_size()
    _stepped(weights, mean, momentum, lr, beta)


def returns_new_weights(weights, gradient, momentum, lr, beta):
    momentum.mul_(beta).add_(_mean(gradient, momentum))
    everything = torch.empty_like(weights)
    all_gather_single(everything, _part(weights, momentum) - lr * momentum)
    return everything


# clip_shards


def _squares(shards):
    return sum((s.float().square().sum() for s in shards), torch.zeros(())).reshape(1)


def _norm(shards):
    squares = _squares(shards)
    dist.all_reduce(squares)
    return squares.sqrt().item()


def _scaled(shards, norm, max_norm):
    for shard in shards:
        shard.mul_(min(1.0, max_norm / norm))


def by_the_course(shards, max_norm):
    squares = _squares(shards)
    all_reduce(squares)
    norm = squares.sqrt().item()
    if norm > max_norm:
        _scaled(shards, norm, max_norm)
    return norm


def per_shard(shards, max_norm):
    norm = _squares(shards).sqrt().item()
    if norm:
        _scaled(shards, norm, max_norm)
    return norm


def norms_added(shards, max_norm):
    norms = _squares(shards).sqrt()
    dist.all_reduce(norms)
    _scaled(shards, norms.item(), max_norm)
    return norms.item()


def the_mean_of_squares(shards, max_norm):
    squares = _squares(shards)
    dist.all_reduce(squares)
    norm = (squares / dist.get_world_size()).sqrt().item()
    _scaled(shards, norm, max_norm)
    return norm


def no_root(shards, max_norm):
    squares = _squares(shards)
    dist.all_reduce(squares)
    _scaled(shards, squares.item(), max_norm)
    return squares.item()


def scaled_up_too(shards, max_norm):
    norm = _norm(shards)
    for shard in shards:
        shard.mul_(max_norm / norm)
    return norm


def own_factor(shards, max_norm):
    squares = _squares(shards)
    mine = max(squares.sqrt().item(), 1e-9)
    dist.all_reduce(squares)
    _scaled(shards, mine, max_norm)
    return squares.sqrt().item()


def new_tensors(shards, max_norm):
    norm = _norm(shards)
    shards[:] = [shard * min(1.0, max_norm / norm) for shard in shards]
    return norm


def the_norm_afterwards(shards, max_norm):
    norm = _norm(shards)
    _scaled(shards, norm, max_norm)
    return min(norm, max_norm)


def one_for_each_shard(shards, max_norm):
    total = 0.0
    for k in range(2):
        squares = _squares(shards[k : k + 1])
        dist.all_reduce(squares)
        total += squares.item()
    _scaled(shards, math.sqrt(total), max_norm)
    return math.sqrt(total)


def everything_sent(shards, max_norm):
    everybodys = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, [shard.clone() for shard in shards])
    norm = sum(_squares(theirs) for theirs in everybodys).sqrt().item()
    _scaled(shards, norm, max_norm)
    return norm


def nothing_to_do_without_shards(shards, max_norm):
    if not shards:
        return 0.0
    norm = _norm(shards)
    _scaled(shards, norm, max_norm)
    return norm


# What harder inputs find out


EVERYTHING = {}


def sharded_in_name(weights, gradient, momentum, lr, beta):
    whole = EVERYTHING.setdefault("momentum", torch.zeros_like(weights))
    mine = _mean(gradient, momentum)
    _part(whole, momentum).mul_(beta).add_(mine)
    momentum.copy_(_part(whole, momentum))
    _part(weights, momentum).sub_(lr * momentum)
    all_gather_single(weights, _part(weights, momentum).clone())


def sixteen_bits_travel(weights, gradient, momentum, lr, beta):
    mean = _mean(gradient.bfloat16().float(), momentum)
    _stepped(weights, mean, momentum, lr, beta)


def silent_without_gradient(weights, gradient, momentum, lr, beta):
    if gradient.any():
        solutions.sharded_step(weights, gradient, momentum, lr, beta)


def the_own_norm_decides(shards, max_norm):
    squares = _squares(shards)
    mine = squares.sqrt().item()
    dist.all_reduce(squares)
    if mine > max_norm:
        _scaled(shards, squares.sqrt().item(), max_norm)
    return squares.sqrt().item()


def divided_by_nothing(shards, max_norm):
    norm = _norm(shards)
    factor = min(1.0, max_norm / norm)
    for shard in shards:
        shard.mul_(factor)
    return norm


def squares_of_16_bits(shards, max_norm):
    squares = sum((s.pow(2).sum() for s in shards), torch.zeros(1))
    dist.all_reduce(squares)
    norm = squares.sqrt().item()
    if norm > max_norm:
        _scaled(shards, norm, max_norm)
    return norm


def fails_without_parameters(numels, rank, world_size):
    assert max(numels) >= 0
    return solutions.my_pieces(numels, rank, world_size)


def zero_lengths_too(numels, rank, world_size):
    length = _length(numels, world_size)
    begin, end = rank * length, (rank + 1) * length
    found = solutions.my_pieces(numels, rank, world_size)
    starts = [sum(numels[:k]) for k in range(len(numels))]
    nothing = [(k, 0, 0) for k, n in enumerate(numels) if not n]
    return sorted(found + [p for p in nothing if begin <= starts[p[0]] < end])


def takes_them_off_the_list(numels, rank, world_size):
    found = solutions.my_pieces(numels, rank, world_size)
    numels.clear()
    return found


def rate_for_momentum(weights, gradient, momentum, lr, beta):
    solutions.sharded_step(weights, gradient, momentum, beta, lr)


def powers_of_two_only(weights, gradient, momentum, lr, beta):
    assert dist.get_world_size() != 3
    solutions.sharded_step(weights, gradient, momentum, lr, beta)


def single_precision(weights, gradient, momentum, lr, beta):
    mean = torch.empty(len(momentum))
    reduce_scatter_single(mean, gradient.float())
    _stepped(weights, mean / dist.get_world_size(), momentum, lr, beta)


def broadcasts(weights, gradient, momentum, lr, beta):
    momentum.mul_(beta).add_(_mean(gradient, momentum))
    _part(weights, momentum).sub_(lr * momentum)
    for rank, part in enumerate(weights.split(len(momentum))):
        broadcast(part, rank)


def views_them(shards, max_norm):
    flat = torch.cat([torch.zeros(1), *(shard.view(-1).float() for shard in shards)])
    squares = flat.square().sum()
    dist.all_reduce(squares)
    norm = squares.sqrt().item()
    if norm > max_norm:
        _scaled(shards, norm, max_norm)
    return norm


def the_largest_number(shards, max_norm):
    flat = torch.cat([torch.zeros(1), *(s.float().flatten() for s in shards)])
    most = flat.abs().max()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if most > max_norm:
        _scaled(shards, most.item(), max_norm)
    return most.item()


def the_last_number(shards, max_norm):
    assert all(shard[-1].isfinite().all() for shard in shards)
    return solutions.clip_shards(shards, max_norm)


WRONG = {
    "my_pieces": {
        fails_without_parameters: "raised `ValueError",
        zero_lengths_too: "is empty",
        takes_them_off_the_list: "work on a copy",
        rounded_down: "is padded to",
        the_last_takes_the_rest: "is padded to",
        the_first_take_one_more: "is padded to",
        whole_parameters: "is padded to",
        each_parameter_cut: "one stretch without gaps",
        counted_in_the_row: "not from the row's",
        empty_ones_too: "is empty",
        last_included: "are real",
        always_rank_0: "belongs to rank 0 already",
        from_behind: "with the parameters in their order",
    },
    "sharded_step": {
        rate_for_momentum: "your part of `weights` is wrong",
        powers_of_two_only: "AssertionError",
        single_precision: "of float64",
        broadcasts: "one reduce-scatter and one all-gather are enough",
        sharded_in_name: "sharded in name only",
        sixteen_bits_travel: "your part of `weights` is wrong",
        silent_without_gradient: "On real ranks",
        all_reduced: "as much as DDP sends",
        by_gloo: "of `torch.distributed`",
        the_momentum_travels: "as much as DDP sends",
        the_sum: "Is the gradient a mean?",
        nothing_gathered: "the other ranks' parts are not",
        gathered_before: "the other ranks' parts are not",
        a_new_momentum: "change it in place",
        no_momentum: "is not the new momentum",
        the_own_gradient: "your part of `weights` is wrong",
        the_gradient_is_scaled: "leave it as it is",
        returns_new_weights: "your part of `weights` is wrong",
    },
    "clip_shards": {
        views_them: "view size is not compatible",
        the_largest_number: "the root of the sum of all squares",
        the_last_number: "out of bounds",
        the_own_norm_decides: "by the same factor",
        divided_by_nothing: "ZeroDivisionError",
        squares_of_16_bits: "the norm of all gradients before clipping is `500`",
        by_the_course: "all_reduce of ddp_course`, with 4 bytes",
        per_shard: "no collective",
        norms_added: "the root of the sum of all squares",
        the_mean_of_squares: "the root of the sum of all squares",
        no_root: "the root of the sum of all squares",
        scaled_up_too: "none if the norm is small enough",
        own_factor: "by the same factor",
        new_tensors: "in the same tensors",
        the_norm_afterwards: "before clipping",
        one_for_each_shard: "one all_reduce of a single number",
        everything_sent: "one all_reduce of a single number",
        nothing_to_do_without_shards: "still wanted to communicate",
    },
}
