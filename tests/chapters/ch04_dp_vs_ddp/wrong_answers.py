"""Wrong answers to the exercises of chapter 04, each with a word its hint must say."""

import hashlib

import torch
import torch.distributed as dist

from ddp_course.chapters.ch04_dp_vs_ddp import solutions
from ddp_course.collectives import all_reduce, broadcast
from ddp_course.train import checksum

# make_replicas


@torch.no_grad()
def one_by_one(model):
    for state in [*model.parameters(), *model.buffers()]:
        dist.broadcast(state, 0)


def _flat(states, send):
    flat = torch.cat([state.detach().flatten() for state in states])
    send(flat)
    parts = flat.split([state.numel() for state in states])
    for state, part in zip(states, parts, strict=True):
        state.data.copy_(part.view(state.shape))


def _from_rank_0(flat):
    dist.broadcast(flat, 0)


def without_buffers(model):
    _flat([*model.parameters()], _from_rank_0)


def only_what_is_trained(model):
    _flat([p for p in model.parameters() if p.requires_grad], _from_rank_0)
    for dtype in (torch.float32, torch.int64):
        _flat([b for b in model.buffers() if b.dtype == dtype], _from_rank_0)


def from_the_last_rank(model):
    last = dist.get_world_size() - 1
    states = [*model.parameters(), *model.buffers()]
    for dtype in (torch.float32, torch.int64):
        _flat(
            [state for state in states if state.dtype == dtype],
            lambda flat: dist.broadcast(flat, last),
        )


def the_mean_of_all(model):
    states = [*model.parameters(), *model.buffers()]

    def average(flat):
        dist.all_reduce(flat)
        flat //= 1 if flat.is_floating_point() else dist.get_world_size()
        if flat.is_floating_point():
            flat /= dist.get_world_size()

    for dtype in (torch.float32, torch.int64):
        _flat([state for state in states if state.dtype == dtype], average)


def from_the_same_seed(model):
    torch.manual_seed(0)
    for layer in (model.first, model.second, model.frozen, model.tied):
        layer.reset_parameters()


def as_objects(model):
    box = [dict(model.named_buffers()) | model.state_dict()]
    dist.broadcast_object_list(box, 0)
    model.load_state_dict(box[0], strict=False)
    model.tied.hidden.copy_(box[0]["tied.hidden"])


def tied_ones_twice(model):
    states = [*model.state_dict().values(), model.tied.hidden]
    for dtype in (torch.float32, torch.int64):
        _flat([s for s in states if s.dtype == dtype], _from_rank_0)


def new_parameters(model):
    solutions.make_replicas(model)
    model.scale = torch.nn.Parameter(model.scale.detach().clone())


def frozen_for_good(model):
    model.requires_grad_(False)
    solutions.make_replicas(model)


def a_leaf_in_place(model):
    for p in model.parameters():
        new = p.detach().clone()
        dist.broadcast(new, 0)
        p.copy_(new)


def everything_as_floats(model):
    with torch.no_grad():
        states = [*model.parameters(), *model.buffers()]
        flat = torch.cat([state.flatten().double() for state in states])
        broadcast(flat, 0)
        parts = flat.split([state.numel() for state in states])
        for state, part in zip(states, parts, strict=True):
            state.copy_(part.view(state.shape))


# average_gradients_flat


def _trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def _filled(model):
    for p in _trained(model):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return [p.grad for p in _trained(model)]


def one_for_each(model):
    for gradient in _filled(model):
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def the_sum(model):
    _flat(_filled(model), dist.all_reduce)


def never_copied_back(model):
    flat = torch.cat([gradient.flatten() for gradient in _filled(model)])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()


def _mean(flat):
    dist.all_reduce(flat)
    flat /= dist.get_world_size()


def skips_those_without(model):
    _flat([p.grad for p in _trained(model) if p.grad is not None], _mean)


def averages_the_parameters(model):
    _filled(model)
    _flat(_trained(model), _mean)


def gathers_at_rank_0(model):
    gradients, n = _filled(model), dist.get_world_size()
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.reduce(flat, 0)
    flat /= n
    dist.broadcast(flat, 0)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view(gradient.shape))


def frozen_ones_too(model):
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    _flat([p.grad for p in model.parameters()], _mean)


def sends_frozen_ones(model):
    n = len(_filled(model))
    vain = [torch.zeros_like(p) for p in model.parameters() if not p.requires_grad]
    gradients = [p.grad for p in _trained(model)]
    assert len(gradients) == n
    _flat(gradients + vain, _mean)


def tied_gradients_twice(model):
    _filled(model)
    named = model.named_parameters(remove_duplicate=False)
    unique = {}
    for name, p in named:
        if p.requires_grad:
            unique[name] = p.grad
    _flat([*unique.values()], _mean)


def mean_over_those_that_have_one(model):
    have = torch.tensor([float(p.grad is not None) for p in _trained(model)])
    gradients = _filled(model)
    flat = torch.cat([g.flatten() for g in gradients] + [have])
    all_reduce(flat)
    *parts, have = flat.split([*(g.numel() for g in gradients), len(have)])
    for gradient, part, n in zip(gradients, parts, have, strict=True):
        gradient.copy_(part.view(gradient.shape) / n)


def takes_the_step_as_well(model):
    solutions.average_gradients_flat(model)
    with torch.no_grad():
        for p in _trained(model):
            p -= 0.1 * p.grad


# replicas_agree


def always(model):
    return True


def compares_sums(model):
    total = sum(t.double().nan_to_num().sum() for t in model.state_dict().values())
    least, most = total.clone(), total.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return bool(least == most)


def _gathered(value):
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, value)
    return everyones


def forgets_buffers(model):
    return len(set(_gathered(checksum(dict(model.named_parameters()))))) == 1


def only_rank_0_knows(model):
    mine = checksum(model.state_dict())
    everyones = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyones)
    return everyones is None or len(set(everyones)) == 1


def compares_with_rank_0(model):
    mine = checksum(model.state_dict())
    return mine == _gathered(mine)[0]


def sends_all_weights(model):
    flat = torch.cat([t.flatten().double() for t in model.state_dict().values()])
    from_0 = flat.clone()
    dist.broadcast(from_0, 0)
    same = torch.equal(flat.nan_to_num(), from_0.nan_to_num())
    return all(_gathered(same))


def within_rounding(model):
    norm = torch.cat([t.flatten().float() for t in model.state_dict().values()])
    mine = float(norm.nan_to_num().norm())
    return all(abs(one - mine) < 1e-3 for one in _gathered(mine))


def repairs_them(model):
    same = solutions.replicas_agree(model)
    if not same:
        with torch.no_grad():
            for t in model.state_dict().values():
                dist.broadcast(t, 0)
    return same


def cleans_it(model):
    with torch.no_grad():
        for t in model.state_dict().values():
            t.nan_to_num_()
    return solutions.replicas_agree(model)


def nan_is_never_equal(model):
    mine = checksum(model.state_dict())
    healthy = all(bool((t == t).all()) for t in model.state_dict().values())
    return len(set(_gathered(mine))) == 1 and healthy


def a_number(model):
    return len(set(_gathered(checksum(model.state_dict()))))


# What harder inputs find out


@torch.no_grad()
def the_state_dict(model):
    for state in model.state_dict().values():
        dist.broadcast(state, 0)


@torch.no_grad()
def seen_as_a_row(model):
    for state in [*model.parameters(), *model.buffers()]:
        row = state.view(-1)
        dist.broadcast(row, 0)


def first_and_last(model):
    everyones = [""] * dist.get_world_size()
    dist.all_gather_object(everyones, checksum(model.state_dict()))
    return everyones[0] == everyones[-1]


def numbers_with_fractions(model):
    states = model.state_dict()
    states = {k: v for k, v in states.items() if v.is_floating_point()}
    everyones = [""] * dist.get_world_size()
    dist.all_gather_object(everyones, checksum(states))
    return len(set(everyones)) == 1


def without_signs_of_zeros(model):
    states = {k: v + 0 for k, v in model.state_dict().items()}
    everyones = [""] * dist.get_world_size()
    dist.all_gather_object(everyones, checksum(states))
    return len(set(everyones)) == 1


@torch.no_grad()
def counters_as_float32(model):
    states = [*model.parameters(), *model.buffers()]
    _flat([s for s in states if s.dtype == torch.float32], _from_rank_0)
    for state in states:
        if state.dtype == torch.int64:
            flat = state.float()
            dist.broadcast(flat, 0)
            state.copy_(flat)


@torch.no_grad()
def into_new_memory(model):
    states = [*model.parameters(), *model.buffers()]
    for dtype in (torch.float32, torch.int64):
        members = [s for s in states if s.dtype == dtype]
        flat = torch.cat([s.flatten() for s in members])
        dist.broadcast(flat, 0)
        parts = flat.split([s.numel() for s in members])
        for state, part in zip(members, parts, strict=True):
            state.data = part.view(state.shape)


def in_float32(model):
    gradients = _filled(model)
    flat = torch.cat([gradient.flatten().float() for gradient in gradients])
    _mean(flat)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view(gradient.shape))


def gradients_as_rows(model):
    _flat([gradient.view(-1) for gradient in _filled(model)], _mean)


def as_float32(model):
    rounded = {k: v.float() for k, v in model.state_dict().items()}
    return len(set(_gathered(checksum(rounded)))) == 1


def by_their_print(model):
    seen = hashlib.sha256(str(model.state_dict()).encode())
    return len(set(_gathered(seen.hexdigest()))) == 1


WRONG = {
    "make_replicas": {
        counters_as_float32: "norm.num_batches_tracked, for one, has changed",
        into_new_memory: "has another tensor than before as",
        the_state_dict: "1 of 14 tensors wrong: tied.hidden",
        seen_as_a_row: "view size is not compatible",
        one_by_one: "x broadcast; expected 2 x broadcast",
        without_buffers: "norm.running_mean",
        only_what_is_trained: "frozen.weight",
        from_the_last_rank: "has changed",
        the_mean_of_all: "has changed",
        from_the_same_seed: "tensors wrong",
        as_objects: "Is something sent twice",
        tied_ones_twice: "Is something sent twice",
        new_parameters: "another tensor than before as scale",
        frozen_for_good: "can no longer be trained",
        a_leaf_in_place: "leaf",
        everything_as_floats: "Is something sent twice",
    },
    "average_gradients_flat": {
        in_float32: "the mean over the ranks is",
        gradients_as_rows: "view size is not compatible",
        one_for_each: "x all_reduce; expected 1 x all_reduce",
        the_sum: "That is the sum.",
        never_copied_back: "the mean over the ranks is",
        skips_those_without: "of another type or size",
        averages_the_parameters: "the mean over the ranks is",
        gathers_at_rank_0: "1 x reduce, 1 x broadcast; expected 1 x all_reduce",
        frozen_ones_too: "which do not require one",
        sends_frozen_ones: "Is something sent twice",
        tied_gradients_twice: "Is something sent twice",
        mean_over_those_that_have_one: "which counts as zero",
        takes_the_step_as_well: "has other parameters than before",
    },
    "replicas_agree": {
        as_float32: "a number of float64",
        by_their_print: "differs in its last bit",
        first_and_last: "a rank in the middle",
        numbers_with_fractions: "a whole number in a buffer",
        without_signs_of_zeros: "has another sign",
        always: "differs in its last bit",
        compares_sums: "two weights have changed places",
        forgets_buffers: "a buffer of the last rank differs",
        only_rank_0_knows: "expected False on every rank",
        compares_with_rank_0: "returned `True`; expected False",
        sends_all_weights: "by the operating system's count",
        within_rounding: "expected False on every rank",
        repairs_them: "by the operating system's count",
        cleans_it: "has another model than before",
        nan_is_never_equal: "with a nan in the same place",
        a_number: "expected True or False",
    },
}
