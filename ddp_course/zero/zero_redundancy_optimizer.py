"""ZeRO stage 1 with all features: `Zero1` and a list of parts.

These files have the parts:

    optimizer_parts   accumulation over backward passes; `state_dict` in the format of
                      one process
    optimizer_guards  errors for differing arguments and for silent mistakes
    metered           optional: labels and records for meters

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
from ddp_course.mechanisms.placements import (
    clip_grad_norm_,
    groups_around,
    groups_of,
)
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
    PatientStep,
    Places,
    plain_names,
)
from ddp_course.zero.stage1 import Zero1


class ZeroRedundancyOptimizer(Zero1):
    """An optimizer that runs `optimizer_class` on this rank's 1/N of all elements.

        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=3e-4)
        model(x, y)[1].backward()  # on this rank's part of the batch
        optimizer.step()

    The model needs no DistributedDataParallel: this class averages the gradients, in
    buckets, while backward runs. After `backward`, a `grad` is the mean in this rank's
    shard only, and partial sums elsewhere. You may change it element by element
    (`mul_`, `clamp_`). A norm, a mean or another reduction of it, and a move of the
    weights by it (SAM), are wrong, and raise no error; clip with this object's
    `clip_grad_norm_`. Backward passes add up until `zero_grad`, as in PyTorch, and each
    must reach at least one parameter. A parameter for which no rank has a gradient is
    not changed. Buffers, such as BatchNorm's means, are not synchronized. Keep this
    object as long as you train: its hooks are removed with it.

    Args:
        params: as for any optimizer: parameters, names and parameters, or groups.
        optimizer_class: any that steps each element by itself (`elementwise`).
        process_group: the ranks that share the states; None means all.
        bucket_cap_mb: MiB at which a bucket is closed (`mechanisms.buckets`). Every
            bucket costs two messages.
        collectives: a module with `reduce_scatter_single` and `all_gather_single`. The
            default uses PyTorch's collectives, but over gloo its reduce-scatter sends
            half the bytes that PyTorch's would.
        parts: further parts, such as those that record (`metered`).
        **defaults: arguments of `optimizer_class`.

    PyTorch's class of this name needs a DistributedDataParallel around the model; so
    does `NaiveZeroRedundancyOptimizer` with gradients="averaged".

    Raises:
        ReplicaError: at construction, on every rank, if the ranks' arguments differ or
            cannot be used.
        RuntimeError: from `backward` or `step`, if something else averages the
            gradients, too; from `step`, if a parameter was moved to another device or
            type.

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
            *(Places(), Guarded(), Alone(), DenseGradients(), Unmoved(), PatientStep()),
            *(recovery, AgreeUnused(recovery.show)),
            *(*parts, self._consolidated, *self.make_parts()),
        ]
        options = {"bucket_cap_mb": bucket_cap_mb, "collectives": collectives}
        options |= {"parts": parts, **defaults}
        super().__init__(groups, optimizer_class, process_group, **options)

    def make_parts(self) -> list[Any]:
        """Return the parts that only this stage has."""
        return [AveragedOnce(), AddsUp()]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to be trained; all ranks must call it.

        Raises ReplicaError, on every rank, if the groups differ or cannot be used.
        """
        if self.optim is not None:  # PyTorch's constructor adds the first groups
            groups = [*({**group} for group in self.param_groups), param_group]
            param_group = agreed_groups(groups, *self._arguments)[-1]
        super().add_param_group(param_group)
        self._consolidated.whole = None  # it lacks the new group

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate, without averaging, the gradients of backwards in this block.

        The next averaged backward pass averages the accumulated sum. `backward` must
        run inside the block; where its forward ran does not matter.
        """
        return self.engine.defer()

    # ---- norms and scalers -----------------------------------------------------------

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups that divide the gradients: this object's and earlier ones."""
        parameters = (p for group in self.param_groups for p in group["params"])
        return groups_around(self.process_group, groups_of(parameters))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients to a norm of at most `max_norm`; return the norm before.

        It is the norm of the mean gradients of all parameters together, as from
        `torch.nn.utils.clip_grad_norm_` in one process, also if other parallelisms have
        divided the parameters. All ranks must call it, between `backward` and `step`.
        """
        self.give_gradients()
        return clip_grad_norm_(self.owned.values(), max_norm, self.groups, norm_type)

    @property
    def unscaled(self) -> Optimizer:
        """The inner optimizer, with the gradients that a `GradScaler` must unscale."""
        self.give_gradients()
        return self.optim

    # ---- states ----------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Send all states to the group's rank `to`; all ranks must call it.

        Until the next step, that rank can call `state_dict`. Raises ReplicaError, on
        every rank, if the ranks pass different `to`, or one that is not in the group.
        """
        self._consolidated.consolidate(self, to)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks, in the format of one process' optimizer.

        One process, or any number of ranks, can load it. Raises RuntimeError if the
        state was not consolidated on this rank since the last step or new group.
        """
        return self._consolidated.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of one process, or of any number of ranks.

        All ranks must call it with the whole state; each keeps its own part. Raises
        ReplicaError, on every rank, if the state does not fit.
        """
        names = plain_names(self)
        parameters = (p for group in self.param_groups for p in group["params"])
        flat = (name for group_names in names for name in group_names)
        shapes = {name: p.shape for name, p in zip(flat, parameters, strict=True)}
        self.load_parts(state_dict, names, shapes, [self.process_group])

    def load_parts(self, state_dict: dict[str, Any], *layout: Any) -> None:
        """Load a whole state into parameters that other groups have divided, too.

        `layout` is names, shapes and groups, as for `load_full_optimizer_state`.
        """
        self._consolidated.load(self, state_dict, *layout)
