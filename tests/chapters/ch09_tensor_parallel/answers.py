"""Answers to the exercises of chapter 09, right ones and wrong ones."""

# ruff: noqa: F401 (the texts use what is imported)

import os

import torch.distributed as dist
import torch.nn.functional as F
from slips import answers

from ddp_course import collectives
from ddp_course.chapters.ch09_tensor_parallel import solutions

WEIGHTS = {}
BUFFERS = {}  # what an answer keeps between two calls
FIRST = {}  # the first word of a rank, kept by an answer that computes it once


def _of_whole(whole, targets):
    loss = F.cross_entropy(whole.requires_grad_(), targets)
    loss.backward()
    return loss.item(), whole.grad.chunk(dist.get_world_size(), 1)[dist.get_rank()]


ANSWERS = answers(
    solutions,
    globals(),
    copy_to_ranks="""
    copy_with_a_hook:
        def add_up(gradient):
            total = gradient.clone()
            all_reduce(total)
            return total

        y = x.clone()
        if y.requires_grad:
            y.register_hook(add_up)
        return y
    copy_once_differentiable:
        class Copy(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx, gradient):
                total = gradient.contiguous().clone()
                all_reduce(total)
                return total

        return Copy.apply(x)
    hook_without_a_gradient: where x requires no gradient
        return Copy.apply(x)
        => y = x.view_as(x)
        => y.register_hook(lambda gradient: Copy.backward(None, gradient))
        => return y
    summed_in_place_and_put_back: share one place in memory
        all_reduce(total)
        => all_reduce(gradient); summed = gradient.clone(); gradient.copy_(total)
        return total => return summed
    silent_without_gradient: even one whose gradient is zero
        all_reduce(total) => if total.any():
        =>     all_reduce(total)
    in_bfloat16: through the copy, summed
        gradient.clone() => gradient.bfloat16() + 0.001
        return total => return total.to(gradient.dtype)
    unfreezes: where x requires none
        return Copy.apply(x)
        => return Copy.apply(x if x.requires_grad else x.detach().requires_grad_())
    hook_on_x_itself: A hook on x itself sees both
        return Copy.apply(x)
        => x.register_hook(lambda gradient: Copy.backward(None, gradient))
        => return x.view_as(x)
    summed_in_float32: x of float64
        gradient.clone() => gradient.float().clone()
    flat_view: On real ranks
        return Copy.apply(x) => return Copy.apply(x.view(-1)).view(x.shape)
    nothing_at_all: 0 times
        return Copy.apply(x) => return x
    detached: no way back
        return Copy.apply(x) => return x.detach()
    autograd_through_the_all_reduce: sent something in forward
        return Copy.apply(x)
        => total = x.clone(); all_reduce(total); return total / dist.get_world_size()
    no_all_reduce: 0 times
        all_reduce(total) => pass
    the_other_way_round: sent something in forward
        all_reduce(total) => pass
        return x.view_as(x) => total = x.clone(); all_reduce(total); return total
    needs_a_dimension: On real ranks
        gradient.clone() => torch.cat([gradient])
    mean_of_ranks: has the mean
        return total => return total / dist.get_world_size()
    contiguous_is_no_copy: a wrong gradient of b
        gradient.clone() => gradient.contiguous()
    in_place: sum a copy
        gradient.clone() => gradient
    two_all_reduces: one all-reduce
        all_reduce(total) => all_reduce(gradient.clone()); all_reduce(total)
    both_ways: sent something in forward
        return x.view_as(x)
        => total = x.clone(); all_reduce(total); return total / dist.get_world_size()
    sum_lost_in_a_copy: a strided x
        all_reduce(total) => all_reduce(total.contiguous())
    one_buffer_for_all_copies: changes the gradient which the first one returned
        gradient.clone()
        => BUFFERS.setdefault(gradient.shape, gradient.clone()).copy_(gradient)
    all_reduce_of_the_last_call: of another call in backward
        all_reduce(total) => BUFFERS["sum"](total)
        return Copy.apply(x) => BUFFERS["sum"] = all_reduce; return Copy.apply(x)
    all_reduce_of_the_first_call: of another call in backward
        all_reduce(total) => BUFFERS["first"](total)
        return Copy.apply(x)
        => BUFFERS.setdefault("first", all_reduce); return Copy.apply(x)
    one_buffer_for_each_copy: changes the gradient which the first one returned
        class Copy => buffer = torch.empty(x.shape, dtype=x.dtype)
        => class Copy
        gradient.clone() => buffer.copy_(gradient)
    summed_only_once: a second backward
        class Copy => calls = []
        => class Copy
        all_reduce(total) => calls.append(1) or calls[1:] or all_reduce(total)
    hook_in_evaluation: under `torch.no_grad()`
        return Copy.apply(x)
        => y = x.clone()
        => if x.requires_grad:
        =>     y.register_hook(lambda gradient: Copy.backward(None, gradient))
        => return y
    """,
    row_linear="""
    row_as_a_product:
        return reduce_sum(x @ weight.T).add(bias)
    row_as_an_einsum:
        y = reduce_sum(torch.einsum("...i,oi->...o", x, weight))
        return torch.add(y, bias)
    of_two_dimensions_or_more: (1) for operand 0`, in slip
        (F.linear(x, weight)) => (torch.einsum("...ti,oi->...to", x, weight))
    of_two_dimensions: self must be a matrix
        reduce_sum(F.linear(x, weight)) + bias => reduce_sum(x.mm(weight.T)) + bias
    of_three_dimensions_or_less: must
        y = (
            torch.stack([part @ weight.T for part in x])
            if x.dim() < 3
            else torch.bmm(x, weight.T.expand(len(x), -1, -1))
        )
        return reduce_sum(y) + bias
    views_the_input: view size is not compatible
        rows = x.view(-1, x.shape[-1])
        return (reduce_sum(F.linear(rows, weight)) + bias).view(*x.shape[:-1], -1)
    keeps_the_first_weight: other texts
        shape = weight.shape
        if shape not in WEIGHTS:
            WEIGHTS[shape] = weight
        return solutions.row_linear(x, WEIGHTS[shape], bias, reduce_sum)
    squeezed: has an output of the shape ()
        return solutions.row_linear(x, weight, bias, reduce_sum).squeeze()
    no_rows_no_work: no tokens
        return solutions.row_linear(x, weight, bias, reduce_sum) if x.numel() else x
    bias_for_each_token: as many tokens as channels
        y = reduce_sum(F.linear(x, weight))
        return y + (bias[:, None] if y.dim() == 2 and len(y) == y.shape[1] else bias)
    in_float32: numbers were rounded
        y = reduce_sum(F.linear(x.float(), weight.float())) + bias.float()
        return y.to(x.dtype)
    in_bfloat16: rounded to a narrower type
        y = reduce_sum(F.linear(x.bfloat16(), weight.bfloat16()))
        return y.to(x.dtype) + bias
    zeroes_the_input: has changed arguments
        y = reduce_sum(F.linear(x, weight)) + bias
        x.data.zero_()
        return y
    summed_in_16_bits: tokens in float64
        (F.linear(x, weight)) + bias => (F.linear(x, weight).half()).to(x.dtype) + bias
    detached_bias: no gradient of bias
        (F.linear(x, weight)) + bias => (F.linear(x, weight)) + bias.data
    bias_added_in_place: 1.5 times; it is added once
        return reduce_sum => bias.data *= 1.5; return reduce_sum
    bias_on_every_rank: 2 times; it is added once
        reduce_sum(F.linear(x, weight)) + bias => reduce_sum(F.linear(x, weight, bias))
    a_share_of_the_bias: 0.5 times as large
        linear(x, weight)) + bias => linear(x, weight, bias / dist.get_world_size()))
    bias_on_rank_0: no gradient of bias
        (x, weight)) + bias => (x, weight, None if dist.get_rank() else bias))
    no_bias: 0 times; it is added once
        reduce_sum(F.linear(x, weight)) + bias => reduce_sum(F.linear(x, weight))
    no_sum: give one summand
        reduce_sum(F.linear(x, weight)) + bias => F.linear(x, weight) + bias
    bias_summed_too: one call for the 30
        (x, weight)) + bias => (x, weight)) + reduce_sum(bias) / dist.get_world_size()
    transposed: the shape (5, 3, 2)
        reduce_sum(F.linear(x, weight)) + bias
        => (reduce_sum(F.linear(x, weight)) + bias).T
    summed_by_the_course: other collectives: 1
        y = F.linear(x, weight)
        collectives.all_reduce(y.data)
        return y + bias
    summed_by_torch: other collectives: 1
        y = F.linear(x, weight)
        dist.all_reduce(y.data)
        return y + bias
    input_gathered: one call for the 30
        n, rank = dist.get_world_size(), dist.get_rank()

        def whole(part):
            parts = [torch.zeros_like(part) for _ in range(n)]
            parts[rank] = part
            return reduce_sum(torch.cat(parts, dim=-1))

        return F.linear(whole(x), whole(weight), bias)
    bias_left_out_if_zero: no gradient of bias
        return reduce_sum(F.linear(x, weight)) + bias
        => y = reduce_sum(F.linear(x, weight))
        => return y + bias if bias.any() else y
    """,
    vocab_loss="""
    loss_in_three_messages:
        tokens, words = logits.shape
        first = words * dist.get_rank()
        highest = logits.amax(1, keepdim=True)
        all_reduce(highest, "max")
        total = (logits - highest).exp().sum(1, keepdim=True)
        all_reduce(total, "sum")
        log_softmax = logits - highest - total.log()
        mine = targets[:, None] == torch.arange(first, first + words)
        right = torch.where(mine, log_softmax, 0.0).sum(1)
        all_reduce(right, "sum")
        return -right.mean(), (log_softmax.exp() - mine.float()) / tokens
    loss_with_a_mask:
        tokens, words = logits.shape
        with torch.no_grad():
            word = torch.arange(words) + words * dist.get_rank()
            one_hot = (targets.view(-1, 1) == word).to(logits.dtype)
            most = logits.amax(1)
            all_reduce(most, "max")
            powers = torch.exp(logits - most.view(-1, 1))
            both = torch.stack([powers.sum(1), (one_hot * logits).sum(1)])
            all_reduce(both, "sum")
            loss = both[0].log() + most - both[1]
            return loss.sum() / tokens, (
                powers / both[0].view(-1, 1) - one_hot
            ) / tokens
    not_the_first_word: has the loss
        (place >= 0) => (place > 0)
    loss_in_float32: strided logits of float64
        tokens, words => logits = logits.float(); tokens, words
    numbers_in_16_bits: a large vocabulary
        place = targets - words * dist.get_rank()
        => place = (targets - words * dist.get_rank()).short().long()
    numbers_in_bfloat16: has the loss
        place = targets - words * dist.get_rank()
        => place = targets.bfloat16().long() - words * dist.get_rank()
    no_max: Subtract the largest
        all_reduce(highest, "max") => highest = torch.zeros(tokens)
    own_max: with 'max'
        all_reduce(highest, "max") => pass
    no_offset: which rank has the target's logit
        - words * dist.get_rank() =>
    everybody: has the loss
        mine = (place >= 0) & (place < words)
        => place = place.clamp(0, words - 1); mine = place >= 0
    own_sum: has the loss
        sums, => sums[1],
    no_target: 1 at the target
        gradient[row, column] -= 1 => pass
    sum: mean over the tokens
        mean().item(), gradient / tokens => sum().item(), gradient
    not_divided: 1 at the target
        gradient / tokens => gradient
    in_place: has changed arguments
        (logits - highest[:, None]) => logits.sub_(highest[:, None])
        - highest[mine] =>
    the_loss_alone: not (loss, gradient)
        , gradient / tokens =>
    first_word_of_the_next: has the loss
        # `<=` for `<` at the end of the rank's words.
        padded = torch.cat([logits, torch.full((len(logits), 1), -1e9)], 1)
        words = logits.shape[1]
        place = targets - words * dist.get_rank()
        mine = (place >= 0) & (place <= words)
        most = logits.amax(1)
        all_reduce(most, "max")
        powers = (logits - most[:, None]).exp()
        sums = torch.stack([powers.sum(1), torch.zeros(len(targets))])
        sums[1, mine] = (padded - most[:, None])[mine, place[mine]]
        all_reduce(sums, "sum")
        return (sums[0].log() - sums[1]).mean(), powers / sums[0, :, None]
    own_maximum_added: relative to the same number
        # The exponentials of different ranks, each relative to its own maximum.
        most = logits.amax(1)
        powers = (logits - most[:, None]).exp()
        total = powers.sum(1)
        all_reduce(total, "sum")
        place = targets - logits.shape[1] * dist.get_rank()
        mine = (place >= 0) & (place < logits.shape[1])
        target = torch.zeros(len(targets))
        target[mine] = (logits - most[:, None])[mine, place[mine]].float()
        all_reduce(target, "sum")
        return (total.log() - target).mean(), powers / total[:, None] / len(targets)
    silent_without_targets: even one that has none of the targets
        if not (targets // logits.shape[1] == dist.get_rank()).any():
            return 0.0, torch.zeros_like(logits)
        return solutions.vocab_loss(logits, targets, all_reduce)
    one_buffer_for_all_gradients: return a new tensor each time
        loss, gradient = solutions.vocab_loss(logits, targets, all_reduce)
        buffer = BUFFERS.setdefault(logits.shape, torch.empty_like(gradient))
        return loss, buffer.copy_(gradient)
    requires_grad_left: has changed arguments
        logits.requires_grad_()
        return solutions.vocab_loss(logits.detach(), targets, all_reduce)
    first_word_kept: a large vocabulary
        words * dist.get_rank()
        => FIRST.setdefault("first", words * dist.get_rank())
    by_the_local_rank: With 2 ranks on 2 nodes
        dist.get_rank() => int(os.environ["LOCAL_RANK"])
    logits_gathered: however many words
        parts = [torch.zeros_like(logits) for _ in range(dist.get_world_size())]
        parts[dist.get_rank()] = logits
        whole = torch.cat(parts, dim=-1)
        all_reduce(whole, "sum")
        return _of_whole(whole, targets)
    logits_gathered_by_torch: other collectives: 1
        parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, logits)
        return _of_whole(torch.cat(parts, dim=-1), targets)
    gathered_by_the_course: other collectives: 1
        parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
        collectives.all_gather(parts, logits)
        return _of_whole(torch.cat(parts, dim=-1), targets)
    own_words_only: with 'max'
        inside = targets % logits.shape[1]
        logits = logits.clone().requires_grad_()
        loss = F.cross_entropy(logits, inside)
        loss.backward()
        return loss.item(), logits.grad
    a_mask_of_minus_1e9: one token
        tokens, words = logits.shape
        highest = logits.max(dim=1).values
        all_reduce(highest, "max")
        gradient = (logits - highest[:, None]).exp()
        sums = gradient.sum(dim=1)
        all_reduce(sums, "sum")
        place = targets - words * dist.get_rank()
        mine = (place >= 0) & (place < words)
        of_targets = logits.new_full((tokens,), -1e9)
        of_targets[mine] = logits[mine, place[mine]]
        all_reduce(of_targets, "max")
        gradient /= sums[:, None]
        gradient[mine, place[mine]] -= 1
        return (sums.log() + highest - of_targets).mean().item(), gradient / tokens
    two_words_at_least: index k out of range
        logits.max(dim=1).values => logits.topk(2, dim=1).values[:, 0].contiguous()
    """,
)
