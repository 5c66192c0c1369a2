"""Answers to the exercises of chapter 15, right ones and wrong ones."""

# ruff: noqa: F401 (the texts use what is imported)

import heapq
from collections import namedtuple
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from slips import answers
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from ddp_course.chapters.ch15_communication_order import solutions
from ddp_course.model import build_gpt

Sent = namedtuple("Sent", "layer begin end")


def arrival(handles, optimizer):
    """Return a hook that waits and steps, and stays."""

    def arrive(*_):
        for handle in handles:
            handle.wait()
        optimizer.step()

    return arrive


TIMES, SENT, OPTIMIZERS, SAVED = {}, {}, {}, {}


class ZeroGrad(namedtuple("ZeroGrad", "optimizer")):
    """An optimizer of which a step only sets gradients to None."""

    def step(self):
        self.optimizer.zero_grad()


ANSWERS = answers(
    solutions,
    globals(),
    my_priority="""
    priority_with_a_heap:
        arrivals = sorted((time, k) for k, time in enumerate(ready))
        heap, now, sent, left = [], 0, [], dict(enumerate(send))
        while arrivals or heap:
            if not heap:
                now = max(now, arrivals[0][0])
            while arrivals and arrivals[0][0] <= now:
                heapq.heappush(heap, arrivals.pop(0)[1])
            layer = heap[0]
            if not left[layer]:
                heapq.heappop(heap)
                continue
            end = now + min(piece, left[layer])
            sent.append((layer, now, end))
            left[layer] -= end - now
            now = end
        return sent
    priority_of_a_list_of_pieces:
        pieces = [
            (layer, ready[layer], min(piece, send[layer] - done))
            for layer in range(len(send))
            for done in range(0, send[layer], piece)
        ]
        now, sent = 0, []
        while pieces:
            now = max(now, min(time for _, time, _ in pieces))
            chosen = min(one for one in pieces if one[1] <= now)
            chosen = next(one for one in pieces if one[0] == chosen[0])
            pieces.remove(chosen)
            sent.append((chosen[0], now, now + chosen[2]))
            now += chosen[2]
        return sent
    first_come_first_served: layer 0 is next from 3 on
        ready_layers[0] => min(ready_layers, key=lambda k: (ready[k], -k))
    before_it_is_ready: nothing is ready before 3
        and ready[k] <= now =>
    whole_layers: the last piece is shorter
        min(piece, left[layer]) => left[layer]
    interrupts_at_any_moment: fits into one piece
        min(piece, left[layer]) => 1
    waits_for_all_of_backward: only layer 1 is ready before 4
        list(send), 0 => list(send), max(ready)
    last_layers_first: layer 0 is next from 3 on
        ready_layers[0] => ready_layers[-1]
    full_pieces_only: the last piece is shorter
        list(send), 0 => [-(-s // piece) * piece for s in send], 0
    uses_up_the_callers_list: changed `send`
        list(send), 0 => send, 0
    priority_as_named_tuples:
        sent = solutions.my_priority(ready, send, piece)
        return tuple(Sent(*one) for one in sent)
    priority_as_lists:
        return [[*one] for one in solutions.my_priority(ready, send, piece)]
    a_hundred_pieces: then layer 1 to its end
        while any(left) => while any(left) and len(sent) < 100
    remembered_by_the_ready_times: the first ready layer is sent
        sent = solutions.my_priority(ready, send, piece)
        return SENT.setdefault((*ready,), sent)
    remembered_without_the_piece: the first ready layer is sent
        sent = solutions.my_priority(ready, send, piece)
        return SENT.setdefault((*ready, *send), sent)
    two_pieces_at_a_time: the first ready layer is sent
        length = min(piece, left[layer])
        => length = min(piece, left[layer])
        => if left[layer] > length > 0:
        =>     sent.append((layer, now, now + length))
        =>     left[layer] -= length
        =>     now += length
        =>     length = min(piece, left[layer])
    remembered_by_sums: the first ready layer is sent
        key = len(ready), sum(ready), sum(send), piece
        return SENT.setdefault(key, solutions.my_priority(ready, send, piece))
    times_of_32_bits: large times are exact, too
        sent = np.array(solutions.my_priority(ready, send, piece))
        return [(int(k), int(a), int(b)) for k, a, b in sent.astype(np.int32)]
    layers_of_8_bits: the first ready layer is sent
        sent = solutions.my_priority(ready, send, piece)
        return [(k % 256, a, b) for k, a, b in sent]
    the_latest_first: layer
        ready_layers[0] => max(ready_layers, key=lambda k: ready[k])
    """,
    my_least_time="""
    least_by_sums_from_both_ends:
        back = list(accumulate(reversed(backward)))[::-1]
        rest = list(accumulate(reversed(forward)))[::-1]
        return max(map(sum, zip(back, accumulate(send), rest, strict=True)))
    least_by_pieces_of_one:
        # Play priority through with the smallest pieces: that reaches the bound.
        ready = [sum(backward[k:]) for k in range(len(send))]
        left, now, ends = list(send), 0, list(ready)
        while any(left):
            waiting = [k for k, rest in enumerate(left) if rest and ready[k] <= now]
            now += 1
            if waiting:
                left[waiting[0]] -= 1
                ends[waiting[0]] = now
        now = ready[0]
        for k, took in enumerate(forward):
            now = max(now, ends[k]) + took
        return now
    all_waited_for: all four paths are equally long
        free = now = 0
        for took, long in zip(backward[::-1], send[::-1], strict=True):
            now += took
            free = max(free, now) + long
        return free + sum(forward)
    the_busier_of_the_two: one layer goes backward, is sent
        return max(sum(forward) + sum(backward), sum(send))
    all_one_after_the_other: all four paths are equally long
        return sum(forward) + sum(backward) + sum(send)
    only_the_first_layers_path: layer 1's path is the longest
        range(len(send)) => range(1)
    only_the_last_layers_path: layer 0 is sent after all of backward
        range(len(send)) => [len(send) - 1]
    its_own_send_alone: layer 1's path is the longest
        sum(send[: c + 1]) => send[c]
    without_its_own_forward: one layer goes backward, is sent
        forward[c:] => forward[c + 1 :]
    least_by_numpy:
        return np.int64(solutions.my_least_time(forward, backward, send))
    least_as_a_float:
        return float(solutions.my_least_time(forward, backward, send))
    rounded_to_16_bits: large times are exact, too
        time = solutions.my_least_time(forward, backward, send)
        return int(torch.tensor(float(time)).bfloat16())
    summed_as_whole_numbers_of_32_bits: large times are exact, too
        time = solutions.my_least_time(forward, backward, send)
        return int(np.int64(time).astype(np.int32))
    remembered_by_sums: Called again
        key = sum(forward), sum(backward), sum(send), len(send)
        time = solutions.my_least_time(forward, backward, send)
        return TIMES.setdefault(key, time)
    paths_of_the_first_layers: the longest of all layers' paths counts
        range(len(send)) => range(min(64, len(send)))
    summed_in_32_bits: large times are exact, too
        time = solutions.my_least_time(forward, backward, send)
        return int(torch.tensor(float(time)))
    remembers_without_forward: the longest of all layers' paths counts
        key = tuple(backward), tuple(send)
        time = solutions.my_least_time(forward, backward, send)
        return TIMES.setdefault(key, time)
    of_four_layers: IndexError
        range(len(send)) => range(4)
        sum(send[: c + 1]) => sum(send[:c], send[c])
    """,
    my_late_steps="""
    late_steps_by_partial:
        def arrive(handles, optimizer, hook, layer, _):
            hook.pop().remove()
            while handles:
                handles.pop().wait()
            optimizer.step()

        for layer, optimizer in zip(layers, optimizers, strict=True):
            sent = [send(p.grad) for p in layer.parameters() if p.grad is not None]
            hook = []
            step = partial(arrive, sent, optimizer, hook)
            hook.append(layer.register_forward_pre_hook(step))
    late_steps_in_a_dictionary:
        due, hooks = {}, {}
        for layer, optimizer in zip(layers, optimizers, strict=True):
            gradients = [p.grad for p in layer.parameters()]
            due[layer] = optimizer, [send(g) for g in gradients if g is not None]

        def arrive(layer, _):
            hooks[layer].remove()
            optimizer, handles = due.pop(layer)
            [handle.wait() for handle in handles]
            optimizer.step()

        for layer in layers:
            hooks[layer] = layer.register_forward_pre_hook(arrive)
    late_steps_by_one_hook_for_all_modules:
        due = {}
        for layer, optimizer in zip(layers, optimizers, strict=True):
            gradients = [p.grad for p in layer.parameters()]
            due[layer] = optimizer, [send(g.data) for g in gradients if g is not None]

        def arrive(module, _):
            if module in due:
                optimizer, handles = due.pop(module)
                [handle.wait() for handle in handles]
                optimizer.step()
            if not due:
                hook.remove()

        hook = nn.modules.module.register_module_forward_pre_hook(arrive)
    hooks_that_stay: A hook that has done its work removes itself
        due = {}
        for layer, optimizer in zip(layers, optimizers, strict=True):
            gradients = [p.grad for p in layer.parameters()]
            due[layer] = optimizer, [send(g) for g in gradients if g is not None]

        def arrive(layer, _):
            if layer in due:
                arrival(due[layer][1], due.pop(layer)[0])()

        for layer in layers:
            layer.register_forward_pre_hook(arrive)
    copies_of_strided_gradients: something else
        send(p.grad) => send(p.grad.contiguous())
    copies_of_32_bits: something else
        send(p.grad) => send(p.grad.float())
    clears_all_hooks: have lost a hook
        _step_before_forward(layer, optimizer, [send(p.grad) for p in present])
        => arrive = arrival([send(p.grad) for p in present], optimizer)
        => def arrive_once(its, *_, arrive=arrive):
        =>     its._forward_pre_hooks.clear()
        =>     arrive()
        => layer.register_forward_pre_hook(arrive_once)
    trainable_ones_alone: Expected each existing gradient
        if p.grad is not None => if p.grad is not None and p.requires_grad
    no_gradients_of_zero: Expected each existing gradient
        if p.grad is not None => if p.grad is not None and p.grad.any()
    in_training_alone: Before layer 0 ran, your hooks had waited for nothing
        _step_before_forward(layer, optimizer, [send(p.grad) for p in present])
        => arrive = arrival([send(p.grad) for p in present], optimizer)
        => def arrive_once(its, *_, steps=[arrive]):
        =>     if its.training and steps:
        =>         steps.pop()()
        => layer.register_forward_pre_hook(arrive_once)
    no_layers_without_gradients: list index out of range
        _step_before_forward(layer, optimizer, [send(p.grad) for p in present])
        => handles = [send(p.grad) for p in present]
        => _step_before_forward(layer, optimizer, handles or [handles[0]])
    its_first_optimizers: With AdamW, in the second call
        OPTIMIZERS.setdefault(layers[0], optimizers)
        solutions.my_late_steps(layers, OPTIMIZERS[layers[0]], send)
    divided_once_more: With 2 ranks, rank 0 after a forward
        def average(tensor):
            if dist.is_initialized():
                tensor /= dist.get_world_size()
            return send(tensor)

        solutions.my_late_steps(layers, optimizers, average)
    zeroed_gradients: are not the means any more
        solutions.my_late_steps(layers, optimizers, send)
        for layer, optimizer in zip(layers, optimizers, strict=True):
            _step_before_forward(layer, ZeroGrad(optimizer), [])
    cut_off_from_the_input: backward does not reach the input
        solutions.my_late_steps(layers, optimizers, send)
        def detach(layer, xs):
            hook.remove()
            return xs[0].detach()

        hook = layers[1].register_forward_pre_hook(detach)
    waits_at_once: waited before it returned: wait 0.
        _step_before_forward(layer, optimizer, [send(p.grad) for p in present])
        => arrival([send(p.grad) for p in present], optimizer)()
    the_first_layer_waits_for_all: 0.scale, 1.inner.bias
        parameters = [p for layer in layers for p in layer.parameters()]
        handles = [send(p.grad) for p in parameters if p.grad is not None]
        for optimizer in optimizers:
            _step_before_forward(layers[0], optimizer, handles)
    as_backward_made_them: needs its gradients first
        (layers, optimizers, strict => (layers[::-1], optimizers[::-1], strict
    steps_at_every_forward: when layer 0 ran a second time
        _step_before_forward(layer, optimizer, [send(p.grad) for p in present])
        => arrive = arrival([send(p.grad) for p in present], optimizer)
        => layer.register_forward_pre_hook(arrive)
    after_the_layer_has_run: Before layer 0 ran, your hooks had waited for nothing
        _step_before_forward(layer, optimizer, [send(p.grad) for p in present])
        => arrive = arrival([send(p.grad) for p in present], optimizer)
        => layer.register_forward_hook(arrive)  # the layer runs with old parameters
    steps_without_waiting: Before layer 0 ran, your hooks had waited for nothing
        [send(p.grad) for p in present] => [send(p.grad) for p in present][:0]
    the_last_layers_handles_for_all: your hooks had waited for nothing
        _step_before_forward(layer, optimizer, [send(p.grad) for p in present])
        => handles = [send(p.grad) for p in present]
        => layer.register_forward_pre_hook(lambda *_: arrival(handles, optimizer)())
    sends_when_it_is_needed: Sent: nothing
        _step_before_forward(layer, optimizer, [send(p.grad) for p in present])
        => def arrive(*_, its=optimizer, present=present):
        =>     arrival([send(p.grad) for p in present], its)()
        => layer.register_forward_pre_hook(arrive)
    weights_only: Expected each existing gradient
        layer.parameters() => [layer.inner.weight]
    the_first_group_alone: Expected each existing gradient
        layer.parameters() => optimizer.param_groups[0]["params"]
    the_frozen_one_too: send got None
        if p.grad is not None =>
    all_that_could_have_one: send got None
        if p.grad is not None => if p.requires_grad
    of_the_layer_itself_alone: Expected each existing gradient
        layer.parameters() => layer.parameters(recurse=False)
    sgd_by_hand: with the mean gradients
        _step_before_forward(layer, optimizer, [send(p.grad) for p in present])
        => def arrive(layer, _, its=[(p, send(p.grad)) for p in present]):
        =>     while its:
        =>         p, handle = its.pop()
        =>         handle.wait()
        =>         p.data -= 0.25 * p.grad
        => layer.register_forward_pre_hook(arrive)
    armed_in_the_first_step_only: Sent: nothing
        if not hasattr(layers[0], "armed"):
            layers[0].armed = True
            solutions.my_late_steps(layers, optimizers, send)
    """,
    my_carry="""
    carry_by_one_rank:
        whole = full_state_dict(ours)
        if dist.get_rank() == 0:
            dcp.save(whole, checkpoint_id=folder, no_dist=True)
        dist.barrier()
        found = {name: torch.empty_like(tensor) for name, tensor in whole.items()}
        dcp.load(found, checkpoint_id=folder, no_dist=True)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(theirs, found, options=options)
    carry_shard_by_shard:
        dcp.save(full_state_dict(ours), checkpoint_id=folder)
        dcp.load(dict(theirs.state_dict()), checkpoint_id=folder)
    nothing: left nothing in the folder
        return
    frozen_afterwards: changed more than weights
        dcp.load(shards, checkpoint_id=folder)  # in place
        => dcp.load(shards, checkpoint_id=folder)
        => theirs.requires_grad_(False)
    trains_afterwards: changed more than weights
        dcp.load(shards, checkpoint_id=folder)  # in place
        => dcp.load(shards, checkpoint_id=folder)
        => theirs.train()
    never_saved_again: another GPT in the same folder, rank 0 saved weights that
        whole = full_state_dict(ours)
        if not Path(folder, ".metadata").exists():
            dcp.save(whole, checkpoint_id=folder)
        dcp.load(get_model_state_dict(theirs), checkpoint_id=folder)
    matrices_only: loaded wrong weights
        dcp.save(full_state_dict(ours), checkpoint_id=folder)
        shards = get_model_state_dict(theirs)
        matrices = {name: each for name, each in shards.items() if each.ndim > 1}
        dcp.load(matrices, checkpoint_id=folder)  # in place
    the_first_models_weights: saved weights that are not ours
        whole = SAVED.setdefault("whole", full_state_dict(ours))
        dcp.save(whole, checkpoint_id=folder)
        shards = get_model_state_dict(theirs)
        dcp.load(shards, checkpoint_id=folder)
    names_of_the_courses_gpt: a GPT of five layers, with a tied head, rank 0 left
        names = build_gpt().state_dict()
        whole = {k: t for k, t in full_state_dict(ours).items() if k in names}
        dcp.save(whole, checkpoint_id=folder)
        shards = get_model_state_dict(theirs)
        dcp.load({k: shards[k] for k in whole}, checkpoint_id=folder)
    one_name_for_a_tied_weight: with a tied head, rank 0 left nothing in the folder
        names = dict(ours.named_parameters())
        whole = {k: t for k, t in full_state_dict(ours).items() if k in names}
        dcp.save(whole, checkpoint_id=folder)
        shards = get_model_state_dict(theirs)
        dcp.load({k: shards[k] for k in whole}, checkpoint_id=folder)
    two_folders: bytes in the folder
        dcp.save(full_state_dict(ours), checkpoint_id=folder)
        => dcp.save(full_state_dict(ours), checkpoint_id=folder)
        => dcp.save(full_state_dict(ours), checkpoint_id=folder + "/again")
    not_loaded: loaded wrong weights
        dcp.load(shards, checkpoint_id=folder) => pass
    through_no_files: left nothing in the folder
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(theirs, full_state_dict(ours), options=options)
    saved_but_not_loaded: read nothing from the folder
        whole = full_state_dict(ours)
        dcp.save(whole, checkpoint_id=folder)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(theirs, whole, options=options)
    pickled: left nothing in the folder
        whole = full_state_dict(ours)
        torch.save(whole, folder + "/weights.pt")
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(theirs, whole, options=options)
    under_other_names: left nothing in the folder
        state = {f"module.{name}": t for name, t in full_state_dict(ours).items()}
        dcp.save(state, checkpoint_id=folder)
        options = StateDictOptions(full_state_dict=True)
        whole = {name[7:]: tensor for name, tensor in state.items()}
        set_model_state_dict(theirs, whole, options=options)
    theirs_is_saved: saved weights that are not ours
        full_state_dict(ours) => get_model_state_dict(theirs)
    whole_tensors: left whole tensors where PyTorch had shards
        dcp.save(full_state_dict(ours), checkpoint_id=folder)
        for name, tensor in full_state_dict(ours).items():
            path, _, last = name.rpartition(".")
            setattr(theirs.get_submodule(path), last, nn.Parameter(tensor))
    twice_as_much: bytes in the folder
        dcp.save(full_state_dict(ours), checkpoint_id=folder)
        => whole = full_state_dict(ours)
        => more = {f"copy of {name}": t.clone() for name, t in whole.items()}
        => dcp.save(whole | more, checkpoint_id=folder)
    """,
)
