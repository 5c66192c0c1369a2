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


def in_turns_from_each_mixing(layers):
    """What is left alone is gathered, which is one message as well."""
    plan, turn = [], 0
    for layer in layers:
        if layer == "linear":
            plan.append(("column", "row")[turn % 2])
            turn += 1
        elif layer == "mixing":
            turn = 0
    return plan


RIGHT = {
    "copy_to_ranks": [copy_with_a_hook],
    "row_linear": [row_as_a_product],
    "vocab_loss": [loss_in_three_messages],
    "plan_cuts": [in_turns_from_each_mixing],
}
