"""What all stages have in common: an optimizer that steps only what this rank owns.

To the training loop it looks like the optimizer that it was told to run: it has that
one's parameter groups, for learning-rate schedulers to change, and its `state_dict`,
for one process to load. Behind it stands a second one, `optim`, of the same class,
which knows only what this rank owns. So only that has states, 1/N of all. A step is

    give_gradients      hand what this rank owns its mean gradients
    optim.step          1/N of the work
    share_parameters    and then all ranks need the result

How parameters are divided, and how the first and the last line are done, is what the
classes in `naive`, `stage1` and `stage2` differ in. Chapter 07.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ddp_course.collectives import communicator
from ddp_course.mechanisms.broadcast import broadcast_all
from ddp_course.mechanisms.guards import averaged_by
from ddp_course.mechanisms.optimizer_state import (
    full_optimizer_state,
    load_full_optimizer_state,
    options_of,
)
from ddp_course.mechanisms.placements import groups_of, placed
from ddp_course.zero.arguments import agreed_arguments, names_of


class ShardedOptimizer(Optimizer):
    """Runs `optimizer_class` on what this rank owns, and shares the result.

    Subclasses say what is owned, and call `divide` when they are ready to say it. Made
    by all ranks together: they must give the same shapes, types and options, and rank
    0's numbers are sent to all.

    Raises ReplicaError, with the same text on every rank, before anything is sent.
    """

    in_pieces = True  # the optimizer is given pieces of tensors
    optim: Optimizer | None = None  # steps what this rank owns

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None,
        defaults: dict[str, Any],
        problem: str | None = None,
        **options: Any,
    ) -> None:
        given = params, optimizer_class, defaults, process_group, self.in_pieces
        groups, filled = agreed_arguments(*given, problem, **options)
        super().__init__(groups, filled)
        comm = communicator(process_group)
        self.process_group = process_group or dist.group.WORLD
        self.rank, self.world_size = comm.rank, comm.size
        self.owned: dict[Tensor, Tensor] = {}  # parameter -> what this rank steps of it
        self._arguments = optimizer_class, defaults
        self._whole: dict[str, Any] | None = None

    # ---- what the subclasses say -----------------------------------------------------

    def take(self, named_parameters: dict[str, Tensor]) -> None:
        """Divide some parameters among the ranks; put what is owned into `owned`."""
        raise NotImplementedError

    def give_gradients(self) -> None:
        """Hand what this rank owns its mean gradients, or None."""
        raise NotImplementedError

    def share_parameters(self) -> None:
        """Give all ranks the parameters that each of them has stepped."""
        raise NotImplementedError

    # ---- a step ----------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any | None:
        """Step what this rank owns, and share the result; called by all ranks.

        `closure` computes loss and gradients anew and returns the loss, as in PyTorch;
        other arguments go to the optimizer.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._whole = None  # what was consolidated is old now
        self.give_gradients()
        _copy_options(self.param_groups, self.optim.param_groups)
        self.optim.step(**kwargs)
        _copy_options(self.optim.param_groups, self.param_groups)
        self.share_parameters()
        # As PyTorch's optimizers do: a backward through a forward with the old numbers
        # must find out that they are gone.
        trained = [p for p in self.parameters() if p.requires_grad]
        torch.autograd.graph.increment_version(trained)
        return loss

    def parameters(self) -> list[Tensor]:
        """Return all parameters, in the order of their numbers in `state_dict`."""
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Along which the gradients are divided: the own group, and those before it."""
        return list(dict.fromkeys([*groups_of(self.parameters()), self.process_group]))

    @property
    def unscaled(self) -> Optimizer:
        """What has the gradients that a `GradScaler` has to unscale."""
        if not self.in_pieces:
            return self
        self.give_gradients()
        return self.optim

    # ---- parameter groups ------------------------------------------------------------

    def divide(self) -> None:
        """Share out the parameters of the first groups; called by all ranks."""
        self._take(self.param_groups)
        optimizer_class, defaults = self._arguments
        own = [self._own(group) for group in self.param_groups]
        self.optim = optimizer_class(own, **defaults)
        self.state = self.optim.state  # of what this rank owns

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to be trained; called by all ranks, as in PyTorch.

        Raises ReplicaError, on every rank.
        """
        if self.optim is None:  # PyTorch's constructor adds the first ones
            super().add_param_group(param_group)
            return
        groups = [*({**group} for group in self.param_groups), param_group]
        groups, _ = agreed_arguments(
            groups, *self._arguments, self.process_group, self.in_pieces
        )
        super().add_param_group(groups[-1])
        self._take(self.param_groups[-1:])
        self.optim.add_param_group(self._own(self.param_groups[-1]))

    def _take(self, groups: list[dict[str, Any]]) -> None:
        names = names_of(self.param_groups)
        new = {names[p]: p for group in groups for p in group["params"]}
        averaged_by(new.values(), self)
        source = communicator(self.process_group).ranks[0]
        broadcast_all(new.values(), source, self.process_group)
        self.take(new)

    def _own(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a parameter group with only what this rank owns of it."""
        own = [self.owned[p] for p in group["params"] if p in self.owned]
        return {**options_of(group), "params": own}

    # ---- states ----------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Send all states to the group's rank `to`; called by all ranks.

        There, `state_dict` can then be called until the next step.
        """
        if to not in range(self.world_size):
            raise ValueError(f"to is {to}; it can be 0 to {self.world_size - 1}")
        whole = [full_optimizer_state(self.optim, self.names, [self.process_group])]
        ranks = communicator(self.process_group).ranks
        if self.rank == 0 and to > 0:
            dist.send_object_list(whole, ranks[to], self.process_group)
        if self.rank == to and to > 0:
            dist.recv_object_list(whole, ranks[0], self.process_group)
        self._whole = whole[0] if self.rank == to else None

    @property
    def names(self) -> list[list[str]]:
        """Of each group the names of its parameters."""
        names = names_of(self.param_groups)
        names |= {p: way.name for p in names if (way := placed(p))}
        return [[names[p] for p in group["params"]] for group in self.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks, in the form of one process' optimizer.

        One process, or any number of ranks, can go on from it. RuntimeError if it has
        not been consolidated on this rank since the last step.
        """
        if self._whole is None:
            raise RuntimeError(
                f"each rank has its own part of the state: call "
                f"consolidate_state_dict(to={self.rank}) on all ranks before "
                f"state_dict() on rank {self.rank}"
            )
        _copy_options(self.param_groups, self._whole["param_groups"])
        return self._whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of one process, or of any number of ranks.

        Called by all ranks, each with the whole state; it keeps its own part. Raises
        ReplicaError, on every rank, if the state does not fit.
        """
        names = (name for those in self.names for name in those)
        shapes = dict(zip(names, (p.shape for p in self.parameters()), strict=True))
        self.load_parts(state_dict, self.names, shapes, [self.process_group])

    def load_parts(self, state_dict: dict[str, Any], *where: Any) -> None:
        """The same from a state that was divided along more groups, too.

        `where` are names, shapes and groups, as of `load_full_optimizer_state`.
        """
        load_full_optimizer_state(self.optim, state_dict, *where)
        self.state, self._whole = self.optim.state, None
        _copy_options(self.optim.param_groups, self.param_groups)


def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Schedulers change the options that they see, and some optimizers their own."""
    for theirs, ours in zip(source, target, strict=True):
        ours.update(options_of(theirs))
