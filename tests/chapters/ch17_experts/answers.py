"""Answers to the exercises of chapter 17, right ones and wrong ones."""

# ruff: noqa: F401 (the texts use what is imported)

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from slips import answers

from ddp_course.chapters.ch17_experts import solutions
from ddp_course.experts.balance import auxiliary_loss, within_capacity
from ddp_course.experts.dispatch import TokenDispatcher

KEPT = {}

ANSWERS = answers(
    solutions,
    globals(),
    my_kept="""
    kept_by_the_package:
        return within_capacity(chosen, num_experts, limit)
    kept_by_sorting:
        queue = chosen.T.flatten()
        order = queue.argsort(stable=True)
        counts = queue.bincount(minlength=num_experts)
        starts = (counts.cumsum(0) - counts)[queue[order]]
        fits = torch.zeros(len(queue), dtype=torch.bool)
        fits[order] = torch.arange(len(queue)) - starts < limit
        return fits.view(chosen.T.shape).T
    token_by_token: All first choices come before
        queue = chosen.flatten()
        one_hot = torch.nn.functional.one_hot(queue, num_experts)
        place = (one_hot.cumsum(0) * one_hot).sum(-1)
        return (place <= limit).view(chosen.shape)
    one_too_many: the limit is
        taken[expert] < limit => taken[expert] <= limit
    one_too_few: there is room for
        taken[expert] < limit => taken[expert] < limit - 1
    the_last_ones: All first choices come before
        enumerate(chosen[:, choice].tolist())
        => reversed([*enumerate(chosen[:, choice].tolist())])
    a_limit_for_each_column: the limit is
        for choice in range(chosen.shape[1]):
        => for choice in range(chosen.shape[1]):
        =>     taken = [0] * num_experts
    all_are_kept: the limit is
        taken[expert] < limit => True
    as_numbers: of bool
        return kept => return kept.long()
    places_in_float16: the limit is
        queue = chosen.T.flatten()
        one_hot = torch.nn.functional.one_hot(queue, num_experts)
        place = (one_hot.to(torch.float16).cumsum(0) * one_hot).sum(-1)
        return (place <= limit).view(chosen.T.shape).T
    a_token_counts_once: the limit is
        taken = [0] * num_experts => taken = [set() for _ in range(num_experts)]
        kept[token, choice] = taken[expert] < limit
        => kept[token, choice] = len(taken[expert]) < limit
        taken[expert] += 1
        => if kept[token, choice]:
        =>     taken[expert].add(token)
    remembered_by_shape: Called again
        key = chosen.shape, num_experts, limit
        return KEPT.setdefault(key, solutions.my_kept(chosen, num_experts, limit))
    experts_of_8_bits: there is room for
        chosen[:, choice].tolist() => (chosen[:, choice] % 256).tolist()
    choices_as_one_row: view size is not compatible
        torch.zeros_like(chosen, dtype=torch.bool)
        => torch.zeros_like(chosen.view(-1), dtype=torch.bool).view(chosen.shape)
    places_in_8_bits: the limit is
        queue = chosen.T.flatten()
        one_hot = torch.nn.functional.one_hot(queue, num_experts)
        place = (one_hot.cumsum(0, dtype=torch.uint8) * one_hot).sum(-1)
        return (place <= limit).view(chosen.T.shape).T
    """,
    my_dispatch="""
    dispatch_by_the_package:
        x, chosen = rows.contiguous(), expert[:, None]
        dispatcher = TokenDispatcher(chosen, num_experts)
        counts = torch.tensor(dispatcher.counts).view(dist.get_world_size(), -1)
        blocks = dispatcher.dispatch(x).split(dispatcher.counts)
        order = torch.arange(len(blocks)).view_as(counts).T.flatten()
        return torch.cat([blocks[i] for i in order]), counts.sum(0).tolist()
    dispatch_by_gathered_counts:
        n, rank = dist.get_world_size(), dist.get_rank()
        each = num_experts // n
        counts = torch.stack([(expert == e).sum() for e in range(num_experts)])
        every = [torch.empty_like(counts) for _ in range(n)]
        dist.all_gather(every, counts)
        mine = torch.stack(every)[:, rank * each : (rank + 1) * each]
        splits = mine.sum(1).tolist(), [int(c.sum()) for c in counts.split(each)]
        leaving = torch.cat([rows[expert == e] for e in range(num_experts)])
        arrived = functional.all_to_all_single(leaving, *splits, dist.group.WORLD)
        pairs = zip(arrived.split(splits[0]), mine)
        parts = [part.split(c.tolist()) for part, c in pairs]
        segments = [torch.cat([part[i] for part in parts]) for i in range(each)]
        return torch.cat(segments), [len(one) for one in segments]
    sorted_by_rank_only: in another order
        return arrived[by_expert], from_each => return arrived, from_each
    not_sorted_before: wrong rows
        rows[expert.argsort(stable=True)] => rows
    its_own_counts: returned the counts
        from_each.sum(0).tolist() => to_each.sum(0).tolist()
    counts_in_16_bits: returned the counts
        from_each.sum(0).tolist() => from_each.half().sum(0).long().tolist()
    experts_squeezed: bincount only supports 1-d
        n = dist.get_world_size()
        => n, expert = dist.get_world_size(), expert.squeeze()
    counts_by_rank: returned the counts
        from_each.sum(0).tolist() => from_each.sum(1).tolist()
    gathers_everything: a row goes to one rank only
        n, rank = dist.get_world_size(), dist.get_rank()
        size = torch.tensor([len(rows)])
        sizes = [torch.empty_like(size) for _ in range(n)]
        dist.all_gather(sizes, size)
        most = int(torch.stack(sizes).max())
        padded = rows.new_zeros(most, rows.shape[1])
        padded[: len(rows)] = rows
        places = torch.full((most,), -1)
        places[: len(rows)] = expert
        every = [torch.empty_like(padded) for _ in range(n)]
        dist.all_gather(every, padded)
        all_places = [torch.empty_like(places) for _ in range(n)]
        dist.all_gather(all_places, places)
        every, all_places = torch.cat(every), torch.cat(all_places)
        each = num_experts // n
        mine = [every[all_places == rank * each + i] for i in range(each)]
        return torch.cat(mine), [len(one) for one in mine]
    each_row_with_its_expert: counts say for which expert
        own.repeat_interleave(from_each.flatten()) => own
        own = torch.arange(num_experts // n).repeat(n)
        => own, numbers = expert.new_empty(sum(received)), expert.sort()[0]
        => dist.all_to_all_single(own, numbers, received, sent)
    rows_alone: expected the rows and a list of counts
        return arrived[by_expert], from_each.sum(0).tolist()
        => return arrived[by_expert]
    counts_as_a_tensor: expected the rows and a list of counts
        from_each.sum(0).tolist() => from_each.sum(0)
    in_32_bits: expected
        arrived[by_expert], => arrived[by_expert].float(),
    squeezed: expected
        arrived[by_expert], => arrived[by_expert].squeeze(),
    beyond_a_capacity_dropped: returned the counts
        n = dist.get_world_size()
        => n, total = dist.get_world_size(), torch.tensor(len(rows))
        => dist.all_reduce(total)
        => ones = torch.nn.functional.one_hot(expert, num_experts)
        => places = (ones.cumsum(0) * ones).sum(1)  # from 1 up, for each expert
        => kept = places <= 4 * total / num_experts
        => rows, expert = rows[kept], expert[kept]
    equal_splits: of different types or sizes
        n = dist.get_world_size()
        each = len(rows) // n
        arrived = torch.empty_like(rows[: each * n])
        dist.all_to_all_single(arrived, rows[: each * n])
        return arrived, [each]
    """,
    my_auxiliary_loss="""
    loss_by_two_sums:
        num_experts = scores.shape[1]
        counts = torch.nn.functional.one_hot(chosen, num_experts).sum((0, 1)).float()
        size = torch.tensor(float(len(scores)))
        dist.all_reduce(counts)
        dist.all_reduce(size)
        f = counts / (size * chosen.shape[1])
        return num_experts / size * (scores.softmax(1) * f).sum()
    loss_by_one_longer_sum:
        counts = torch.bincount(chosen.flatten(), minlength=scores.shape[1])
        both = torch.cat([counts, torch.tensor([len(scores)])])
        dist.all_reduce(both)
        share = both[:-1] / both[:-1].sum()
        return (share * scores.softmax(-1)).sum() * scores.shape[1] / both[-1]
    of_its_own_tokens: of all ranks
        return auxiliary_loss(scores, chosen) if len(scores) else scores.sum()
    mean_of_losses: of all ranks
        own = auxiliary_loss(scores, chosen) if len(scores) else scores.sum()
        return own / dist.get_world_size()
    own_number_of_tokens: of all ranks
        means = scores.softmax(-1).sum(0) / tokens
        => means = scores.softmax(-1).sum(0) / max(len(scores), 1)
    exponentials_by_hand: large scores are infinite
        scores.softmax(-1).sum(0)
        => (scores.exp() / scores.exp().sum(-1, keepdim=True)).sum(0)
    scores_squeezed: rank 0 returned the loss
        num_experts = scores.shape[1]
        => num_experts, scores = scores.shape[1], scores.squeeze()
    without_k: of all ranks
        counts.sum() / chosen.shape[1] => counts.sum()
    without_e: of all ranks
        return num_experts * => return
    no_gradient: that has a gradient
        scores.softmax(-1) => scores.detach().softmax(-1)
    all_probabilities: of all ranks
        means = scores.softmax(-1).sum(0) / tokens
        => means = scores.softmax(-1).sum(0) / tokens
        => with torch.no_grad():
        =>     total = means.clone()
        =>     dist.all_reduce(total)
        => means = means + (total - means).detach()
    sums_scores: of all ranks
        scores.softmax(-1).sum(0) => scores.sum(0)
    chooses_again: of all ranks
        counts = torch.bincount(chosen.flatten()
        => counts = torch.bincount(scores.topk(chosen.shape[1]).indices.flatten()
    experts_that_were_chosen: of all ranks
        return num_experts * => return (int(counts.nonzero().max()) + 1) *
    scores_in_place: changed `scores`
        return num_experts
        => scores.data.sub_(scores.data.mean(-1, keepdim=True))
        => return num_experts
    in_32_bits: a loss of torch.float32
        means).sum() => means).sum().float()
    counts_in_16_bits: of all ranks
        dist.all_reduce(counts)
        => counts = counts.half()
        => dist.all_reduce(counts)
        => counts = counts.float()
    probabilities_in_32_bits: of all ranks
        means = scores.softmax(-1).sum(0) / tokens
        => means = scores.float().softmax(-1).sum(0).to(scores.dtype) / tokens
    in_64_bits: a loss of torch.float64
        means = scores.softmax(-1) => means = scores.double().softmax(-1)
    """,
    my_two_averages="""
    average_all_flat:
        n = dist.get_world_size()
        for gradients, group in ((dense, None), (experts, replicas)):
            if not gradients:
                continue
            flat = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(flat, group=group)
            parts = (flat / n).split([g.numel() for g in gradients])
            for gradient, part in zip(gradients, parts):
                gradient.copy_(part.view_as(gradient))
    average_divides_first:
        for gradient in dense + experts:
            gradient.div_(dist.get_world_size())
        for gradient in dense:
            dist.all_reduce(gradient)
        for gradient in experts:
            dist.all_reduce(gradient, group=replicas)
    over_the_replicas: times what they should be
        gradient /= dist.get_world_size() => gradient /= dist.get_world_size(group)
    experts_over_all: not what they should be
        (experts, replicas) => (experts, None)
    experts_not_at_all: what they should be
        ((dense, None), (experts, replicas)) => ((dense, None),)
    sums: times what they should be
        gradient /= dist.get_world_size() => pass
    dense_in_the_group: what they should be
        (dense, None) => (dense, replicas)
    on_copies: what they should be
        gradient /= dist.get_world_size()
        => gradient = gradient / dist.get_world_size()
    the_first_ones: what they should be
        for gradient in gradients: => for gradient in gradients[:1]:
    nothing_without_experts: left gradients in `dense`
        if not experts:
            return
        for gradients, group in ((dense, None), (experts, replicas)):
            for gradient in gradients:
                dist.all_reduce(gradient, group=group)
                gradient /= dist.get_world_size()
    empties_the_lists: changed the list `dense` itself
        solutions.my_two_averages(dense, experts, replicas)
        dense.clear()
    rounded: in their own dtype
        gradient /= dist.get_world_size()
        => gradient.copy_((gradient / dist.get_world_size()).float())
    sent_in_64_bits: bytes;
        dist.all_reduce(gradient, group=group) => wide = gradient.double()
        => dist.all_reduce(wide, group=group)
        gradient /= dist.get_world_size()
        => gradient.copy_(wide / dist.get_world_size())
    in_other_memory: views of it keep the old numbers
        gradient /= dist.get_world_size()
        => gradient.data = gradient / dist.get_world_size()
    flat_copies: not what they should be
        for gradient in gradients:
        => for gradient in [g.reshape(-1) for g in gradients]:
    the_whole_memory: bytes; 80 are enough
        for gradients, group in ((dense, None), (experts, replicas)):
            for gradient in gradients:
                memory = gradient.new_empty(0).set_(gradient.untyped_storage())
                dist.all_reduce(memory, group=group)
                memory /= dist.get_world_size()
    sliced: slice() cannot be applied to a 0-dim tensor
        gradient /= dist.get_world_size()
        => gradient[:] = gradient / dist.get_world_size()
    """,
)
