"""Right answers to the exercises of chapter 09, in other styles than the solutions."""

import torch
import torch.distributed as dist


def copy_with_a_hook(x, all_reduce):
    def add_up(gradient):
        total = gradient.clone()
        all_reduce(total)
        return total

    y = x.clone()
    y.register_hook(add_up)
    return y


def row_as_a_product(x, weight, bias, reduce_sum):
    return reduce_sum(x @ weight.T).add(bias)


def loss_in_three_messages(logits, targets, all_reduce):
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


def copy_once_differentiable(x, all_reduce):
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


def row_as_an_einsum(x, weight, bias, reduce_sum):
    y = reduce_sum(torch.einsum("...i,oi->...o", x, weight))
    return torch.add(y, bias)


def loss_with_a_mask(logits, targets, all_reduce):
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
        return loss.sum() / tokens, (powers / both[0].view(-1, 1) - one_hot) / tokens


RIGHT = {
    "copy_to_ranks": [copy_with_a_hook, copy_once_differentiable],
    "row_linear": [row_as_a_product, row_as_an_einsum],
    "vocab_loss": [loss_in_three_messages, loss_with_a_mask],
}
