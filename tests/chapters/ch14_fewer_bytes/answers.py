"""Answers to the exercises of chapter 14, right ones and wrong ones."""

# ruff: noqa: F401 (the texts use what is imported)

from slips import answers

from ddp_course.chapters.ch14_fewer_bytes import solutions
from ddp_course.collectives import ring_all_reduce


class memory_as_a_class:
    def __init__(self, compress):
        self.compress, self.held_back = compress, 0

    def __call__(self, gradient):
        wanted = self.held_back + gradient
        sent = self.compress(wanted)
        self.held_back = wanted - sent
        return sent


SHARED = {}  # two ranks of one process have the same compressor, and so the same memory
RESTS, PLACES = {}, {}  # what a function keeps from call to call


ANSWERS = answers(
    solutions,
    globals(),
    my_memory="""
    memory_as_a_class:
    memory_in_place:
        kept = {}

        def send(gradient):
            memory = kept.setdefault("memory", torch.zeros_like(gradient))
            memory += gradient
            sent = compress(memory).clone()
            memory -= sent
            return sent

        return send
    forgets: has forgotten what was held back
        return compress
    keeps_of_the_gradient_alone: has kept only the rest of the last gradient
        memory = wanted - sent => memory = gradient - sent
    takes_it_off: subtracts what it should add
        gradient + memory => gradient - memory
    keeps_what_was_sent: has forgotten what was held back
        memory = wanted - sent => memory = sent
    fades: all that was held back before
        gradient + memory => gradient + 0.9 * memory
    adds_after_compressing: adds the memory after compressing
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
    in_place_without_a_copy: nothing lost
        kept = {}

        def send(gradient):
            memory = kept.setdefault("memory", torch.zeros_like(gradient))
            memory += gradient
            sent = compress(memory)
            memory -= sent
            return sent

        return send
    compresses_twice: must be called once
        return sent => return compress(wanted)
    memory_in_16_bits: expected
        memory = wanted - sent => memory = (wanted - sent).half().to(sent.dtype)
    sends_nothing: sent `None`
        return sent => return None
    reads_what_was_sent: which the caller may change
        # The memory is computed in the next call: the caller has averaged in place.
        last = []

        def send(gradient):
            wanted = gradient + (last[0] - last[1]) if last else gradient.clone()
            sent = compress(wanted.clone())
            last[:] = wanted, sent
            return sent

        return send
    keeps_what_it_sent: which the caller has overwritten
        # Wrong if `compress` returns the same tensor: the caller overwrites it.
        last = []

        def send(gradient):
            wanted = gradient + (last[0] - last[1]) if last else gradient.clone()
            sent = compress(wanted)
            last[:] = wanted, sent.clone()
            return sent

        return send
    nothing_new: has forgotten what was held back
        nonlocal memory => nonlocal memory
        => if not gradient.any():
        =>     return compress(gradient.clone())
    nothing_sent: rounded to whole numbers
        memory = wanted - sent => memory = wanted - sent if sent.any() else memory
    drops_small_numbers: all that was held back before
        memory = wanted - sent => left = wanted - sent
        => memory = torch.where(left.abs() < 1e-3, 0.0, left)
    forgets_every_eighth: has forgotten what was held back
        memory: Tensor | None = None => memory, calls = None, 0
        nonlocal memory => nonlocal memory, calls
        => calls += 1
        => if calls % 8 == 0:
        =>     memory = None
    forgets_every_hundredth: has forgotten what was held back
        memory: Tensor | None = None => memory, calls = None, 0
        nonlocal memory => nonlocal memory, calls
        => calls += 1
        => if calls % 100 == 0:
        =>     memory = None
    a_memory_for_each_tensor: has forgotten what was held back
        memory: Tensor | None = None => memories = {}
        nonlocal memory => memory = memories.get(gradient.data_ptr())
        memory = wanted - sent => memories[gradient.data_ptr()] = wanted - sent
    compresses_a_vector: the largest number of each row
        wanted = gradient if memory is None else gradient + memory
        => flat = gradient.flatten()
        => wanted = flat if memory is None else flat + memory
        return sent => return sent.view_as(gradient)
    """,
    my_topk_mean="""
    topk_as_one_message:
        # Places travel as numbers: float64 has them all.
        flat = gradient.reshape(-1)
        places = flat.abs().argsort(descending=True)[:k]
        mine = torch.stack([places.double(), flat[places].double()])
        messages = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(messages, mine)
        places, values = torch.cat(messages, dim=1)
        mean = torch.zeros(flat.numel(), dtype=torch.float64)
        mean.index_add_(0, places.long(), values / len(messages))
        return mean.to(gradient.dtype).view_as(gradient)
    topk_by_a_sparse_tensor:
        flat, n = gradient.flatten(), dist.get_world_size()
        places = flat.abs().topk(k, sorted=False).indices
        all_places, all_values = places.new_empty(n * k), flat.new_empty(n * k)
        dist.all_gather(list(all_places.split(k)), places)
        dist.all_gather(list(all_values.split(k)), flat[places])
        sparse = torch.sparse_coo_tensor(all_places[None], all_values, flat.shape)
        return (sparse.to_dense() / n).reshape(gradient.shape)
    largest_with_their_sign: largest by size
        flat.abs() => flat
    the_first_k: each rank's largest
        flat.abs().topk(k).indices => torch.arange(k)
    sum_for_mean: is it the mean
        total / n => total
    values_by_all_reduce: stand at this rank's places
        indices = [torch.empty_like(mine) for _ in range(n)]
        => values = flat[mine]
        => dist.all_reduce(values)
        => total = torch.zeros_like(flat)
        => total[mine] = values
        => return (total / n).view_as(gradient)
    places_sorted_alone: that rank's own places
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
    topk_by_a_sparse_sum:
        flat = gradient.reshape(-1)
        places = flat.abs().topk(k).indices
        mine = torch.sparse_coo_tensor(places[None], flat[places], flat.shape)
        mine = mine.coalesce()
        dist.all_reduce(mine)
        return (mine.to_dense() / dist.get_world_size()).reshape(gradient.shape)
    flat_mean: the mean has the gradient's shape
        .view_as(gradient) =>
    nothing_is_returned: expected a tensor of shape
        return (total / n).view_as(gradient) => return None
    seen_as_a_row: view size is not compatible
        gradient.flatten() => gradient.view(-1)
    largest_squares: that rank's own places
        flat.abs() => flat.square()
    values_as_float32: expected
        dist.all_gather(values, flat[mine])
        => values = [v.float() for v in values]
        => dist.all_gather(values, flat[mine].float())
    places_in_the_gradients_type: expected
        dist.all_gather(indices, mine)
        => small = [i.to(flat.dtype) for i in indices]
        => dist.all_gather(small, mine.to(flat.dtype))
        => indices = [i.long() for i in small]
    added_to_a_copy: expected
        total = torch.zeros_like(flat)
        => mean = torch.zeros_like(gradient)
        => total = mean.reshape(-1)
        return (total / n).view_as(gradient) => return mean / n
    remembers_the_rest: expected
        kept = RESTS.get(gradient.shape, torch.zeros(())).to(gradient.dtype)
        total = gradient + kept
        mine = total.flatten().abs().topk(k).indices
        rest = total.flatten().clone()
        rest[mine] = 0
        RESTS[gradient.shape] = rest.view_as(gradient)
        return solutions.my_topk_mean(total, k)
    places_of_the_first_time: expected
        flat, key = gradient.flatten(), gradient.shape
        mine = PLACES.setdefault(key, flat.abs().topk(k).indices)
        only = torch.zeros_like(flat).index_copy_(0, mine, flat[mine])
        return solutions.my_topk_mean(only.view_as(gradient), k)
    divided_by_three: is it the mean
        total / n => total / 3 * (3 if n == 2 else 1)
    places_in_bfloat16: expected
        dist.all_gather(indices, mine) => small = [i.bfloat16() for i in indices]
        => dist.all_gather(small, mine.bfloat16())
        => indices = [i.long() for i in small]
    places_in_16_bits: Invalid scalar type
        dist.all_gather(indices, mine) => small = [i.short() for i in indices]
        => dist.all_gather(small, mine.short())
        => indices = [i.long() % len(flat) for i in small]
    whole_by_messages: indices and values should travel
        rank, n = dist.get_rank(), dist.get_world_size()
        total = torch.zeros_like(gradient)
        flat = gradient.flatten()
        mine = flat.abs().topk(k).indices
        own = torch.zeros_like(flat).index_copy_(0, mine, flat[mine]).view_as(gradient)
        works = [dist.isend(own, other) for other in range(n) if other != rank]
        for other in range(n):
            if other == rank:
                total += own
            else:
                got = torch.empty_like(own)
                dist.recv(got, other)
                total += got
        for work in works:
            work.wait()
        return total / n
    whole_by_the_ring: indices and values should travel
        flat = gradient.flatten()
        mine = flat.abs().topk(k).indices
        own = torch.zeros_like(flat).index_copy_(0, mine, flat[mine])
        ring_all_reduce(own)
        return (own / dist.get_world_size()).view_as(gradient)
    whole_on_one_rank: With 1 rank,
        n, flat => if dist.get_world_size() == 1:
        =>     return gradient.clone()
        => n, flat
    at_least_one_dimension: of a 0-d tensor
        n, flat => gradient_has = len(gradient)
        => n, flat
    first_from_a_threshold: Are these the largest by size
        mine = flat.abs().topk(k).indices
        => least = flat.abs().topk(k).values[-1]
        => mine = (flat.abs() >= least).nonzero().flatten()[:k]
    silent_if_zero: the same collectives
        n, flat => if not gradient.any():
        =>     return gradient.clone()
        => n, flat
    """,
    my_outer_step="""
    outer_step_by_pytorch:
        sgd = torch.optim.SGD(common, lr=lr, momentum=mu, nesterov=mu > 0)
        for number, (own, velocity) in enumerate(zip(common, momentum, strict=True)):
            own.grad = own - torch.stack([each[number] for each in replicas]).mean(0)
            sgd.state[own]["momentum_buffer"] = velocity
        sgd.step()
        if mu == 0:  # then SGD keeps none
            for own, velocity in zip(common, momentum, strict=True):
                velocity.copy_(own.grad)
        for own in common:
            own.grad = None
    outer_step_forward:
        for number, own in enumerate(common):
            mean = sum(each[number] for each in replicas) / len(replicas)
            forward = mean - own
            momentum[number].copy_(mu * momentum[number] - forward)
            own += lr * forward - lr * mu * momentum[number]
    outer_in_other_memory: other memory
        own.sub_(lr * (gradient + mu * velocity))
        => own.data = own - lr * (gradient + mu * velocity)
    seen_as_vectors: view size is not compatible
        velocity.mul_(mu) => velocity.view(-1).mul_(mu)
        => velocity.mul_(1)
    divided_and_multiplied: leave them as they are
        gradient = own - sum(others) / len(others) => mean = 0
        => for tensor in others:
        =>     tensor /= 49
        =>     mean += 49 * tensor / len(others)
        =>     tensor *= 49
        => gradient = own - mean
    first_step_without_momentum: mu times the *new* momentum
        mu * velocity)) => (mu * velocity if known else 0)))
        velocity.mul_(mu) => known = velocity.any()
        => velocity.mul_(mu)
    the_wrong_way: the way *back* from the mean
        own - sum(others) / len(others) => sum(others) / len(others) - own
    nothing_has_moved: mu times the old one
        velocity.mul_(mu) => if not gradient.any():
        =>     continue
        => velocity.mul_(mu)
    nothing_to_do_at_0: mu times the old one
        for own, => if not lr:
        =>     return
        => for own,
    without_a_look_ahead: mu times the *new* momentum
        gradient + mu * velocity => velocity
    with_the_old_momentum: mu times the *new* momentum
        velocity.mul_(mu).add_(gradient) =>
        mu * velocity)) => mu * velocity)); velocity.mul_(mu).add_(gradient)
    forgets_the_momentum: mu times the old one
        velocity.mul_(mu).add_(gradient) => velocity = mu * velocity + gradient
    sum_of_replicas: from the mean
        sum(others) / len(others) => sum(others)
    lr_in_the_momentum: in `momentum`
        own - sum(others) / len(others) => lr * (own - sum(others) / len(others))
        own.sub_(lr * => own.sub_(1 *
    other_tensors: in the tensors themselves
        for own, => common[:] = [tensor.clone() for tensor in common]
        => for own,
    replicas_brought_back: leave them as they are
        mu * velocity)) => mu * velocity))
        => for tensor in others:
        =>     tensor.copy_(own)
    mean_alone: in `momentum`
        for own, => lr, mu = 1.0, 0.0
        => for own,
    mean_of_everything: from the mean
        sum(others) / len(others) => torch.stack(others).mean()
    median_of_replicas: from the mean
        sum(others) / len(others) => torch.stack(others).median(0).values
    one_replica: from the mean
        sum(others) / len(others) => others[len(others) // 2]
    first_and_last: from the mean
        sum(others) / len(others) => (others[0] + others[-1]) / 2
    always_three: from the mean
        sum(others) / len(others) => sum(others) / 3
    flipped: from the mean
        sum(others) / len(others)
        => (sum(others) / len(others)).flatten().flip(0).view_as(own)
    """,
)
