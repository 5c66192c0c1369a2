"""Right answers to the exercises of chapter 07, in other styles than the solutions."""

import math
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from ddp_course.collectives import all_gather_single, reduce_scatter_single


def element_by_element(numels, rank, world_size):
    row = [(k, i) for k, numel in enumerate(numels) for i in range(numel)]
    length = -(-len(row) // world_size)
    mine, found = row[rank * length : (rank + 1) * length], []
    for k in dict.fromkeys(k for k, _ in mine):
        elements = [i for its, i in mine if its == k]
        found.append((k, elements[0], elements[-1] + 1))
    return found


def by_overlaps(numels, rank, world_size):
    length = math.ceil(sum(numels) / world_size)
    begin, end, found = rank * length, (rank + 1) * length, []
    for k, (first, last) in enumerate(pairwise(accumulate(numels, initial=0))):
        if max(first, begin) < min(last, end):
            found.append((k, max(begin - first, 0), min(end, last) - first))
    return found


def scaled_before_it_is_summed(weights, gradient, momentum, lr, beta):
    """As the package does it: small summands, no overflow in 16 bits."""
    n, rank = dist.get_world_size(), dist.get_rank()
    mean = torch.zeros_like(momentum)
    reduce_scatter_single(mean, gradient / n)
    momentum[:] = beta * momentum + mean
    stepped = weights.chunk(n)[rank] - lr * momentum
    all_gather_single(weights, stepped)


def with_an_optimizer(weights, gradient, momentum, lr, beta):
    """SGD of PyTorch, on this rank's part."""
    mine = torch.nn.Parameter(weights.view(dist.get_world_size(), -1)[dist.get_rank()])
    mine.grad = torch.empty_like(momentum)
    reduce_scatter_single(mine.grad, gradient)
    mine.grad /= dist.get_world_size()
    sgd = torch.optim.SGD([mine], lr=lr, momentum=beta)
    sgd.state[mine]["momentum_buffer"] = momentum
    sgd.step()
    all_gather_single(weights, mine.detach().clone())


def norm_of_norms(shards, max_norm):
    norms = [torch.linalg.vector_norm(s, dtype=torch.float64) for s in shards]
    squares = torch.stack([torch.zeros((), dtype=torch.float64), *norms]).square().sum()
    dist.all_reduce(squares)
    norm = squares.sqrt()
    for shard in shards:
        shard *= torch.clamp(max_norm / norm, max=1.0).to(shard.dtype)
    return float(norm)


def squares_of_python(shards, max_norm):
    squares = [float(x) ** 2 for shard in shards for x in shard.flatten()]
    total = torch.tensor(math.fsum(squares), dtype=torch.float64)
    dist.all_reduce(total)
    norm = math.sqrt(total)
    for shard in shards if norm > max_norm else []:
        shard.copy_(shard * (max_norm / norm))
    return norm


RIGHT = {
    "my_pieces": [element_by_element, by_overlaps],
    "sharded_step": [scaled_before_it_is_summed, with_an_optimizer],
    "clip_shards": [norm_of_norms, squares_of_python],
}
