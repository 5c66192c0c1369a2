"""A training step under our DistributedDataParallel and under PyTorch's, in one run.

All variants use the fused AdamW, PyTorch's fastest. Chapter 05.
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.nn.parallel import DistributedDataParallel as PyTorchDDP

from ddp_course.bench import steps
from ddp_course.bench.turns import against
from ddp_course.data_parallel.ddp import DistributedDataParallel

ABOUT = "A training step under our DDP beside one under PyTorch's."


def torch_ddp(model: nn.Module, **options: bool) -> steps.Parallelized:
    """Return the model under PyTorch's DDP."""
    return steps.with_adamw(PyTorchDDP(model, **options))


def our_ddp(model: nn.Module, **options: bool) -> steps.Parallelized:
    """Return the model under this course's DDP."""
    return steps.with_adamw(DistributedDataParallel(model, **options))


BEST = {"static_graph": True, "gradient_as_bucket_view": True}
VARIANTS: dict[str, steps.Variant] = {
    "default": torch_ddp,
    "again": torch_ddp,  # shows the noise
    "best": partial(torch_ddp, **BEST),
    "gloo": our_ddp,
    "bound": steps.with_adamw,  # no communication at all: no DDP can be faster
}
PAIRS = (
    *against("default", {"gloo": 1.05, "again": None}),
    *against("best", {"gloo": 1.05}),
    *against("default", {"best": None, "bound": None}),
)
bench = partial(steps.contest, variants=VARIANTS, pairs=PAIRS)
