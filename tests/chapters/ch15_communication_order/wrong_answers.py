"""Wrong answers to the exercises of chapter 15, each with a word of its hint."""

from slips import slips

from ddp_course.chapters.ch15_communication_order import solutions


def arrival(handles, optimizer):
    """Return a hook that waits and steps, and stays."""

    def arrive(*_):
        for handle in handles:
            handle.wait()
        optimizer.step()

    return arrive


WRONG = slips(
    solutions,
    globals(),
    my_priority="""
    first_come_first_served: layer 0 is next from 3 on
        there[0] => min(there, key=lambda k: (ready[k], -k))
    before_it_is_there: nothing is there before 3
        and ready[k] <= now =>
    whole_layers: the last piece is shorter
        min(piece, left[layer]) => left[layer]
    interrupts_at_any_moment: fits into one piece
        min(piece, left[layer]) => 1
    waits_for_all_of_backward: layer 1 is alone until 4
        list(send), 0 => list(send), max(ready)
    last_layers_first: layer 0 is next from 3 on
        there[0] => there[-1]
    full_pieces_only: the last piece is shorter
        list(send), 0 => [-(-s // piece) * piece for s in send], 0
    uses_up_the_callers_list: changed the lists
        list(send), 0 => send, 0
    """,
    my_least_time="""
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
    """,
    my_late_steps="""
    waits_at_once: did not return before it had waited: wait 0.weight
        _step_before_forward(layer, optimizer, [send(p.grad) for p in there])
        => arrival([send(p.grad) for p in there], optimizer)()
    the_first_layer_waits_for_all: Before layer 0 ran, 0.bias, 0.weight, 1.bias
        parameters = [p for layer in layers for p in layer.parameters()]
        handles = [send(p.grad) for p in parameters if p.grad is not None]
        for optimizer in optimizers:
            _step_before_forward(layers[0], optimizer, handles)
    as_backward_made_them: needs its gradients first
        (layers, optimizers, strict => (layers[::-1], optimizers[::-1], strict
    steps_at_every_forward: When layer 0 ran a second time
        _step_before_forward(layer, optimizer, [send(p.grad) for p in there])
        => arrive = arrival([send(p.grad) for p in there], optimizer)
        => layer.register_forward_pre_hook(arrive)
    after_the_layer_has_run: Before layer 0 ran, nothing had been waited for
        _step_before_forward(layer, optimizer, [send(p.grad) for p in there])
        => arrive = arrival([send(p.grad) for p in there], optimizer)
        => layer.register_forward_hook(arrive)  # the layer runs with old parameters
    steps_without_waiting: Before layer 0 ran, nothing had been waited for
        [send(p.grad) for p in there] => [send(p.grad) for p in there][:0]
    the_last_layers_handles_for_all: Before layer 0 ran, 2.weight
        _step_before_forward(layer, optimizer, [send(p.grad) for p in there])
        => handles = [send(p.grad) for p in there]
        => layer.register_forward_pre_hook(lambda *_: arrival(handles, optimizer)())
    sends_when_it_is_needed: Sent: nothing
        _step_before_forward(layer, optimizer, [send(p.grad) for p in there])
        => def arrive(*_, its=optimizer, there=there):
        =>     arrival([send(p.grad) for p in there], its)()
        => layer.register_forward_pre_hook(arrive)
    weights_only: Expected each gradient that there is
        layer.parameters() => [layer.weight]
    the_frozen_one_too: AttributeError
        if p.grad is not None =>
    """,
)
