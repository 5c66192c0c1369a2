"""Stage 3, step two: gather, use and free one unit after the other.

This is the whole idea; `stage3` adds overlapped messages, options and parts. During a
step each unit goes through these states; each arrow is a hook:

    in shards -> gathered -> used -> in shards                         forward
              -> gathered -> used -> in shards, gradients reduced      backward

Backward visits the units in the reverse order of forward. So when it enters a unit, it
has finished the previous one and computed all gradients of that one. The *root* unit
(embedding, head) encloses the others: backward leaves the root last. Read also `units`
(which parameters are gathered together) and `unit_storage` (their memory). Chapter 08.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from ddp_course.mechanisms.graph import tensors_in
from ddp_course.mechanisms.parts import announce
from ddp_course.zero.unit_storage import FlatStorage, ShardMessages, Unit, places_in
from ddp_course.zero.units import Chosen, unit_plan


class SimpleFullyShardedDataParallel(nn.Module):
    """A wrapper that runs `module` with only one or two units gathered at a time.

    Its inputs and outputs are those of `module`. `named_parameters()` are this rank's
    pieces, under the names in `module`; when `backward` returns, each piece's part of
    the mean gradient has been added to its `grad`. A step sends 3 (N - 1) / N of the
    model's bytes: two gathers and one reduce-scatter of each unit. With `replicas`, the
    shards of the gradients are all-reduced over the replicas, too (hybrid sharding).

    All ranks must construct it together (all get the first rank's values), and use the
    units in the same order. A unit's `forward` must return its results as tensors, or
    in lists, dicts or dataclasses: hooks on these tensors notice when backward enters.
    A parameter without a gradient counts as zero. After an error in forward or
    backward, a unit may keep old values: construct the wrapper anew.

    Args:
        module: the module to shard; another parallelism may have cut it before.
        process_group, units, replicas: as for `stage3.FullyShardedDataParallel`.
        exchange: an object that gathers and sums shards.
        storage: the class for the memory of a unit's parameters.
        parts: objects with methods for these moments: constructed, before_forward,
            gathered, used, after_forward, before_backward, left, after_backward.

    Chapter 08.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        units: Chosen = None,
        replicas: dist.ProcessGroup | None = None,
        exchange: ShardMessages | None = None,
        storage: Callable[..., FlatStorage] = FlatStorage,
        parts: Sequence[Any] = (),
    ) -> None:
        super().__init__()
        self.process_group, self.parts = process_group, list(parts)
        self.exchange = exchange or ShardMessages(process_group)
        self.plan = unit_plan(module, self.exchange.size, units)
        for group in (process_group, replicas)[: 1 + (replicas is not None)]:
            for buffer in module.buffers():
                numbers = buffer.data.contiguous()  # a slice has gaps in memory
                dist.broadcast(numbers, group=group, group_src=0)
                buffer.data.copy_(numbers)
        parameters, places = dict(module.named_parameters()), places_in(module)
        self.units: list[Unit] = []
        pieces: dict[str, nn.Parameter] = {}
        for unit in self.plan:  # one at a time, so that only one unit is copied at once
            args = parameters, self.exchange, replicas
            flats = [storage(flat, *args) for flat in unit.flats]
            self.units.append(Unit(unit, flats, places))
            for flat in flats:
                pieces |= flat.pieces
        self.pieces = {name: pieces[name] for name in parameters}  # in module order
        self.root, self.module = self.units[0], module
        self.entered: dict[Unit, set] = {}  # unit -> grad_fn of its forward's inputs
        self.open: list[Unit] = []  # units that backward is in, outermost first
        modules = dict(module.named_modules())
        for unit in self.units[1:]:
            called = modules[unit.plan.name]
            called.register_forward_pre_hook(
                partial(self._enter_forward, unit), prepend=True, with_kwargs=True
            )
            called.register_forward_hook(partial(self._exit_forward, unit))
        announce(self.parts, "constructed", self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; hooks gather and free its units."""
        announce(self.parts, "before_forward", self)
        self._enter_forward(self.root, self.module, inputs, kwargs)
        output = self.module(*inputs, **kwargs)
        self._exit_forward(self.root, self.module, inputs, output)
        announce(self.parts, "after_forward", self)
        return output

    # ---- hooks -----------------------------------------------------------------------

    def _enter_forward(
        self, unit: Unit, module: nn.Module, inputs: Any, kwargs: Any
    ) -> None:
        """Gather `unit`: its module is about to be called."""
        nodes = {tensor.grad_fn for tensor in tensors_in([inputs, kwargs])}
        self.entered[unit] = nodes | {None}
        self._gather(unit)

    def _exit_forward(
        self, unit: Unit, module: nn.Module, inputs: Any, output: Any
    ) -> None:
        """Free `unit`, and register hooks on its outputs to notice backward."""
        nodes = {tensor.grad_fn for tensor in tensors_in(output)}
        nodes -= self.entered.pop(unit)
        for node in nodes:
            node.register_prehook(partial(self._enter_backward, unit))
        announce(self.parts, "used", self, unit, output)
        self._free_after_forward(unit, bool(nodes))

    def _enter_backward(self, unit: Unit, gradients: Any = None) -> None:
        """Gather `unit`: backward has the gradient of one of its outputs."""
        if unit in self.open:
            return
        if not self.open:
            announce(self.parts, "before_backward", self)
            Variable._execution_engine.queue_callback(self._end_backward)
            if unit is not self.root:
                self._enter_backward(self.root)
        self._exit_backward(unit)
        self.open.append(unit)
        self._gather(unit)

    def _exit_backward(self, next_unit: Unit | None = None) -> None:
        """Free and reduce all open units that do not enclose the next unit."""
        for unit in self.open[::-1]:
            if next_unit is None or not unit.plan.encloses(next_unit.plan):
                self.open.remove(unit)
                announce(self.parts, "left", self, unit)
                unit.free()
                self._reduce(unit)

    @torch.no_grad()
    def _end_backward(self) -> None:
        self._exit_backward()
        self._finish_reductions()
        announce(self.parts, "after_backward", self)

    # ---- gather, free, reduce: `stage3` overrides these ------------------------------

    def _gather(self, unit: Unit) -> None:
        """Gather `unit`: forward or backward computes with it now."""
        unit.wait_gathered()
        announce(self.parts, "gathered", self, unit)

    def _free_after_forward(self, unit: Unit, needed_again: bool) -> None:
        """Free `unit`, unless this forward is a recomputation inside of backward."""
        if unit not in self.open:
            unit.free()

    def _reduce(self, unit: Unit) -> None:
        """Average the gradients of `unit`; each rank keeps its pieces of the mean."""
        unit.start_reduce()
        unit.wait_reduced()

    def _finish_reductions(self) -> None:
        """Wait for unfinished reductions; here `_reduce` leaves none."""

    # ---- methods of torch.nn.Module --------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's pieces, by the names of the parameters in `module`."""
        for name, piece in self.pieces.items():
            yield prefix + ("." if prefix else "") + name, piece

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the `state_dict` of the unsharded module; all ranks must call it."""
        for unit in self.units:
            unit.wait_gathered()
        state = {key: t.clone() for key, t in self.module.state_dict().items()}
        for unit in self.units:
            unit.free()
        return state

    def extra_repr(self) -> str:
        """Return the units with their sizes."""
        return "\n".join(map(str, self.plan))
