"""Solutions of the exercises of chapter 15."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim import Optimizer

from ddp_course.zero import FullyShardedDataParallel, full_state_dict


def my_priority(
    ready: Sequence[int], send: Sequence[int], piece: int
) -> list[tuple[int, int, int]]:
    """Send, whenever the link is free, a piece of the first layer that is ready."""
    left, now, sent = list(send), 0, []
    while any(left):
        ready_layers = [k for k, rest in enumerate(left) if rest and ready[k] <= now]
        if not ready_layers:
            now = min(ready[k] for k, rest in enumerate(left) if rest)
            continue
        layer = ready_layers[0]
        length = min(piece, left[layer])
        sent.append((layer, now, now + length))
        left[layer] -= length
        now += length
    return sent


def my_least_time(
    forward: Sequence[int], backward: Sequence[int], send: Sequence[int]
) -> int:
    """Return the longest path: backward to a layer, sends up to it, forward from it."""
    return max(
        sum(backward[c:]) + sum(send[: c + 1]) + sum(forward[c:])
        for c in range(len(send))
    )


def my_late_steps(
    layers: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    send: Callable[[Tensor], Any],
) -> None:
    """Send all gradients; register a hook on each layer that waits and steps."""
    for layer, optimizer in zip(layers, optimizers, strict=True):
        present = [p for p in layer.parameters() if p.grad is not None]
        _step_before_forward(layer, optimizer, [send(p.grad) for p in present])


def _step_before_forward(
    layer: nn.Module, optimizer: Optimizer, handles: Sequence[Any]
) -> None:
    def step(*_: object) -> None:
        hook.remove()
        for handle in handles:
            handle.wait()
        optimizer.step()

    hook = layer.register_forward_pre_hook(step)


def my_carry(ours: FullyShardedDataParallel, theirs: nn.Module, folder: str) -> None:
    """Save whole weights under plain names; load them into PyTorch's shards."""
    dcp.save(full_state_dict(ours), checkpoint_id=folder)
    shards = get_model_state_dict(theirs)  # DTensors, by the same names
    dcp.load(shards, checkpoint_id=folder)  # in place
