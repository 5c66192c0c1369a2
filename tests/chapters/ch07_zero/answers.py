"""Answers to the exercises of chapter 07, right ones and wrong ones."""

# ruff: noqa: F401 (the texts use what is imported)

import math
from itertools import accumulate, pairwise

from slips import answers

from ddp_course.chapters.ch07_zero import solutions

EVERYTHING = {}
PARTS, NORMS = {}, {}


ANSWERS = answers(
    solutions,
    globals(),
    my_pieces="""
    element_by_element:
        row = [(k, i) for k, numel in enumerate(numels) for i in range(numel)]
        length = -(-len(row) // world_size)
        mine, found = row[rank * length : (rank + 1) * length], []
        for k in dict.fromkeys(k for k, _ in mine):
            elements = [i for its, i in mine if its == k]
            found.append((k, elements[0], elements[-1] + 1))
        return found
    by_overlaps:
        length = math.ceil(sum(numels) / world_size)
        begin, end, found = rank * length, (rank + 1) * length, []
        for k, (first, last) in enumerate(pairwise(accumulate(numels, initial=0))):
            if max(first, begin) < min(last, end):
                found.append((k, max(begin - first, 0), min(end, last) - first))
        return found
    fails_without_parameters: raised `ValueError
        length = => assert max(numels) >= 0; length =
    recursive: RecursionError
        def places(k):
            return [0] if k == 0 else (lambda p: [*p, p[-1] + numels[k - 1]])(
                places(k - 1)
            )

        places(len(numels))
        return solutions.my_pieces(numels, rank, world_size)
    in_16_bits: real
        (k, first - start, last - start)
        => (k, (first - start) % 2**16, (last - start) % 2**16)
    known_by_the_sum: Called again
        key = sum(numels), rank, world_size
        return PARTS.setdefault(key, solutions.my_pieces(numels, rank, world_size))
    zero_lengths_too: is empty
        first < last: => first < last or (not numel and begin <= start < end):
    takes_them_off_the_list: work on a copy
        return pieces => numels.clear(); return pieces
    rounded_down: is padded to
        -(-sum(numels) // world_size) => sum(numels) // world_size
    rounded_up_by_almost_one: is padded to
        -(-sum(numels) // world_size) => int(sum(numels) / world_size + 0.999)
    the_last_takes_the_rest: is padded to
        -(-sum(numels) // world_size) => sum(numels) // world_size
        rank + 1 => (rank + 1 if rank < world_size - 1 else 1 << 40)
    the_first_take_one_more: is padded to
        -(-sum(numels) // world_size) => sum(numels) // world_size
        rank * length, (rank + 1) * length
        => (k * length + min(k, sum(numels) % world_size) for k in (rank, rank + 1))
    whole_parameters: is padded to
        length = => mine = range(rank, len(numels), world_size)
        => return [(k, 0, numels[k]) for k in mine]
        => length =
    counted_in_the_row: not from the row's
        first - start, last - start => first, last
    empty_ones_too: is empty
        if first < last: => last = max(first, last)
        => if True:
    last_included: are real
        last - start => last - start - 1
    always_rank_0: these elements belong to rank 0
        rank * length, (rank + 1) * length => 0, length
    from_behind: with the parameters in their order
        return pieces => return pieces[::-1]
    each_parameter_cut: are real
        found = []
        for k, numel in enumerate(numels):
            length = -(-numel // world_size)
            first, last = rank * length, min((rank + 1) * length, numel)
            if first < last:
                found.append((k, first, last))
        return found
    """,
    sharded_step="""
    scaled_before_it_is_summed:
        # As the package does it: small summands, no overflow in 16 bits.
        n, rank = dist.get_world_size(), dist.get_rank()
        mean = torch.zeros_like(momentum)
        reduce_scatter_single(mean, gradient / n)
        momentum[:] = beta * momentum + mean
        stepped = weights.chunk(n)[rank] - lr * momentum
        all_gather_single(weights, stepped)
    with_an_optimizer:
        # SGD of PyTorch, on this rank's part.
        mine = torch.nn.Parameter(
            weights.view(dist.get_world_size(), -1)[dist.get_rank()]
        )
        mine.grad = torch.empty_like(momentum)
        reduce_scatter_single(mine.grad, gradient)
        mine.grad /= dist.get_world_size()
        sgd = torch.optim.SGD([mine], lr=lr, momentum=beta)
        sgd.state[mine]["momentum_buffer"] = momentum
        sgd.step()
        all_gather_single(weights, mine.detach().clone())
    rate_for_momentum: your part of `weights` is wrong
        mul_(beta) => mul_(lr)
        lr * momentum => beta * momentum
    powers_of_two_only: AssertionError
        mean = torch => assert dist.get_world_size() != 3; mean = torch
    single_precision: wrong float64 numbers
        empty_like(momentum) => empty(len(momentum))
        (mean, gradient) => (mean, gradient.float())
    broadcasts: one reduce-scatter and one all-gather are enough
        all_gather_single(weights, mine.clone())
        => from ddp_course.collectives import all_reduce, broadcast
        => for rank, part in enumerate(weights.split(len(momentum))):
        =>     broadcast(part, rank)
    sixteen_bits_travel: your part of `weights` is wrong
        (mean, gradient) => (mean, gradient.bfloat16().float())
    silent_without_gradient: On real ranks
        mean = torch => if not gradient.any():
        =>     return
        => mean = torch
    all_reduced: as much as DDP sends
        reduce_scatter_single(mean, gradient)
        => from ddp_course.collectives import all_reduce, broadcast
        => gradient = gradient.clone()
        => all_reduce(gradient)
        => mean = gradient.chunk(dist.get_world_size())[dist.get_rank()]
    by_gloo: use `reduce_scatter_single`
        reduce_scatter_single(mean, gradient) => gradient = gradient.clone()
        => dist.all_reduce(gradient)
        => mean = gradient.chunk(dist.get_world_size())[dist.get_rank()]
    the_momentum_travels: as much as DDP sends
        mine -= lr * momentum => everything = torch.empty_like(weights)
        => all_gather_single(everything, momentum)
        => weights -= lr * everything
    the_sum: Is the gradient a mean?
        mean /= dist.get_world_size() => pass
    nothing_gathered: the others' parts are not
        all_gather_single(weights, mine.clone()) => pass
    gathered_before: the others' parts are not
        mine -= lr => all_gather_single(weights, momentum * 0 + mine); mine -= lr
        all_gather_single(weights, mine.clone()) => pass
    a_new_momentum: change it in place
        momentum.mul_(beta).add_(mean) => momentum = momentum.mul(beta).add_(mean)
    no_momentum: is the momentum changed in place
        momentum.mul_(beta).add_(mean) => momentum = mean
    the_own_gradient: your part of `weights` is wrong
        reduce_scatter_single(mean, gradient) => n = dist.get_world_size()
        => mean = gradient.chunk(n)[dist.get_rank()] * n
    the_gradient_is_scaled: leave it as it is
        reduce_scatter_single(mean, gradient)
        => gradient /= dist.get_world_size(); reduce_scatter_single(mean, gradient)
        mean /= dist.get_world_size() => pass
    returns_new_weights: your part of `weights` is wrong
        mine -= lr * momentum => weights = weights.clone(); mine = mine - lr * momentum
        (weights, mine.clone()) => (weights, mine.clone()); return weights
    rates_of_float32: wrong float64 numbers
        mean = torch.empty_like(momentum)
        => mean = torch.empty_like(momentum)
        => lr, beta = torch.tensor(lr), torch.tensor(beta)
    no_step_without_a_mean: your part of `weights` is wrong
        momentum.mul_(beta).add_(mean)
        => if mean.any():
        =>     momentum.mul_(beta).add_(mean)
    no_nan: your part of `weights` is wrong
        mean /= dist.get_world_size() => mean.nan_to_num_().div_(dist.get_world_size())
    weights_of_the_first_call: your part of `weights` is wrong
        mine -= lr => mine.copy_(PARTS.setdefault((begin, mine.dtype), mine.clone()))
        => mine -= lr
    nothing_without_a_rate: has an old momentum
        if lr:
            solutions.sharded_step(weights, gradient, momentum, lr, beta)
        else:
            reduce_scatter_single(torch.empty_like(momentum), gradient)
            all_gather_single(torch.empty_like(weights), momentum)
    beta_of_the_first_call: wrong float64 numbers
        momentum.mul_(beta) => momentum.mul_(PARTS.setdefault("beta", beta))
    another_memory: as `.data = ...` does
        momentum.mul_(beta).add_(mean) => momentum.data = momentum.mul(beta).add_(mean)
    sharded_in_name: sharded in name only
        whole = EVERYTHING.setdefault(len(weights), torch.zeros_like(weights))
        solutions.sharded_step(weights, gradient, momentum, lr, beta)
        whole.chunk(dist.get_world_size())[dist.get_rank()].copy_(momentum)
    squeezed: output with shape []
        empty_like(momentum) => empty_like(momentum); momentum = momentum.squeeze()
    """,
    clip_shards="""
    norm_of_norms:
        norms = [torch.linalg.vector_norm(s, dtype=torch.float64) for s in shards]
        squares = (
            torch.stack([torch.zeros((), dtype=torch.float64), *norms]).square().sum()
        )
        dist.all_reduce(squares)
        norm = squares.sqrt()
        for shard in shards if norm else []:
            shard *= torch.clamp(max_norm / norm, max=1.0)
        return float(norm)
    squares_of_python:
        squares = [float(x) ** 2 for shard in shards for x in shard.flatten()]
        total = torch.tensor(math.fsum(squares), dtype=torch.float64)
        dist.all_reduce(total)
        norm = math.sqrt(total)
        for shard in shards if norm > max_norm else []:
            shard.copy_(shard * (max_norm / norm))
        return norm
    views_them: view size is not compatible
        shard.double() => shard.view(-1).double()
    the_largest_number: the root of the sum of all squares
        squares += shard.double().pow(2).sum() => numbers = shard.flatten().abs()
        => squares = torch.cat([squares, numbers]).max().view(1)
        dist.all_reduce(squares) => dist.all_reduce(squares, dist.ReduceOp.MAX)
        squares.sqrt().item() => squares.item()
    the_last_number: out of bounds
        squares = torch.
        => assert all(shard[-1].isfinite().all() for shard in shards); squares = torch.
    the_own_norm_decides: by the same factor
        dist.all_reduce => mine = squares.sqrt().item(); dist.all_reduce
        if norm > max_norm => if mine > max_norm
    divided_by_nothing: ZeroDivisionError
        if norm > max_norm => max_norm / norm
        => if norm > max_norm
    divided_by_a_quotient: ZeroDivisionError
        shard.mul_(max_norm / norm) => shard.div_(norm / max_norm)
    divided_first: in a single step
        shard.mul_(max_norm / norm) => shard.div_(norm).mul_(max_norm)
    squares_of_16_bits: returned `inf`; the norm of all
        .double() =>
    squares_of_32_bits: returned `inf`; the norm of all
        .double() => .float()
    sent_in_32_bits: returned `inf`; the norm of all
        dist.all_reduce(squares) => squares = squares.float(); dist.all_reduce(squares)
    a_millionth_more: by the same factor
        max_norm / norm => max_norm / (norm + 1e-6)
    factor_of_the_own_type: was the factor rounded to a narrower type
        max_norm / norm => torch.tensor(max_norm / norm).to(shard.dtype)
    a_rounded_norm: the root of the sum of all squares
        squares.sqrt().item() => round(squares.sqrt().item(), 6)
    row_by_row: iteration over a 0-d tensor
        squares += shard.double().pow(2).sum()
        => squares += sum(row.double().pow(2).sum() for row in shard)
    in_the_first_ones_type: returned
        squares = torch.zeros(1, dtype=torch.float64)
        => squares = torch.zeros(1, dtype=torch.float64)
        => first = [shard.dtype for shard in shards][:1]
        shard.double() => shard.to(first[0]).double()
    by_the_course: all_reduce of ddp_course`, with 8 bytes
        dist.all_reduce(squares)
        => from ddp_course.collectives import all_reduce, broadcast; all_reduce(squares)
    per_shard: the root of the sum of all squares
        dist.all_reduce(squares) => pass
    norms_added: the root of the sum of all squares
        dist.all_reduce(squares) => squares = squares.sqrt(); dist.all_reduce(squares)
        squares.sqrt().item() => squares.item()
    the_mean_of_squares: the root of the sum of all squares
        squares.sqrt().item() => (squares / dist.get_world_size()).sqrt().item()
    norm_of_32_bits: returned `inf`; the norm of all
        return norm => return torch.tensor(norm, dtype=torch.float32).item()
    a_hundredth_is_nothing: a norm just above `max_norm`
        norm > max_norm => norm > 1.01 * max_norm
    no_root: the root of the sum of all squares
        squares.sqrt().item() => squares.item()
    scaled_up_too: none if the norm is small enough
        if norm > max_norm => if norm
    own_factor: by the same factor
        dist.all_reduce => mine = max(squares.sqrt().item(), 1e-9); dist.all_reduce
        max_norm / norm => min(1.0, max_norm / mine)
        if norm > max_norm => if True
    another_memory: as `.data = ...` does
        shard.mul_(max_norm / norm) => shard.data = shard * (max_norm / norm)
    norms_kept_by_size: the root of the sum of all squares
        norm = squares => sizes = tuple(shard.numel() for shard in shards)
        => norm = NORMS.setdefault(sizes, squares.sqrt().item())
        => _ = squares
    new_tensors: in the same tensors
        if norm > max_norm: => if norm > max_norm:
        =>     shards[:] = [shard * (max_norm / norm) for shard in shards]
        => if False:
    the_norm_afterwards: before clipping
        return norm => return min(norm, max_norm)
    one_for_each_shard: one `all_reduce` of a single number
        dist.all_reduce(squares) => each = [s.double().pow(2).sum() for s in shards]
        => each = [*each, *torch.zeros(3, dtype=torch.float64)][:3]
        => for squares in each:
        =>     dist.all_reduce(squares)
        => squares = sum(each)
    two_numbers: one `all_reduce` of a single number
        dist.all_reduce(squares) => both = squares.repeat(2)
        => dist.all_reduce(both)
        => squares = both[:1]
    everything_sent: one `all_reduce` of a single number
        dist.all_reduce(squares) => everybodys = [None] * dist.get_world_size()
        => dist.all_gather_object(everybodys, shards)
        => its = [shard for shards in everybodys for shard in shards]
        => squares += sum(s.double().pow(2).sum() for s in its) - squares
    nothing_to_do_without_shards: still wanted to communicate
        squares = torch.zeros(1, dtype => if not shards:
        =>     return 0.0
        => squares = torch.zeros(1, dtype
    nothing_divided_by_nothing: ZeroDivisionError
        if norm > max_norm => if norm >= max_norm
    """,
)
