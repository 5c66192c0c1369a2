"""The naive pipeline: each rank has a slice of the model; one rank works at a time.

A microbatch goes forward through all ranks and back again before the next one starts.
This file writes out all that a pipeline must do: which tensors are sent, where a rank's
graph ends and the next rank's begins, how the gradients of microbatches add up.
`runtime` does the same for any order. With one microbatch this is naive model
parallelism. Chapters 09 and 10.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_course.pipeline.stages import add_layers, spine


class NaivePipeline(nn.Module):
    """This rank's layers of `model`, trained in microbatches, one after the other.

    Parameters and layers keep their names in `model`.

    Args:
        model: the same on all ranks, with a `spine`, and no parameter on two ranks.
        sizes: the number of layers on each rank of the group.
        num_microbatches: the number of parts of a batch.
        form: shape of an activation between layers, without its rows: (T, C).
        group: the ranks of the pipeline, in order; None means all.
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
        self.m, self.form, self.group = num_microbatches, form, group
        rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
        first = sum(sizes[:rank])
        layers = dict([*spine(model).items()][first : first + sizes[rank]])
        add_layers(self, layers)
        self.layers = list(layers.values())
        self.before = ranks[rank - 1] if rank > 0 else None
        self.after = ranks[rank + 1] if rank + 1 < len(sizes) else None
        self.last = ranks[-1]

    def forward(self, x: Tensor) -> Tensor:
        """Call this rank's layers."""
        for layer in self.layers:
            x = layer(x)
        return x

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Run forward and backward with a batch; return its mean loss, on all ranks.

        x, y: (B, T), the same on all ranks.
        """
        loss = torch.zeros((), device=x.device)
        parts = zip(x.tensor_split(self.m), y.tensor_split(self.m), strict=True)
        for inputs, targets in parts:
            weight = len(inputs) / len(x)  # a microbatch's share of the rows
            if self.before is not None:
                inputs = torch.empty(len(inputs), *self.form, device=x.device)
                dist.recv(inputs, self.before, self.group)
                inputs.requires_grad_()  # a new leaf: this rank's graph begins here
            output = self(inputs)
            if self.after is None:
                part = F.cross_entropy(output.flatten(0, 1), targets.flatten()) * weight
                part.backward()
                loss += part.detach()
            else:
                dist.send(output.detach(), self.after, self.group)  # without the graph
                gradient = torch.empty_like(output)
                dist.recv(gradient, self.after, self.group)
                output.backward(gradient)
            if self.before is not None:
                dist.send(inputs.grad, self.before, self.group)
        dist.broadcast(loss, self.last, self.group)
        return loss
