"""FullyShardedDataParallel: the readable stage 3 plus overlapped messages and parts.

Step three, after `stage3_simple`; it announces the same moments, and also "reducing"
and "tidied". PyTorch's first class had this name (the present one is `fully_shard`).
The class itself gathers the next unit ahead (`Order`), reduces gradients while backward
goes on, keeps units gathered if asked to, accumulates gradients, works with activation
recomputation, and can be used again after an error. All other features are parts
(`sharded_parts`). `mechanisms.whole_state` has functions for its full state, such as
`full_state_dict(model)`. Explained in chapter 08.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_course.collectives.meeting import quick_exchange
from ddp_course.launch.deadlock import CollectiveError, checked_group
from ddp_course.mechanisms.agreement import agreed
from ddp_course.mechanisms.divided import DividedModule, PlainModel, groups_before
from ddp_course.mechanisms.hooks import listeners
from ddp_course.mechanisms.parts import announce
from ddp_course.mechanisms.placements import Flat, place
from ddp_course.mechanisms.replicable import form_of, why_not_replicable
from ddp_course.mechanisms.shard_collectives import (
    Followed,
    all_gather_single,
    reduce_scatter_single,
)
from ddp_course.zero import sharded_parts
from ddp_course.zero.sharded_parts import Order
from ddp_course.zero.stage3_simple import SimpleFullyShardedDataParallel
from ddp_course.zero.unit_storage import (
    FlatStorage,
    ShardedError,
    ShardMessages,
    Unit,
    is_sharded,
)
from ddp_course.zero.units import Chosen, UnitPlan, unit_plan


class PeerMessages(ShardMessages):
    """ShardMessages without the bytes that gloo wastes; ranks compare calls first."""

    all_gather = staticmethod(all_gather_single)

    def reduce(self, own: Tensor, whole: Tensor, then: Callable[[], None]) -> Any:
        """Begin to sum `whole` over all ranks, and to write this rank's part to `own`.

        Returns a handle, whose `wait()` calls `then()` at the end.
        """
        work = reduce_scatter_single(own, whole, self.group, async_op=True)
        return Followed([work], then)


class FullyShardedDataParallel(DividedModule, SimpleFullyShardedDataParallel):
    """SimpleFullyShardedDataParallel with overlapped messages and PyTorch's options.

    In forward and backward

        launch    the gather of the next unit, or the reduce-scatter of gradients
        wait      for the gather of the current unit
        compute   with the current unit; then free it

    Any elementwise optimizer (SGD, AdamW, ...) can step `parameters()`, also in groups
    by name. They are vectors, this rank's pieces, with mean gradients; a norm that you
    compute from these is that of this rank's pieces only. A gradient that is missing on
    some ranks counts as zero there; if it is missing on all ranks, the parameter is not
    changed. Each rank keeps its own buffers; the whole state has the first rank's.

    Args:
        module: the whole model, on the CPU or on this rank's GPU.
        process_group: the ranks that divide the model; None means all.
        units: names of the modules that are gathered as one (`unit_plan`); None means
            the modules in `nn.ModuleList`s, and the rest.
        replicas: hybrid sharding: the ranks that have the same shard. Inside of
            `process_group` (F ranks) a step sends 3 (F - 1) / F of the model's bytes;
            among R replicas, 2 (R - 1) / R of a shard's bytes. All these ranks train on
            different samples.
        reshard_after_forward: True frees each unit after its forward, and gathers it
            again for backward; None excepts the root unit (PyTorch's default, as
            backward needs the root at once); False frees none, and sends 2 (N - 1) / N.
        prefetch: the number of units to gather ahead.
        compute_dtype: gather and compute in this type, and cast floating-point inputs
            to it; shards keep their type. As MixedPrecisionPolicy's param_dtype.
        reduce_dtype: sum gradients in this type; None means the type of computing.
        cpu_offload: keep shards, gradients and optimizer states on the CPU, if `module`
            is on a GPU (`sharded_parts.OffloadedStorage`).
        exchange: an object that gathers shards and sums gradients; None means
            `PeerMessages`, which use PyTorch's collectives.
        storage: the class for the memory of a unit's parameters of one type.
        parts: further parts, such as those that record (`metered`).

    Raises:
        ReplicaError: the ranks' modules or arguments differ, or cannot be used.
        CollectiveError: the ranks do not use the units in the same order.

    torch/distributed/fsdp/_fully_shard; Rajbhandari et al. 2020, "ZeRO", section 5.3;
    Zhao et al. 2023, "PyTorch FSDP". Chapter 08.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        units: Chosen = None,
        replicas: dist.ProcessGroup | None = None,
        reshard_after_forward: bool | None = True,
        prefetch: int = 1,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        cpu_offload: bool = False,
        exchange: ShardMessages | None = None,
        storage: Callable[..., FlatStorage] = FlatStorage,
        parts: Iterable[Any] = (),
    ) -> None:
        dtypes = {"compute_dtype": compute_dtype, "reduce_dtype": reduce_dtype}
        options = {
            "reshard_after_forward": reshard_after_forward,
            "prefetch": prefetch,
            "cpu_offload": cpu_offload,
            **dtypes,
        }
        groups = [process_group] if replicas is None else [process_group, replicas]
        groups = [checked_group(group) for group in groups]
        units = tuple(units) if isinstance(units, Iterator) else units  # read twice
        check_units(module, groups, units, **options)
        plain, before = PlainModel.of(module), groups_before(module)
        exchange = exchange or PeerMessages(process_group)
        text_exchanges = [quick_exchange(group) for group in groups]
        parts = [
            *parts,
            sharded_parts.ParameterGuard(),
            sharded_parts.Stepped(),
            sharded_parts.PatientPass(),
            *([sharded_parts.Offload()] if cpu_offload else []),
            sharded_parts.UnusedPieces(text_exchanges),
            sharded_parts.SameOrder(groups, text_exchanges),
            *([sharded_parts.Cast(compute_dtype)] if compute_dtype else []),
        ]
        if cpu_offload:
            storage = sharded_parts.OffloadedStorage
        super().__init__(
            module,
            process_group,
            units=units,
            replicas=replicas,
            exchange=exchange,
            storage=partial(storage, **dtypes),
            parts=parts,
        )
        self.plain, self.groups = plain, (*before, groups[0])
        self.replica_groups = groups[1:]
        self._place_pieces()
        self.sync = True  # whether backward passes are averaged
        self.in_flight: Unit | None = None  # the unit whose gradients are being summed
        self.span: Callable[..., AbstractContextManager] = no_span
        keeps = {True: (), None: (self.root,), False: self.units}
        self.kept_units = keeps[reshard_after_forward]  # units not freed after forward
        self.order = Order([unit.plan.index for unit in self.units[1:]], prefetch)

    def _place_pieces(self) -> None:
        """Record for each piece which elements of which parameter it has."""
        group = self.groups[-1]
        for flat in (flat for unit in self.units for flat in unit.flats):
            plan = flat.plan.pieces(self.exchange.rank, empty=True)
            for piece, whole in zip(plan, flat.parameters, strict=True):
                own, elements = flat.pieces[piece.parameter], (piece.first, piece.last)
                place(own, group, Flat(*elements), like=whole, name=piece.parameter)

    # ---- forward ---------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; hooks gather and free its units."""
        if self._recomputing():
            return self.module(*inputs, **kwargs)
        self._tidy_up()
        try:
            output = super().forward(*inputs, **kwargs)
        except BaseException:
            self._tidy_up()
            raise
        self.order.end_forward()
        for unit in self.units:
            if not unit.is_whole:
                unit.free()  # it was gathered ahead, but not used
        return output

    def _gather(self, unit: Unit) -> None:
        """Launch the gathers of `unit` and of the next units, and wait for `unit`."""
        order, at = self.order, unit.plan.index
        if unit is self.root:
            ahead = order.begin_backward() if self.open else order.begin_forward()
        else:
            ahead = order.backward(at) if self.open else order.forward(at)
        for each in [unit, *(self.units[index] for index in ahead)]:
            if each.needs_gather:  # async only if there is computation to overlap with
                with self.span("launch", gather=each.plan.name), _explained():
                    each.start_gather(async_op=order.prefetch > 0)
        with self.span("wait", unit=unit.plan.name), _explained():
            unit.wait_gathered()
        super()._gather(unit)

    def _free_after_forward(self, unit: Unit, needed_again: bool) -> None:
        """Free `unit`, unless backward recomputes it now or it is not resharded."""
        if not (self._recomputing() or (needed_again and unit in self.kept_units)):
            unit.free()

    def _recomputing(self) -> bool:
        """Return whether this forward recomputes activations inside of backward."""
        return bool(self.open) and torch._C._current_graph_task_id() != -1

    # ---- backward --------------------------------------------------------------------

    def _reduce(self, unit: Unit) -> None:
        """Wait for the previous reduction, then begin to sum the gradients of `unit`.

        So the gradients of at most one unit are being sent at any time.
        """
        if self.sync and unit.has_gradients:
            self._wait_reduced()
            with self.span("launch", reduce=unit.plan.name), _explained():
                unit.start_reduce()
            self.in_flight = unit
            announce(self.parts, "reducing", self, unit)

    def _wait_reduced(self) -> None:
        unit, self.in_flight = self.in_flight, None
        if unit is not None:
            with self.span("wait", reduced=unit.plan.name), _explained():
                unit.wait_reduced()

    def _finish_reductions(self) -> None:
        """Free all units, reduce remaining gradients, and wait for all reductions."""
        for unit in self.units[::-1]:  # some were gathered ahead, or not averaged
            unit.free()
            self._reduce(unit)
        self._wait_reduced()

    def _end_backward(self) -> None:
        with _explained():
            super()._end_backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate, without averaging, the gradients of backwards in this block.

        They are stored whole, which takes the memory of all gradients; the next
        averaged pass sends their sum, even if `zero_grad` was called in between. In
        PyTorch, this is FSDPModule.set_requires_gradient_sync.
        """
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    def _tidy_up(self) -> None:
        """Free units that a pass left whole, as it failed or had no backward.

        If backward failed, only some units have added their gradients, so this drops
        the gradients of all units.
        """
        announce(self.parts, "tidied", self)
        self._wait_reduced()
        for unit in self.units:
            unit.free()
            for flat in unit.trainable if self.open else ():  # backward failed
                for parameter in (*flat.parameters, *flat.pieces.values()):
                    parameter.grad = None
        self.open.clear()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of `module`; bind methods of `module` to this object.

        So a method such as `generate(...)` of a GPT, which calls `self(...)`, calls
        this object's forward, which gathers and frees the units.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "module" not in self._modules:
                raise
        value = getattr(self.module, name)
        is_method = getattr(value, "__self__", None) is self.module
        return MethodType(value.__func__, self) if is_method else value

    # ---- methods of torch.nn.Module that a sharded module refuses --------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        raise ShardedError(
            f"{type(self).__name__} cannot be moved or cast any more (to, cuda, half, "
            "...): move or cast the module before it is sharded"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Raise ShardedError: callers could expect the whole state or a shard."""
        raise ShardedError(
            "state_dict() could be the whole state or this rank's part: call "
            "zero.full_state_dict(model), or zero.sharded_checkpoint.save(folder, ...)"
        )

    def full_state_dict(self) -> dict[str, Tensor]:
        """Raise ShardedError: the base class does not know of other divisions."""
        raise ShardedError(
            "another parallelism may have divided this module, too: call the function "
            "zero.full_state_dict(model), which knows of all divisions"
        )

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ShardedError: callers could pass the whole state or a shard."""
        raise ShardedError(
            "load_state_dict() could mean the whole state or this rank's part: call "
            "zero.load_full_state_dict(model, state), or "
            "zero.sharded_checkpoint.load(folder, ...)"
        )


def no_span(op: str, **detail: Any) -> AbstractContextManager:
    """Record nothing; a part that records replaces this function."""
    return nullcontext()


@contextmanager
def _explained() -> Iterator[None]:
    """Add the most common cause to a CollectiveError that the block raises."""
    try:
        yield
    except CollectiveError as error:
        if " a unit, let it add" in str(error):  # explained already
            raise
        raise CollectiveError(
            f"{error} Do all ranks use all units in one order, in forward and in "
            "backward? If one rank's loss does not depend on a unit, let it add 0 * "
            "(the unit's output).sum()"
        ) from error


# ---- checks before construction ------------------------------------------------------


def check_units(
    module: Any,
    groups: list[dist.ProcessGroup | None],
    units: Chosen,
    **options: Any,
) -> None:
    """Check modules, units and options, and compare them along all groups.

    Runs before anything is sent. Raises ReplicaError, with the same text on every rank.
    """
    problem = (
        _unfit(module) or why_not_replicable(module) or _unusable(module, **options)
    )
    plan: tuple[UnitPlan, ...] = ()
    if not problem:
        try:
            plan = unit_plan(module, dist.get_world_size(groups[0]), units)
        except (TypeError, ValueError) as error:
            problem = f"units: {error}"
    form = {} if problem else form_of(module, **options)
    form |= {f"unit {unit.name}": str(unit) for unit in plan}
    agreed(partial(_refuse, problem), *groups, **form)


def _refuse(problem: str | None) -> None:
    if problem:
        raise ValueError(problem)


def _unfit(module: Any) -> str | None:
    if not isinstance(module, nn.Module):
        return None  # `why_not_replicable` reports it
    if is_sharded(module):
        return "the module is sharded already; shard the original module once"
    averaged = any(listeners(p) for p in module.parameters())
    if averaged or any(isinstance(m, TorchDDP) for m in module.modules()):
        return (
            "the module is wrapped in DistributedDataParallel already, which averages "
            "the same gradients: shard the plain module; for replicas, pass `replicas`"
        )
    devices = {p.device for p in module.parameters()}
    if len(devices) > 1:
        names = ", ".join(map(str, devices))
        return f"the module is on {names}; it must be on one device"
    return None


def _unusable(
    module: Any,
    reshard_after_forward: Any,
    prefetch: Any,
    cpu_offload: bool,
    **dtypes: Any,
) -> str | None:
    if (value := reshard_after_forward) not in (True, False, None):
        return f"reshard_after_forward is {value!r}; it can be True, False or None"
    if type(prefetch) is not int or prefetch < 0:
        return f"prefetch is {prefetch!r}; it must be a whole number, 0 or more"
    for name, dtype in dtypes.items():
        floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        if dtype is not None and not floating:
            return f"{name} is {dtype!r}; it must be a floating-point dtype or None"
    devices = {p.device.type for p in module.parameters()}
    if cpu_offload and "cpu" in devices:
        return (
            "cpu_offload is True, but the module is on the CPU, so there is nothing to "
            "offload; move the module to a GPU, or leave cpu_offload out"
        )
    return None
