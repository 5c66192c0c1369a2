"""Model parallelism in its first steps: by layer, and by column with too much sent.

    NaiveModelParallel   each rank has some of the layers; they work one after the other
    NaiveParallelMLP     each rank has columns of both matrices; all gather both results

The first needs little communication, and uses one rank at a time: chapters 10 and 11
begin here. The second computes on all ranks at once; `layers` has a better way for it.
Chapter 09.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_course.collectives import communicator
from ddp_course.collectives.port import Port
from ddp_course.measure import active_logs
from ddp_course.mechanisms.agreement import check_same, form_of, problem_with
from ddp_course.mechanisms.exchange import Group
from ddp_course.model import GPT, MLP, cross_entropy
from ddp_course.tensor_parallel.layers import ColumnParallelLinear
from ddp_course.tensor_parallel.ops import gather_from_group
from ddp_course.tensor_parallel.tokens import same_tokens

# ---- by layer ------------------------------------------------------------------------


def split_layers(num_layers: int, size: int) -> list[range]:
    """Return which layers each of `size` ranks has: as many as the others, or one more.

    Pure. Raises ValueError if there are more ranks than layers.
    """
    if not 1 <= size <= num_layers:
        raise ValueError(
            f"{num_layers} layers are for 1 to {num_layers} ranks, not for {size}"
        )
    each, more = divmod(num_layers, size)
    ends = [rank * each + min(rank, more) for rank in range(size + 1)]
    return [range(a, b) for a, b in zip(ends, ends[1:], strict=False)]


class NaiveModelParallel(nn.Module):
    """A GPT of which every rank has some layers: `[embed, *blocks, head]`, cut.

    Activations go from rank to rank, their gradients back, and at any time one rank
    computes: of N ranks each is idle for (N - 1)/N of a step, if their layers take
    equally long. Open event logs get the lanes "compute" and "wait".

    Args:
        model: the same on all ranks; each keeps its own layers, by the plain names.
        group: the ranks that share it; None are all.

    Raises ReplicaError, on every rank, for models that differ, that have fewer layers
    than there are ranks, or whose embedding is tied to the head, which are on different
    ranks (`pipeline` can do that). Chapter 09.
    """

    def __init__(self, model: GPT, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group, self.comm = group, communicator(group)
        self.rank, self.last = self.comm.rank, self.comm.size - 1
        problem = _unfit(model, self.comm.size)
        check_same({} if problem else form_of(model), problem, group)
        self.config = model.config
        self.like = next(model.parameters()).detach().new_empty(0)  # type and device
        self.layers: list[nn.Module] = []
        self.blocks = nn.ModuleDict()
        named = [("embed", model.embed)]
        named += [(str(i), block) for i, block in enumerate(model.blocks)]
        named += [("head", model.head)]
        for i in split_layers(len(named), self.comm.size)[self.rank]:
            name, layer = named[i]
            (self.blocks if name.isdigit() else self).add_module(name, layer)
            self.layers.append(layer)

    def step(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Go forward and backward with a batch, and return its mean loss.

        Called by all ranks with the same `idx` and `targets`, (B, T) each. Raises
        CollectiveError, on every rank, if they are not the same, or do not fit.
        """
        same_tokens(self.comm, self.config, idx, targets)
        x, y = self._forward(idx, targets)
        gradient = None  # of the loss: 1
        if self.rank < self.last:
            gradient = self._receive(torch.empty_like(y), self.rank + 1, "gradient")
        with _event("backward", "compute"):
            if y.requires_grad:
                y.backward(gradient)
        if self.rank > 0:
            self._send(x.grad, self.rank - 1)
        return self._to_all(y, ())

    @torch.no_grad()
    def forward(self, idx: Tensor, targets: None = None) -> tuple[Tensor, None]:
        """Return the logits (B, T, V) for `idx` (B, T), on all ranks."""
        same_tokens(self.comm, self.config, idx, targets)
        _, y = self._forward(idx, targets)
        return self._to_all(y, (*idx.shape, self.config.vocab_size)), None

    def _forward(self, idx: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor]:
        """Take what comes from the rank before, send on what the own layers make."""
        x = idx
        if self.rank > 0:
            x = self.like.new_empty((*idx.shape, self.config.d_model))  # (B, T, C)
            x = self._receive(x, self.rank - 1, "activations").requires_grad_()
        y = x
        with _event("forward", "compute"):
            for layer in self.layers:
                y = layer(y)  # (B, T, C); the head's: (B, T, V)
            if self.rank == self.last and targets is not None:
                y = cross_entropy(y, targets)  # a scalar
        if self.rank < self.last:
            self._send(y.detach(), self.rank + 1)
        return x, y

    def _send(self, tensor: Tensor, to: int) -> None:
        Port(self.comm.group).send(tensor.contiguous(), to).wait()

    def _receive(self, tensor: Tensor, source: int, what: str) -> Tensor:
        with _event(f"wait for {what}", "wait"):
            Port(self.comm.group).receive(tensor, source).wait()
        return tensor

    def _to_all(self, y: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Give all ranks what the last one has computed."""
        value = y.detach() if self.rank == self.last else self.like.new_empty(shape)
        dist.broadcast(value, self.comm.ranks[-1], self.group)
        return value


@contextmanager
def _event(op: str, lane: str) -> Iterator[None]:
    """Tell the open logs how long this took."""
    with ExitStack() as stack:
        for log in active_logs():
            stack.enter_context(log.span(op, lane=lane))
        yield


def _unfit(model: Any, size: int) -> str | None:
    """Return why a model cannot be cut by layer for so many ranks, or None."""
    if not isinstance(model, GPT):
        return f"model is a {type(model).__name__}; it must be a GPT"
    if model.config.tied:
        return (
            "the embedding is tied to the head, and they would be on different ranks; "
            "take a GPT with tied=False"
        )
    layers = len(model.blocks) + 2
    if size > layers:
        return f"{layers} layers are for 1 to {layers} ranks, not for {size}"
    return problem_with(model)


# ---- by column -----------------------------------------------------------------------


class NaiveParallelMLP(nn.Module):
    """The MLP with columns of both matrices on each rank, and both results gathered.

    Correct, and every rank computes 1/N. But what is gathered first is 4C wide, and it
    is gathered only to be cut again; so is its gradient. Chapter 09.
    """

    def __init__(self, full: MLP, group: Group = None) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(full.up, group)
        self.down = ColumnParallelLinear(full.down, group)

    def forward(self, x: Tensor) -> Tensor:
        """As the plain MLP: (B, T, C) -> (B, T, C)."""
        h = gather_from_group(F.gelu(self.up(x)), -1, self.up.group)
        return gather_from_group(self.down(h), -1, self.down.group)
