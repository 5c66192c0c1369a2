"""Stage 3 as it is meant: one unit after the other is gathered, used and freed.

The second step after `stage3_naive`, and the whole idea: what `stage3` adds is that
messages are under way meanwhile, and options. A unit goes through a step like this;
each arrow is a hook:

    in shards -> gathered -> used -> in shards                            forward
              -> gathered -> used -> left: in shards, gradients reduced   backward

Backward does last what forward has done first. So when it comes to a unit, it has left
the one before, and all gradients of that one are there. The *root* unit (embedding,
head) is around the others: it is left when backward has ended. Read with it `units`
(what is gathered together), `unit_storage` (memory that comes and goes),
`sharded_module` (what all stage 3 modules are) and, if need be, the messages in
`mechanisms.shard_exchange`. Chapter 08.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from ddp_course.mechanisms.frozen import check_first_order
from ddp_course.mechanisms.hooks import tensors_in
from ddp_course.zero.sharded_module import ShardedModule
from ddp_course.zero.unit_storage import Unit


class SimpleFullyShardedDataParallel(ShardedModule):
    """Runs `module` on this rank's part of the batch; only a unit or two are whole.

    Takes and returns what `module` does. `parameters()` are this rank's pieces; when
    `backward` returns, each has its part of the mean gradient over the ranks as `grad`,
    added to what was there. A step sends 3 (N - 1) / N of the model's bytes: two
    gathers and one reduce-scatter of each unit. With `replicas`, the shards of the
    gradients are all-reduced over them, too (hybrid sharding).

    Made by all ranks together, with the numbers of rank 0. All ranks must use the units
    in the same order. Tensors must leave units in what their `forward` returns (lists,
    dicts, dataclasses): that is how backward is seen to come back. Chapter 08.
    """

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        self.given: dict[Unit, set] = {}  # what autograd noted before their forward
        self.open: list[Unit] = []  # those that backward is in, from the outer inwards
        modules = dict(module.named_modules())
        for unit in self.units:
            if unit is not self.root:
                called = modules[unit.plan.name]
                called.register_forward_pre_hook(
                    partial(self._forward_comes, unit), prepend=True, with_kwargs=True
                )
                called.register_forward_hook(partial(self._forward_leaves, unit))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; its units are gathered and freed on the way."""
        self.check_kept()
        self._forward_comes(self.root, self.module, inputs, kwargs)
        output = self.module(*inputs, **kwargs)
        self._forward_leaves(self.root, self.module, inputs, output)
        return output

    # ---- what hooks report -----------------------------------------------------------

    def _forward_comes(
        self, unit: Unit, module: nn.Module, inputs: Any, kwargs: Any
    ) -> None:
        """The module of `unit` is about to be called."""
        self.given[unit] = {t.grad_fn for t in tensors_in([inputs, kwargs])} | {None}
        self._gather(unit)

    def _forward_leaves(
        self, unit: Unit, module: nn.Module, inputs: Any, output: Any
    ) -> None:
        """The module of `unit` has returned: backward will come back the same way."""
        made = {t.grad_fn for t in tensors_in(output)} - self.given.pop(unit)
        for node in made:
            node.register_prehook(partial(self._backward_comes, unit))
        self.check_unchanged(unit)
        self._used(unit, bool(made))

    def _backward_comes(self, unit: Unit, gradients: Any = None) -> None:
        """The gradient of an output of `unit` is there."""
        if unit in self.open:
            return
        if not self.open:
            check_first_order()
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
                unit.free()
                self._reduce(unit)

    @torch.no_grad()
    def _backward_has_ended(self) -> None:
        self._backward_leaves()
        self._forget_unused()

    # ---- what is done then -----------------------------------------------------------

    def _gather(self, unit: Unit) -> None:
        """Make `unit` whole: forward or backward computes with it now."""
        unit.gather()

    def _used(self, unit: Unit, needed_again: bool) -> None:
        """Forward has computed with `unit`: free it, unless backward has called."""
        if unit not in self.open:
            unit.free()

    def _reduce(self, unit: Unit) -> None:
        """Average the gradients of `unit`; each rank keeps its pieces of the mean."""
        unit.reduce()
        unit.settle()
