"""Five steps of a small GPT, in one process and in a pipeline, and their comparison.

Chapter 10.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ddp_course.data import load_corpus
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.pipeline import PipelineParallel

LR = 3e-4
SMALL = GPTConfig(block_size=16, n_layer=4, n_head=2, d_model=24)
TIED = replace(SMALL, tied=True)

Trained = tuple[dict[str, tuple[Tensor, Tensor]], float]  # {name: (p, p.grad)}, norm


def five_steps(
    model: nn.Module, step: Callable[..., object], clip: Callable, rows: int
) -> Trained:
    """Train `model` with AdamW; return its parameters, last gradients and their norm.

    `step(x, y)` runs forward and backward; `clip` clips the gradients and returns their
    norm.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for k in range(5):
        optimizer.zero_grad()
        step(*load_corpus().batch(k, rows, 16))
        norm = clip(max_norm=1.0).item()
        optimizer.step()
    return {n: (p.detach(), p.grad) for n, p in model.named_parameters()}, norm


def alone(config: GPTConfig = SMALL, rows: int = 8) -> Trained:
    """Train in one process, with whole batches."""
    gpt = build_gpt(config)
    clip = partial(nn.utils.clip_grad_norm_, list(gpt.parameters()))
    return five_steps(gpt, lambda x, y: gpt(x, y)[1].backward(), clip, rows)


def staged(microbatches: int, config: GPTConfig = SMALL, rows: int = 8) -> Trained:
    """Train as one rank of a pipeline."""
    pipeline = PipelineParallel(build_gpt(config), "gpipe", microbatches)
    return five_steps(pipeline, pipeline.step, pipeline.clip_grad_norm_, rows)


def same(
    ranks: Sequence[Trained], one: dict[str, tuple[Tensor, Tensor]], norm: float
) -> bool:
    """Return whether the ranks together have all parameters of one process.

    Raises AssertionError if a parameter, a gradient or a norm differs too much from
    one process's.
    """
    for its_state, its_norm in ranks:
        for name, (parameter, gradient) in its_state.items():
            assert (parameter - one[name][0]).abs().max() < 0.1 * LR, name
            torch.testing.assert_close(gradient, one[name][1], rtol=1e-4, atol=1e-6)
        assert abs(its_norm / norm - 1) < 1e-4
    return {name for its_state, _ in ranks for name in its_state} == set(one)
