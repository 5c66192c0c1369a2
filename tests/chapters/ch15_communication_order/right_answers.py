"""Right answers to the exercises of chapter 15, in other styles than the solutions."""

import heapq
from functools import partial
from itertools import accumulate


def priority_with_a_heap(ready, send, piece):
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


def priority_of_a_list_of_pieces(ready, send, piece):
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


def least_by_sums_from_both_ends(forward, backward, send):
    back = list(accumulate(reversed(backward)))[::-1]
    rest = list(accumulate(reversed(forward)))[::-1]
    return max(map(sum, zip(back, accumulate(send), rest, strict=True)))


def least_by_pieces_of_one(forward, backward, send):
    """Play priority through with the smallest pieces: that reaches the bound."""
    ready = [sum(backward[k:]) for k in range(len(send))]
    left, now, ends = list(send), 0, list(ready)
    while any(left):
        there = [k for k, rest in enumerate(left) if rest and ready[k] <= now]
        now += 1
        if there:
            left[there[0]] -= 1
            ends[there[0]] = now
    now = ready[0]
    for k, took in enumerate(forward):
        now = max(now, ends[k]) + took
    return now


def late_steps_by_partial(layers, optimizers, send):
    def arrive(handles, optimizer, layer, _):
        while handles:
            handles.pop().wait()
            if not handles:
                optimizer.step()

    for layer, optimizer in zip(layers, optimizers, strict=True):
        sent = [send(p.grad) for p in layer.parameters() if p.requires_grad]
        layer.register_forward_pre_hook(partial(arrive, sent, optimizer))


def late_steps_in_a_dictionary(layers, optimizers, send):
    due = {}
    for layer, optimizer in zip(layers, optimizers, strict=True):
        gradients = [p.grad for p in layer.parameters()]
        due[layer] = optimizer, [send(g) for g in gradients if g is not None]

    def arrive(layer, _):
        if layer in due:
            optimizer, handles = due.pop(layer)
            [handle.wait() for handle in handles]
            optimizer.step()

    for layer in layers:
        layer.register_forward_pre_hook(arrive)


RIGHT = {
    "my_priority": [priority_with_a_heap, priority_of_a_list_of_pieces],
    "my_least_time": [least_by_sums_from_both_ends, least_by_pieces_of_one],
    "my_late_steps": [late_steps_by_partial, late_steps_in_a_dictionary],
}
