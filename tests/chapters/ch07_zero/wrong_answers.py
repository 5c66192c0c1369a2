"""Wrong answers to the exercises of chapter 07, each with a word of its hint."""

import math

import torch
import torch.distributed as dist

from ddp_course.chapters.ch07_zero import solutions
from ddp_course.collectives import all_gather_single, all_reduce, reduce_scatter_single

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


def all_reduced(weights, gradient, momentum, lr, beta):
    mean = gradient.clone()
    all_reduce(mean)
    momentum.mul_(beta).add_(_part(mean, momentum) / dist.get_world_size())
    mine = _part(weights, momentum)
    mine -= lr * momentum
    all_gather_single(weights, mine.clone())


def by_gloo(weights, gradient, momentum, lr, beta):
    mean = gradient.clone()
    dist.all_reduce(mean)
    momentum.mul_(beta).add_(_part(mean, momentum) / dist.get_world_size())
    mine = _part(weights, momentum)
    mine -= lr * momentum
    all_gather_single(weights, mine.clone())


def the_momentum_travels(weights, gradient, momentum, lr, beta):
    mean = _mean(gradient, momentum)
    momentum.mul_(beta).add_(mean)
    everything = torch.empty_like(weights)
    all_gather_single(everything, momentum)
    weights -= lr * everything
    all_gather_single(weights, _part(weights, momentum).clone())


def the_sum(weights, gradient, momentum, lr, beta):
    total = torch.empty_like(momentum)
    reduce_scatter_single(total, gradient)
    momentum.mul_(beta).add_(total)
    mine = _part(weights, momentum)
    mine -= lr * momentum
    all_gather_single(weights, mine.clone())


def nothing_gathered(weights, gradient, momentum, lr, beta):
    momentum.mul_(beta).add_(_mean(gradient, momentum))
    _part(weights, momentum).sub_(lr * momentum)


def gathered_before(weights, gradient, momentum, lr, beta):
    momentum.mul_(beta).add_(_mean(gradient, momentum))
    all_gather_single(weights, _part(weights, momentum).clone())
    _part(weights, momentum).sub_(lr * momentum)


def a_new_momentum(weights, gradient, momentum, lr, beta):
    momentum = beta * momentum + _mean(gradient, momentum)
    mine = _part(weights, momentum)
    mine -= lr * momentum
    all_gather_single(weights, mine.clone())


def no_momentum(weights, gradient, momentum, lr, beta):
    mine = _part(weights, momentum)
    mine -= lr * _mean(gradient, momentum)
    all_gather_single(weights, mine.clone())


def the_own_gradient(weights, gradient, momentum, lr, beta):
    momentum.mul_(beta).add_(_part(gradient, momentum))
    mine = _part(weights, momentum)
    mine -= lr * momentum
    all_gather_single(weights, mine.clone())


def the_gradient_is_scaled(weights, gradient, momentum, lr, beta):
    gradient /= dist.get_world_size()
    mean = torch.empty_like(momentum)
    reduce_scatter_single(mean, gradient)
    momentum.mul_(beta).add_(mean)
    mine = _part(weights, momentum)
    mine -= lr * momentum
    all_gather_single(weights, mine.clone())


def returns_new_weights(weights, gradient, momentum, lr, beta):
    momentum.mul_(beta).add_(_mean(gradient, momentum))
    everything = torch.empty_like(weights)
    all_gather_single(everything, _part(weights, momentum) - lr * momentum)
    return everything


# clip_shards


def _squares(shards):
    return sum((s.float().square().sum() for s in shards), torch.zeros(())).reshape(1)


def _scaled(shards, norm, max_norm):
    for shard in shards:
        shard.mul_(min(1.0, max_norm / norm))


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
    squares = _squares(shards)
    dist.all_reduce(squares)
    norm = squares.sqrt().item()
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
    squares = _squares(shards)
    dist.all_reduce(squares)
    norm = squares.sqrt().item()
    shards[:] = [shard * min(1.0, max_norm / norm) for shard in shards]
    return norm


def the_norm_afterwards(shards, max_norm):
    squares = _squares(shards)
    dist.all_reduce(squares)
    norm = squares.sqrt().item()
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
    squares = _squares(shards)
    dist.all_reduce(squares)
    norm = squares.sqrt().item()
    _scaled(shards, norm, max_norm)
    return norm


# stored_and_sent


def _bytes(numel, n, stage, states, passes, whole=None, gradients=None, scatters=None):
    shard = 4 * -(-numel // n)
    gradients = (n if stage == 1 else 1) if gradients is None else gradients
    scatters = (1 if stage == 1 else passes) if scatters is None else scatters
    return (
        (n + gradients + (states if whole is None else whole)) * shard,
        (scatters + 1) * (n - 1) * shard,
    )


def without_padding(numel, world_size, stage, states, passes):
    sharded = states + (stage == 2)
    stored = 4 * numel * (1 + (stage == 1)) + 4 * numel * sharded // world_size
    sent = 4 * numel * (world_size - 1) // world_size
    return stored, sent * (2 if stage == 1 else passes + 1)


def one_reduce_scatter(numel, world_size, stage, states, passes):
    return _bytes(numel, world_size, stage, states, passes, scatters=1)


def one_in_every_pass(numel, world_size, stage, states, passes):
    return _bytes(numel, world_size, stage, states, passes, scatters=passes)


def both_in_every_pass(numel, world_size, stage, states, passes):
    scatters = 1 if stage == 1 else 2 * passes - 1
    return _bytes(numel, world_size, stage, states, passes, scatters=scatters)


def gradients_whole_in_stage_2(numel, world_size, stage, states, passes):
    return _bytes(numel, world_size, stage, states, passes, gradients=world_size)


def gradients_cut_in_stage_1(numel, world_size, stage, states, passes):
    return _bytes(numel, world_size, stage, states, passes, gradients=1)


def states_whole(numel, world_size, stage, states, passes):
    whole = states * world_size
    return _bytes(numel, world_size, stage, states, passes, whole=whole)


def always_adam(numel, world_size, stage, states, passes):
    return _bytes(numel, world_size, stage, 2, passes)


def three_of_them(numel, world_size, stage, states, passes):
    return _bytes(numel, world_size, stage, states, passes, scatters=2)


def with_fractions(numel, world_size, stage, states, passes):
    shard = 4 * numel / world_size
    stored, sent = _bytes(numel, world_size, stage, states, passes)
    return stored + 0 * shard, sent + 0 * shard


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
    momentum.mul_(beta).add_(_mean(gradient.bfloat16().float(), momentum))
    _part(weights, momentum).sub_(lr * momentum)
    all_gather_single(weights, _part(weights, momentum).clone())


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
    squares = _squares(shards)
    dist.all_reduce(squares)
    norm = squares.sqrt().item()
    factor = min(1.0, max_norm / squares.sqrt()[0].item())
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


WRONG = {
    "my_pieces": {
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
        the_own_norm_decides: "by the same factor",
        divided_by_nothing: "ZeroDivisionError",
        squares_of_16_bits: "the norm of all gradients before clipping is `500`",
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
    "stored_and_sent": {
        without_padding: "with padding",
        one_reduce_scatter: "How many reduce-scatters",
        one_in_every_pass: "How many reduce-scatters",
        both_in_every_pass: "How many reduce-scatters",
        gradients_whole_in_stage_2: "Which of parameters, gradients and states",
        gradients_cut_in_stage_1: "Which of parameters, gradients and states",
        states_whole: "Which of parameters, gradients and states",
        always_adam: "Which of parameters, gradients and states",
        three_of_them: "How many reduce-scatters",
        with_fractions: "two whole numbers",
    },
}
