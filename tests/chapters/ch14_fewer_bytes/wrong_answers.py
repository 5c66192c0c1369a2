"""Wrong answers to the exercises of chapter 14, each with a word of its hint."""

from slips import slips

from ddp_course.chapters.ch14_fewer_bytes import solutions

SHARED = {}  # two ranks of one process have the same compressor, and so the same memory

WRONG = slips(
    solutions,
    globals(),
    my_memory="""
    forgets: has forgotten what was held back
        return compress
    keeps_of_the_gradient_alone: has kept the rest of the last gradient alone
        memory = wanted - sent => memory = gradient - sent
    takes_it_off: takes off what it should add
        gradient + memory => gradient - memory
    keeps_what_was_sent: has forgotten what was held back
        memory = wanted - sent => memory = sent
    fades: all that was held back before
        gradient + memory => gradient + 0.9 * memory
    adds_after_compressing: adds it after compressing
        wanted = gradient if memory is None else gradient + memory
        => held = 0 if memory is None else memory
        compress(wanted) => compress(gradient)
        memory = wanted - sent => memory = gradient - sent
        return sent => return sent + held
    one_memory_for_all: a tensor of its own
        memory: Tensor | None = None => SHARED.clear()
        nonlocal memory => memory = SHARED.get(compress)
        memory = wanted - sent => SHARED[compress] = wanted - sent
    in_the_bucket: the gradient was changed
        gradient + memory => gradient.add_(memory)
    keeps_the_bucket: all that was held back before
        memory: Tensor | None = None => memory = before = None
        nonlocal memory => nonlocal memory, before
        gradient + memory => gradient + memory - before
        memory = wanted - sent => memory, before = gradient, sent
    sends_all: nothing was held back before
        return lambda gradient: gradient.clone()
    no_function: must return a function
        return torch.zeros(3)
    """,
    my_topk_mean="""
    largest_with_their_sign: largest by size
        flat.abs() => flat
    the_first_k: each rank's largest
        flat.abs().topk(k).indices => torch.arange(k)
    sum_for_mean: is it the mean
        total / n => total
    values_by_all_reduce: put where this rank had its own
        indices = [torch.empty_like(mine) for _ in range(n)]
        => values = flat[mine]
        => dist.all_reduce(values)
        => total = torch.zeros_like(flat)
        => total[mine] = values
        => return (total / n).view_as(gradient)
    places_sorted_alone: where *it* had them
        (indices, mine) => (indices, mine.sort().values)
    the_last_one_wins: both add up
        total[where] += what => total[where] = what
    signs_lost: signs are lost
        gradient.flatten() => gradient.flatten().abs()
    largest_of_the_mean: the largest of the mean
        mean = gradient / dist.get_world_size()
        dist.all_reduce(mean)
        return mean * (mean.abs() >= mean.abs().flatten().topk(k).values[-1])
    all_of_it: indices and values should travel
        indices = [torch.empty_like(mine) for _ in range(n)]
        => mean = torch.zeros_like(flat)
        => mean[mine] = flat[mine]
        => dist.all_reduce(mean)
        => return (mean / n).view_as(gradient)
    in_the_gradient: work on a copy
        return (total / n).view_as(gradient)
        => return gradient.copy_((total / n).view_as(gradient))
    """,
    my_outer_step="""
    the_wrong_way: the way *back* from the mean
        here - sum(there) / len(there) => sum(there) / len(there) - here
    without_a_look_ahead: mu times the *new* momentum
        gradient + mu * velocity => velocity
    with_the_old_momentum: mu times the *new* momentum
        velocity.mul_(mu).add_(gradient) =>
        mu * velocity)) => mu * velocity)); velocity.mul_(mu).add_(gradient)
    forgets_the_momentum: mu times the old one
        velocity.mul_(mu).add_(gradient) => velocity = mu * velocity + gradient
    sum_of_replicas: from the mean
        sum(there) / len(there) => sum(there)
    lr_in_the_momentum: in `momentum`
        here - sum(there) / len(there) => lr * (here - sum(there) / len(there))
        here.sub_(lr * => here.sub_(1 *
    other_tensors: in the tensors themselves
        for here, => common[:] = [tensor.clone() for tensor in common]
        => for here,
    replicas_brought_back: leave them as they are
        mu * velocity)) => mu * velocity))
        => for tensor in there:
        =>     tensor.copy_(here)
    mean_alone: in `common`
        for here, => lr, mu = 1.0, 0.0
        => for here,
    """,
)
