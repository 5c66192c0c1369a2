"""Stages 1 and 2 as one trains with them: what `Zero1` and `Zero2` leave out.

What is added to the readable classes:

    passes that add up, `no_sync`, parameters without a gradient, clipping
    buckets leave in the order in which they become full, whatever the plan was
    buckets in memory that all ranks see
    whatever else would go wrong in silence is refused: a second one who averages, a
    parameter that has moved, sparse gradients, gradients that nobody has zeroed

Chapter 07.
"""

import gc
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.optim import Optimizer

from ddp_course import collectives
from ddp_course.collectives import communicator, shared_memory
from ddp_course.measure import label
from ddp_course.mechanisms.agreement import check_same
from ddp_course.mechanisms.buckets import BUCKET_CAP_MB, LiveBucket, Slot
from ddp_course.mechanisms.engine import Engine
from ddp_course.mechanisms.hooks import before_gradient, listeners
from ddp_course.mechanisms.memory_exchange import empty_for_all
from ddp_course.mechanisms.norms import clip_grad_norm_
from ddp_course.zero.arguments import names_of
from ddp_course.zero.stage1 import ReduceScatter, Zero1
from ddp_course.zero.stage2 import SMALLER_CAP_MB, ReduceScatterAndFree, Zero2

# ---- what becomes of gradients -------------------------------------------------------


class Watchful(ReduceScatter):
    """What both endings look after, beside the numbers."""

    in_order = False  # buckets are launched in rank 0's order

    def added(self, engine: Engine, bucket: LiveBucket) -> None:
        """The engine has one more bucket."""
        self.engine, self.in_order = weakref.proxy(engine), False
        super().added(engine, bucket)

    def pass_begins(self, engine: Engine) -> None:
        """A backward pass begins."""
        if not self.in_order:
            check_alone(engine.slots)
        self.full: list[int] = []  # buckets, as their last gradients came in this pass
        super().pass_begins(engine)

    def pack(self, bucket: LiveBucket, slot: Slot) -> None:
        """A gradient has come."""
        gradient = slot.parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of parameter {slot.name} is {gradient.layout}; only "
                "dense gradients can be cut into shards (Embedding: sparse=False)"
            )
        if bucket.missing == 1:
            self.full.append(bucket.index)
        super().pack(bucket, slot)

    def settle(self, engine: Engine) -> None:
        """All buckets have arrived: see in which order they became full.

        From the second pass on, they are launched in the one that rank 0 has seen: a
        model whose parameters come in groups, all matrices first and all biases last,
        fills its buckets in an order that no plan can know. PyTorch's DDP arranges its
        buckets anew for that.
        """
        super().settle(engine)
        if not self.in_order:
            seen = communicator(self.group).exchange(tuple(self.full))[0]
            turns = {index: turn for turn, index in enumerate(seen)}
            engine.buckets.sort(key=lambda bucket: turns.get(bucket.index, len(turns)))
            self.in_order = True
            check_alone_later(engine)


class AddingUp(Watchful):
    """The ending of stage 1, in which backward passes add up.

    After an averaged pass the buckets hold means, to which the next one would add; and
    what it adds is to be averaged, but not the means once more. So they are put aside,
    this rank's shards of them, and added again when the new means have arrived.
    """

    means = False  # is what lies in the buckets

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.aside: dict[LiveBucket, Tensor] = {}

    def added(self, engine: Engine, bucket: LiveBucket) -> None:
        """Give a bucket memory, and hear of gradients that are about to come."""
        super().added(engine, bucket)
        for slot in bucket.slots:
            before_gradient(slot.parameter, self.put_aside)

    def pass_begins(self, engine: Engine) -> None:
        """A pass begins, or `held` ends, in which this rank had no gradient at all."""
        self.put_aside()
        super().pass_begins(engine)

    def put_aside(self) -> None:
        """A gradient is about to be added to what lies in the buckets."""
        if not self.means:
            return
        self.means = False
        for bucket in self.engine.buckets:
            zeroed = [s for s in bucket.slots if s.parameter.grad is not s.view]
            if len(zeroed) < len(bucket.slots):
                for slot in zeroed:
                    slot.view.zero_()
                self.aside[bucket] = label(self.own(bucket).clone(), "gradients")
                bucket.flat.zero_()

    def keep(self, bucket: LiveBucket, slot: Slot) -> None:
        """A gradient has come that is not averaged yet; it lies in the bucket, too."""
        if slot.parameter.grad is not slot.view:
            slot.parameter.grad = slot.view.copy_(slot.parameter.grad.detach())

    def arrived(self, bucket: LiveBucket) -> None:
        """Add the new mean to the old one."""
        if (before := self.aside.pop(bucket, None)) is not None:
            self.own(bucket).add_(before)

    def settle(self, engine: Engine) -> None:
        """All buckets have arrived."""
        super().settle(engine)
        self.means = True

    def zero(self, set_to_none: bool) -> None:
        """Forget what was put aside."""
        self.aside.clear()


class InTurns(Watchful, ReduceScatterAndFree):
    """The ending of stage 2; buckets may also take turns in shared memory that stays.

    There bucket k lies in place k % limit, as large as the largest bucket.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.in_shared_memory = self.empty is not torch.empty
        self.turns: list[LiveBucket] = []
        self.places: list[Tensor] = []  # uint8
        self.adding = False  # the shards have gradients of earlier passes
        self.stepped = False  # and they are those of the last step

    def pass_begins(self, engine: Engine) -> None:
        """A backward pass begins."""
        if self.stepped and self.shards:
            raise RuntimeError(
                "the gradients of the last step are still there: call this optimizer's "
                "zero_grad() before backward; module.zero_grad() cannot reach a shard"
            )
        super().pass_begins(engine)
        self.unused_before = self.unused
        if self.in_shared_memory and self.turns != engine.buckets:
            self.lay_in_turns(list(engine.buckets))

    def lay_in_turns(self, buckets: list[LiveBucket]) -> None:
        """Let buckets lie in the memory of others before them."""
        self.turns, nbytes = buckets, max(bucket.plan.nbytes for bucket in buckets)
        count = min(len(buckets), self.limit)
        if len(self.places) < count or self.places[0].nbytes < nbytes:
            of = {"dtype": torch.uint8, "device": buckets[0].flat.device}
            self.places = [self.empty(nbytes, **of) for _ in range(count)]
        for turn, bucket in enumerate(buckets):
            place = label(self.places[turn % count], "communication buffers")
            bucket.lie_in(place[: bucket.plan.nbytes].view(bucket.flat.dtype))

    def allocate(self, bucket: LiveBucket) -> None:
        """Give a bucket its memory, unless it lies in memory that stays."""
        if not self.in_shared_memory:
            super().allocate(bucket)

    def free(self, bucket: LiveBucket) -> None:
        """Give it back."""
        if self.in_shared_memory:
            self.opened.discard(bucket)
        else:
            super().free(bucket)

    def settle(self, engine: Engine) -> None:
        """All buckets have arrived, and there may be gradients of earlier passes."""
        super().settle(engine)
        if self.adding:
            self.unused &= self.unused_before
        self.adding = True

    def zero(self, set_to_none: bool) -> None:
        """Let go of the shards, or make them zeros."""
        super().zero(set_to_none)
        self.stepped, self.adding = False, self.adding and not set_to_none


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
        buckets_in_shared_memory: put parameters and gradients where all ranks of one
            machine see them, and share them there, with nothing to copy; CPU only. That
            memory is taken until the process group ends.
        **defaults: arguments of `optimizer_class`.

    PyTorch's class of this name wants a DistributedDataParallel around the model; that
    is `NaiveZeroRedundancyOptimizer` with gradients="averaged".

    Raises:
        ReplicaError: at construction, on every rank, if the ranks' arguments differ or
            cannot be used.
        RuntimeError: from `backward`, if something else averages the gradients, too;
            from `step`, if a parameter has been moved elsewhere.

    torch/distributed/optim/zero_redundancy_optimizer.py; Rajbhandari et al. 2020,
    "ZeRO", sections 5.1 and 7.2.1. Chapter 07.
    """

    ending_class: type[ReduceScatter] = AddingUp

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None = None,
        *,
        bucket_cap_mb: float = BUCKET_CAP_MB,
        buckets_in_shared_memory: bool = False,
        **defaults: Any,
    ) -> None:
        form = {"argument buckets_in_shared_memory": repr(buckets_in_shared_memory)}
        check_same(form, None, process_group)
        self.of, empty = collectives, torch.empty
        if buckets_in_shared_memory:
            self.of, empty = shared_memory, empty_for_all(process_group)
        of_group = process_group, self.of.reduce_scatter_single, empty
        options = {"bucket_cap_mb": bucket_cap_mb, **defaults}
        options["ending"] = self.ending_class(*of_group)
        super().__init__(params, optimizer_class, process_group, **options)

    def all_gather(self, row: Tensor, own: Tensor) -> None:
        """Fill a row with every rank's shard; `own` is this rank's part of it."""
        self.of.all_gather_single(row, own, group=self.process_group)

    def no_sync(self) -> AbstractContextManager[None]:
        """Only accumulate the gradients of backward passes made in this block.

        They stay this rank's own until the next averaged backward pass, which averages
        their sum. It is `backward` that must be inside.
        """
        return self.engine.hold()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, or make them zeros."""
        super().zero_grad(set_to_none)
        self.ending.zero(set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients to a norm of at most `max_norm`; return what it was.

        The norm is that of the mean gradients of all parameters together, as of
        `torch.nn.utils.clip_grad_norm_` in one process; also if other parallelisms have
        divided them. Called by all ranks, between `backward` and `step`.
        """
        self.give_gradients()
        return clip_grad_norm_(self.owned.values(), max_norm, self.groups)

    def give_gradients(self) -> None:
        """Let what this rank owns see its part of the gradients."""
        self.check_places()
        super().give_gradients()
        for parameter in self.ending.unused & self.owned.keys():
            self.owned[parameter].grad = None

    def check_places(self) -> None:
        """RuntimeError if what is trained is not what lies in the buckets."""
        places = {
            slot.parameter: self.rows[bucket.index][slot.offset :].data_ptr()
            for bucket in self.engine.buckets
            for slot in bucket.slots
        }
        for parameter, name in names_of(self.param_groups).items():
            place = places.get(parameter)
            if place is None and parameter.grad is not None and parameter.numel():
                was = "was frozen when this optimizer was made, and has a gradient now"
                raise RuntimeError(f"parameter {name} {was}; make it anew")
            if place is not None and place != parameter.data_ptr():
                was = "has been moved, to another device or type"
                raise RuntimeError(f"parameter {name} {was}; make the optimizer anew")


class ShardedGradientOptimizer(ZeroRedundancyOptimizer, Zero2):
    """Runs `optimizer_class` on 1/N of all elements, with 1/N of states and gradients.

    As `ZeroRedundancyOptimizer`, but after `backward` there is only this rank's shard
    of the mean gradients, and every parameter's `grad` is None. So gradients are zeroed
    by this object's `zero_grad`, which must be called between `step` and the next
    backward: `module.zero_grad()` finds nothing to zero. There is no `no_sync`: every
    backward pass is averaged, and the means add up.

    Args:
        params, optimizer_class, process_group, options: as of
            `ZeroRedundancyOptimizer`.
        buckets_in_flight: how many buckets may have memory at once, 1 or more, shared
            or not; with 1 backward waits for every bucket. (Their `bucket_cap_mb` is 4:
            what is on its way is not sharded, so buckets are smaller here.)

    Raises RuntimeError from `backward` if the gradients of the last step are still
    there, and what `ZeroRedundancyOptimizer` raises. PyTorch has no stage 2 of its own;
    FSDP's SHARD_GRAD_OP comes close. Rajbhandari et al. 2020, section 5.2. Chapter 07.
    """

    ending_class = InTurns

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None = None,
        *,
        buckets_in_flight: int = 2,
        **options: Any,
    ) -> None:
        limit, problem = buckets_in_flight, None
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            problem = f"buckets_in_flight is {limit!r}; it must be a whole number >= 1"
        check_same({"argument buckets_in_flight": repr(limit)}, problem, process_group)
        options = {"bucket_cap_mb": SMALLER_CAP_MB, **options}
        super().__init__(params, optimizer_class, process_group, **options)
        self.ending.limit = limit

    def no_sync(self) -> AbstractContextManager[None]:
        """Refuse: gradients that are not averaged are whole, on every rank."""
        raise RuntimeError(
            "stage 2 keeps no whole gradients, so every backward pass is averaged, and "
            "their means add up; ZeroRedundancyOptimizer (stage 1) has no_sync"
        )

    def share_parameters(self) -> None:
        """Bring the shards of the parameters together again."""
        super().share_parameters()
        self.ending.stepped = True


# ---- does anything else average these gradients, too? --------------------------------

ADVICE = (
    "If DistributedDataParallel averages them, take NaiveZeroRedundancyOptimizer with "
    "gradients='averaged'; an earlier optimizer of the same parameters must be gone "
    "(del) before training."
)


def check_alone(slots: Iterable[Slot]) -> None:
    """Raise RuntimeError if somebody else of this course listens for gradients.

    Whoever is used to PyTorch's ZeroRedundancyOptimizer wraps the model into its
    DistributedDataParallel as well. Then two would write into the same gradients at the
    same time, and no number would be right, but training would go on.
    """
    shared = [slot for slot in slots if len(listeners(slot.parameter)) > 1]
    if shared:
        gc.collect()  # it may be one that is only waiting to be collected
    for slot in shared:
        if len(listeners(slot.parameter)) > 1:
            who = f"the gradient of parameter {slot.name} is averaged by something else"
            raise RuntimeError(f"{who}, too. {ADVICE}")


def check_alone_later(engine: Engine) -> None:
    """Raise RuntimeError, when backward ends, if somebody has written gradients.

    PyTorch's DDP leaves no trace on a parameter, but it writes its means when all its
    buckets are there, which is after this was called and before what is queued here.
    """
    if torch._C._current_graph_task_id() < 0:
        return  # no backward is under way (`held`)
    flats = [(bucket, bucket.flat._version) for bucket in engine.buckets]
    grads = [(slot, slot.parameter.grad) for slot in engine.slots]

    def check() -> None:
        written = [b.slots[0] for b, version in flats if b.flat._version != version]
        written += [slot for slot, before in grads if slot.parameter.grad is not before]
        for slot in written[:1]:
            raise RuntimeError(
                f"something else has written the gradient of parameter {slot.name} at "
                f"the end of backward. {ADVICE}"
            )

    Variable._execution_engine.queue_callback(check)
