"""Stage 3 as it is meant: one unit after the other is gathered, used and freed.

The second step after `stage3_naive`, and the whole idea: what `stage3` adds is that
messages are under way meanwhile, options, and parts. A unit goes through a step like
this; each arrow is a hook:

    in shards -> gathered -> used -> in shards                            forward
              -> gathered -> used -> left: in shards, gradients reduced   backward

Backward does last what forward has done first. So when it comes to a unit, it has left
the one before, and all gradients of that one are there. The *root* unit (embedding,
head) is around the others: it is left when backward has ended. Read with it `units`
(what is gathered together) and `unit_storage` (memory that comes and goes). Chapter 08.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from ddp_course.mechanisms.hooks import tensors_in
from ddp_course.mechanisms.parts import announce
from ddp_course.zero.unit_storage import FlatStorage, Messages, Unit, places_in
from ddp_course.zero.units import Chosen, unit_plan


class SimpleFullyShardedDataParallel(nn.Module):
    """Runs `module` on this rank's part of the batch; only a unit or two are whole.

    Takes and returns what `module` does. `parameters()` are this rank's pieces, under
    their plain names; when `backward` returns, each has its part of the mean gradient
    over the ranks as `grad`, added to what was there. A step sends 3 (N - 1) / N of the
    model's bytes: two gathers and one reduce-scatter of each unit. With `replicas`, the
    shards of the gradients are all-reduced over them, too (hybrid sharding).

    All ranks construct it together; the first rank's numbers are sent to all. All ranks
    must use the units in the same order. Tensors must leave units in what their
    `forward` returns (lists, dicts, dataclasses): that is how backward is seen to come
    back. A parameter without a gradient counts as one whose gradient is zero.

    Args:
        module: what another parallelism has cut before is a module like any other.
        process_group, units, replicas: as `stage3.FullyShardedDataParallel` takes them.
        exchange, storage: how shards are gathered and summed, and their memory.
        parts: objects that hear of the moments: constructed, before_forward, gathered,
            used, after_forward, before_backward, left, after_backward.

    Chapter 08.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        units: Chosen = None,
        replicas: dist.ProcessGroup | None = None,
        exchange: Messages | None = None,
        storage: Callable[..., FlatStorage] = FlatStorage,
        parts: Sequence[Any] = (),
    ) -> None:
        super().__init__()
        self.process_group, self.parts = process_group, list(parts)
        self.exchange = exchange or Messages(process_group)
        self.plan = unit_plan(module, self.exchange.size, units)
        for group in (process_group, replicas)[: 1 + (replicas is not None)]:
            for buffer in module.buffers():
                dist.broadcast(buffer, group=group, group_src=0)
        parameters, places = dict(module.named_parameters()), places_in(module)
        self.units: list[Unit] = []
        pieces: dict[str, nn.Parameter] = {}
        for unit in self.plan:  # one after the other: only one is there twice at a time
            how = parameters, self.exchange, replicas
            flats = [storage(flat, *how) for flat in unit.flats]
            self.units.append(Unit(unit, flats, places))
            for flat in flats:
                pieces |= flat.pieces
        self.pieces = {name: pieces[name] for name in parameters}  # in the plain order
        self.root, self.module = self.units[0], module
        self.entered: dict[
            Unit, set
        ] = {}  # grad_fn of what its forward was called with
        self.open: list[Unit] = []  # those that backward is in, from the outer inwards
        modules = dict(module.named_modules())
        for unit in self.units[1:]:
            called = modules[unit.plan.name]
            called.register_forward_pre_hook(
                partial(self._forward_comes, unit), prepend=True, with_kwargs=True
            )
            called.register_forward_hook(partial(self._forward_leaves, unit))
        announce(self.parts, "constructed", self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; its units are gathered and freed on the way."""
        announce(self.parts, "before_forward", self)
        self._forward_comes(self.root, self.module, inputs, kwargs)
        output = self.module(*inputs, **kwargs)
        self._forward_leaves(self.root, self.module, inputs, output)
        announce(self.parts, "after_forward", self)
        return output

    # ---- what hooks report -----------------------------------------------------------

    def _forward_comes(
        self, unit: Unit, module: nn.Module, inputs: Any, kwargs: Any
    ) -> None:
        """The module of `unit` is about to be called."""
        nodes = {tensor.grad_fn for tensor in tensors_in([inputs, kwargs])}
        self.entered[unit] = nodes | {None}
        self._gather(unit)

    def _forward_leaves(
        self, unit: Unit, module: nn.Module, inputs: Any, output: Any
    ) -> None:
        """The module of `unit` has returned: backward will come back the same way."""
        nodes = {tensor.grad_fn for tensor in tensors_in(output)}
        nodes -= self.entered.pop(unit)
        for node in nodes:
            node.register_prehook(partial(self._backward_comes, unit))
        announce(self.parts, "used", self, unit, output)
        self._used(unit, bool(nodes))

    def _backward_comes(self, unit: Unit, gradients: Any = None) -> None:
        """The gradient of an output of `unit` is there."""
        if unit in self.open:
            return
        if not self.open:
            announce(self.parts, "before_backward", self)
            Variable._execution_engine.queue_callback(self._backward_has_ended)
            if unit is not self.root:
                self._backward_comes(self.root)
        self._backward_leaves(unit)
        self.open.append(unit)
        self._gather(unit)

    def _backward_leaves(self, coming: Unit | None = None) -> None:
        """Leave all units but those around the one that comes."""
        for unit in self.open[::-1]:
            if coming is None or not unit.plan.encloses(coming.plan):
                self.open.remove(unit)
                announce(self.parts, "left", self, unit)
                unit.free()
                self._reduce(unit)

    @torch.no_grad()
    def _backward_has_ended(self) -> None:
        self._backward_leaves()
        self._settle()
        announce(self.parts, "after_backward", self)

    # ---- what is done then -----------------------------------------------------------

    def _gather(self, unit: Unit) -> None:
        """Make `unit` whole: forward or backward computes with it now."""
        unit.wait_gathered()
        announce(self.parts, "gathered", self, unit)

    def _used(self, unit: Unit, needed_again: bool) -> None:
        """Forward has computed with `unit`: free it, unless backward has called."""
        if unit not in self.open:
            unit.free()

    def _reduce(self, unit: Unit) -> None:
        """Average the gradients of `unit`; each rank keeps its pieces of the mean."""
        unit.start_reduce()
        unit.wait_reduced()

    def _settle(self) -> None:
        """Wait for what `_reduce` has left under way: nothing."""

    # ---- what torch.nn.Module would do, were it whole --------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's pieces, by the names of the plain module's parameters."""
        for name, piece in self.pieces.items():
            yield prefix + ("." if prefix else "") + name, piece

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the plain module's `state_dict`; a collective call."""
        for unit in self.units:
            unit.wait_gathered()
        state = {key: t.clone() for key, t in self.module.state_dict().items()}
        for unit in self.units:
            unit.free()
        return state

    def extra_repr(self) -> str:
        """Return the units with their sizes."""
        return "\n".join(map(str, self.plan))
