"""Wrong answers to the exercises of chapter 09, each with a word of its hint."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddp_course import collectives
from ddp_course.chapters.ch09_tensor_parallel import solutions

# copy_to_ranks


def _function(forward, backward):
    """Return an answer: an autograd function of these two."""

    def copy_to_ranks(x, all_reduce):
        class Copy(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return forward(x, all_reduce)

            @staticmethod
            def backward(ctx, gradient):
                return backward(gradient, all_reduce)

        return Copy.apply(x)

    return copy_to_ranks


def _summed(tensor, all_reduce):
    total = tensor.clone()
    all_reduce(total)
    return total


def _same(tensor, all_reduce):
    return tensor.view_as(tensor)


def _in_place(gradient, all_reduce):
    all_reduce(gradient)
    return gradient


def _mean(gradient, all_reduce):
    return _summed(gradient, all_reduce) / dist.get_world_size()


def _twice(gradient, all_reduce):
    _summed(gradient, all_reduce)
    return _summed(gradient, all_reduce)


def _named(function, name):
    function.__name__ = function.__qualname__ = name
    return function


def nothing_at_all(x, all_reduce):
    return x


def detached(x, all_reduce):
    return x.detach()


def autograd_through_the_all_reduce(x, all_reduce):
    y = x.clone()
    all_reduce(y)
    return y / dist.get_world_size()


no_all_reduce = _named(_function(_same, _same), "no_all_reduce")
the_other_way_round = _named(_function(_summed, _same), "the_other_way_round")
mean_of_ranks = _named(_function(_same, _mean), "mean_of_ranks")
in_place = _named(_function(_same, _in_place), "in_place")
two_all_reduces = _named(_function(_same, _twice), "two_all_reduces")
both_ways = _named(
    _function(lambda x, r: _summed(x, r) / dist.get_world_size(), _summed), "both_ways"
)


# row_linear


def bias_on_every_rank(x, weight, bias, reduce_sum):
    return reduce_sum(F.linear(x, weight, bias))


def a_share_of_the_bias(x, weight, bias, reduce_sum):
    return reduce_sum(F.linear(x, weight, bias / dist.get_world_size()))


def bias_on_rank_0(x, weight, bias, reduce_sum):
    return reduce_sum(F.linear(x, weight, bias if dist.get_rank() == 0 else None))


def no_bias(x, weight, bias, reduce_sum):
    return reduce_sum(F.linear(x, weight))


def no_sum(x, weight, bias, reduce_sum):
    return F.linear(x, weight) + bias


def summed_by_the_course(x, weight, bias, reduce_sum):
    y = F.linear(x, weight)
    collectives.all_reduce(y.data)
    return y + bias


def bias_summed_too(x, weight, bias, reduce_sum):
    n = dist.get_world_size()
    return reduce_sum(F.linear(x, weight)) + reduce_sum(bias) / n


def summed_by_torch(x, weight, bias, reduce_sum):
    y = F.linear(x, weight)
    dist.all_reduce(y.data)
    return y + bias


def input_gathered(x, weight, bias, reduce_sum):
    n, rank = dist.get_world_size(), dist.get_rank()

    def whole(part):
        parts = [torch.zeros_like(part) for _ in range(n)]
        parts[rank] = part
        return reduce_sum(torch.cat(parts, dim=-1))

    return F.linear(whole(x), whole(weight), bias)


def transposed(x, weight, bias, reduce_sum):
    return (reduce_sum(F.linear(x, weight)) + bias).T


# vocab_loss


def _loss(**mistakes):
    def vocab_loss(logits, targets, all_reduce):
        tokens, words = logits.shape
        rank = dist.get_rank()
        highest = logits.max(dim=1).values
        if "no_max" in mistakes:
            highest = torch.zeros(tokens)
        elif "own_max" not in mistakes:
            all_reduce(highest, "max")
        shifted = (
            logits.sub_(highest[:, None])
            if "in_place" in mistakes
            else logits - highest[:, None]
        )
        exponentials = shifted.exp()
        place = targets - (0 if "no_offset" in mistakes else words * rank)
        mine = (place >= 0) & (place < words)
        if "everybody" in mistakes:
            place, mine = place.clamp(0, words - 1), torch.ones_like(mine)
        row, column = torch.arange(tokens)[mine], place[mine]
        target = torch.zeros(tokens)
        target[mine] = shifted[row, column]
        total = exponentials.sum(dim=1)
        if "own_sum" not in mistakes:
            all_reduce(total, "sum")
        all_reduce(target, "sum")
        gradient = exponentials / total[:, None]
        if "no_target" not in mistakes:
            gradient[row, column] -= 1
        loss = total.log() - target
        if "sum" in mistakes:
            return loss.sum().item(), gradient
        scale = 1 if "not_divided" in mistakes else tokens
        return loss.mean().item(), gradient / scale

    return _named(vocab_loss, "_".join(mistakes))


def _of_whole(whole, targets):
    loss = F.cross_entropy(whole.requires_grad_(), targets)
    loss.backward()
    return loss.item(), whole.grad.chunk(dist.get_world_size(), 1)[dist.get_rank()]


def logits_gathered(logits, targets, all_reduce):
    parts = [torch.zeros_like(logits) for _ in range(dist.get_world_size())]
    parts[dist.get_rank()] = logits
    whole = torch.cat(parts, dim=-1)
    all_reduce(whole, "sum")
    return _of_whole(whole, targets)


def logits_gathered_by_torch(logits, targets, all_reduce):
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits)
    return _of_whole(torch.cat(parts, dim=-1), targets)


def gathered_by_the_course(logits, targets, all_reduce):
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    collectives.all_gather(parts, logits)
    return _of_whole(torch.cat(parts, dim=-1), targets)


def own_words_only(logits, targets, all_reduce):
    inside = targets % logits.shape[1]
    logits = logits.clone().requires_grad_()
    loss = F.cross_entropy(logits, inside)
    loss.backward()
    return loss.item(), logits.grad


no_max = _loss(no_max=True)
own_max = _loss(own_max=True)
no_offset = _loss(no_offset=True)
everybody = _loss(everybody=True)
own_sum = _loss(own_sum=True)
no_target = _loss(no_target=True)
sum_of_tokens = _loss(sum=True)
not_divided = _loss(not_divided=True)
logits_changed = _loss(in_place=True)


def the_loss_alone(logits, targets, all_reduce):
    return _loss()(logits, targets, all_reduce)[0]


# What harder inputs find out


def silent_without_gradient(x, all_reduce):
    return solutions.copy_to_ranks(x, lambda t: all_reduce(t) if t.any() else None)


def of_two_dimensions(x, weight, bias, reduce_sum):
    return reduce_sum(x.mm(weight.T)) + bias


def not_the_first_word(logits, targets, all_reduce):
    words = logits.shape[1]
    first = targets == words * dist.get_rank()
    return solutions.vocab_loss(logits, targets - len(targets) * first, all_reduce)


def silent_without_targets(logits, targets, all_reduce):
    if not (targets // logits.shape[1] == dist.get_rank()).any():
        return 0.0, torch.zeros_like(logits)
    return solutions.vocab_loss(logits, targets, all_reduce)


def in_bfloat16(x, all_reduce):
    """Half of the bytes, and other numbers."""

    def add_up(gradient):
        total = gradient.bfloat16() + 0.001
        all_reduce(total)
        return total.to(gradient.dtype)

    y = x.clone()
    y.register_hook(add_up)
    return y


def hook_on_x_itself(x, all_reduce):
    x.register_hook(lambda gradient: _summed(gradient, all_reduce))
    return x.view_as(x)


def summed_in_float32(x, all_reduce):
    return _function(_same, lambda g, r: _summed(g.float(), r))(x, all_reduce)


def flat_view(x, all_reduce):
    return solutions.copy_to_ranks(x.view(-1), all_reduce).view(x.shape)


def summed_in_16_bits(x, weight, bias, reduce_sum):
    return reduce_sum(F.linear(x, weight).half()).to(x.dtype) + bias


def detached_bias(x, weight, bias, reduce_sum):
    return reduce_sum(F.linear(x, weight)) + bias.data


def bias_added_in_place(x, weight, bias, reduce_sum):
    bias.data *= 1.5
    return reduce_sum(F.linear(x, weight)) + bias


def first_word_of_the_next(logits, targets, all_reduce):
    """`<=` for `<` at the end of the rank's words."""
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


def loss_in_float32(logits, targets, all_reduce):
    return solutions.vocab_loss(logits.float(), targets, all_reduce)


def own_maximum_added(logits, targets, all_reduce):
    """The exponentials of different ranks, each relative to its own maximum."""
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


WRONG = {
    "copy_to_ranks": {
        silent_without_gradient: "also one whose gradient is zero",
        in_bfloat16: "the sum of what the use",
        hook_on_x_itself: "A hook on x itself sees both",
        summed_in_float32: "x of float64",
        flat_view: "On real ranks",
        nothing_at_all: "0 times",
        detached: "no way back",
        autograd_through_the_all_reduce: "sent something in forward",
        no_all_reduce: "0 times",
        the_other_way_round: "sent something in forward",
        mean_of_ranks: "has the mean",
        in_place: "another gradient of b",
        two_all_reduces: "one all-reduce",
        both_ways: "sent something in forward",
    },
    "row_linear": {
        of_two_dimensions: "self must be a matrix",
        summed_in_16_bits: "tokens in float64",
        detached_bias: "no gradient of bias",
        bias_added_in_place: "1.5 times; it is added once",
        bias_on_every_rank: "2 times; it is added once",
        a_share_of_the_bias: "0.5 times as large",
        bias_on_rank_0: "no gradient of bias",
        no_bias: "0 times; it is added once",
        no_sum: "give one summand",
        bias_summed_too: "one of the 30",
        summed_by_the_course: "other collectives: 1",
        summed_by_torch: "other collectives: 1",
        input_gathered: "one of the 30",
        transposed: "the shape (5, 3, 2)",
    },
    "vocab_loss": {
        not_the_first_word: "has the loss",
        first_word_of_the_next: "has the loss",
        loss_in_float32: "strided logits of float64",
        own_maximum_added: "relative to the same number",
        silent_without_targets: "also one that has none of the targets",
        logits_gathered: "however many words",
        logits_gathered_by_torch: "other collectives: 1",
        gathered_by_the_course: "other collectives: 1",
        own_words_only: "with 'max'",
        no_max: "Subtract the largest",
        own_max: "with 'max'",
        no_offset: "which rank has the target's logit",
        everybody: "has the loss",
        own_sum: "has the loss",
        no_target: "1 at the target",
        sum_of_tokens: "mean over the tokens",
        not_divided: "1 at the target",
        logits_changed: "changed what it was given",
        the_loss_alone: "not (loss, gradient)",
    },
}
