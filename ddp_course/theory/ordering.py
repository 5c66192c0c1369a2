"""In which order gradients travel: what no order can beat, as closed forms.

Layer 0 is the first of forward. Backward comes to it last, so its gradient is there
last; and the next forward needs its parameters first. With f, b, s, u the times of a
layer's forward, backward, send and update, layers 0 to n-1, and backward from time 0:

    ready(l)   b[n-1] + ... + b[l]                its gradient is there
    tail(l)    (u+f)[l] + ... + (u+f)[n-1]        what cannot begin before it is sent

    step time, all waited for    last send's end + tail(0)
    step time, best order        max over c:  ready(c) + s[0] + ... + s[c] + tail(c)

The second is a bound: layers 0 to c are none of them ready before layer c, share one
link, and each of them is waited for by the tail of c at least. Whoever always sends
what has the longest tail, the first layer, reaches it, if a send may be put off for a
more urgent one at any moment: Jackson's rule (1955), for jobs that are released one
after the other and can be interrupted (Horn 1974). Without interruption the problem is
NP-hard; pieces are in between. Chapter 15.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Real


@dataclass(frozen=True)
class Layer:
    """What one layer takes, in any one unit of time; `send` is its gradient's way."""

    forward: Real
    backward: Real
    send: Real
    update: Real = 0


def ready_times(layers: Sequence[Layer]) -> list[Real]:
    """Return for each layer when its gradient is there: the last layer's first."""
    return list(accumulate(layer.backward for layer in reversed(layers)))[::-1]


def tails(layers: Sequence[Layer]) -> list[Real]:
    """Return for each layer what is left to compute from its update on."""
    own = (layer.update + layer.forward for layer in reversed(layers))
    return list(accumulate(own))[::-1]


def send_starts(compute: Sequence[Real], network: Sequence[Real]) -> list[Real]:
    """Return when the sends of buckets 0, 1, ... begin, first come, first served.

    Bucket k begins when its gradient is there, after `compute[0]` to `compute[k]`, and
    the link has sent bucket k-1: s[k] = max(ready[k], s[k-1] + network[k-1]).
    """
    starts, free = [], 0
    for ready, seconds in zip(accumulate(compute), network, strict=True):
        starts.append(max(ready, free))
        free = starts[-1] + seconds
    return starts


def wait_for_all_time(layers: Sequence[Layer]) -> Real:
    """Return the step time if sends are in the order of backward, and all waited for.

    That is data parallelism with a bucket for each layer, as DDP has it.
    """
    backward = [layer.backward for layer in reversed(layers)]
    network = [layer.send for layer in reversed(layers)]
    last = send_starts(backward, network)[-1] + network[-1]
    return max(sum(backward), last) + tails(layers)[0]


def paths(layers: Sequence[Layer]) -> list[Real]:
    """Return for each layer c the time of: backward to c, sends 0 to c, c's tail."""
    sent = accumulate(layer.send for layer in layers)
    parts = zip(ready_times(layers), sent, tails(layers), strict=True)
    return [sum(three) for three in parts]


def least_step_time(layers: Sequence[Layer]) -> Real:
    """Return what no order can beat, see above: the longest of `paths`.

    From the first moment of backward to the last of the next forward. If the longest is
    that of a layer whose own send is most of it, no order helps: only fewer bytes, or a
    layer that is divided between ranks.
    """
    return max(paths(layers))


def binding_layer(layers: Sequence[Layer]) -> int:
    """Return the layer c whose path is the longest (of several, the first)."""
    of_each = paths(layers)
    return of_each.index(max(of_each))


def good_piece(layers: Sequence[Layer], each: Real) -> float:
    """Return how long a piece had better be on the link, if each costs `each` more.

    Pieces of length p make S / p times `each` of a whole S, and an urgent one waits up
    to p for the one before it: p + each S / p is least at the root of each S (0: the
    smaller, the better). An estimate; sweep around it.
    """
    return math.sqrt(each * sum(layer.send for layer in layers))
