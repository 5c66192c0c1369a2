"""Random numbers in a parallel region: different on each rank, and repeatable.

Outside of parallel regions all ranks compute the same, so a dropout there must draw the
same mask on all of them: they have the same seed, and that is enough. Inside, each
rank has columns (or heads, or tokens) of its own. With the same seed, all ranks would
drop the same columns of their parts: the mask of the whole tensor would repeat itself.

    with parallel_rng(group):
        x = F.dropout(x, 0.1, training)

The numbers inside depend on the rank and on the generator's state outside, which
advances by one number, on all ranks alike. So there is no other state to save: code
that restores the generator's state, as recomputation does, gets the same masks again.
(Megatron-LM keeps a second generator, `get_cuda_rng_tracker().fork()` in
megatron/core/tensor_parallel/random.py, whose state recomputation has to put back,
too.) Chapter 09.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ddp_course.mechanisms.exchange import Group, exchange_of


@contextmanager
def parallel_rng(group: Group = None) -> Iterator[None]:
    """Draw different random numbers on each rank of `group` inside the block.

    After the block all ranks draw equal numbers again, if they did before. This holds
    for the CPU's generator and for that of this rank's GPU.
    """
    rank = exchange_of(group).rank
    seed = int(torch.randint(1 << 48, ()))  # CPU generator, equal on all ranks
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=gpus):
        # torch.manual_seed would also seed GPUs whose state is not restored.
        torch.default_generator.manual_seed(seed + rank)
        if gpus:
            torch.cuda.manual_seed(seed + rank)
        yield
