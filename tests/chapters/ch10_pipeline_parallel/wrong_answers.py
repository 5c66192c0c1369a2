"""Wrong answers to the exercises of chapter 10, each with a word of its hint."""

import itertools

import torch
import torch.distributed as dist

from ddp_course.chapters.ch10_pipeline_parallel import solutions

# my_gpipe


def _row(rank, forwards, backwards):
    return [f"{rank}F{k}" for k in forwards] + [f"{rank}B{k}" for k in backwards]


def one_microbatch_at_a_time(num_stages, num_microbatches, rank):
    return [f"{rank}{op}{k}" for k in range(num_microbatches) for op in "FB"]


def as_early_as_it_can(num_stages, num_microbatches, rank):
    warm_up = min(num_microbatches, num_stages - rank)
    row = [f"{rank}F{k}" for k in range(warm_up)]
    for k in range(num_microbatches):
        row.append(f"{rank}B{k}")
        if warm_up + k < num_microbatches:
            row.append(f"{rank}F{warm_up + k}")
    return row


def odd_ranks_the_other_way(num_stages, num_microbatches, rank):
    ks = range(num_microbatches)
    return _row(rank, ks, ks[::-1] if rank % 2 else ks)


def every_rank_has_every_stage(num_stages, num_microbatches, rank):
    return [
        f"{stage}{op}{k}"
        for op in "FB"
        for k in range(num_microbatches)
        for stage in range(num_stages)
    ]


def the_last_one_is_forgotten(num_stages, num_microbatches, rank):
    ks = range(num_microbatches)
    return _row(rank, ks, ks[:-1])


def counted_from_one(num_stages, num_microbatches, rank):
    ks = range(1, num_microbatches + 1)
    return _row(rank, ks, ks)


def the_next_batch_too(num_stages, num_microbatches, rank):
    ks = range(2 * num_microbatches)
    return _row(rank, ks, ks)


def a_line_of_text(num_stages, num_microbatches, rank):
    ks = range(num_microbatches)
    return " ".join(_row(rank, ks, ks))


def forward_is_called_f(num_stages, num_microbatches, rank):
    ks = range(num_microbatches)
    return [one.lower() for one in _row(rank, ks, ks)]


# my_cut


def as_many_layers_each(costs, num_stages):
    share, more = divmod(len(costs), num_stages)
    return [share + (stage < more) for stage in range(num_stages)]


def until_the_mean_is_reached(costs, num_stages):
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


def nearest_to_the_mean(costs, num_stages):
    mean = sum(costs) / num_stages
    return _best(
        costs, num_stages, lambda parts: sum((sum(p) - mean) ** 2 for p in parts)
    )


def the_cheapest_is_dear(costs, num_stages):
    return _best(costs, num_stages, lambda parts: -min(sum(p) for p in parts))


def _best(costs, num_stages, badness):
    def parts(sizes):
        ends = list(itertools.accumulate(sizes))
        return [costs[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    every = itertools.product(range(1, len(costs) + 1), repeat=num_stages)
    fitting = [list(sizes) for sizes in every if sum(sizes) == len(costs)]
    return min(fitting, key=lambda sizes: badness(parts(sizes)))


def where_the_stages_begin(costs, num_stages):
    return [0, *itertools.accumulate(_right_cut(costs, num_stages)[:-1])]


def the_layers_themselves(costs, num_stages):
    rest = list(costs)
    return [
        [rest.pop(0) for _ in range(size)] for size in _right_cut(costs, num_stages)
    ]


def sorted_first(costs, num_stages):
    costs.sort(reverse=True)
    return _right_cut(costs, num_stages)


def an_empty_stage(costs, num_stages):
    return [len(costs), *[0] * (num_stages - 1)]


def _right_cut(costs, num_stages):
    return _best(costs, num_stages, lambda parts: max(sum(p) for p in parts))


# my_stage_step


def _forwards(stage, ks, forward_in, forward_out, *_, needs_grad=True, graph=False):
    """The forwards of the microbatches ks: input and output of each."""
    kept = {}
    for k in ks:
        x = forward_in(k)
        if needs_grad and x.is_floating_point():
            x.requires_grad_()
        kept[k] = x, stage(x)
        forward_out(k, kept[k][1] if graph else kept[k][1].detach())
    return kept


def _back(kept, _, __, backward_in, backward_out, ks=None, retain=False):
    for k in kept if ks is None else ks:
        x, y = kept[k]
        y.backward(backward_in(k), retain_graph=retain)
        backward_out(k, x.grad)


def input_without_gradient(stage, m, *ends):
    _back(_forwards(stage, range(m), *ends, needs_grad=False), *ends)


def through_the_last_forward(stage, m, *ends):
    last = _forwards(stage, range(m), *ends)[m - 1]
    _back(dict.fromkeys(range(m), last), *ends, retain=True)


def graphs_are_kept(stage, m, *ends):
    _back(_forwards(stage, range(m), *ends), *ends, retain=True)


def one_at_a_time(stage, m, *ends):
    for k in range(m):
        _back(_forwards(stage, [k], *ends), *ends)


def divided_once_more(stage, m, *ends):
    halves = *ends[:2], lambda k: ends[2](k) / 2, ends[3]
    solutions.my_stage_step(stage, m, *halves)


def all_back_at_once(stage, m, *ends):
    kept = _forwards(stage, range(m), *ends).values()
    torch.autograd.backward([y for _, y in kept], [ends[2](k) for k in range(m)])
    for k, (x, _) in enumerate(kept):
        ends[3](k, x.grad)


def only_the_last_counts(stage, m, *ends):
    def backward_in(k):
        stage.zero_grad()
        return ends[2](k)

    solutions.my_stage_step(stage, m, *ends[:2], backward_in, ends[3])


def never_goes_back(stage, m, *ends):
    _forwards(stage, range(m), *ends)


def the_output_goes_back(stage, m, *ends):
    noted = {}

    def backward_in(k):
        noted[k] = ends[2](k)
        return noted[k]

    def backward_out(k, gradient):
        ends[3](k, None if gradient is None else noted[k])

    solutions.my_stage_step(stage, m, *ends[:2], backward_in, backward_out)


# What harder inputs find out


def of_one_digit(num_stages, num_microbatches, rank):
    row = solutions.my_gpipe(num_stages, num_microbatches, rank)
    return [action[:2] + action[-1] for action in row]


def whole_costs(costs, num_stages):
    return solutions.my_cut([int(cost) for cost in costs], num_stages)


def dear_layers_only(costs, num_stages):
    return solutions.my_cut([cost for cost in costs if cost], num_stages)


def zeros_for_none(stage, m, *ends):
    def back(k, gradient):
        ends[3](k, torch.zeros(2, 4) if gradient is None else gradient)

    solutions.my_stage_step(stage, m, *ends[:3], back)


def begins_with_zero_grad(stage, m, *ends):
    stage.zero_grad()
    solutions.my_stage_step(stage, m, *ends)


def in_evaluation_mode(stage, m, *ends):
    solutions.my_stage_step(stage.eval(), m, *ends)


def begins_with_zeros(stage, m, *ends):
    stage.zero_grad(set_to_none=False)
    solutions.my_stage_step(stage, m, *ends)


def sent_with_its_graph(stage, m, *ends):
    _back(_forwards(stage, range(m), *ends, graph=True), *ends)


def odd_ranks_back_in_reverse(stage, m, *ends):
    kept = _forwards(stage, range(m), *ends)
    _back(kept, *ends, ks=range(m)[:: -1 if dist.get_rank() % 2 else 1])


def gradients_of_all_parameters(stage, m, *ends):
    """Stumbles over a frozen one."""
    for k, (x, y) in _forwards(stage, range(m), *ends).items():
        inputs = [*stage.parameters(), *([x] if x.requires_grad else [])]
        found = torch.autograd.grad(y, inputs, ends[2](k))
        for parameter, gradient in zip(stage.parameters(), found, strict=False):
            parameter.grad += gradient
        ends[3](k, found[-1] if x.requires_grad else None)


WRONG = {
    "my_gpipe": {
        of_one_digit: "With 2 stages and 12 microbatches",
        one_microbatch_at_a_time: "the forwards of all microbatches come first",
        as_early_as_it_can: "the forwards of all microbatches come first",
        odd_ranks_the_other_way: "in the same order on all ranks",
        every_rank_has_every_stage: "rank 0 has stage 0",
        the_last_one_is_forgotten: "the checker says",
        counted_from_one: "the checker says",
        the_next_batch_too: "those of the next batch",
        a_line_of_text: "expected a list of strings",
        forward_is_called_f: "is no action",
    },
    "my_cut": {
        whole_costs: "the dearest stage costs",
        dear_layers_only: "[0, 0, 5, 0, 5]",
        as_many_layers_each: "all others wait for it",
        until_the_mean_is_reached: "all others wait for it",
        nearest_to_the_mean: "all others wait for it",
        the_cheapest_is_dear: "all others wait for it",
        where_the_stages_begin: "without layers",
        the_layers_themselves: "the number of layers of each stage",
        sorted_first: "all others wait for it",
        an_empty_stage: "without layers",
    },
    "my_stage_step": {
        input_without_gradient: "must require a gradient before",
        through_the_last_forward: "go back through its own forward",
        graphs_are_kept: "a graph that is not needed any more",
        one_at_a_time: "come before the first backward",
        divided_once_more: "as a weight's gradient",
        all_back_at_once: "before the next microbatch begins",
        only_the_last_counts: "do all of them add up",
        zeros_for_none: "it is None",
        begins_with_zero_grad: "has lost what was in `grad`",
        in_evaluation_mode: "into evaluation mode",
        begins_with_zeros: "has lost what was in `grad`",
        sent_with_its_graph: "Hand on `y.detach()`",
        odd_ranks_back_in_reverse: "matched by their order",
        gradients_of_all_parameters: "does not require grad",
        never_goes_back: "each of the 11 has one backward",
        the_output_goes_back: "as a weight's gradient",
    },
}
