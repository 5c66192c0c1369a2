"""A training step under our DistributedDataParallel and under PyTorch's, in one run.

The variants, each with a model and an optimizer of its own:

    default   PyTorch's DDP as it is
    again     the same once more: how much of a difference is noise
    best      PyTorch's DDP with static_graph and gradient_as_bucket_view
    gloo      ours over gloo, as PyTorch's
    shared    ours with buckets in shared memory
    bound     no communication at all: what no DDP can be faster than

All of them use the fused AdamW, the faster of PyTorch's. Chapter 05.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.nn.parallel import DistributedDataParallel as PyTorchDDP

from ddp_course.bench import steps
from ddp_course.bench.turns import Pair, Row
from ddp_course.data_parallel.ddp import DistributedDataParallel

ABOUT = "A training step under our DDP over one under PyTorch's."


VARIANTS: dict[str, steps.Variant] = {
    "default": lambda model: steps.with_adamw(PyTorchDDP(model)),
    "again": lambda model: steps.with_adamw(PyTorchDDP(model)),
    "best": lambda model: steps.with_adamw(
        PyTorchDDP(model, static_graph=True, gradient_as_bucket_view=True)
    ),
    "gloo": lambda model: steps.with_adamw(DistributedDataParallel(model)),
    "shared": lambda model: steps.with_adamw(
        DistributedDataParallel(model, buckets_in_shared_memory=True)
    ),
    "bound": steps.with_adamw,
}
PAIRS = (
    Pair("gloo", "default", at_most=1.05),
    Pair("gloo", "best", at_most=1.05),
    Pair("shared", "default", at_most={128: 0.9}),
    Pair("shared", "best", at_most={128: 0.9}),
    Pair("again", "default", control=True),
    Pair("best", "default"),
    Pair("bound", "default"),
)


def bench(quick: bool) -> Iterator[Row]:
    """Yield a row for each number of ranks, preset, number of tokens and pair."""
    yield from steps.contest("ddp", quick, lambda case: VARIANTS, PAIRS)
