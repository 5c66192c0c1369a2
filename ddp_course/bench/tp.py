"""A training step under our tensor parallelism and under PyTorch's, in one run.

All ranks work on the same batch, of `tokens` tokens. Chapter 09.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.optim import AdamW

from ddp_course.bench import steps
from ddp_course.bench.turns import Pair, against
from ddp_course.model import GPT
from ddp_course.tensor_parallel import tensor_parallel

ABOUT = "A training step under our tensor parallelism beside PyTorch's DTensor."


# ---- PyTorch's -----------------------------------------------------------------------


def styles(model: GPT, gathers: bool, sequence: bool) -> dict[str, ParallelStyle]:
    """Return PyTorch's plan that divides a GPT as this course does."""
    cut = {"output_layouts": Shard(1)} if sequence else {}
    entered = {"input_layouts": Shard(1)} if sequence else {}
    out = Replicate() if gathers else Shard(-1)
    plan: dict[str, ParallelStyle] = {
        "embed.tokens": RowwiseParallel(input_layouts=Replicate(), **cut),
        "head.out": ColwiseParallel(
            **entered, output_layouts=out, use_local_output=gathers
        ),
    }
    for k in range(model.config.n_layer):
        at = f"blocks.{k}"
        plan[f"{at}.attn.qkv"] = ColwiseParallel(**entered)
        plan[f"{at}.attn.proj"] = RowwiseParallel(**cut)
        plan[f"{at}.mlp.up"] = ColwiseParallel(**entered)
        plan[f"{at}.mlp.down"] = RowwiseParallel(**cut)
        if sequence:
            plan[f"{at}.norm1"] = plan[f"{at}.norm2"] = SequenceParallel()
    if sequence:
        plan["head.norm"] = SequenceParallel()
        # Every rank looks up all positions, and adds its own part of them.
        plan["embed.positions"] = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(0)
        )
    return plan


def dtensor(
    model: GPT, best: bool = True, sequence: bool = False
) -> steps.Parallelized:
    """Return the model cut by PyTorch, with its optimizer.

    `best` fuses AdamW and keeps logits sharded; `sequence` shards norms and residuals.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallel = parallelize_module(model, mesh, styles(model, not best, sequence))
    groups: dict[type, list[nn.Parameter]] = {}  # fused AdamW: one type per group
    for parameter in parallel.parameters():
        groups.setdefault(type(parameter.data), []).append(parameter)
    options = [{"params": group} for group in groups.values()]
    optimizer = AdamW(options, **steps.ADAMW | {"fused": best})
    if best:  # the context lasts from forward to the end of backward
        steps.during_step((parallel, optimizer), loss_parallel)
    return steps.OneBatch(parallel), optimizer


# ---- ours ----------------------------------------------------------------------------


def our_layers(model: GPT, **options: bool) -> steps.Parallelized:
    """Return the model cut by this course, with its optimizer."""
    parallel, optimizer = steps.with_adamw(tensor_parallel(model, **options))
    return steps.OneBatch(parallel), optimizer


class IdleModel(nn.Module):
    """A model for an idle rank: its loss is one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> tuple[None, Tensor]:
        """Return None in place of logits, and a loss."""
        return None, self.parameter * 1


def one_rank_alone(model: GPT) -> steps.Parallelized:
    """Return the whole model on rank 0, and an idle model on other ranks."""
    return steps.with_adamw(IdleModel() if dist.get_rank() > 0 else model)


VARIANTS: dict[str, steps.Variant] = {
    "DTensor default": partial(dtensor, best=False),  # as in PyTorch's tutorial
    "DTensor again": partial(dtensor, best=False),  # shows the noise
    "DTensor best": dtensor,  # the fused AdamW; logits are not gathered
    "DTensor patient": partial(steps.patiently, make=dtensor),
    "DTensor sequence": partial(dtensor, sequence=True),  # cuts norms and residuals
    "tp gloo": our_layers,
    "tp gloo sequence": partial(our_layers, sequence_parallel=True),
    "one rank alone": one_rank_alone,  # tensor parallelism has to be faster
}
DEFAULT, BEST, SEQUENCE = "DTensor default", "DTensor best", "DTensor sequence"
PAIRS = (
    *against(DEFAULT, dict.fromkeys(("DTensor again", BEST, "tp gloo"))),
    *against(BEST, {"DTensor patient": None, SEQUENCE: None}),
    *against(BEST, {"tp gloo": {128: 0.6, 1024: 0.8}}),
    *against("one rank alone", {"tp gloo": None}),
    *against(SEQUENCE, {"tp gloo sequence": None}),
    Pair(
        "tp gloo sequence",
        "tp gloo",
        over="the same with whole sequences",
        title="tp gloo",
    ),
    *against(BEST, {"one rank alone": None}),
)
bench = partial(steps.contest, variants=VARIANTS, pairs=PAIRS)
