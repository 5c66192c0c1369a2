"""The naive pipeline: each rank has a slice of the model; one rank works at a time.

A microbatch goes forward through all ranks and back again, and then comes the next one.
Everything that a pipeline must do is here, written out: what is sent, where the graph
ends and begins again, how microbatches add up. `runtime` does the same for any order.
Chapter 10.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.collectives import communicator
from ddp_course.model import cross_entropy
from ddp_course.pipeline.stages import spine


class NaivePipeline(nn.Module):
    """This rank's layers of `model`, trained in microbatches, one after the other.

    Args:
        model: the same on all ranks, with a `spine`, and no parameter on two ranks.
        sizes: for each rank of the group the number of its layers.
        num_microbatches: into how many parts a batch is cut.
        form: shape of what passes from layer to layer, without its rows: (T, C).
        group: the ranks of the pipeline, in order; None are all.
    """

    def __init__(
        self,
        model: nn.Module,
        sizes: list[int],
        num_microbatches: int,
        form: tuple[int, ...],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.comm, self.form, self.m = communicator(group), form, num_microbatches
        rank = self.comm.rank
        first = sum(sizes[:rank])
        layers = list(spine(model).values())[first : first + sizes[rank]]
        self.stage = nn.Sequential(*layers)
        self.before = self.comm.ranks[rank - 1] if rank > 0 else None
        self.after = self.comm.ranks[rank + 1] if rank + 1 < len(sizes) else None

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Go forward and backward with a batch, and return its mean loss, on all ranks.

        x, y: (B, T), the same on all ranks.
        """
        loss, group = torch.zeros((), device=x.device), self.comm.group
        parts = zip(x.tensor_split(self.m), y.tensor_split(self.m), strict=True)
        for given, targets in parts:
            weight = len(given) / len(x)  # a microbatch counts as much as it has rows
            if self.before is not None:
                given = torch.empty(len(given), *self.form, device=x.device)
                dist.recv(given, self.before, group)
                given.requires_grad_()  # a new leaf: this rank's graph begins here
            output = self.stage(given)
            if self.after is None:
                part = cross_entropy(output, targets) * weight
                part.backward()
                loss += part.detach()
            else:
                dist.send(output.detach(), self.after, group)  # the graph stays here
                gradient = torch.empty_like(output)
                dist.recv(gradient, self.after, group)
                output.backward(gradient)
            if self.before is not None:
                dist.send(given.grad, self.before, group)
        dist.broadcast(loss, self.comm.ranks[-1], group)
        return loss
