"""ZeRO stage 1 with all that one trains with: `Zero1`, and the list of its parts.

What a part adds is said where it stands:

    optimizer_parts   backward passes add up until `zero_grad`; `state_dict` in the form
                      of one process
    optimizer_guards  arguments are compared, and what would be wrong in silence refused
    metered           what meters need, for whoever wants it

Chapter 07.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ddp_course.collectives.meeting import quick_exchange
from ddp_course.mechanisms import shard_collectives
from ddp_course.mechanisms.buckets import BUCKET_CAP_MB
from ddp_course.mechanisms.placements import clip_grad_norm_, groups_of
from ddp_course.mechanisms.recovery import AgreeUnused, Recovery
from ddp_course.zero.optimizer_guards import (
    Alone,
    AveragedOnce,
    DenseGradients,
    Unmoved,
    agreed_groups,
)
from ddp_course.zero.optimizer_parts import (
    AddsUp,
    ConsolidatedState,
    Guarded,
    Patient,
    Places,
    plain_names,
)
from ddp_course.zero.stage1 import Zero1


class ZeroRedundancyOptimizer(Zero1):
    """Runs `optimizer_class` on 1/N of all elements, with 1/N of its states.

        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=3e-4)
        model(x, y)[1].backward()  # on this rank's part of the batch
        optimizer.step()

    No DistributedDataParallel is needed: the gradients are averaged here, in buckets,
    while backward runs. After `backward`, every `grad` holds the mean in this rank's
    shard, and numbers of no use elsewhere; so norms are clipped by `clip_grad_norm_`.
    Backward passes add up until `zero_grad`, as in PyTorch, and each must reach at
    least one of the parameters. One that gets no gradient on any rank is not touched.
    A module's buffers, such as BatchNorm's means, are not the optimizer's affair. Keep
    this object as long as you train: the averaging goes with it.

    Args:
        params: as of any optimizer: parameters, names and parameters, or groups.
        optimizer_class: any that treats each element alone (`elementwise`).
        process_group: the ranks that share the states; None are all.
        bucket_cap_mb: MiB at which a bucket is closed (`mechanisms.buckets`). Every
            bucket is two messages more.
        collectives: has `reduce_scatter_single` and `all_gather_single`. The default
            uses PyTorch's collectives; over gloo its reduce-scatter sends no byte
            twice.
        parts: more parts, such as those that record (`metered`).
        **defaults: arguments of `optimizer_class`.

    PyTorch's class of this name wants a DistributedDataParallel around the model; that
    is `NaiveZeroRedundancyOptimizer` with gradients="averaged".

    Raises:
        ReplicaError: at construction, on every rank, if the ranks' arguments differ or
            cannot be used.
        RuntimeError: from `backward` or `step`, if something else averages the
            gradients, too; from `step`, if a parameter has been moved elsewhere.

    torch/distributed/optim/zero_redundancy_optimizer.py; Rajbhandari et al. 2020,
    "ZeRO", sections 5.1 and 7.2.1. Chapter 07.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None = None,
        *,
        bucket_cap_mb: float = BUCKET_CAP_MB,
        collectives: Any = shard_collectives,
        parts: Iterable[Any] = (),
        **defaults: Any,
    ) -> None:
        self._arguments = optimizer_class, defaults, process_group, bucket_cap_mb
        groups = agreed_groups(params, *self._arguments)
        self._consolidated = ConsolidatedState()
        recovery = Recovery(process_group, quick_exchange(process_group))
        parts = [
            *(Places(), Guarded(), Alone(), DenseGradients(), Unmoved(), Patient()),
            *(recovery, AgreeUnused(recovery.show)),
            *(*parts, self._consolidated, *self.make_parts()),
        ]
        options = {"bucket_cap_mb": bucket_cap_mb, "collectives": collectives}
        options |= {"parts": parts, **defaults}
        super().__init__(groups, optimizer_class, process_group, **options)

    def make_parts(self) -> list[Any]:
        """Return the parts of this stage alone."""
        return [AveragedOnce(), AddsUp()]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to be trained; called by all ranks, as in PyTorch.

        Raises ReplicaError, on every rank.
        """
        if self.optim is not None:  # PyTorch's constructor adds the first groups
            groups = [*({**group} for group in self.param_groups), param_group]
            param_group = agreed_groups(groups, *self._arguments)[-1]
        super().add_param_group(param_group)

    def no_sync(self) -> AbstractContextManager[None]:
        """Only accumulate the gradients of backward passes made in this block.

        They stay this rank's own until the next averaged backward pass, which averages
        their sum. It is `backward` that must be inside.
        """
        return self.engine.hold()

    # ---- norms and scalers -----------------------------------------------------------

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Along which the gradients are divided: the own group, and those before it."""
        parameters = (p for group in self.param_groups for p in group["params"])
        return list(dict.fromkeys([*groups_of(parameters), self.process_group]))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients to a norm of at most `max_norm`; return what it was.

        The norm is that of the mean gradients of all parameters together, as of
        `torch.nn.utils.clip_grad_norm_` in one process; also if other parallelisms have
        divided them. Called by all ranks, between `backward` and `step`.
        """
        self.give_gradients()
        return clip_grad_norm_(self.owned.values(), max_norm, self.groups, norm_type)

    @property
    def unscaled(self) -> Optimizer:
        """The optimizer that has the gradients which a `GradScaler` has to unscale."""
        self.give_gradients()
        return self.optim

    # ---- states ----------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Send all states to the group's rank `to`; called by all ranks.

        There, `state_dict` can then be called until the next step.
        """
        self._consolidated.consolidate(self, to)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks, in the form of one process' optimizer.

        One process, or any number of ranks, can go on from it. RuntimeError if it has
        not been consolidated on this rank since the last step.
        """
        return self._consolidated.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of one process, or of any number of ranks.

        Called by all ranks, each with the whole state; it keeps its own part. Raises
        ReplicaError, on every rank, if the state does not fit.
        """
        names = plain_names(self)
        parameters = (p for group in self.param_groups for p in group["params"])
        every = (name for those in names for name in those)
        shapes = {name: p.shape for name, p in zip(every, parameters, strict=True)}
        self.load_parts(state_dict, names, shapes, [self.process_group])

    def load_parts(self, state_dict: dict[str, Any], *where: Any) -> None:
        """The same from a state that was divided along more groups, too.

        `where` are names, shapes and groups, as of `load_full_optimizer_state`.
        """
        self._consolidated.load(self, state_dict, *where)
