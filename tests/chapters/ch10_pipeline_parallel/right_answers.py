"""Right answers to the exercises of chapter 10, in other styles than the solutions."""

import itertools

import torch


def gpipe_backwards_in_reverse(num_stages, num_microbatches, rank):
    """As the figure of the paper has it: the last microbatch goes back first."""
    ks = range(num_microbatches)
    return [f"{rank}F{k}" for k in ks] + [f"{rank}B{k}" for k in ks[::-1]]


def cut_by_filling(costs, num_stages):
    """The least limit for which stages filled one after the other are enough."""
    n = len(costs)
    sums = {sum(costs[a:b]) for a in range(n) for b in range(a + 1, n + 1)}
    fitting = (_filled(costs, num_stages, limit) for limit in sorted(sums))
    return next(sizes for sizes in fitting if sizes)


def _filled(costs, num_stages, limit):
    sizes, full = [0], 0
    for k, cost in enumerate(costs):
        must = len(costs) - k <= num_stages - len(sizes)  # a layer for each stage
        if sizes[-1] and (full + cost > limit or must):
            sizes.append(0)
            full = 0
        sizes[-1] += 1
        full += cost
        if full > limit:
            return None
    return sizes if len(sizes) == num_stages else None


def stage_step_last_first(
    stage, num_microbatches, forward_in, forward_out, backward_in, backward_out
):
    """Go back through the last microbatch first."""
    kept = []
    for k in range(num_microbatches):
        x = forward_in(k)
        x = x.requires_grad_() if x.is_floating_point() else x
        kept.append((x, stage(x)))
        forward_out(k, kept[k][1].detach())
    while kept:
        x, y = kept.pop()
        k = len(kept)
        y.backward(backward_in(k))
        backward_out(k, x.grad)


def stage_step_recomputed(
    stage, num_microbatches, forward_in, forward_out, backward_in, backward_out
):
    """Keep what has entered, and go forward again when the gradient is there."""
    entered = []
    for k in range(num_microbatches):
        entered.append(forward_in(k))
        with torch.no_grad():
            forward_out(k, stage(entered[k]))
    for k, x in enumerate(entered):
        gradient = backward_in(k)
        if x.is_floating_point():
            x.requires_grad_()
        stage(x).backward(gradient)
        backward_out(k, x.grad)


def gpipe_action_by_action(num_stages, num_microbatches, rank):
    row = []
    for place in range(2 * num_microbatches):
        back, microbatch = divmod(place, num_microbatches)
        row.append(str(rank) + ("B" if back else "F") + str(microbatch))
    return row


def cut_of_all_cuts(costs, num_stages):
    def dearest(ends):
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))

    inner = itertools.combinations(range(1, len(costs)), num_stages - 1)
    ends = min(((0, *cuts, len(costs)) for cuts in inner), key=dearest)
    return [b - a for a, b in itertools.pairwise(ends)]


RIGHT = {
    "my_gpipe": [gpipe_backwards_in_reverse, gpipe_action_by_action],
    "my_cut": [cut_by_filling, cut_of_all_cuts],
    "my_stage_step": [stage_step_last_first, stage_step_recomputed],
}
