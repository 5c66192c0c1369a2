"""Wrong answers to the exercises of chapter 15, each with a word of its hint."""

from ddp_course.chapters.ch15_communication_order import solutions

# my_priority


def first_come_first_served(ready, send, piece):
    sent, now = [], 0
    for layer in sorted(range(len(send)), key=lambda k: (ready[k], -k)):
        now = max(now, ready[layer])
        for done in range(0, send[layer], piece):
            length = min(piece, send[layer] - done)
            sent.append((layer, now, now + length))
            now += length
    return sent


def before_it_is_there(ready, send, piece):
    return solutions.my_priority([0] * len(ready), send, piece)


def whole_layers(ready, send, piece):
    return solutions.my_priority(ready, send, max(send))


def interrupts_at_any_moment(ready, send, piece):
    return solutions.my_priority(ready, send, 1)


def waits_for_all_of_backward(ready, send, piece):
    return solutions.my_priority([max(ready)] * len(ready), send, piece)


def last_layers_first(ready, send, piece):
    n = len(ready) - 1
    sent = solutions.my_priority(ready[::-1], send[::-1], piece)
    return [(n - layer, start, end) for layer, start, end in sent]


def full_pieces_only(ready, send, piece):
    return solutions.my_priority(ready, [-(-s // piece) * piece for s in send], piece)


def uses_up_the_callers_list(ready, send, piece):
    sent = solutions.my_priority(ready, send, piece)
    send[:] = [0] * len(send)
    return sent


# my_least_time


def all_waited_for(forward, backward, send):
    """DDP's time."""
    free = now = 0
    for took, long in zip(backward[::-1], send[::-1], strict=True):
        now += took
        free = max(free, now) + long
    return free + sum(forward)


def the_busier_of_the_two(forward, backward, send):
    return max(sum(forward) + sum(backward), sum(send))


def all_one_after_the_other(forward, backward, send):
    return sum(forward) + sum(backward) + sum(send)


def only_the_first_layers_path(forward, backward, send):
    return sum(backward) + send[0] + sum(forward)


def only_the_last_layers_path(forward, backward, send):
    return backward[-1] + sum(send) + forward[-1]


def its_own_send_alone(forward, backward, send):
    layers = range(len(send))
    return max(sum(backward[c:]) + send[c] + sum(forward[c:]) for c in layers)


def without_its_own_forward(forward, backward, send):
    return max(
        sum(backward[c:]) + sum(send[: c + 1]) + sum(forward[c + 1 :])
        for c in range(len(send))
    )


# my_late_steps


def sent(layer, send):
    return [send(p.grad) for p in layer.parameters() if p.requires_grad]


def arrival(handles, optimizer):
    def arrive(*_):
        for handle in handles:
            handle.wait()
        optimizer.step()

    return arrive


def waits_at_once(layers, optimizers, send):
    for layer, optimizer in zip(layers, optimizers, strict=True):
        arrival(sent(layer, send), optimizer)()


def the_first_layer_waits_for_all(layers, optimizers, send):
    handles = [handle for layer in layers for handle in sent(layer, send)]

    def arrive(*_):
        hook.remove()
        for optimizer in optimizers:
            arrival(handles, optimizer)()

    hook = layers[0].register_forward_pre_hook(arrive)


def as_backward_made_them(layers, optimizers, send):
    solutions.my_late_steps(layers[::-1], optimizers[::-1], send)


def steps_at_every_forward(layers, optimizers, send):
    for layer, optimizer in zip(layers, optimizers, strict=True):
        layer.register_forward_pre_hook(arrival(sent(layer, send), optimizer))


def after_the_layer_has_run(layers, optimizers, send):
    """A forward hook, not a pre-hook: the layer runs with old parameters."""
    for layer, optimizer in zip(layers, optimizers, strict=True):
        layer.register_forward_hook(arrival(sent(layer, send), optimizer))


def steps_without_waiting(layers, optimizers, send):
    for layer, optimizer in zip(layers, optimizers, strict=True):
        sent(layer, send)
        layer.register_forward_pre_hook(arrival([], optimizer))


def the_last_layers_handles_for_all(layers, optimizers, send):
    """A closure sees its loop's variables as they are at the end."""
    for layer, optimizer in zip(layers, optimizers, strict=True):
        handles = sent(layer, send)
        layer.register_forward_pre_hook(lambda *_: arrival(handles, optimizer)())  # noqa: B023


def sends_when_it_is_needed(layers, optimizers, send):
    """Nothing travels while anything is computed."""
    for layer, optimizer in zip(layers, optimizers, strict=True):
        layer.register_forward_pre_hook(
            lambda layer, _, its=optimizer: arrival(sent(layer, send), its)()
        )


def weights_only(layers, optimizers, send):
    for layer, optimizer in zip(layers, optimizers, strict=True):
        handle = send(layer.weight.grad)
        solutions._step_before_forward(layer, optimizer, [handle])


def the_frozen_one_too(layers, optimizers, send):
    for layer, optimizer in zip(layers, optimizers, strict=True):
        handles = [send(p.grad) for p in layer.parameters()]
        solutions._step_before_forward(layer, optimizer, handles)


WRONG = {
    "my_priority": {
        first_come_first_served: "layer 0 is next from 3 on",
        before_it_is_there: "nothing is there before 3",
        whole_layers: "the last piece is shorter",
        interrupts_at_any_moment: "fits into one piece",
        waits_for_all_of_backward: "layer 1 is alone until 4",
        last_layers_first: "layer 0 is next from 3 on",
        full_pieces_only: "the last piece is shorter",
        uses_up_the_callers_list: "changed the lists",
    },
    "my_least_time": {
        all_waited_for: "all four paths are equally long",
        the_busier_of_the_two: "one layer goes backward, is sent",
        all_one_after_the_other: "all four paths are equally long",
        only_the_first_layers_path: "layer 1's path is the longest",
        only_the_last_layers_path: "layer 0 is sent after all of backward",
        its_own_send_alone: "layer 1's path is the longest",
        without_its_own_forward: "one layer goes backward, is sent",
    },
    "my_late_steps": {
        waits_at_once: "did not return before it had waited: wait 0.weight",
        the_first_layer_waits_for_all: "Before layer 0 ran, 0.bias, 0.weight, 1.bias",
        as_backward_made_them: "needs its gradients first",
        steps_at_every_forward: "When layer 0 ran a second time",
        after_the_layer_has_run: "Before layer 0 ran, nothing had been waited for",
        steps_without_waiting: "Before layer 0 ran, nothing had been waited for",
        the_last_layers_handles_for_all: "Before layer 0 ran, 2.weight",
        sends_when_it_is_needed: "Sent: nothing",
        weights_only: "Expected each gradient that there is",
        the_frozen_one_too: "AttributeError",
    },
}
