"""ZeroRedundancyOptimizer in its first step: whole parameters, dealt out to the ranks.

In data parallelism every rank keeps the states of all parameters and does the whole
work of the optimizer, and all come to the same result: N times the memory and N times
the work for nothing. Here every parameter has one owner, which steps it and sends the
result to the others. This is what PyTorch's ZeroRedundancyOptimizer does. Chapter 07.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ddp_course.collectives import communicator
from ddp_course.mechanisms.agreement import on_any_rank
from ddp_course.mechanisms.placements import Stage, place
from ddp_course.zero.sharded_optimizer import ShardedOptimizer
from ddp_course.zero.shards import deal


class NaiveZeroRedundancyOptimizer(ShardedOptimizer):
    """Runs `optimizer_class`, with the states of each parameter on one rank only.

    Tensors stay whole, so it can be any optimizer, such as Adafactor or Muon. A rank
    owns 1/N of all elements only if the parameters can be dealt out that evenly. An
    average over N ranks costs 2 (N - 1) / N of the parameters' bytes, and sending the
    results (N - 1) / N: half as much again as data parallelism.

    Args:
        params: as of any optimizer: parameters, names and parameters, or groups.
        optimizer_class: such as `torch.optim.AdamW`.
        process_group: the ranks that share the states; None are all.
        gradients: "average" them in `step`, one all-reduce for each parameter; or they
            are "averaged" already, by DistributedDataParallel.
        **defaults: arguments of `optimizer_class`.

    Raises ReplicaError, on every rank, if the ranks' arguments differ or cannot be
    used. torch/distributed/optim/zero_redundancy_optimizer.py; Rajbhandari et al. 2020,
    "ZeRO", section 5.1. Chapter 07.
    """

    in_pieces = False

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None = None,
        *,
        gradients: str = "average",
        **defaults: Any,
    ) -> None:
        problem, form = None, {"gradients": gradients}
        if gradients not in ("average", "averaged"):
            problem = f"gradients is {gradients!r}; it can be 'average' or 'averaged'"
        given = params, optimizer_class, process_group, defaults
        super().__init__(*given, problem, **form)
        self.gradients = gradients
        self.owners: dict[Tensor, int] = {}
        self.loads = [0] * self.world_size  # elements that each rank owns
        self.divide()

    def take(self, named_parameters: dict[str, Tensor]) -> None:
        """Deal the parameters out."""
        parameters = [p for p in named_parameters.values() if p.requires_grad]
        names = {p: name for name, p in named_parameters.items()}
        owners = deal([p.numel() for p in parameters], self.loads)
        for parameter, owner in zip(parameters, owners, strict=True):
            self.owners[parameter] = owner
            self.loads[owner] += parameter.numel()
            place(parameter, self.process_group, Stage((owner,)), name=names[parameter])
            if owner == self.rank:
                self.owned[parameter] = parameter

    def give_gradients(self) -> None:
        """Replace every gradient by its mean over the ranks."""
        if self.gradients == "averaged":
            return
        there = [parameter.grad is not None for parameter in self.owners]
        used = on_any_rank(there, self.process_group)
        for parameter in itertools.compress(self.owners, used):
            if parameter.grad is None:  # other ranks have one, and wait for us
                parameter.grad = parameter.new_zeros(parameter.shape)
            mean = parameter.grad.contiguous()
            dist.all_reduce(mean, group=self.process_group)
            parameter.grad.copy_(mean.div_(self.world_size))

    def share_parameters(self) -> None:
        """Send every parameter from its owner to the others."""
        ranks = communicator(self.process_group).ranks
        for parameter, owner in self.owners.items():
            numbers = parameter.detach().contiguous()
            dist.broadcast(numbers, ranks[owner], self.process_group)
            if numbers.data_ptr() != parameter.data_ptr():
                parameter.copy_(numbers)
