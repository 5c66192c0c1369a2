"""Model parallelism in its first steps: by layer, and by column with too much sent.

    NaiveModelParallel   each rank has some of the layers; they work one after the other
    NaiveParallelMLP     each rank has columns of both matrices; all gather both results

The first needs little communication, and uses one rank at a time: chapters 10 and 11
begin here. The second computes on all ranks at once; `layers` has a better way for it.
Chapter 09.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_course.collectives import communicator
from ddp_course.collectives.port import Port
from ddp_course.measure import active_logs
from ddp_course.mechanisms.exchange import Group
from ddp_course.model import GPT, MLP, cross_entropy
from ddp_course.tensor_parallel.layers import ColumnParallelLinear
from ddp_course.tensor_parallel.ops import gather_from_group


def split_layers(num_layers: int, size: int) -> list[range]:
    """Return which layers each of `size` ranks has: as many as the others, or one more.

    Pure. Raises ValueError if there are more ranks than layers.
    """
    if not 1 <= size <= (n := num_layers):
        raise ValueError(f"{n} layers are for 1 to {n} ranks, not for {size}")
    each, more = divmod(num_layers, size)
    ends = [rank * each + min(rank, more) for rank in range(size + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


class NaiveModelParallel(nn.Module):
    """A GPT of which every rank has some layers: `[embed, *blocks, head]`, cut.

    Activations go from rank to rank, their gradients back, and at any time one rank
    computes: of N ranks each is idle for (N - 1)/N of a step, if their layers take
    equally long. Open event logs get the lanes "compute" and "wait".

    Args:
        model: the same on all ranks, its head not tied; each keeps its own layers, by
            the plain names.
        group: the ranks that share it; None are all.

    Raises ValueError if there are more ranks than layers. Chapter 09.
    """

    def __init__(self, model: GPT, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.comm, self.d_model = communicator(group), model.config.d_model
        self.last = self.comm.size - 1
        blocks = {str(i): block for i, block in enumerate(model.blocks)}
        layers = [("embed", model.embed), *blocks.items(), ("head", model.head)]
        own = split_layers(len(layers), self.comm.size)[self.comm.rank]
        self.layers = [layers[i][1] for i in own]
        self.blocks = nn.ModuleDict()
        for name, layer in (layers[i] for i in own):
            (self.blocks if name.isdigit() else self).add_module(name, layer)

    def step(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Go forward and backward with a batch, and return its mean loss.

        Called by all ranks with the same `idx` and `targets`, (B, T) each.
        """
        rank, port = self.comm.rank, Port(self.comm.group)  # counts what it sends
        x, gradient = idx, None  # the gradient of the loss: 1
        if rank > 0:
            x = torch.empty(*idx.shape, self.d_model, device=x.device)  # (B, T, C)
            with _event("wait for activations", "wait"):
                port.receive(x, rank - 1).wait()
            x.requires_grad_()
        with _event("forward", "compute"):
            y = x
            for layer in self.layers:
                y = layer(y)  # (B, T, C); the head's: (B, T, V)
            if rank == self.last:
                y = cross_entropy(y, targets)  # a scalar
        if rank < self.last:
            port.send(y.detach(), rank + 1).wait()
            gradient = torch.empty_like(y)
            with _event("wait for gradient", "wait"):
                port.receive(gradient, rank + 1).wait()
        with _event("backward", "compute"):
            if y.requires_grad:  # not if all before it is frozen
                y.backward(gradient)
        if rank > 0:
            port.send(x.grad, rank - 1).wait()
        loss = y.detach() if rank == self.last else y.new_empty(())
        dist.broadcast(loss, self.comm.ranks[-1], self.comm.group)
        return loss


@contextmanager
def _event(op: str, lane: str) -> Iterator[None]:
    """Tell the open logs how long this took."""
    with ExitStack() as stack:
        for log in active_logs():
            stack.enter_context(log.span(op, lane=lane))
        yield


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
