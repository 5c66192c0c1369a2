"""FullyShardedDataParallel: stage 3, with only a unit or two whole at any time.

The second step after `stage3_naive`, with the name of PyTorch's first class for it
(`fully_shard` is the present one). Read with it:

    units      which parameters are gathered together: plain data
    live       their memory, which comes and goes
    gather     how shards come together, and gradients apart
    order      what comes next, and can be gathered ahead
    offload    where shards live
    sharded_module, full_state, sharded_checkpoint
               what both stage 3 modules have; the whole state; saved shards

Explained in chapter 08.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_map_only

from ddp_course.collectives.patience import patient
from ddp_course.mechanisms.hooks import tensors_in
from ddp_course.mechanisms.timeline import Timeline, span
from ddp_course.zero.live import LiveUnit
from ddp_course.zero.order import Order
from ddp_course.zero.sharded_module import ShardedModule
from ddp_course.zero.units import Chosen


class FullyShardedDataParallel(ShardedModule):
    """Runs `module` on this rank's part of the batch, with 1/N of everything kept.

    Takes and returns what `module` does. `parameters()` are this rank's shards, for any
    elementwise optimizer; when `backward` returns, each has its part of the mean
    gradient over the ranks as `grad`, added to what was there. In forward and backward

        launch    the gather of the next unit, or the reduce-scatter of gradients
        wait      for the unit that is computed with now
        compute   with it; then free it

    A step sends 3 (N - 1) / N of the model's bytes: two gathers, one reduce-scatter.

    Made by all ranks together, with equal names, shapes and types, and rank 0's numbers
    are sent to all. All ranks must use the units in the same order. Tensors must leave
    units in what their `forward` returns (lists, dicts, dataclasses): that is how
    backward is seen to come back.

    Args:
        module: on the CPU or on this rank's GPU.
        process_group: the ranks that share a batch; None are all.
        units: what is gathered together (`unit_plan`); None are the modules in
            `nn.ModuleList`s, and the rest.
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
        all_gather, reduce_scatter: other collectives (`gather.Messages`).

    Raises:
        ReplicaError: the ranks' modules or arguments differ, or cannot be used.
        ShardedError: a parameter is used while its unit is not whole.
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
        reshard_after_forward: bool | None = True,
        prefetch: int = 1,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        cpu_offload: bool = False,
        in_shared_memory: bool = False,
        all_gather: Callable[..., Any] | None = None,
        reduce_scatter: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(
            module,
            process_group,
            units,
            all_gather,
            reduce_scatter,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            cpu_offload=cpu_offload,
            in_shared_memory=in_shared_memory,
            problem=_unusable(reshard_after_forward, prefetch),
            reshard_after_forward=reshard_after_forward,
            prefetch=prefetch,
        )
        self.sync = True  # backward passes are averaged
        self.running = False  # a backward pass is under way
        self.in_flight: LiveUnit | None = None  # its gradients are being summed
        self.timeline: Timeline | None = None
        guess = [unit.plan.index for unit in self.units if unit is not self.root]
        self.order = Order(guess, 0 if in_shared_memory else prefetch)
        self.left: list[LiveUnit] = []  # units that this backward pass has left
        self.reduced: list[int] = []  # and whose gradients were sent, in order
        self._agreed: dict[str, list[int]] = {}
        self._patience = ExitStack()
        modules = dict(module.named_modules())
        for unit in self.units:
            keeps = {True: False, None: unit is self.root, False: True}
            unit.stays = keeps[reshard_after_forward]
            if unit is not self.root:
                called = modules[unit.plan.name]
                called.register_forward_pre_hook(
                    partial(self._before_forward, unit), prepend=True, with_kwargs=True
                )
                called.register_forward_hook(partial(self._after_forward, unit))

    # ---- forward ---------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; its units are gathered and freed on the way."""
        if self._recomputing():
            self.root.gather()
            return self.module(*inputs, **kwargs)
        self._tidy_up()
        self.timeline = Timeline.begin()
        self.way.meet("a forward begins")  # all ranks have made their step
        inputs, kwargs = self._cast(inputs), self._cast(kwargs)
        try:
            self._be_patient()
            self._gather(self.root, self.order.begin_forward())
            output = self.module(*inputs, **kwargs)
        except BaseException:
            self._tidy_up()
            raise
        self.order.end_forward()
        self._same_on_all_ranks("forward", self.order.units)
        self._after_forward(self.root, self.module, (), output)
        for unit in self.units:
            if not unit.here:
                unit.free()  # gathered ahead, and not used
        self._patience.close()
        self.way.meet("a forward has ended")
        return output

    def _before_forward(
        self, unit: LiveUnit, module: nn.Module, inputs: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """The module of `unit` is about to be called."""
        number = unit.plan.index
        if not self._recomputing():
            self._gather(unit, self.order.forward(number))
        elif not unit.open:  # before its gradient has come
            self._reduce_left()
            self._gather(unit, self.order.backward(number))
        unit.since = time.perf_counter()
        return self._cast(inputs), self._cast(kwargs)

    def _gather(self, unit: LiveUnit, ahead: list[int]) -> None:
        """Launch `unit` and what comes next, and wait for `unit`."""
        for each in [unit, *(self.units[index] for index in ahead)]:
            if each.away:  # without prefetch there is nothing to go on with meanwhile
                with span(self.timeline, "launch", gather=each.plan.name):
                    each.launch(async_op=self.order.prefetch > 0)
        with span(self.timeline, "wait", unit=unit.plan.name):
            unit.gather()

    def _after_forward(
        self, unit: LiveUnit, module: nn.Module, inputs: Any, output: Any
    ) -> None:
        """The module of `unit` has returned: free it, unless backward needs it now."""
        if unit is not self.root:
            self._computed("forward", unit)
        if unit.open:  # recomputed, and its gradient is there: backward is next
            return
        outputs = {t.grad_fn for t in tensors_in(output) if t.grad_fn is not None}
        # Backward does last what forward has done first: when it comes to the oldest of
        # the inputs, all gradients inside are there. Leaves have no such place in the
        # order: then the end of backward is waited for.
        inner = [t for t in tensors_in(inputs) if t.grad_fn is not None]
        # One unit's output is the next one's input: a tensor's hooks are called before
        # those of the node that made it, so that one is left before the other comes.
        call = object()
        for node in outputs:
            node.register_prehook(partial(self._backward_comes, unit, call, not inner))
        if outputs and inner:
            oldest = min(inner, key=lambda tensor: tensor.grad_fn._sequence_nr())
            oldest.register_hook(partial(self._backward_leaves, unit, call))
        if not self._recomputing() and not (unit.stays and outputs):
            unit.free()

    # ---- backward --------------------------------------------------------------------

    def _backward_comes(
        self, unit: LiveUnit, call: object, to_the_end: bool, gradients: Any
    ) -> None:
        """The gradient of an output of `unit` is there."""
        self._begin_backward()
        if call in unit.open or unit is self.root:
            return
        self._reduce_left()
        unit.open.add(call)
        self._gather(unit, self.order.backward(unit.plan.index))
        if to_the_end:
            end = partial(self._backward_leaves, unit, call, None)
            Variable._execution_engine.queue_callback(end)
        unit.since = time.perf_counter()

    def _begin_backward(self) -> None:
        if self.running:
            return
        self.running, self.left, self.reduced = True, [], []
        self.timeline = Timeline.begin()
        Variable._execution_engine.queue_callback(self._backward_has_ended)
        self.root.open.add(self)
        self._be_patient()
        self._gather(self.root, self.order.begin_backward())

    def _backward_leaves(self, unit: LiveUnit, call: object, gradient: Any) -> None:
        """The gradients of a unit's inputs are there, and so are its parameters'."""
        if call not in unit.open:
            return
        unit.open.discard(call)
        if not unit.open:
            self._computed("backward", unit)
            unit.free()
            if unit not in self.left:
                self.left.append(unit)
            self._reduce_left()

    def _reduce_left(self) -> None:
        """Sum the gradients of the units that backward has left, one after the other.

        One is on its way at a time. So beside what is computed now, there are one
        unit's gradients at most. If a block is recomputed (`mechanisms.recompute`),
        autograd hands its gradients over a little later; then they are sent at the
        next occasion.
        """
        for unit in [unit for unit in self.left if self.sync and unit.has_gradients]:
            self.left.remove(unit)
            self._settle()
            with span(self.timeline, "launch", reduce=unit.plan.name):
                unit.reduce()
            self.in_flight = unit
            self.reduced.append(unit.plan.index)

    def _settle(self) -> None:
        """Wait for the gradients that are on their way."""
        unit, self.in_flight = self.in_flight, None
        if unit is not None:
            with span(self.timeline, "wait", reduced=unit.plan.name):
                unit.settle()

    @torch.no_grad()
    def _backward_has_ended(self) -> None:
        """Send what is left, wait for what is under way, free what is still whole."""
        for unit in reversed(self.units):  # the root is the last
            unit.open.clear()
            unit.free()
        self.left = list(reversed(self.units))
        self._reduce_left()
        self._settle()
        self.home.settle()
        self._patience.close()
        self.running = False
        self._same_on_all_ranks("backward", self.reduced)
        self.way.meet("a backward has ended")

    # ---- accumulation ----------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Let backward passes only collect gradients, until this is True again.

        They stay whole, with the parameters, which takes the memory of all gradients;
        the next pass that is averaged sends their sum. As of PyTorch's FSDPModule.
        """
        self.sync = requires_gradient_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only collect the gradients of the backward passes in this block."""
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
            self.comm.agree_now(f"{what} through the units {units}")
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
            if self.running:  # backward failed
                unit.open.clear()
                unit.forget()
        self.running = False

    def _recomputing(self) -> bool:
        """Whether this forward is called by our backward, to have activations again."""
        return self.running and torch._C._current_graph_task_id() != -1

    def _be_patient(self) -> None:
        """Let gloo's threads interrupt nobody until the forward or backward has ended.

        What they carry is seldom needed at once, and where there are no more cores than
        ranks, they take the time from those that compute (`collectives.patience`).
        """
        self._patience.enter_context(patient(self.comm.threads))

    # ---- small things ----------------------------------------------------------------

    def _cast(self, values: Any) -> Any:
        """Cast floating tensors to the type of computing."""
        dtype = self.compute_dtype
        if dtype is None:
            return values
        return tree_map_only(
            Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values
        )

    def _computed(self, op: str, unit: LiveUnit) -> None:
        if self.timeline is not None:
            self.timeline.add(op, unit.since, "compute", unit=unit.plan.name)


def _unusable(reshard_after_forward: Any, prefetch: Any) -> str | None:
    """Return which argument cannot be used, and why; or None."""
    if reshard_after_forward not in (True, False, None):
        return (
            f"reshard_after_forward is {reshard_after_forward!r}; it can be True, "
            "False or None"
        )
    if type(prefetch) is not int or prefetch < 0:
        return f"prefetch is {prefetch!r}; it must be a whole number, 0 or more"
    return None
