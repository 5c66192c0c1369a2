"""Right answers to the exercises of chapter 08, in other styles than the solutions."""

import torch


def divided_before_it_is_summed(x, shard, gather, reduce_scatter, world_size):
    """As the package does it: small summands, no overflow in 16 bits."""

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, shard):
            ctx.save_for_backward(x, shard)
            return x @ gather(shard).T

        @staticmethod
        def backward(ctx, gradient):
            x, shard = ctx.saved_tensors
            own = reduce_scatter((gradient / world_size).T @ x)
            return gradient @ gather(shard), own

    return Linear.apply(x, shard)


RIGHT = {"sharded_linear": [divided_before_it_is_summed]}
