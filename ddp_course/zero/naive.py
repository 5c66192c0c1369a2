"""ZeRO stage 1, as simple as it can be: each parameter has one owner, which steps it.

In data parallelism every rank stores the optimizer states of all parameters and steps
all of them, and all ranks compute the same numbers. Here only its owner steps a
parameter, and broadcasts the result. PyTorch's ZeroRedundancyOptimizer divides the work
in the same way. This file checks nothing: all ranks must pass the same shapes and
options. Chapter 07.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer


def deal(numels: Sequence[int], loads: Sequence[int]) -> tuple[int, ...]:
    """Return, for each parameter, the rank that owns it.

    Parameters are assigned in order of size, the largest first, each to the rank with
    the fewest elements so far. So, if `loads` are equal, no rank ends with more
    elements than the mean plus those of one parameter. PyTorch does the same within
    every parameter group (`_partition_parameters` in
    torch/distributed/optim/zero_redundancy_optimizer.py). Chapter 07.

    Args:
        numels: elements of each parameter.
        loads: elements that each rank owns already.
    """
    loads, owner = list(loads), [0] * len(numels)
    for k in sorted(range(len(numels)), key=lambda k: -numels[k]):
        owner[k] = loads.index(min(loads))
        loads[owner[k]] += numels[k]
    return tuple(owner)


class NaiveZeroRedundancyOptimizer(Optimizer):
    """An optimizer that keeps the states of each parameter on one rank only.

    Parameters stay whole, so `optimizer_class` can be any optimizer, such as Adafactor
    or Muon. A rank owns 1/N of all elements only if the sizes of the parameters allow
    it. Averaging the gradients sends 2 (N - 1) / N of the parameters' bytes, and
    broadcasting the results (N - 1) / N: half as much again as data parallelism. A
    gradient that is missing on a rank counts as zero.

    Args:
        params: as for any optimizer: parameters, names and parameters, or groups.
        optimizer_class: such as `torch.optim.AdamW`.
        process_group: the ranks that share the states; None means all.
        gradients: "average": `step` averages them, one all-reduce for each parameter;
            "averaged": DistributedDataParallel has averaged them already.
        **defaults: arguments of `optimizer_class`.

    torch/distributed/optim/zero_redundancy_optimizer.py; Rajbhandari et al. 2020,
    "ZeRO", section 5.1. Chapter 07.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None = None,
        *,
        gradients: str = "average",
        **defaults: Any,
    ) -> None:
        super().__init__(params, defaults)
        self.process_group, self.gradients = process_group, gradients
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)

        parameters = [p for group in self.param_groups for p in group["params"]]
        trained = [p for p in parameters if p.requires_grad]
        owners = deal([p.numel() for p in trained], [0] * self.world_size)
        self.owners = dict(zip(trained, owners, strict=True))
        for parameter in parameters:  # all ranks start with rank 0's values
            self.broadcast(parameter, 0)

        own = [{"params": self.owned(group)} for group in self.param_groups]
        copy_options(self.param_groups, own)
        self.optim = optimizer_class(own, **defaults)  # only the inner one has states
        self.state = self.optim.state
        copy_options(self.optim.param_groups, self.param_groups)

    def owned(self, group: dict[str, Any]) -> list[torch.Tensor]:
        """Return the parameters of a group that this rank owns."""
        return [p for p in group["params"] if self.owners.get(p) == self.rank]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any | None:
        """Step this rank's parameters and broadcast them; all ranks must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.gradients == "average":
            self.average_gradients()
        copy_options(self.param_groups, self.optim.param_groups)
        self.optim.step()  # 1/N of the work
        copy_options(self.optim.param_groups, self.param_groups)
        for parameter, owner in self.owners.items():
            self.broadcast(parameter, owner)
        return loss

    def average_gradients(self) -> None:
        """Replace every gradient with its mean over the ranks."""
        for parameter in self.owners:
            if parameter.grad is None:  # other ranks may have one, and all-reduce it
                parameter.grad = torch.zeros_like(parameter)
            mean = parameter.grad.contiguous()
            dist.all_reduce(mean, group=self.process_group)
            parameter.grad.copy_(mean.div_(self.world_size))

    @torch.no_grad()
    def broadcast(self, parameter: torch.Tensor, owner: int) -> None:
        """Copy the owner's values of a parameter to all ranks."""
        numbers = parameter.detach().contiguous()
        dist.broadcast(numbers, group=self.process_group, group_src=owner)
        parameter.copy_(numbers)


def copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Copy learning rates and other options from one optimizer's groups to another's.

    Schedulers change the options of the outer optimizer, and some inner optimizers
    change their own. `shards` has this function, too: a naive rung imports only torch.
    """
    for source_group, target_group in zip(source, target, strict=True):
        for name, value in source_group.items():
            if name not in ("params", "param_names"):
                target_group[name] = value
