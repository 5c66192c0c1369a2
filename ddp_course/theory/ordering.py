"""The order of sending gradients: step times, and a bound for every order.

Layer 0 is the first in forward. Its gradient is ready last in backward, and the next
forward needs its parameters first. Let f, b, s, u be the times of a layer's forward,
backward, send and update, for layers 0 to n-1; backward begins at time 0.

    ready(l)   b[n-1] + ... + b[l]                the time when l's gradient is ready
    tail(l)    (u+f)[l] + ... + (u+f)[n-1]        the work that must wait for l's send

    step time, as in DDP         last send's end + tail(0)
    step time, best order        max over c:  ready(c) + s[0] + ... + s[c] + tail(c)

The second line is a lower bound: layers 0 to c are not ready before layer c is, they
share one link, and the tail of c must wait for each of them. It is reached if the
ready layer with the lowest number, which has the longest tail, is always sent first,
and may interrupt another send at any moment: Jackson's rule (1955), for jobs that
become ready one after the other and can be interrupted (Horn 1974). Without
interruption the problem is NP-hard; cutting sends into pieces is in between. Chapter
15.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Real


@dataclass(frozen=True)
class Layer:
    """The times that one layer takes, in any unit; `send` is for its gradient."""

    forward: Real
    backward: Real
    send: Real
    update: Real = 0


def check_layers(layers: Sequence[Layer]) -> None:
    """Raise ValueError unless each of `layers` is a Layer."""
    for number, layer in enumerate(layers):
        if not isinstance(layer, Layer):
            raise ValueError(
                f"layers[{number}] is {layer!r}; it must be a Layer(forward, backward, "
                "send)"
            )


def ready_times(layers: Sequence[Layer]) -> list[Real]:
    """Return, for each layer, the time when its gradient is ready."""
    check_layers(layers)
    return list(accumulate(layer.backward for layer in reversed(layers)))[::-1]


def tails(layers: Sequence[Layer]) -> list[Real]:
    """Return, for each layer, the computing time from its update to forward's end."""
    own = (layer.update + layer.forward for layer in reversed(layers))
    return list(accumulate(own))[::-1]


def send_starts(compute: Sequence[Real], network: Sequence[Real]) -> list[Real]:
    """Return the times when the sends of buckets 0, 1, ... begin, in this order.

    Bucket k begins when its gradient is ready, after `compute[0]` to `compute[k]`, and
    the link has sent bucket k-1: s[k] = max(ready[k], s[k-1] + network[k-1]).
    """
    if len(compute) != len(network):
        raise ValueError(
            f"compute has {len(compute)} times and network {len(network)}; each needs "
            "one for each bucket"
        )
    starts, free = [], 0
    for ready, seconds in zip(accumulate(compute), network, strict=True):
        starts.append(max(ready, free))
        free = starts[-1] + seconds
    return starts


def wait_for_all_time(layers: Sequence[Layer]) -> Real:
    """Return the step time with sends in backward's order; updates wait for all sends.

    That is data parallelism as in DDP, with a bucket for each layer.
    """
    check_layers(layers)
    backward = [layer.backward for layer in reversed(layers)]
    network = [layer.send for layer in reversed(layers)]
    last = send_starts(backward, network)[-1] + network[-1]
    return max(sum(backward), last) + tails(layers)[0]


def paths(layers: Sequence[Layer]) -> list[Real]:
    """Return, for each layer c: ready(c), plus the sends of 0 to c, plus tail(c)."""
    sent = accumulate(layer.send for layer in layers)
    parts = zip(ready_times(layers), sent, tails(layers), strict=True)
    return [sum(three) for three in parts]


def least_step_time(layers: Sequence[Layer]) -> Real:
    """Return the lower bound of the step time, for any order: the longest of `paths`.

    The step is from the start of backward to the end of the next forward. If the
    longest path is mostly one layer's own send, no order helps; only fewer bytes do, or
    a layer that is divided between ranks.
    """
    return max(paths(layers))


def binding_layer(layers: Sequence[Layer]) -> int:
    """Return the layer c with the longest path (the first of several)."""
    of_each = paths(layers)
    return of_each.index(max(of_each))


def good_piece(layers: Sequence[Layer], each: Real) -> float:
    """Return a good length of pieces, as time on the link; `each`: a piece's overhead.

    Let S be the time of all sends. Pieces of length p cost `each` S / p more, and an
    urgent piece waits up to p for the previous one. p + `each` S / p is smallest at
    p = sqrt(`each` S). This is an estimate; try values around it.
    """
    return math.sqrt(each * sum(layer.send for layer in layers))
