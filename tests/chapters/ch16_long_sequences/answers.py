"""Answers to the exercises of chapter 16, right ones and wrong ones."""

# ruff: noqa: F401 (the texts use what is imported)

import numpy as np
import torch
from slips import answers

from ddp_course.chapters.ch16_long_sequences import solutions
from ddp_course.context_parallel import online_softmax
from ddp_course.context_parallel.online_softmax import merge

BUFFERS = {}  # what a function keeps from call to call


ANSWERS = answers(
    solutions,
    globals(),
    my_merge="""
    merge_by_a_sigmoid:
        share = torch.sigmoid(lse2 - lse1)[..., None]
        share = torch.where((lse2 == -torch.inf)[..., None], 0.0, share)
        return out1 + share * (out2 - out1), torch.logaddexp(lse1, lse2)
    merge_by_the_larger_lse:
        most = torch.maximum(lse1, lse2)
        most = most.masked_fill(most == -torch.inf, 0)
        e1, e2 = (lse1 - most).exp(), (lse2 - most).exp()
        total = (e1 + e2).clamp(min=1e-300 if e1.dtype == torch.float64 else 1e-38)
        out = (e1[..., None] * out1 + e2[..., None] * out2) / total[..., None]
        return out, most + (e1 + e2).log()
    by_its_definition: the exponential of such an lse is infinite
        e1, e2 = lse1.exp()[..., None], lse2.exp()[..., None]
        return (e1 * out1 + e2 * out2) / (e1 + e2), (e1 + e2)[..., 0].log()
    none_seen_is_no_number: sees no key of either block has the output 0
        torch.where(lse.isneginf(), 0, lse) => lse
    mean_of_outputs: weighs more
        share1 * out1 + share2 * out2 => (out1 + out2) / 2
    weights_exchanged: weighs more
        share1 * out1 + share2 * out2 => share2 * out1 + share1 * out2
    lses_are_added: gave the lse
        torch.logaddexp(lse1, lse2) => lse1 + lse2
    the_larger_lse: gave the lse
        torch.logaddexp(lse1, lse2) => torch.maximum(lse1, lse2)
    in_base_two: gave the lse
        torch.logaddexp(lse1, lse2) => torch.logaddexp2(lse1, lse2)
    one_maximum_for_all_queries: each query's own two lses
        most = torch.maximum(lse1, lse2).max()
        most = most.masked_fill(most.isneginf(), 0)
        e1, e2 = (lse1 - most).exp(), (lse2 - most).exp()
        total = (e1 + e2).masked_fill(e1 + e2 == 0, 1)[..., None]
        out = (e1[..., None] * out1 + e2[..., None] * out2) / total
        return out, most + (e1 + e2).log()
    outputs_as_one_row: view size is not compatible
        share1 * out1 => share1 * out1.view(-1).view(out1.shape)
    the_output_alone: expected a list of 2
        share2 * out2, lse => share2 * out2
    equal_lses_are_none: gave the lse
        def added(most, other):
            return most + (other - most).exp().log1p()

        more, less = lse1 > lse2, lse1 < lse2
        lse = torch.where(less, added(lse2, lse1), lse1)
        lse = torch.where(more, added(lse1, lse2), lse)  # and not nan for none seen
        finite = torch.where(lse.isneginf(), 0, lse)
        share1, share2 = ((one - finite).exp()[..., None] for one in (lse1, lse2))
        return share1 * out1 + share2 * out2, lse
    infinite_if_block_2_is_far_above: the exponential of such an lse is infinite
        torch.logaddexp(lse1, lse2)
        => lse1 + (lse2 - lse1).exp().log1p()
        => lse = torch.where(lse1.isneginf(), lse2, lse)
    blocks_differ_by_50_at_most: gave the lse
        return share1 * out1 + share2 * out2, lse
        => added = lse1 + (lse2 - lse1).clamp(max=50).exp().log1p()
        => lse = torch.where(lse1.isneginf(), lse2, added)
        => return share1 * out1 + share2 * out2, lse
    minus_20000_as_minus_infinity: only minus infinity itself
        lse = torch.logaddexp(lse1, lse2)
        => low1, low2 = (one.clamp(min=-20_000) for one in (lse1, lse2))
        => lse = torch.logaddexp(low1, low2)
        => lse = lse.masked_fill(lse <= -19_999, -torch.inf)
    an_output_of_0_saw_no_key: gave the lse
        torch.logaddexp(lse1, lse2)
        => torch.logaddexp(lse1.masked_fill((out1 == 0).all(-1), -torch.inf), lse2)
    an_lse_of_0_is_none: gave the lse
        torch.logaddexp(lse1, lse2)
        => torch.logaddexp(lse1.masked_fill(lse1 == 0, -torch.inf), lse2)
    in_place: changed `out1`
        return share1 * out1 + share2 * out2, lse
        => return out1.mul_(share1).add_(share2 * out2), lse
    """,
    my_zigzag="""
    zigzag_by_asking_each_position:
        size = (length + 2 * ranks - 1) // (2 * ranks)
        owner = lambda i: min(i // size, 2 * ranks - 1 - i // size)
        return [[i for i in range(length) if owner(i) == r] for r in range(ranks)]
    zigzag_by_numpy:
        size = int(np.ceil(length / (2 * ranks)))
        every = np.arange(length)
        chunks = [every[k * size : (k + 1) * size] for k in range(2 * ranks)]
        pairs = zip(chunks[:ranks], chunks[: ranks - 1 : -1], strict=True)
        return [[int(i) for i in np.concatenate(pair)] for pair in pairs]
    contiguous_parts: a chunk from the front
        size = -(-length // ranks)
        ends = [min(r * size, length) for r in range(ranks + 1)]
        return [list(range(*ends[r : r + 2])) for r in range(ranks)]
    striped_parts: a chunk from the front
        return [list(range(r, length, ranks)) for r in range(ranks)]
    rounded_down: no rank has position
        -(-length // (2 * ranks)) => length // (2 * ranks)
    rounded_by_a_thousandth_less: no rank has position 1200
        -(-length // (2 * ranks)) => int(length / (2 * ranks) + 0.999)
    with_the_padding: none beyond the last
        min((k + 1) * size, length) => (k + 1) * size
    two_neighbours: a chunk from the front
        chunks[rank] + chunks[2 * ranks - 1 - rank]
        => chunks[2 * rank] + chunks[2 * rank + 1]
    the_back_first: a rank's positions ascend
        chunks[rank] + chunks[2 * ranks - 1 - rank]
        => chunks[2 * ranks - 1 - rank] + chunks[rank]
    a_chunk_twice: no rank has position
        chunks[2 * ranks - 1 - rank] => chunks[rank]
    a_thousand_positions: no rank has position 1000
        min((k + 1) * size, length) => min((k + 1) * size, length, 1000)
    positions_of_16_bits: no rank has position 32768
        return [chunks[rank] + chunks[2 * ranks - 1 - rank] for rank in range(ranks)]
        => each = [np.array(chunk, dtype=np.int64).astype(np.int16) for chunk in chunks]
        => both = zip(each[:ranks], each[: ranks - 1 : -1], strict=True)
        => return [np.concatenate(pair).tolist() for pair in both]
    with_gaps_as_none: a list of positions for each rank
        return [chunks[rank] + chunks[2 * ranks - 1 - rank] for rank in range(ranks)]
        => return [[None] for rank in range(ranks)]
    """,
    my_ring="""
    ring_by_lists:
        blocks = []
        for _ in range(ranks - 1):
            on_its_way = pass_on(k, v)
            blocks.append(attend(q, k, v))
            k, v = on_its_way.wait()
        blocks.append(attend(q, k, v))
        lse = torch.stack([its for _, its in blocks]).logsumexp(0)
        return sum((its - lse).exp()[..., None] * out for out, its in blocks)
    ring_of_blocks:
        block = None
        for left in reversed(range(ranks)):
            message = pass_on(k, v) if left else None
            own = attend(q, k, v)
            block = own if block is None else online_softmax.merge(*block, *own)
            k, v = message.wait() if left else (k, v)
        return block[0]
    gathers_first: A rank attends to one part in each step
        parts = [(k, v)]
        for _ in range(ranks - 1):
            parts.append(pass_on(*parts[-1]).wait())
        k, v = (torch.cat(its, dim=2) for its in zip(*parts, strict=True))
        return attend(q, k, v)[0]
    waits_at_once: compute while that is under way
        out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
        for left in reversed(range(ranks)):
            own = k, v
            if left:
                k, v = pass_on(k, v).wait()
            out, lse = merge(out, lse, *attend(q, *own))
        return out
    passes_on_afterwards: Begin to pass on
        handle = None if last else pass_on(k, v) => handle = None
        k, v = handle.wait() => k, v = pass_on(k, v).wait()
    keys_as_one_row: view size is not compatible
        pass_on(k, v) => pass_on(k.view(-1).view(k.shape), v)
    rings_of_five: Each part has to be passed on
        for step in range(ranks) => for step in range(min(ranks, 5))
    once_too_often: Each part has to be passed on
        None if last else pass_on(k, v) => pass_on(k, v)
    its_own_part_alone: Each part has to be passed on
        return attend(q, k, v)[0]
    its_own_part_again_and_again: passed on something else
        k, v = handle.wait() => handle.wait()
    values_first: passed on something else
        pass_on(k, v) => pass_on(v, k)
    the_mean_of_blocks: outputs that differ from attention over the whole
        out, lse = merge(out, lse, *attend(q, k, v))
        => out = out + attend(q, k, v)[0] / ranks
    the_last_block: outputs that differ from attention over the whole
        merge(out, lse, *attend(q, k, v)) => attend(q, k, v)
    lses_by_heads_first: must be (1, 3, 1)
        torch.full_like(q[..., 0], -torch.inf)
        => torch.full_like(q[..., 0].transpose(0, 1), -torch.inf)
    over_its_queries: changed its queries
        return out => return q.copy_(out)
    one_buffer_for_all_calls: changed the outputs of an earlier one
        return out
        => kept = BUFFERS.setdefault((out.shape, out.dtype), torch.empty_like(out))
        => return kept.copy_(out)
    output_and_lse: returned
        return out => return out, lse
    """,
    my_gradient_check="""
    check_by_gradcheck:
        verdicts = []
        for k in range(len(tensors)):
            inputs = [x.detach().clone() for x in tensors]
            inputs[k].requires_grad_()
            try:
                good = torch.autograd.gradcheck(function, inputs, raise_exception=False)
            except RuntimeError:  # the output does not depend on it
                good = True
            verdicts.append(good)
        return verdicts
    check_element_by_element:
        inputs = [x.detach().clone().requires_grad_() for x in tensors]
        out = function(*inputs)
        weights = torch.linspace(0.3, 1.7, out.numel()).double().view(out.shape).sin()
        grads = torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True)
        verdicts = []
        for k, (x, grad) in enumerate(zip(tensors, grads, strict=True)):
            slopes = torch.zeros_like(x)
            for place in np.ndindex(*x.shape):
                moved = [y.clone() for y in tensors]
                moved[k][place] += 1e-6
                upper = (function(*moved) * weights).sum()
                moved[k][place] -= 2e-6
                slopes[place] = (upper - (function(*moved) * weights).sum()) / 2e-6
            grad = torch.zeros_like(x) if grad is None else grad
            verdicts.append(torch.allclose(grad, slopes, rtol=1e-4, atol=1e-6))
        return verdicts
    all_are_right: returned `[True, True, True]`
        return [True] * len(tensors)
    the_sum_of_all: returned
        torch.randn_like(x) => torch.ones_like(x)
    right_without_a_gradient: returned
        expected = 0.0 if x.grad is None
        => expected = slope if x.grad is None
    of_either_sign: returned
        abs(slope - expected) => abs(abs(slope) - abs(expected))
    the_first_output: returned
        weights = torch.rand_like(function(*inputs)) + 0.5
        => weights = torch.zeros_like(function(*inputs))
        => weights.view(-1)[0] = 1
    the_last_output: returned
        weights = torch.rand_like(function(*inputs)) + 0.5
        => weights = torch.zeros_like(function(*inputs))
        => weights.view(-1)[-1] = 1
    moves_the_last_row: returned
        direction = torch.randn_like(x)
        => direction = torch.randn_like(x)
        => direction[:-1] = 0
    one_verdict_for_all: expected
        return verdicts => return all(verdicts)
    loose: returned
        1e-7 * (1 + abs(slope)) => 3e-2 * (1 + abs(slope))
    not_relative: returned
        1e-7 * (1 + abs(slope)) => 1e-2
    not_relative_to_small_ones: returned
        1e-7 * (1 + abs(slope)) => 1e-4
    tight: returned
        1e-7 * (1 + abs(slope)) => 0
    all_move_together: returned
        moved = list(tensors)
        => moved = [tensor + step * direction for tensor in tensors]
    by_steps_that_are_too_large: returned
        (1e-5, -1e-5) => (1.0, -1.0)
        2e-5 => 2.0
    three_of_all: For a function of five
        enumerate(inputs) => enumerate(inputs[:3])
    the_first_one_only: expected `[True, True, True]`
        return verdicts => return verdicts[:1]
    asks_autograd_itself: returned
        slope = (values[0] - values[1]) / 2e-5
        => slope = 0.0 if x.grad is None else (x.grad * direction).sum()
    gradients_for_the_caller: changed `tensors`
        tensor.detach().clone().requires_grad_() => tensor.requires_grad_()
    moves_the_callers_tensors: changed `tensors`
        return verdicts
        => tensors[0].mul_(2)
        => return verdicts
    there_and_back: a step there and back is rounded
        moved = list(tensors) => moved = [y.detach() for y in tensors]
        moved[k] = tensors[k] + step * direction => moved[k] += step * direction
        values.append((function(*moved) * weights).sum())
        => values.append((function(*moved) * weights).sum())
        => moved[k] -= step * direction
    by_the_length: For a vector of length 1
        (function(*inputs) * weights).sum() => function(*inputs).norm()
        (function(*moved) * weights).sum() => function(*moved).norm()
    largest_of_none: input.numel() == 0
        abs(slope - expected) < => (direction.max() or 1) and abs(slope - expected) <
    moves_rows: 0-d tensor
        verdicts.append(bool( => verdicts.append(bool(len(x) + 1) and bool(
    in_proportion_to_the_values: For a function at 0
        direction = torch.randn_like(x) => direction = torch.randn_like(x) * x.detach()
    moves_a_copy_of_strided_ones: For a function of any shapes
        moved[k] = tensors[k] + step * direction
        => moved[k] = tensors[k].clone()
        => moved[k].reshape(-1).add_(step * direction.flatten())
    one_tolerance_for_all: For very unequal gradients
        1e-7 * (1 + abs(slope))
        => 1e-5 * max(0 if y.grad is None else y.grad.norm() for y in inputs)
    the_mean_of_none: For a function that returns no number
        (function(*inputs) * weights).sum() => (function(*inputs) * weights).mean()
        (function(*moved) * weights).sum() => (function(*moved) * weights).mean()
    infinity_is_near_infinity: gets inf for the gradient
        < 1e-7 * (1 + abs(slope)) => <= 1e-7 * (1 + max(abs(slope), abs(expected)))
    no_gradients_left_at_all: an earlier gradient has changed
        return verdicts
        => for tensor in tensors:
        =>     tensor.grad = None
        => return verdicts
    not_a_number_is_right: NaN
        abs(slope - expected) < => not abs(slope - expected) >=
    """,
)
