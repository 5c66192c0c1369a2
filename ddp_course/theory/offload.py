"""The time of a step whose states lie on the host, behind a slow link. Chapter 08.

L equal units; each takes f in forward and b in backward, and the copy of its shard over
the link to the host takes c. The root unit's copy takes r. Each direction of the link
makes one copy at a time; the optimizer's step on the CPU takes u. Then stage 3 takes

    nothing prefetched   2 r + L (2 c + f + b)                              + c + r + u
    one unit ahead       2 (r + c) + (L - 1) (max(c, f) + max(c, b)) + f + b
                                                                            + c + r + u

as a unit is fetched before its forward and before its backward, and the gradients of
all units but the last one leave while the next unit is fetched and computed. The first
fetch of each pass, and the last gradients, overlap with nothing. ZeRO-Offload, with all
parameters on the device, fetches nothing before the step and everything after it:

    L f + b + (L - 1) max(b, c) + c + r + u + L c + r

Messages between ranks are not counted. Ren et al. 2021, "ZeRO-Offload", section 4.
"""

from numbers import Real


def offloaded_step_time(
    units: int,
    copy: Real,
    forward: Real,
    backward: Real,
    *,
    root_copy: Real = 0,
    update: Real = 0,
    prefetch: bool = True,
) -> Real:
    """Return the seconds of a stage 3 step with its shards on the host.

    Args:
        units: L, the number of equal units; the root unit is not among them.
        copy: c, seconds to copy this rank's part of a unit to or from the host.
        forward, backward: f and b, seconds to compute with one unit.
        root_copy: r, seconds to copy this rank's part of the root unit.
        update: u, seconds of the optimizer's step on the CPU.
        prefetch: whether the next unit is fetched while this one computes.
    """
    last_gradients = copy + root_copy
    if not prefetch:
        passes = 2 * root_copy + units * (2 * copy + forward + backward)
        return passes + last_gradients + update
    hidden = (units - 1) * (max(copy, forward) + max(copy, backward))
    return (
        2 * (root_copy + copy) + hidden + forward + backward + last_gradients + update
    )


def zero_offload_step_time(
    units: int,
    copy: Real,
    forward: Real,
    backward: Real,
    *,
    root_copy: Real = 0,
    update: Real = 0,
) -> Real:
    """Return the seconds of a step of ZeRO-Offload: gradients out, parameters back.

    The arguments are those of `offloaded_step_time`.
    """
    gradients_left = backward + (units - 1) * max(backward, copy) + copy + root_copy
    return units * forward + gradients_left + update + units * copy + root_copy
