"""FullyShardedDataParallel: stage 3 with messages under way meanwhile, and options.

The third step, after `stage3_simple`, whose moments it keeps; with the name of
PyTorch's first class for it (`fully_shard` is the present one). What it adds: the next
unit is gathered ahead (`order`), gradients are summed while backward goes on, units may
stay whole, other types, shards in shared memory or on the CPU (`offload`),
accumulation, recomputation; and after an error all is well. Explained in chapter 08.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ddp_course.collectives.patience import patient, threads_of
from ddp_course.mechanisms.frozen import check_first_order
from ddp_course.mechanisms.memory_exchange import ShardMemory, memory_problem
from ddp_course.mechanisms.shard_exchange import ShardMessages
from ddp_course.mechanisms.timeline import Timeline, span
from ddp_course.zero.offload import OffloadedStorage, settle
from ddp_course.zero.order import Order
from ddp_course.zero.stage3_simple import SimpleFullyShardedDataParallel
from ddp_course.zero.unit_storage import FlatStorage, Unit
from ddp_course.zero.units import Chosen


class FullyShardedDataParallel(SimpleFullyShardedDataParallel):
    """As SimpleFullyShardedDataParallel, while messages are under way, with options.

    In forward and backward

        launch    the gather of the next unit, or the reduce-scatter of gradients
        wait      for the unit that is computed with now
        compute   with it; then free it

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
        prefetch: how many units are gathered ahead. 0 with shards in shared memory,
            where nothing is gathered, or with another `compute_dtype` copied.
        compute_dtype: gather and compute in this type, floating inputs are cast to it;
            shards stay as they are. As MixedPrecisionPolicy's param_dtype.
        reduce_dtype: sum gradients in this type; None is that of computing.
        cpu_offload: keep shards, gradients and optimizer states on the CPU, if `module`
            is on a GPU (`offload`).
        in_shared_memory: keep shards where all ranks of one machine see them; CPU only.

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
        in_shared_memory: bool = False,
    ) -> None:
        dtypes = {"compute_dtype": compute_dtype, "reduce_dtype": reduce_dtype}
        told = {
            "reshard_after_forward": reshard_after_forward,
            "prefetch": prefetch,
            "cpu_offload": cpu_offload,
            "in_shared_memory": in_shared_memory,
            **dtypes,
        }
        problem = _unusable(module, process_group, **told)
        exchange = ShardMemory if in_shared_memory else ShardMessages
        super().__init__(
            module,
            process_group,
            units=units,
            replicas=replicas,
            exchange=exchange(process_group),
            storage=partial(OffloadedStorage if cpu_offload else FlatStorage, **dtypes),
            problem=problem,
            told=told,
        )
        self.compute_dtype, self.cpu_offload = compute_dtype, cpu_offload
        self.sync = True  # backward passes are averaged
        self.in_flight: Unit | None = None  # its gradients are being summed
        self.timeline: Timeline | None = None
        inner = [unit for unit in self.units if unit is not self.root]
        keeps = {True: (), None: (self.root,), False: self.units}
        self.stay = keeps[reshard_after_forward]  # whole from forward to backward
        guess = [unit.plan.index for unit in inner]
        self.order = Order(guess, 0 if in_shared_memory else prefetch)
        self.reduced: list[int] = []  # units whose gradients were sent, in order
        self._since: dict[Unit, float] = {}  # when it began to compute
        self._agreed: dict[str, list[int]] = {}
        self._patience = ExitStack()

    # ---- forward ---------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; its units are gathered and freed on the way."""
        if self._recomputing():
            return self.module(*self._cast(inputs), **self._cast(kwargs))
        self._tidy_up()
        self.timeline = Timeline.begin()
        self.exchange.meet("a forward begins")  # all ranks have made their step
        try:
            self._be_patient()
            output = super().forward(*self._cast(inputs), **self._cast(kwargs))
        except BaseException:
            self._tidy_up()
            raise
        self.order.end_forward()
        self._same_on_all_ranks("forward", self.order.units)
        for unit in self.units:
            if not unit.here:
                unit.free()  # gathered ahead, and not used
        self._patience.close()
        self.exchange.meet("a forward has ended")
        return output

    def _forward_comes(
        self, unit: Unit, module: nn.Module, inputs: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """The module of `unit` is about to be called, perhaps by our backward."""
        super()._forward_comes(unit, module, inputs, kwargs)
        return self._cast(inputs), self._cast(kwargs)

    def _used(self, unit: Unit, needed_again: bool) -> None:
        """Free it, unless backward has called, and needs it next, or it is to stay."""
        self._computed("forward", unit)
        if not (self._recomputing() or (needed_again and unit in self.stay)):
            unit.free()

    def _gather(self, unit: Unit) -> None:
        """Launch `unit` and what comes next, and wait for `unit`."""
        order, at = self.order, unit.plan.index
        if unit is self.root:
            ahead = order.begin_backward() if self.open else order.begin_forward()
        else:
            ahead = order.backward(at) if self.open else order.forward(at)
        for each in [unit, *(self.units[index] for index in ahead)]:
            if each.away:  # without prefetch there is nothing to go on with meanwhile
                with span(self.timeline, "launch", gather=each.plan.name):
                    each.launch(async_op=order.prefetch > 0)
        with span(self.timeline, "wait", unit=unit.plan.name):
            unit.gather()
        self._since[unit] = time.perf_counter()

    # ---- backward --------------------------------------------------------------------

    def _backward_comes(self, unit: Unit, gradients: Any = None) -> None:
        """The gradient of an output of `unit` is there."""
        if not self.open:
            check_first_order()
            self.reduced, self.timeline = [], Timeline.begin()
            self._be_patient()
        super()._backward_comes(unit)

    def _reduce(self, unit: Unit) -> None:
        """Begin to sum the gradients of `unit`, when those before have arrived.

        So beside what is computed now, there are one unit's gradients at most.
        """
        self._computed("backward", unit)
        if self.sync and unit.has_gradients:
            self._settle()
            with span(self.timeline, "launch", reduce=unit.plan.name):
                unit.reduce()
            self.in_flight = unit
            self.reduced.append(unit.plan.index)

    def _settle(self) -> None:
        unit, self.in_flight = self.in_flight, None
        if unit is not None:
            with span(self.timeline, "wait", reduced=unit.plan.name):
                unit.settle()

    @torch.no_grad()
    def _backward_has_ended(self) -> None:
        """Send what is left, wait for what is under way, free what is still whole."""
        self._backward_leaves()
        for unit in self.units[::-1]:  # of earlier passes, or gathered ahead
            unit.free()
            self._reduce(unit)
        self._settle()
        if self.cpu_offload:
            settle()
        self._forget_unused()
        self._patience.close()
        self._same_on_all_ranks("backward", self.reduced)
        self.exchange.meet("a backward has ended")

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

    # ---- the same on all ranks, and after errors -------------------------------------

    def _same_on_all_ranks(self, what: str, units: list[int]) -> None:
        """Compare an order with the other ranks' when it is a new one.

        A shard does not say of which unit it is: if one rank gathered block 1 while
        another gathers block 2, each would get a mixture, and nobody would notice.
        """
        if self._agreed.get(what) != units:
            for comm in self.comms:
                comm.agree_now(f"{what} through the units {units}")
            self._agreed[what] = list(units)

    def _tidy_up(self) -> None:
        """Free what an earlier pass has left whole: it failed, or had no backward.

        If backward failed, some units' gradients are in and others are not: such a
        mixture is dropped, with all that it was added to.
        """
        self._patience.close()
        self._settle()
        for unit in self.units:
            unit.free()
            for flat in unit.trainable if self.open else ():  # backward failed
                for parameter in (*flat.parameters, *flat.pieces.values()):
                    parameter.grad = None
        self.open.clear()

    def _recomputing(self) -> bool:
        """Whether this forward is called by our backward, to have activations again."""
        return bool(self.open) and torch._C._current_graph_task_id() != -1

    def _be_patient(self) -> None:
        """Let gloo's threads interrupt nobody until the forward or backward has ended.

        What they carry is seldom needed at once, and where there are no more cores than
        ranks, they take the time from those that compute (`collectives.patience`).
        """
        threads = [thread for comm in self.comms for thread in threads_of(comm)]
        self._patience.enter_context(patient(threads))

    def _cast(self, values: Any) -> Any:
        dtype = self.compute_dtype
        cast = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
        return values if dtype is None else tree_map_only(Tensor, cast, values)

    def _computed(self, op: str, unit: Unit) -> None:
        since = self._since.pop(unit, None)
        if self.timeline is not None and since and unit is not self.root:
            self.timeline.add(op, since, "compute", unit=unit.plan.name)


def _unusable(
    module: Any,
    group: dist.ProcessGroup | None,
    reshard_after_forward: Any,
    prefetch: Any,
    cpu_offload: bool,
    in_shared_memory: bool,
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
    devices = {p.device.type for p in getattr(module, "parameters", list)()}
    if cpu_offload and "cpu" in devices:
        return (
            "cpu_offload is True, but the module computes on the CPU: there is nothing "
            "to offload. It must be on a GPU"
        )
    return memory_problem(group, devices) if in_shared_memory else None
