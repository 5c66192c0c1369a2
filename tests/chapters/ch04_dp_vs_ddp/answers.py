"""Answers to the exercises of chapter 04, right ones and wrong ones."""

# ruff: noqa: F401 (the texts use what is imported)

import hashlib
from itertools import groupby

import torch
import torch.distributed as dist
from slips import answers
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ddp_course.chapters.ch04_dp_vs_ddp import solutions
from ddp_course.collectives import all_reduce, broadcast


def _hash(model):
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(
            name.encode() + tensor.flatten().view(torch.uint8).numpy().tobytes()
        )
    return digest.digest()


@torch.no_grad()
def _flat(states, send):
    flat = torch.cat([state.detach().flatten() for state in states])
    send(flat)
    parts = flat.split([state.numel() for state in states])
    for state, part in zip(states, parts, strict=True):
        state.data.copy_(part.view(state.shape))


def a_leaf_in_place(model):
    for p in model.parameters():
        new = p.detach().clone()
        dist.broadcast(new, 0)
        p.copy_(new)


def _trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def _filled(model):
    for p in _trained(model):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return [p.grad for p in _trained(model)]


def _mean(flat):
    dist.all_reduce(flat)
    flat /= dist.get_world_size()


def records_nothing_more(model):
    torch.set_grad_enabled(False)
    solutions.make_replicas(model)


FLAT_MODELS: dict = {}
ROWS: list = []
ROWS_KEPT: dict = {}
FIRST_MODEL: dict = {}

ANSWERS = answers(
    solutions,
    globals(),
    make_replicas="""
    a_box_for_each_type:
        boxes = {}
        for state in [*model.buffers(), *model.parameters()]:
            boxes.setdefault(state.dtype, []).append(state.data)
        for members in boxes.values():
            box = torch.empty(sum(s.numel() for s in members), dtype=members[0].dtype)
            if dist.get_rank() == 0:
                torch.cat([s.reshape(-1) for s in members], out=box)
            dist.broadcast(box, src=0)
            start = 0
            for s in members:
                s[...] = box[start : start + s.numel()].reshape(s.shape)
                start += s.numel()
    flattened_by_pytorch:
        states = sorted(
            [*model.buffers(), *model.parameters()], key=lambda s: str(s.dtype)
        )
        for _, members in groupby(states, key=lambda s: s.dtype):
            members = list(members)
            flat = _flatten_dense_tensors(members)
            broadcast(flat, src=0)
            torch._foreach_copy_(members, _unflatten_dense_tensors(flat, members))
    counters_as_float32: norm.num_batches_tracked has changed
        state.flatten() for => state.flatten().float() for
    into_new_memory: has a new tensor as
        state.copy_(part.view(state.shape)) => state.data = part.view(state.shape)
    without_buffers: norm.running_mean
        [*model.parameters(), *model.buffers()] => [*model.parameters()]
    the_usual_three_types: frozen.fine is not rank 0's
        states = [*model.parameters(), *model.buffers()]
        => usual = torch.float32, torch.float64, torch.int64
        => states = [*model.parameters(), *model.buffers()]
        => states = [state for state in states if state.dtype in usual]
    numbers_without_bools: frozen.fine is not rank 0's
        states = [*model.parameters(), *model.buffers()]
        => states = [*model.parameters(), *model.buffers()]
        => states = [state for state in states if state.dtype != torch.bool]
    of_the_first_model: tensors wrong
        states = [*model.parameters(), *model.buffers()]
        => states = [*model.parameters(), *model.buffers()]
        => states = FIRST_MODEL.setdefault("states", states)
    not_waited_for: never waits for a collective
        dist.broadcast(flat, 0) => dist.broadcast(flat, 0, async_op=True)
    only_what_is_trained: frozen.weight
        model.parameters() => [p for p in model.parameters() if p.requires_grad]
    from_the_last_rank: has changed
        dist.broadcast(flat, 0) => dist.broadcast(flat, dist.get_world_size() - 1)
    the_mean_of_all: has changed
        broadcast(flat, 0) => all_reduce(flat); flat.copy_(flat / dist.get_world_size())
    tied_ones_twice: Is a number sent twice
        parameters(), *model.buffers() => state_dict().values(), model.tied.hidden
    new_parameters: has a new tensor as scale
        states =
        => model.scale = torch.nn.Parameter(model.scale.detach().clone()); states =
    frozen_for_good: can no longer be trained
        states = => model.requires_grad_(False); states =
    the_state_dict: 1 of 17 tensors wrong: for example, tied.hidden
        for state in model.state_dict().values():
            dist.broadcast(state, 0)
    seen_as_a_row: view size is not compatible
        for state in [*model.parameters(), *model.buffers()]:
            row = state.view(-1)
            dist.broadcast(row, 0)
    one_by_one: x broadcast; expected 3 x broadcast
        for state in [*model.parameters(), *model.buffers()]:
            dist.broadcast(state, 0)
    from_the_same_seed: tensors wrong
        torch.manual_seed(0)
        for layer in (model.first, model.second, model.frozen, model.tied):
            layer.reset_parameters()
    as_objects: Is a number sent twice
        box = [dict(model.named_buffers()) | model.state_dict()]
        dist.broadcast_object_list(box, 0)
        model.load_state_dict(box[0], strict=False)
        model.tied.hidden.copy_(box[0]["tied.hidden"])
    a_leaf_in_place: leaf
    counters_as_float64: norm.num_batches_tracked has changed
        cat([state.flatten() for state in members])
        => cat([state.flatten() for state in members])
        => flat = flat if flat.is_floating_point() else flat.double()
    gradients_cleared: can no longer be trained as before
        states = => model.zero_grad(); states =
    left_in_eval_mode: can no longer be trained as before
        states = => model.eval(); states =
    records_nothing_more: leaves a setting of the whole process changed
    left_in_train_mode: can no longer be trained as before
        states = => model.train(); states =
    without_nan: tied.hidden
        solutions.make_replicas(model)
        model.tied.hidden.nan_to_num_()
    sent_but_not_written: for example, tied.hidden is not rank 0's
        hidden = model.tied.hidden.clone()
        solutions.make_replicas(model)
        model.tied.hidden.copy_(hidden)
    without_signs_of_zeros: tied.hidden
        solutions.make_replicas(model)
        model.tied.hidden.add_(0)
    once_for_each_model: tensors wrong
        if not hasattr(model, "replicated"):
            solutions.make_replicas(model)
            model.replicated = True
    a_buffer_left_behind: buffer more than before: flat
        solutions.make_replicas(model)
        model.register_buffer("flat", torch.zeros(3))
    sends_the_first_model_again: tensors wrong
        states = [*model.parameters(), *model.buffers()]
        for dtype in dict.fromkeys(state.dtype for state in states):
            members = [state for state in states if state.dtype == dtype]
            flat = torch.cat([state.flatten() for state in members])
            flat = FLAT_MODELS.setdefault(dtype, flat)
            dist.broadcast(flat, 0)
            parts = flat.split([state.numel() for state in members])
            for state, part in zip(members, parts, strict=True):
                state.copy_(part.view(state.shape))
    everything_as_floats: norm.num_batches_tracked has changed
        states = [*model.parameters(), *model.buffers()]
        flat = torch.cat([state.flatten().double() for state in states])
        broadcast(flat, 0)
        parts = flat.split([state.numel() for state in states])
        for state, part in zip(states, parts, strict=True):
            state.copy_(part.view(state.shape))
    """,
    average_gradients_flat="""
    by_vectors:
        trained = [p for p in model.parameters() if p.requires_grad]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        vector = parameters_to_vector([g.contiguous() for g in gradients])
        vector /= dist.get_world_size()  # before the sum
        dist.all_reduce(vector)
        vector_to_parameters(vector, gradients)
        for p, gradient in zip(trained, gradients, strict=True):
            p.grad = gradient
    by_our_ring:
        trained = {p: p.grad for p in model.parameters() if p.requires_grad}
        parts = [torch.zeros_like(p) if g is None else g for p, g in trained.items()]
        flat = torch.cat([part.reshape(-1) for part in parts])
        all_reduce(flat)
        flat *= 1 / dist.get_world_size()
        for p in trained:
            p.grad = flat[: p.numel()].reshape(p.shape).clone()
            flat = flat[p.numel() :]
    in_float32: the mean over the ranks is
        p.grad.flatten() for => p.grad.flatten().float() for
    gradients_as_rows: view size is not compatible
        p.grad.flatten() for => p.grad.view(-1) for
    the_sum: That is the sum.
        flat /= dist.get_world_size() => pass
    not_waited_for: never waits for a collective
        dist.all_reduce(flat) => dist.all_reduce(flat, async_op=True)
    adds_to_the_last_row: in a second call
        flat /= dist.get_world_size()
        => ROWS.append(flat.clone())
        => flat = sum(ROWS) / dist.get_world_size()
    in_a_row_for_all_models: on a second model
        trained = _trained(model)
        new = torch.cat([gradient.flatten() for gradient in _filled(model)])
        row = ROWS_KEPT.setdefault((new.numel(), new.dtype), new).copy_(new)
        _mean(row)
        for p, mean in zip(trained, row.split([p.numel() for p in trained])):
            p.grad = mean.view(p.shape)
    of_the_first_model: on a second model
        trained = FIRST_MODEL.setdefault("trained", _trained(model))
        for p in trained:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        _flat([p.grad for p in trained], _mean)
    left_in_eval_mode: trains differently than before
        solutions.average_gradients_flat(model)
        model.eval()
    left_in_train_mode: trains differently than before
        solutions.average_gradients_flat(model)
        model.train()
    keeps_zeros: the other ranks' gradients are missing
        zero = [p for p in _trained(model) if p.grad is not None and not p.grad.any()]
        kept = {p: p.grad.clone() for p in zero}
        _flat(_filled(model), _mean)
        for p, gradient in kept.items():
            p.grad = gradient
    zeros_of_another_type: do not fit together
        trained, parts = _trained(model), []
        for p in trained:
            parts.append(torch.zeros(p.numel()) if p.grad is None else p.grad.flatten())
        flat = torch.cat(parts)
        _mean(flat)
        for p, mean in zip(trained, flat.split([p.numel() for p in trained])):
            p.grad = mean.view(p.shape).to(p.dtype).clone()
    hides_infinity: in a second call
        mean.view(p.shape) => mean.nan_to_num(nan=torch.nan).view(p.shape)
    hides_nan: in a second call
        mean.view(p.shape) => mean.nan_to_num().view(p.shape)
    modules_of_one_level: as the gradient of deep.0.0.weight
        [p for p in model.parameters() if p.requires_grad]
        => [p for m in (model, *model.children()) for p in m.parameters(recurse=False)]
        => trained = list(dict.fromkeys(p for p in trained if p.requires_grad))
    the_sum_is_not_read: the other ranks' gradients are missing
        dist.all_reduce(flat) => dist.all_reduce(flat.clone())
    turned_over: ; at [0, 1] it has
        p.grad.copy_(mean.view(p.shape))
        => mean = mean.view(p.shape[::-1])
        => p.grad.copy_(mean.T if p.dim() == 2 else mean)
    never_copied_back: the mean over the ranks is
        p.grad.copy_(mean.view(p.shape)) => pass
    skips_those_without: collectives do not fit together
        parameters() if p.requires_grad => parameters() if p.grad is not None
    averages_the_parameters: the mean over the ranks is
        p.grad.flatten() for p in trained => p.flatten() for p in trained
        p.grad.copy_(mean.view(p.shape)) => p.copy_(mean.view(p.shape))
    gathers_at_rank_0: 1 x reduce, 1 x broadcast; expected 1 x all_reduce
        dist.all_reduce(flat) => dist.reduce(flat, 0)
        /= dist.get_world_size() => /= dist.get_world_size(); dist.broadcast(flat, 0)
    frozen_ones_too: which do not require one
        [p for p in model.parameters() if p.requires_grad] => [*model.parameters()]
    takes_the_step_as_well: has changed parameters
        copy_(mean.view(p.shape)) => copy_(mean.view(p.shape)); p -= 0.1 * p.grad
    one_for_each: x all_reduce; expected 1 x all_reduce
        for gradient in _filled(model):
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
    sends_frozen_ones: Is a number sent twice
        n = len(_filled(model))
        vain = [torch.zeros_like(p) for p in model.parameters() if not p.requires_grad]
        gradients = [p.grad for p in _trained(model)]
        assert len(gradients) == n
        _flat(gradients + vain, _mean)
    tied_gradients_twice: Is a number sent twice
        _filled(model)
        named = model.named_parameters(remove_duplicate=False)
        unique = {}
        for name, p in named:
            if p.requires_grad:
                unique[name] = p.grad
        _flat([*unique.values()], _mean)
    mean_over_those_that_have_one: which counts as zero
        have = torch.tensor([float(p.grad is not None) for p in _trained(model)])
        gradients = _filled(model)
        flat = torch.cat([g.flatten() for g in gradients] + [have])
        all_reduce(flat)
        *parts, have = flat.split([*(g.numel() for g in gradients), len(have)])
        for gradient, part, n in zip(gradients, parts, have, strict=True):
            gradient.copy_(part.view(gradient.shape) / n)
    """,
    replicas_agree="""
    hashes_as_bytes:
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, _hash(model))
        return all(one == everyones[0] for one in everyones)
    all_must_vote:
        mine = torch.tensor(list(_hash(model)))
        first = mine.clone()
        dist.broadcast(first, 0)
        vote = torch.tensor([int(torch.equal(mine, first))])
        dist.all_reduce(vote, op=dist.ReduceOp.MIN)
        return bool(vote.item())
    as_float64: a whole number in a buffer
        (model.state_dict()) => ({k: v.double() for k, v in model.state_dict().items()})
    as_float32: a number of float64
        (model.state_dict()) => ({k: v.float() for k, v in model.state_dict().items()})
    first_and_last: a rank in the middle
        len(set(everyones)) == 1 => everyones[0] == everyones[-1]
    first_middle_and_last: rank 1 alone has another weight
        len(set(everyones)) == 1
        => everyones[0] == everyones[len(everyones) // 2] == everyones[-1]
    all_different: every rank has another weight
        len(set(everyones)) == 1 => len(set(everyones)) != 2
    storages: is a part of a larger tensor
        mine, everyones = hashlib.sha256(), [None] * dist.get_world_size()
        for t in model.state_dict().values():
            storage = t.untyped_storage()
            mine.update(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
        dist.all_gather_object(everyones, mine.digest())
        return len(set(everyones)) == 1
    with_a_second_rank: IndexError: list index out of range
        len(set(everyones)) == 1
        => all(everyones[1] == one for one in everyones)
    numbers_with_fractions: a whole number in a buffer
        everyones = => state = model.state_dict(); everyones =
        checksum(model.state_dict())
        => checksum({k: v for k, v in state.items() if v.is_floating_point()})
    without_signs_of_zeros: has another sign
        (model.state_dict()) => ({k: v + 0 for k, v in model.state_dict().items()})
    forgets_buffers: a buffer of the last rank differs
        checksum(model.state_dict()) => checksum(dict(model.named_parameters()))
    compares_with_rank_0: returned `True`; expected False
        len(set(everyones)) == 1 => checksum(model.state_dict()) == everyones[0]
    nan_is_never_equal: with a nan in the same place
        == 1 => == 1 and all((t == t).all() for t in model.state_dict().values())
    the_first_2000_numbers: the last weight
        (model.state_dict())
        => ({k: v.flatten()[:2000] for k, v in model.state_dict().items()})
    in_any_order: have been exchanged
        hashes = sorted(checksum({"": t}) for t in model.state_dict().values())
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, "".join(map(str, hashes)))
        return len(set(everyones)) == 1
    as_lists: has other bits
        numbers = repr([t.tolist() for t in model.state_dict().values()])
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, hashlib.sha256(numbers.encode()).digest())
        return len(set(everyones)) == 1
    left_in_eval_mode: has a changed model
        everyones = => model.eval(); everyones =
    clears_gradients: has a changed model
        everyones = => model.zero_grad(); everyones =
    false_for_ever: is the same again
        if not hasattr(model, "differs"):
            model.differs = not solutions.replicas_agree(model)
        return not model.differs and solutions.replicas_agree(model)
    through_numpy: unsupported ScalarType BFloat16
        arrays = b"".join(t.numpy().tobytes() for t in model.state_dict().values())
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, hashlib.sha256(arrays).digest())
        return len(set(everyones)) == 1
    forgets_frozen_ones: a frozen weight of the last rank differs
        state = dict(model.named_buffers())
        state |= {k: p for k, p in model.named_parameters() if p.requires_grad}
        everyones = [""] * dist.get_world_size()
        dist.all_gather_object(everyones, checksum(state))
        return len(set(everyones)) == 1
    answers_once: in a second call
        if not hasattr(model, "agree"):
            model.agree = solutions.replicas_agree(model)
        return model.agree
    a_number: expected True or False
        len(set(everyones)) == 1 => len(set(everyones))
    by_their_print: differs in its last bit
        seen = hashlib.sha256(str(model.state_dict()).encode())
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, seen.hexdigest())
        return len(set(everyones)) == 1
    also_unsaved_buffers: that is not in `state_dict()` differs
        (model.state_dict()) => (dict(model.named_parameters()) | buffers)
        everyones = => buffers = dict(model.named_buffers()); everyones =
    always: differs in its last bit
        return True
    compares_sums: two weights have changed places
        total = sum(t.double().nan_to_num().sum() for t in model.state_dict().values())
        least, most = total.clone(), total.clone()
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return bool(least == most)
    only_rank_0_knows: expected False on every rank
        mine = checksum(model.state_dict())
        everyones = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, everyones)
        return everyones is None or len(set(everyones)) == 1
    sends_all_weights: by the operating system's count
        flat = torch.cat([t.flatten().double() for t in model.state_dict().values()])
        from_0 = flat.clone()
        dist.broadcast(from_0, 0)
        same = torch.equal(flat.nan_to_num(), from_0.nan_to_num())
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, same)
        return all(everyones)
    within_rounding: expected False on every rank
        norm = torch.cat([t.flatten().float() for t in model.state_dict().values()])
        mine = float(norm.nan_to_num().norm())
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        return all(abs(one - mine) < 1e-3 for one in everyones)
    repairs_them: by the operating system's count
        same = solutions.replicas_agree(model)
        if not same:
            with torch.no_grad():
                for t in model.state_dict().values():
                    dist.broadcast(t, 0)
        return same
    cleans_it: has a changed model
        with torch.no_grad():
            for t in model.state_dict().values():
                t.nan_to_num_()
        return solutions.replicas_agree(model)
    """,
)
