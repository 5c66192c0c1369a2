"""ZeRO stage 1 with all that one trains with: `Zero1`, and the list of its parts.

What a part adds is said where it stands:

    optimizer_arguments  all ranks' arguments are checked and compared
    adds_up              backward passes add up until `zero_grad`
    optimizer_state      `state_dict` in the form of one process
    optimizer_guards     what would be wrong in silence is refused

Chapter 07.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ddp_course.collectives import unrooted
from ddp_course.measure.storages import label
from ddp_course.mechanisms.buckets import BUCKET_CAP_MB, LiveBucket
from ddp_course.mechanisms.engine import Engine
from ddp_course.mechanisms.guards import averaged_by
from ddp_course.mechanisms.placements import clip_grad_norm_, groups_of
from ddp_course.mechanisms.recovery import AgreeUnused, Recovery
from ddp_course.mechanisms.timeline import RecordBackward
from ddp_course.zero.adds_up import AddsUp
from ddp_course.zero.optimizer_arguments import agreed_groups
from ddp_course.zero.optimizer_guards import (
    Alone,
    AveragedOnce,
    DenseGradients,
    Unmoved,
)
from ddp_course.zero.optimizer_state import ConsolidatedState, Places, plain_names
from ddp_course.zero.shards import ShardedBucket
from ddp_course.zero.stage1 import Zero1


class Labels:
    """Labels memory for ledgers (`measure.resident`); `kind` is that of buckets."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def row_made(
        self, optimizer: Any, bucket: ShardedBucket, parameters: dict[str, Tensor]
    ) -> None:
        """Label a row of parameters."""
        label(optimizer.rows[-1], "parameters")

    def bucket_added(self, engine: Engine, bucket: LiveBucket) -> None:
        """Label the memory of a bucket."""
        label(bucket.flat, self.kind)

    def shard_kept(self, shard: Tensor) -> None:
        """Label this rank's part of the mean gradients."""
        label(shard, "gradients")


class Guarded:
    """Lets guards of PyTorch's own tools know who averages (`mechanisms.guards`)."""

    def row_made(
        self, optimizer: Any, bucket: ShardedBucket, parameters: dict[str, Tensor]
    ) -> None:
        """Note that the gradients of these parameters are means in parts."""
        averaged_by((parameters[name] for name in bucket.parameters), optimizer)


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
        **defaults: Any,
    ) -> None:
        self._arguments = optimizer_class, defaults, process_group, bucket_cap_mb
        groups = agreed_groups(params, *self._arguments)
        self._consolidated = ConsolidatedState()
        options = {"bucket_cap_mb": bucket_cap_mb, "collectives": unrooted}
        recovery = Recovery(process_group)
        options["parts"] = [
            *(Places(), Guarded(), Alone(), DenseGradients(), Unmoved()),
            *(recovery, AgreeUnused(recovery.show), RecordBackward()),
            *(self._consolidated, *self.make_parts()),
        ]
        super().__init__(groups, optimizer_class, process_group, **options, **defaults)

    def make_parts(self) -> list[Any]:
        """Return the parts of this stage alone."""
        return [Labels("gradients"), AveragedOnce(), AddsUp()]

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
