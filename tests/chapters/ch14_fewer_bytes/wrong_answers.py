"""Wrong answers to the exercises of chapter 14, each with a word of its hint."""

import torch
import torch.distributed as dist

from ddp_course.chapters.ch14_fewer_bytes import solutions

# my_memory


def forgets(compress):
    return compress


def remembers(compress, wanted_of, kept_of):
    """A memory with a mistake in what it compresses, or in what it keeps."""
    memory = 0

    def send(gradient):
        nonlocal memory
        wanted = wanted_of(gradient, memory)
        sent = compress(wanted)
        memory = kept_of(gradient, wanted, sent)
        return sent

    return send


def keeps_of_the_gradient_alone(compress):
    """What was held back before is sent once or never again."""
    return remembers(compress, lambda g, e: g + e, lambda g, v, sent: g - sent)


def takes_it_off(compress):
    return remembers(compress, lambda g, e: g - e, lambda g, v, sent: v - sent)


def keeps_what_was_sent(compress):
    return remembers(compress, lambda g, e: g + e, lambda g, v, sent: sent)


def fades(compress):
    return remembers(compress, lambda g, e: g + 0.9 * e, lambda g, v, sent: v - sent)


def adds_after_compressing(compress):
    memory = 0

    def send(gradient):
        nonlocal memory
        sent = compress(gradient) + memory
        memory = gradient - compress(gradient)
        return sent

    return send


SHARED = {}


def one_memory_for_all(compress):
    """Two ranks of one process have the same compressor, and so the same memory."""
    SHARED.clear()

    def send(gradient):
        wanted = gradient + SHARED.get(compress, 0)
        sent = compress(wanted)
        SHARED[compress] = wanted - sent
        return sent

    return send


def in_the_bucket(compress):
    """Adds the memory to the caller's tensor."""
    memory = None

    def send(gradient):
        nonlocal memory
        if memory is not None:
            gradient += memory
        sent = compress(gradient)
        memory = gradient - sent
        return sent

    return send


def keeps_the_bucket(compress):
    """What is kept is the bucket itself, and soon holds the next gradient."""
    memory, before = None, None

    def send(gradient):
        nonlocal memory, before
        wanted = gradient if memory is None else gradient + memory - before
        memory, before = gradient, compress(wanted)
        return before

    return send


def sends_all(compress):
    return lambda gradient: gradient.clone()


def no_function(compress):
    return torch.zeros(3)


# my_topk_mean


def gathered(gradient, mine):
    """Return the mean of all ranks' values, where they say; `mine` are its places."""
    n, flat = dist.get_world_size(), gradient.flatten()
    places = [torch.empty_like(mine) for _ in range(n)]
    values = [torch.empty_like(flat[mine]) for _ in range(n)]
    dist.all_gather(places, mine)
    dist.all_gather(values, flat[mine])
    total = torch.zeros_like(flat)
    for where, what in zip(places, values, strict=True):
        total[where] += what
    return (total / n).view_as(gradient)


def largest_with_their_sign(gradient, k):
    return gathered(gradient, gradient.flatten().topk(k).indices)


def the_first_k(gradient, k):
    return gathered(gradient, torch.arange(k))


def sum_for_mean(gradient, k):
    return solutions.my_topk_mean(gradient, k) * dist.get_world_size()


def values_by_all_reduce(gradient, k):
    """Adds what lies in different places, and puts it where this rank had its own."""
    flat = gradient.flatten()
    mine = flat.abs().topk(k).indices
    values = flat[mine]
    dist.all_reduce(values)
    mean = torch.zeros_like(flat)
    mean[mine] = values / dist.get_world_size()
    return mean.view_as(gradient)


def places_sorted_alone(gradient, k):
    """The places are in another order than their values."""
    n, flat = dist.get_world_size(), gradient.flatten()
    mine = flat.abs().topk(k).indices
    values = [torch.empty(k, dtype=flat.dtype) for _ in range(n)]
    places = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(values, flat[mine])
    dist.all_gather(places, mine.sort().values)
    total = torch.zeros_like(flat)
    for where, what in zip(places, values, strict=True):
        total[where] += what
    return (total / n).view_as(gradient)


def the_last_one_wins(gradient, k):
    """Where two ranks have sent the same place, one is lost."""
    n, flat = dist.get_world_size(), gradient.flatten()
    mine = flat.abs().topk(k).indices
    places, values = mine.new_empty(n * k), flat.new_empty(n * k)
    dist.all_gather(list(places.split(k)), mine)
    dist.all_gather(list(values.split(k)), flat[mine])
    total = torch.zeros_like(flat)
    total[places] += values
    return (total / n).view_as(gradient)


def all_of_it(gradient, k):
    """Right numbers, but all zeros travel, too."""
    flat = gradient.flatten()
    mine = flat.abs().topk(k).indices
    mean = torch.zeros_like(flat)
    mean[mine] = flat[mine]
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).view_as(gradient)


def signs_lost(gradient, k):
    mine = gradient.flatten().abs().topk(k).indices
    return gathered(gradient.abs(), mine)


def largest_of_the_mean(gradient, k):
    mean = gradient / dist.get_world_size()
    dist.all_reduce(mean)
    return mean * (mean.abs() >= mean.abs().flatten().topk(k).values[-1])


def in_the_gradient(gradient, k):
    gradient.copy_(solutions.my_topk_mean(gradient, k))
    return gradient


# my_outer_step


def stepped(common, replicas, momentum, step):
    """Call `step(here, mean, velocity)`, which returns the new point and momentum."""
    for number, (here, velocity) in enumerate(zip(common, momentum, strict=True)):
        mean = sum(each[number] for each in replicas) / len(replicas)
        point, new = step(here.clone(), mean, velocity.clone())
        velocity.copy_(new)
        here.copy_(point)


def the_wrong_way(common, replicas, momentum, lr, mu):
    def step(here, mean, velocity):
        velocity = mu * velocity + mean - here
        return here - lr * (mean - here + mu * velocity), velocity

    stepped(common, replicas, momentum, step)


def without_a_look_ahead(common, replicas, momentum, lr, mu):
    """Momentum as in SGD by default, not Nesterov's."""

    def step(here, mean, velocity):
        velocity = mu * velocity + here - mean
        return here - lr * velocity, velocity

    stepped(common, replicas, momentum, step)


def with_the_old_momentum(common, replicas, momentum, lr, mu):
    def step(here, mean, velocity):
        new = mu * velocity + here - mean
        return here - lr * (here - mean + mu * velocity), new

    stepped(common, replicas, momentum, step)


def forgets_the_momentum(common, replicas, momentum, lr, mu):
    solutions.my_outer_step(common, replicas, [t.clone() for t in momentum], lr, mu)


def sum_of_replicas(common, replicas, momentum, lr, mu):
    def step(here, mean, velocity):
        velocity = mu * velocity + here - len(replicas) * mean
        return here - lr * (here - len(replicas) * mean + mu * velocity), velocity

    stepped(common, replicas, momentum, step)


def lr_in_the_momentum(common, replicas, momentum, lr, mu):
    def step(here, mean, velocity):
        velocity = mu * velocity + lr * (here - mean)
        return here - (lr * (here - mean) + mu * velocity), velocity

    stepped(common, replicas, momentum, step)


def other_tensors(common, replicas, momentum, lr, mu):
    """The lists get new tensors, and whoever has the old ones sees nothing."""
    held = [t.clone() for t in common]
    solutions.my_outer_step(held, replicas, momentum, lr, mu)
    common[:] = held


def replicas_brought_back(common, replicas, momentum, lr, mu):
    solutions.my_outer_step(common, replicas, momentum, lr, mu)
    for each in replicas:
        for tensor, here in zip(each, common, strict=True):
            tensor.copy_(here)


def mean_alone(common, replicas, momentum, lr, mu):
    solutions.my_outer_step(common, replicas, momentum, 1.0, 0.0)


WRONG = {
    "my_memory": {
        forgets: "has forgotten what was held back",
        keeps_of_the_gradient_alone: "has kept the rest of the last gradient alone",
        takes_it_off: "takes off what it should add",
        keeps_what_was_sent: "has forgotten what was held back",
        fades: "all that was held back before",
        adds_after_compressing: "adds it after compressing",
        one_memory_for_all: "a tensor of its own",
        in_the_bucket: "the gradient was changed",
        keeps_the_bucket: "all that was held back before",
        sends_all: "nothing was held back before",
        no_function: "must return a function",
    },
    "my_topk_mean": {
        largest_with_their_sign: "largest by size",
        the_first_k: "each rank's largest",
        sum_for_mean: "is it the mean",
        values_by_all_reduce: "put where this rank had its own",
        places_sorted_alone: "where *it* had them",
        the_last_one_wins: "both add up",
        signs_lost: "signs are lost",
        largest_of_the_mean: "the largest of the mean",
        all_of_it: "indices and values should travel",
        in_the_gradient: "work on a copy",
    },
    "my_outer_step": {
        the_wrong_way: "the way *back* from the mean",
        without_a_look_ahead: "mu times the *new* momentum",
        with_the_old_momentum: "mu times the *new* momentum",
        forgets_the_momentum: "mu times the old one",
        sum_of_replicas: "from the mean",
        lr_in_the_momentum: "in `momentum`",
        other_tensors: "in the tensors themselves",
        replicas_brought_back: "leave them as they are",
        mean_alone: "in `common`",
    },
}
