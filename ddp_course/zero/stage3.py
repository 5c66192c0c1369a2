"""FullyShardedDataParallel: the readable stage 3 plus messages meanwhile, and parts.

The third step, after `stage3_simple`, whose moments it keeps; with the name of
PyTorch's first class for it (`fully_shard` is the present one). What it adds itself: it
gathers the next unit ahead (`Order`), sums gradients while backward goes on, keeps
units whole if it is to, accumulates, recomputes, and is well again after an error.
Everything else are parts (`sharded_parts`), and the whole state
(`mechanisms.whole_state`). Explained in chapter 08.
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
from ddp_course.mechanisms.agreement import agreed, form_of, problem_with
from ddp_course.mechanisms.elementwise import Stepped
from ddp_course.mechanisms.hooks import listeners
from ddp_course.mechanisms.parts import announce
from ddp_course.mechanisms.placements import Flat, PlainModel, groups_before, place
from ddp_course.mechanisms.shard_collectives import (
    Followed,
    all_gather_single,
    reduce_scatter_single,
)
from ddp_course.mechanisms.whole_state import WholeState
from ddp_course.zero import sharded_parts
from ddp_course.zero.sharded_parts import Order
from ddp_course.zero.stage3_simple import SimpleFullyShardedDataParallel
from ddp_course.zero.unit_storage import (
    FlatStorage,
    Messages,
    ShardedError,
    Unit,
    is_sharded,
)
from ddp_course.zero.units import Chosen, UnitPlan, unit_plan


class PeerMessages(Messages):
    """Messages of which gloo sends no byte twice, and which the ranks compare first."""

    all_gather = staticmethod(all_gather_single)

    def reduce(self, own: Tensor, whole: Tensor, then: Callable[[], None]) -> Any:
        """Begin to sum `whole` over all ranks, this rank's part into `own`.

        Returns an object to wait for, which then calls `then`.
        """
        work = reduce_scatter_single(own, whole, self.group, async_op=True)
        return Followed([work], then)


class FullyShardedDataParallel(WholeState, SimpleFullyShardedDataParallel):
    """As SimpleFullyShardedDataParallel, while messages are under way, with options.

    In forward and backward

        launch    the gather of the next unit, or the reduce-scatter of gradients
        wait      for the unit that is computed with now
        compute   with it; then free it

    Any elementwise optimizer can step `parameters()` (SGD, AdamW, ...), in groups by
    name, too: to it they are vectors with their mean gradients. A parameter that some
    rank has no gradient for counts as one whose gradient is zero there; one that none
    has any for is left alone. Buffers stay each rank's own; the whole state has the
    first rank's.

    Args:
        module: on the CPU or on this rank's GPU.
        process_group: the ranks that divide the model; None are all.
        units: what is gathered together (`unit_plan`); None are the modules in
            `nn.ModuleList`s, and the rest.
        replicas: hybrid sharding: the ranks that have the same shard. Inside of
            `process_group` a step sends 3 (F - 1) / F of the model's bytes, among R
            replicas 2 (R - 1) / R of a shard's. Ranks of both groups have other rows.
        reshard_after_forward: free each unit after its forward, and gather it again for
            backward; None is all but the root unit (PyTorch's default, as the root is
            needed at once); False is none, which sends 2 (N - 1) / N.
        prefetch: how many units are gathered ahead.
        compute_dtype: gather and compute in this type, floating inputs are cast to it;
            shards stay as they are. As MixedPrecisionPolicy's param_dtype.
        reduce_dtype: sum gradients in this type; None is that of computing.
        cpu_offload: keep shards, gradients and optimizer states on the CPU, if `module`
            is on a GPU (`sharded_parts.OffloadedStorage`).
        exchange: how shards are gathered and gradients are summed; None is by PyTorch's
            collectives, which send no byte twice over gloo, either.
        storage: the memory of a unit's parameters of one type.
        parts: more parts, such as those that record (`metered`).

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
        exchange: Messages | None = None,
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
        check_units(module, groups, units, **options)
        plain, before = PlainModel.of(module), groups_before(module)
        exchange = exchange or PeerMessages(process_group)
        shows = [quick_exchange(group) for group in groups]
        parts = [
            *parts,
            sharded_parts.Kept(),
            Stepped(),
            sharded_parts.Patient(),
            *([sharded_parts.Offload()] if cpu_offload else []),
            sharded_parts.Unused(shows),
            sharded_parts.SameOrder(groups, shows),
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
        self.sync = True  # backward passes are averaged
        self.in_flight: Unit | None = None  # its gradients are being summed
        self.span: Callable[..., AbstractContextManager] = no_span
        keeps = {True: (), None: (self.root,), False: self.units}
        self.stay = keeps[reshard_after_forward]  # whole from forward to backward
        self.order = Order([unit.plan.index for unit in self.units[1:]], prefetch)

    def _place_pieces(self) -> None:
        """Note on each piece which elements of which parameter it is."""
        group = self.groups[-1]
        for flat in (flat for unit in self.units for flat in unit.flats):
            plan = flat.plan.pieces(self.exchange.rank, empty=True)
            for piece, whole in zip(plan, flat.parameters, strict=True):
                its = flat.pieces[piece.parameter], group, Flat(piece.first, piece.last)
                place(*its, like=whole, name=piece.parameter)

    # ---- forward ---------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; its units are gathered and freed on the way."""
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
            if not unit.here:
                unit.free()  # gathered ahead, and not used
        return output

    def _gather(self, unit: Unit) -> None:
        """Launch `unit` and what comes next, and wait for `unit`."""
        order, at = self.order, unit.plan.index
        if unit is self.root:
            ahead = order.begin_backward() if self.open else order.begin_forward()
        else:
            ahead = order.backward(at) if self.open else order.forward(at)
        for each in [unit, *(self.units[index] for index in ahead)]:
            if each.away:  # without prefetch there is nothing to go on with meanwhile
                with self.span("launch", gather=each.plan.name), _explained():
                    each.start_gather(async_op=order.prefetch > 0)
        with self.span("wait", unit=unit.plan.name), _explained():
            unit.wait_gathered()
        super()._gather(unit)

    def _used(self, unit: Unit, needed_again: bool) -> None:
        """Free it, unless backward has called, and needs it next, or it is to stay."""
        if not (self._recomputing() or (needed_again and unit in self.stay)):
            unit.free()

    def _recomputing(self) -> bool:
        """Whether this forward is called by our backward, to have activations again."""
        return bool(self.open) and torch._C._current_graph_task_id() != -1

    # ---- backward --------------------------------------------------------------------

    def _reduce(self, unit: Unit) -> None:
        """Begin to sum the gradients of `unit`, when those before have arrived.

        So beside what is computed now, there are one unit's gradients at most.
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

    def _settle(self) -> None:
        """Send what is left, wait for what is under way, free what is still whole."""
        for unit in self.units[::-1]:  # of earlier passes, or gathered ahead
            unit.free()
            self._reduce(unit)
        self._wait_reduced()

    def _backward_has_ended(self) -> None:
        with _explained():
            super()._backward_has_ended()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only collect the gradients of the backward passes in this block.

        They stay whole, which takes the memory of all gradients; the next pass that is
        averaged sends their sum. As set_requires_gradient_sync of PyTorch's FSDPModule.
        """
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    def _tidy_up(self) -> None:
        """Free what an earlier pass has left whole: it failed, or had no backward.

        If backward failed, some units' gradients are in and others are not: such a
        mixture is dropped, with all that it was added to.
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
        """Return an attribute of the plain module; its methods call this one's forward.

        So `generate(...)` of a GPT, which calls itself, gathers and frees units, too.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "module" not in self._modules:
                raise
        value = getattr(self.module, name)
        of_its_own = getattr(value, "__self__", None) is self.module
        return MethodType(value.__func__, self) if of_its_own else value

    # ---- what a sharded module cannot do any more ------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        raise ShardedError(
            f"{type(self).__name__} cannot be moved or cast any more (to, cuda, half, "
            "...): do that with the module before it is sharded"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Raise ShardedError: which state is meant has to be said."""
        raise ShardedError(
            "state_dict() could be the whole state or this rank's part: call "
            "full_state_dict(), or zero.sharded_checkpoint.save(folder, ...)"
        )

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ShardedError: which state is meant has to be said."""
        load = "zero.sharded_checkpoint.load(folder, ...)"
        raise ShardedError(f"call load_full_state_dict(state), or {load}")


def no_span(op: str, **detail: Any) -> AbstractContextManager:
    """Record nothing; a part that records takes the place of this function."""
    return nullcontext()


@contextmanager
def _explained() -> Iterator[None]:
    """Say in a CollectiveError what it most often comes from here."""
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


# ---- before anything is divided: do all ranks mean the same, and can it be done? -----


def check_units(
    module: Any,
    groups: list[dist.ProcessGroup | None],
    units: Chosen,
    **options: Any,
) -> None:
    """Compare modules, units and options along all groups; nothing has been sent then.

    Raises ReplicaError, with the same text on every rank.
    """
    problem = _unfit(module) or problem_with(module) or _unusable(module, **options)
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
        return None  # `problem_with` says it
    if is_sharded(module):
        return "the module is sharded already"
    averaged = any(listeners(p) for p in module.parameters())
    if averaged or any(isinstance(m, TorchDDP) for m in module.modules()):
        return (
            "the module is wrapped in DistributedDataParallel already, which averages "
            "the same gradients: shard the plain module; for replicas, give `replicas`"
        )
    devices = {p.device for p in module.parameters()}
    if len(devices) > 1:
        return f"the module is on {', '.join(map(str, devices))}; it must be on one"
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
            "cpu_offload is True, but the module computes on the CPU: there is nothing "
            "to offload. It must be on a GPU"
        )
    return None
