"""Answers to the exercises of chapter 10, right ones and wrong ones."""

import itertools

import torch
from slips import answers

from ddp_course.chapters.ch10_pipeline_parallel import solutions

KEPT = []  # of an answer that remembers


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


def _best(costs, num_stages, badness):
    def parts(sizes):
        ends = list(itertools.accumulate(sizes))
        return [costs[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    every = itertools.product(range(1, len(costs) + 1), repeat=num_stages)
    fitting = [list(sizes) for sizes in every if sum(sizes) == len(costs)]
    return min(fitting, key=lambda sizes: badness(parts(sizes)))


def gradients_of_all_parameters(stage, m, forward_in, forward_out, back_in, back_out):
    """Stumbles over a frozen one."""
    for k in range(m):
        x = forward_in(k)
        if x.is_floating_point():
            x.requires_grad_()
        y = stage(x)
        forward_out(k, y.detach())
        inputs = [*stage.parameters(), *([x] if x.requires_grad else [])]
        found = torch.autograd.grad(y, inputs, back_in(k))
        for parameter, gradient in zip(stage.parameters(), found, strict=False):
            parameter.grad += gradient
        back_out(k, found[-1] if x.requires_grad else None)


ANSWERS = answers(
    solutions,
    globals(),
    my_gpipe="""
    gpipe_backwards_in_reverse:
        # As the figure of the paper has it: the last microbatch goes back first.
        ks = range(num_microbatches)
        return [f"{rank}F{k}" for k in ks] + [f"{rank}B{k}" for k in ks[::-1]]
    gpipe_action_by_action:
        row = []
        for place in range(2 * num_microbatches):
            back, microbatch = divmod(place, num_microbatches)
            row.append(str(rank) + ("B" if back else "F") + str(microbatch))
        return row
    of_one_digit: With 2 stages and 12 microbatches
        {microbatch} => {microbatch % 10}
    ten_stages_at_most: rank 10 has stage 10
        {rank} => {min(rank, 9)}
    one_microbatch_at_a_time: the forwards of all microbatches come first
        return [f"{rank}{op}{k}" for k in range(num_microbatches) for op in "FB"]
    odd_ranks_the_other_way: in the same order on all ranks
        (num_microbatches) => (num_microbatches)[:: -1 if op == "B" and rank % 2 else 1]
    every_rank_has_every_stage: rank 0 has stage 0
        {rank} => {stage}
        range(num_microbatches) => range(num_microbatches)
        => for stage in range(num_stages)
    the_last_one_is_forgotten: the checker says
        range(num_microbatches) => range(num_microbatches - (op == "B"))
    counted_from_one: the checker says
        range(num_microbatches) => range(1, num_microbatches + 1)
    the_next_batch_too: the next batch's microbatches have to wait
        range(num_microbatches) => range(2 * num_microbatches)
    a_line_of_text: expected a list of strings
        ks = range(num_microbatches)
        return " ".join(f"{rank}{op}{k}" for op in "FB" for k in ks)
    forward_is_called_f: is not an action
        "FB" => "fb"
    as_early_as_it_can: the forwards of all microbatches come first
        warm_up = min(num_microbatches, num_stages - rank)
        row = [f"{rank}F{k}" for k in range(warm_up)]
        for k in range(num_microbatches):
            row.append(f"{rank}B{k}")
            if warm_up + k < num_microbatches:
                row.append(f"{rank}F{warm_up + k}")
        return row
    """,
    my_cut="""
    cut_by_filling:
        # The least limit for which stages filled one after the other are enough.
        n = len(costs)
        sums = {sum(costs[a:b]) for a in range(n) for b in range(a + 1, n + 1)}
        fitting = (_filled(costs, num_stages, limit) for limit in sorted(sums))
        return next(sizes for sizes in fitting if sizes)
    cut_of_all_cuts:
        def dearest(ends):
            return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))

        inner = itertools.combinations(range(1, len(costs)), num_stages - 1)
        ends = min(((0, *cuts, len(costs)) for cuts in inner), key=dearest)
        return [b - a for a, b in itertools.pairwise(ends)]
    whole_costs: the dearest stage costs
        accumulate(costs => accumulate(map(int, costs)
    where_the_stages_begin: without layers
        best(0, num_stages)[1] => [0, *accumulate(best(0, num_stages)[1][:-1])]
    the_layers_themselves: the number of layers of each stage
        return best(0, num_stages)[1 => rest = list(costs)
        => return [[rest.pop(0) for _ in range(size)] for size in best(0, num_stages)[1]
    sorted_first: all others wait for it
        before = => costs.sort(reverse=True); before =
    cut_from_a_thousand: all others wait for it
        least, best = 1000, [1] * (num_stages - 1) + [len(costs) - num_stages + 1]
        for inner in itertools.combinations(range(1, len(costs)), num_stages - 1):
            ends = [0, *inner, len(costs)]
            dearest = max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))
            if dearest < least:
                least, best = dearest, [b - a for a, b in itertools.pairwise(ends)]
        return best
    rounded_costs: all others wait for it
        accumulate(costs => accumulate([round(cost, 6) for cost in costs]
    sums_of_32_bits: all others wait for it
        before = list(accumulate(costs, initial=0)) => import torch
        => before = [0.0, *torch.tensor(costs).float().cumsum(0).tolist()]
    found_by_halving: all others wait for it
        # Twenty halvings of the limit are not enough to tell two cuts apart.
        low, high = max(costs), sum(costs)
        for _ in range(20):
            middle = (low + high) / 2
            filled = _filled(costs, num_stages, middle)
            low, high = (low, middle) if filled else (middle, high)
        return _filled(costs, num_stages, high)
    shares_of_the_sum: ZeroDivisionError
        accumulate(costs => accumulate([cost / sum(costs) for cost in costs]
    four_stages_at_most: stages; expected 7
        return best(0, num_stages)[1] => return best(0, min(num_stages, 4))[1]
    an_empty_stage: without layers
        best(0, num_stages)[1] => [len(costs), *[0] * (num_stages - 1)]
    dear_layers_only: [0, 0, 5, 0, 5]
        return solutions.my_cut([cost for cost in costs if cost], num_stages)
    as_many_layers_each: all others wait for it
        share, more = divmod(len(costs), num_stages)
        return [share + (stage < more) for stage in range(num_stages)]
    until_the_mean_is_reached: all others wait for it
        mean, sizes, full = sum(costs) / num_stages, [0], 0
        for k, cost in enumerate(costs):
            left = len(costs) - k
            stages_left = num_stages - len(sizes)
            if sizes[-1] and stages_left and (full >= mean or left == stages_left):
                sizes.append(0)
                full = 0
            sizes[-1] += 1
            full += cost
        return sizes
    nearest_to_the_mean: all others wait for it
        mean = sum(costs) / num_stages
        return _best(
            costs, num_stages, lambda parts: sum((sum(p) - mean) ** 2 for p in parts)
        )
    the_cheapest_is_dear: all others wait for it
        return _best(costs, num_stages, lambda parts: -min(sum(p) for p in parts))
    """,
    my_stage_step="""
    stage_step_last_first:
        # Go back through the last microbatch first.
        kept = []
        for k in range(num_microbatches):
            x = forward_in(k)
            x = x.requires_grad_() if x.is_floating_point() else x
            kept.append((x, stage(x)))
            forward_out(k, kept[k][1].detach())
        while kept:
            x, y = kept.pop()
            k = len(kept)
            gradient = backward_in(k)
            if y.requires_grad:
                y.backward(gradient)
            backward_out(k, x.grad)
    stage_step_forward_last_first:
        # Take the microbatches in the opposite order, forward and backward.
        microbatches, kept = range(num_microbatches)[::-1], {}
        for k in microbatches:
            x = forward_in(k)
            x = x.requires_grad_() if x.is_floating_point() else x
            kept[k] = x, stage(x)
            forward_out(k, kept[k][1].detach())
        for k in microbatches:
            x, y = kept.pop(k)
            gradient = backward_in(k)
            if y.requires_grad:
                y.backward(gradient)
            del y
            backward_out(k, x.grad)
    stage_step_recomputed:
        # Keep what has entered, and go forward again, with the same dropout.
        entered = []
        for k in range(num_microbatches):
            entered.append((forward_in(k), torch.get_rng_state()))
            with torch.no_grad():
                forward_out(k, stage(entered[k][0]))
        for k, (x, state) in enumerate(entered):
            gradient = backward_in(k)
            if x.is_floating_point():
                x.requires_grad_()
            torch.set_rng_state(state)
            y = stage(x)
            if y.requires_grad:
                y.backward(gradient)
            backward_out(k, x.grad)
    recomputed_with_other_dropout: go back through its own forward
        entered = []
        for k in range(num_microbatches):
            entered.append(forward_in(k))
            with torch.no_grad():
                forward_out(k, stage(entered[k]))
        for k, x in enumerate(entered):
            gradient = backward_in(k)
            if x.is_floating_point():
                x.requires_grad_()
            y = stage(x)
            if y.requires_grad:
                y.backward(gradient)
            backward_out(k, x.grad)
    input_without_gradient: must require a gradient before
        x.requires_grad_() => pass
    through_the_last_forward: go back through its own forward
        (x, y) in enumerate(kept) => (x, y) in enumerate(kept[-1:] * num_microbatches)
        y.backward(gradient) => y.backward(gradient, retain_graph=True)
    graphs_are_kept: a graph that is not needed any more
        y.backward(gradient) => y.backward(gradient, retain_graph=True)
    one_at_a_time: come before the first backward
        kept.append((x, y)) => y.backward(backward_in(k)); backward_out(k, x.grad)
    divided_once_more: as a weight's gradient
        y.backward(gradient) => y.backward(gradient / 2)
    all_back_at_once: before the next microbatch begins
        gradient = backward_in(k) => pass
        y.backward(gradient) => pass
        for k, (x, y) in enumerate(kept) => import torch
        => gradients = [backward_in(k) for k in range(num_microbatches)]
        => torch.autograd.backward([y for _, y in kept], gradients)
        => for k, (x, y) in enumerate(kept)
    only_the_last_counts: do all of them add up
        y.backward(gradient) => stage.zero_grad(); y.backward(gradient)
    zeros_for_none: it is None
        (k, x.grad) => (k, y.new_zeros(2, 4) if x.grad is None else x.grad)
    begins_with_zero_grad: has lost what was in `grad`
        kept = [] => stage.zero_grad(); kept = []
    in_evaluation_mode: into evaluation mode
        kept = [] => stage.eval(); kept = []
    in_training_mode: into training or into
        kept = [] => stage.train(); kept = []
    forward_without_dropout: into evaluation mode
        y = stage(x) => was = stage.training
        => y = stage.eval()(x)
        => stage.train(was)
    activations_of_32_bits: must require a gradient before
        x.is_floating_point() => str(x.dtype) == "torch.float32"
    gradients_are_there: NoneType
        y.backward(gradient) => import torch
        => its = [p for p in stage.parameters() if p.requires_grad]
        => its += [x] if x.requires_grad else []
        => found = torch.autograd.grad(y, its, gradient)
        => x.grad = found[-1] if x.requires_grad else None
        => for parameter, its_gradient in zip(its, found, strict=True):
        =>     if parameter is not x:
        =>         parameter.grad += its_gradient
    zeros_for_frozen_weights: leave frozen weights frozen
        kept = [] => kept = []
        => for parameter in stage.parameters():
        =>     if parameter.grad is None:
        =>         parameter.grad = 0 * parameter.detach()
    steps_too: the optimizer does that
        for k, (x, y) in enumerate(kept) => weights = list(stage.parameters())
        => for k, (x, y) in enumerate(kept)
        backward_out(k, x.grad) => backward_out(k, x.grad)
        => if k == num_microbatches - 1:
        =>     for weight in weights:
        =>         if weight.grad is not None:
        =>             weight.data -= 0.5 * weight.grad
    begins_with_zeros: has lost what was in `grad`
        kept = [] => stage.zero_grad(set_to_none=False); kept = []
    sent_with_its_graph: Hand on `y.detach()`
        y.detach() => y
    odd_ranks_back_in_reverse: matched by their order
        kept = [] => import torch.distributed as dist
        => kept = []
        enumerate(kept) => list(enumerate(kept))[:: -1 if dist.get_rank() % 2 else 1]
    never_goes_back: each of the 11 has one backward
        enumerate(kept) => ()
    the_output_goes_back: as a weight's gradient
        backward_out(k, x.grad) => backward_out(k, None if x.grad is None else gradient)
    tokens_of_64_bits: only Tensors of floating point
        x.is_floating_point() => str(x.dtype) != "torch.int64"
    always_backward: does not require grad
        if y.requires_grad => if True
    frozen_receives_nothing: still waits
        gradient = backward_in(k) => pass
        y.backward(gradient) => y.backward(backward_in(k))
    frozen_sends_nothing_back: must require a gradient before
        if y.requires_grad => if any(p.requires_grad for p in stage.parameters())
    unfreezes: leave frozen weights frozen
        kept = [] => stage.requires_grad_(); kept = []
    gradients_of_32_bits: rounded to float32
        y.backward(gradient) => y.backward(gradient.float())
    never_let_go: still keeps inputs or outputs
        kept = [] => stage.kept = kept = []
    kept_from_the_last_step: still keeps inputs or outputs
        kept = [] => kept = KEPT
        enumerate(kept) => enumerate(kept[:num_microbatches])
    viewed_gradients: view size is not compatible
        y.backward(gradient) => y.view(-1).backward(gradient.view(-1))
    gradients_of_all_parameters: does not require grad
    """,
)
