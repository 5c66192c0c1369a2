"""ZeRO stage 1: optimizer states are sharded, to the element.

Two things are better than in `naive`. Shards are equal parts of a flat row of all
parameters, so every rank has 1/N of the states, whatever the parameters are. And since
a rank needs only its own part of the mean gradients, they are reduce-scattered instead
of all-reduced, while backward runs:

    data parallelism   all-reduce gradients                        2 (N - 1) / N
    naive              all-reduce gradients, broadcast parameters  3 (N - 1) / N
    stage 1            reduce-scatter, all-gather                  2 (N - 1) / N

of the parameters' bytes, sent by each rank: the states of the other ranks are saved for
nothing. An all-reduce *is* a reduce-scatter and an all-gather; here the optimizer steps
in between. Read with it: `shards`, `flat`, `reducer`. Chapter 07.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from ddp_course import collectives
from ddp_course.collectives import shared_memory
from ddp_course.mechanisms.buckets import BUCKET_CAP_MB
from ddp_course.mechanisms.norm import total_norm
from ddp_course.zero.flat import Empty, FlatParameters, empty_in_shared_memory
from ddp_course.zero.reducer import Reducer
from ddp_course.zero.sharded import ShardedOptimizer, unknown_gradients
from ddp_course.zero.shards import ShardedBucket, shard_plan
from ddp_course.zero.states import in_memory_order


class ZeroRedundancyOptimizer(ShardedOptimizer):
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
        parameters_as_bucket_view: must be True: the parameters' memory moves into the
            buckets, from where it is sent (`flat`). (PyTorch's default is False.)
        overlap_with_ddp: must be False; backward and communication do overlap.
        gradients: "average" them; or they are "averaged" already, whole, by a
            DistributedDataParallel around the model, as PyTorch's class expects it.
        bucket_cap_mb: MiB at which a bucket is closed (`mechanisms.buckets`).
        first_bucket_mb: the same for the first bucket, which may be a small one, to
            leave early; None: as the others. (Every bucket is two messages more.)
        reduce_scatter, all_gather: functions like `collectives.reduce_scatter_single`
            and `all_gather_single`, which are taken if they are None.
        buckets_in_shared_memory: put parameters and gradients where all ranks of one
            machine see them, and share them there, with nothing to copy; CPU only. That
            memory is taken until the process group ends.
        **defaults: arguments of `optimizer_class`.

    Raises:
        ReplicaError: at construction, on every rank, if the ranks' arguments differ or
            cannot be used.
        RuntimeError: from `backward`, if something else averages the gradients, too;
            from `step`, if a parameter has been moved elsewhere.

    torch/distributed/optim/zero_redundancy_optimizer.py; Rajbhandari et al. 2020,
    "ZeRO", sections 5.1 and 7.2.1. Chapter 07.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = True,
        overlap_with_ddp: bool = False,
        *,
        gradients: str = "average",
        bucket_cap_mb: float = BUCKET_CAP_MB,
        first_bucket_mb: float | None = None,
        reduce_scatter: Callable[..., Any] | None = None,
        all_gather: Callable[..., Any] | None = None,
        buckets_in_shared_memory: bool = False,
        **defaults: Any,
    ) -> None:
        of = shared_memory if buckets_in_shared_memory else collectives
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.overlap_with_ddp = overlap_with_ddp
        self.gradients = gradients
        first = bucket_cap_mb if first_bucket_mb is None else first_bucket_mb
        self.caps = bucket_cap_mb, first
        self.in_shared_memory = buckets_in_shared_memory
        self.empty: Empty = torch.empty
        if buckets_in_shared_memory:
            self.empty = functools.partial(empty_in_shared_memory, group=process_group)
        self.reduce_scatter = reduce_scatter or of.reduce_scatter_single
        self.all_gather = all_gather or of.all_gather_single
        self.flats: list[FlatParameters] = []
        self.places: dict[Tensor, int] = {}  # addresses
        self.reducer: Reducer | None = None
        super().__init__(
            params,
            optimizer_class,
            process_group,
            defaults,
            self.problem(),
            **self.must_agree(),
        )

    def problem(self) -> str | None:
        """Return what is wrong with the arguments, or None."""
        if self.parameters_as_bucket_view is not True:
            return (
                f"parameters_as_bucket_view is {self.parameters_as_bucket_view!r}; it "
                "must be True, as shards are parts of buckets. "
                "NaiveZeroRedundancyOptimizer leaves parameters where they are"
            )
        if self.overlap_with_ddp is not False:
            return (
                f"overlap_with_ddp is {self.overlap_with_ddp!r}; it must be False: no "
                "DistributedDataParallel is needed for communication to overlap"
            )
        for name in ("reduce_scatter", "all_gather"):
            if not callable(function := getattr(self, name)):
                return f"{name} is {function!r}; it must be a function"
        try:
            shard_plan((), 1, *self.caps)
        except ValueError as error:
            return str(error)
        return unknown_gradients(self.gradients)

    def must_agree(self) -> dict[str, Any]:
        """Return the arguments that must be the same on all ranks."""
        return {
            "gradients": self.gradients,
            "bucket_cap_mb": self.caps[0],
            "first_bucket_mb": self.caps[1],
            "reduce_scatter": _name_of(self.reduce_scatter),
            "all_gather": _name_of(self.all_gather),
            "buckets_in_shared_memory": self.in_shared_memory,
        }

    @property
    def plan(self) -> tuple[ShardedBucket, ...]:
        """Which buckets there are, and who owns what of them."""
        return tuple(flat.plan for flat in self.flats)

    def take(self, named_parameters: dict[str, Tensor]) -> None:
        """Move the parameters into buckets, of which this rank owns its shards."""
        plan = shard_plan(named_parameters.items(), self.world_size, *self.caps)
        if self.gradients == "average" and self.reducer is None:
            self.reducer = self.make_reducer()
        for bucket in plan:
            flat = FlatParameters(bucket, named_parameters, self.rank, self.empty)
            self.flats.append(flat)
            self.places |= flat.places
            self.owned |= {owned.parameter: owned for owned in flat.owned}
            if self.reducer is not None:
                self.reducer.add(bucket, named_parameters)

    def make_reducer(self) -> Reducer:
        """Return what averages the gradients."""
        return Reducer(self.process_group, self.reduce_scatter, self.empty)

    # ---- backward --------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate the gradients of backward passes made in this block.

        They stay this rank's own until the next averaged backward pass, which averages
        their sum. It is `backward` that must be inside.
        """
        if self.reducer is None:
            raise RuntimeError(
                "these gradients are averaged by DistributedDataParallel; use its "
                "no_sync"
            )
        before, self.reducer.sync = self.reducer.sync, False
        try:
            yield
        finally:
            self.reducer.sync = before

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients to a norm of at most `max_norm`; return what it was.

        The norm is that of the mean gradients of all parameters together, as of
        `torch.nn.utils.clip_grad_norm_` in one process. Called by all ranks, between
        `backward` and `step`. RuntimeError if asked for and the norm is not finite.
        """
        self.give_gradients()
        own = [owned.tensor for owned in self.owned.values()]
        norm = total_norm(
            own,
            self.flats[0].flat.device,
            norm_type,
            self.process_group,
            error_if_nonfinite,
        )
        clip_grads_with_norm_(own, max_norm, norm)
        return norm

    # ---- step ------------------------------------------------------------------------

    def give_gradients(self) -> None:
        """Let what this rank owns see its part of the gradients."""
        self.check_places()
        for parameter, owned in self.owned.items():
            gradient = parameter.grad
            if gradient is not None:
                flat = in_memory_order(gradient.detach(), parameter)
                gradient = flat[owned.first : owned.last]
            owned.tensor.grad = gradient

    def share_parameters(self) -> None:
        """Bring the shards together again, in place, one all-gather for each bucket."""
        for owned in self.owned.values():
            owned.tensor.grad = None
        for flat in self.flats:
            self.all_gather(flat.flat, flat.own, group=self.process_group)

    def check_places(self) -> None:
        """RuntimeError if what is trained is not what lies in the buckets."""
        for parameter in self.parameters():
            place = self.places.get(parameter)
            if place is None and parameter.grad is not None and parameter.numel():
                raise RuntimeError(
                    f"parameter {self.name_of(parameter)} was frozen when this "
                    "optimizer was made, and has a gradient now; make it anew"
                )
            if place is not None and place != parameter.data_ptr():
                raise RuntimeError(
                    f"parameter {self.name_of(parameter)} has been moved, to another "
                    "device or type; make the optimizer anew"
                )


def _name_of(function: Any) -> str:
    return (
        f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    )
