"""Model parallelism in its first steps: by layer, and by column with too much sent.

    NaiveModelParallel   each rank has some of the layers; they work one after the other
    NaiveParallelMLP     each rank has columns of both matrices; all gather both results
    ParallelMLP          columns of the first, rows of the second; one sum

The first needs little communication, and uses one rank at a time: chapters 10 and 11
begin here. The other two compute on all ranks at once. Chapter 09.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function, Variable

from ddp_course.collectives import communicator
from ddp_course.measure import active_meters
from ddp_course.mechanisms.exchange import Group
from ddp_course.mechanisms.replicas import check_same, form_of, problem_with
from ddp_course.mechanisms.timeline import Timeline
from ddp_course.model import GPT, MLP, cross_entropy
from ddp_course.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
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

    Takes and returns what the GPT does, on all ranks; the loss is the last rank's, and
    `backward()` is to be called on every rank. Activations go from rank to rank, their
    gradients back, and at any time one rank computes: of N ranks each is idle for
    (N - 1)/N of a step, if their layers take equally long. What it computes and what it
    waits for is written into the open event logs, in the lanes "compute" and "wait".

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
        rank, size = self.comm.rank, self.comm.size
        problem, form = _unfit(model, size), {}
        if not problem:
            form = form_of(model, config=model.config)
        check_same(form, problem, group)
        self.config, self.dtype = model.config, next(model.parameters()).dtype
        self.is_first, self.is_last = rank == 0, rank == size - 1
        self.previous = None if self.is_first else self.comm.ranks[rank - 1]
        self.next = None if self.is_last else self.comm.ranks[rank + 1]
        self.blocks = nn.ModuleDict()
        layers = [("embed", model.embed)]
        layers += [(str(i), block) for i, block in enumerate(model.blocks)]
        layers += [("head", model.head)]
        self.layers: list[nn.Module] = []
        for at in split_layers(len(layers), size)[rank]:
            name, layer = layers[at]
            (self.blocks if name.isdigit() else self).add_module(name, layer)
            self.layers.append(layer)
        self.timeline: Timeline | None = None
        self.since = 0.0  # this rank computes

    def forward(
        self, idx: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the logits (B, T, V) for `idx` (B, T), or the mean loss.

        Called by all ranks with the same tokens. Raises CollectiveError, on every rank,
        if they are not the same, or do not fit.
        """
        same_tokens(self.comm, self.config, idx, targets)
        self.timeline = Timeline.begin()
        x = idx if self.is_first else self._receive_activations(idx.shape)
        self.since = time.perf_counter()
        for layer in self.layers:
            x = layer(x)  # (B, T, C); the head's: (B, T, V)
        if self.is_last and targets is not None:
            x = cross_entropy(x, targets)  # a scalar
        self._computed("forward")
        if not self.is_last:
            if torch.is_grad_enabled() and not x.requires_grad:  # nothing is trained
                x = x.detach().requires_grad_()  # here; yet its gradient will come
            x = SendActivations.apply(x, self)  # a scalar, 0, to call backward of
        return self._told_to_all(x, idx, targets)

    def _told_to_all(
        self, x: Tensor, idx: Tensor, targets: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Send the last rank's result to all, where it is joined to each own graph."""
        shape = () if targets is not None else (*idx.shape, self.config.vocab_size)
        value = torch.empty(shape, dtype=self.dtype, device=x.device)
        if self.is_last:
            value.copy_(x.detach())
        dist.broadcast(value, self.comm.ranks[-1], self.group)
        if not self.is_last:
            x = x + value
        else:
            self.since = time.perf_counter()  # backward begins here
        return (x, None) if targets is None else (None, x)

    # ---- from rank to rank -----------------------------------------------------------

    def _receive_activations(self, shape: torch.Size) -> Tensor:
        """Wait for the activations of the previous rank; send their gradient back."""
        device = next(self.parameters()).device
        shape = (*shape, self.config.d_model)
        x = torch.empty(shape, dtype=self.dtype, device=device)  # (B, T, C)
        self.receive(x, self.previous, "activations")
        if torch.is_grad_enabled():
            x.requires_grad_().register_hook(self._send_gradient)
        return x

    def _send_gradient(self, gradient: Tensor) -> None:
        """This rank's backward is through: it is the previous one's turn."""
        self._computed("backward")
        self.send(gradient.contiguous(), self.previous)

    def receive_gradient(self, gradient: Tensor) -> Tensor:
        """Wait for the next rank's backward; then it is this one's turn."""
        self.receive(gradient, self.next, "gradient")
        self.since = time.perf_counter()
        if self.is_first:  # it sends no gradient when it is through
            Variable._execution_engine.queue_callback(
                lambda: self._computed("backward")
            )
        return gradient

    def send(self, tensor: Tensor, to: int) -> None:
        """Send to rank `to` of the job."""
        dist.send(tensor, to, self.group)
        for meter in active_meters():
            meter.count_sent(to, tensor.nbytes)

    def receive(self, tensor: Tensor, source: int, what: str) -> None:
        """Wait for rank `source`, and fill the tensor."""
        start = time.perf_counter()
        dist.recv(tensor, source, self.group)
        for meter in active_meters():
            meter.count_received(source, tensor.nbytes)
        if self.timeline is not None:
            self.timeline.add(f"wait for {what}", start, "wait")

    # ---- small things ----------------------------------------------------------------

    def _computed(self, op: str) -> None:
        if self.timeline is not None:
            self.timeline.add(op, self.since, "compute")


class SendActivations(Function):
    """Hands activations to the next rank; backward waits for their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, here: NaiveModelParallel) -> Tensor:
        """Send; return a 0 that stands for what the next ranks make of it."""
        ctx.here, ctx.like = here, torch.empty_like(x.detach(), device="meta")
        ctx.device = x.device
        here.send(x.contiguous(), here.next)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Receive."""
        return ctx.here.receive_gradient(
            torch.empty_like(ctx.like, device=ctx.device)
        ), None


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
        self.up = ColumnParallelLinear(full.up, group, gather_output=True)
        self.down = ColumnParallelLinear(full.down, group, gather_output=True)

    def forward(self, x: Tensor) -> Tensor:
        """As the plain MLP: (B, T, C) -> (B, T, C)."""
        return self.down(F.gelu(self.up(x)))


class ParallelMLP(nn.Module):
    """The MLP with columns of the first matrix and rows of the second on each rank.

    GELU treats every number alone, so it needs no more than this rank's columns, and
    these are what its rows of the second matrix want. Chapter 09.
    """

    def __init__(self, full: MLP, group: Group = None) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(full.up, group)
        self.down = RowParallelLinear(full.down, group)

    def forward(self, x: Tensor) -> Tensor:
        """As the plain MLP: (B, T, C) -> (B, T, C)."""
        return self.down(F.gelu(self.up(x)))
