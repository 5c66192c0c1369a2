"""Data parallelism that keeps an order: the next forward begins layer by layer.

    backward   a layer's gradient is ready: its pieces leave when the order says so
    step       notes that a step is due, and returns at once
    forward    before each layer: wait for its gradient alone, and step its parameters

Neither `step` nor the end of backward may wait, as DDP does: then no order would be
better than any other. Where the order comes from, who checks that the ranks agree, and
that nobody touches a gradient under way, are parts (`scheduled`). Chapter 15.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_course.communication_order.pieces import InPieces
from ddp_course.mechanisms.buckets import LiveBucket, bucket_plan
from ddp_course.mechanisms.engine import Engine
from ddp_course.mechanisms.hooks import Averager, on_backward, tensors_in, while_alive
from ddp_course.mechanisms.parts import announce

WHOLE = 1e9  # MiB: a bucket for each layer, however large


class OrderedDataParallel(nn.Module):
    """Runs `module` on this rank's part of the batch, and steps it layer by layer.

    Args:
        module: the same on all ranks; rank 0's numbers are taken.
        optimizer: of `module.parameters()`; any that steps each parameter for itself.
        piece: bytes that are sent at once; None: a layer's gradient as a whole.
        process_group: the ranks that share a batch; None are all.
        sending: a second process group of the same ranks, for gradients alone.
        all_reduce: any of this course, or PyTorch's.
        layers: modules that are one layer with all that is in them.
        parts: objects to which the moments are announced, those of the `Engine` and:

            before_replication(model)        the ranks' modules may differ still
            after_replication(model)         they are equal, and there is an engine
            before_forward(model), after_forward(model, output)
            layer_reached(model, name)       a layer's forward has been called
            before_layer(model, buckets)     its parameters are those of this step
            step_due(model)                  the program has called `step`
            before_update(model, bucket), after_update(model, bucket)

    `reducer.order` is what all ranks keep; it may be replaced between two passes.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        piece: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        sending: dist.ProcessGroup | None = None,
        all_reduce: Callable[..., Any] = dist.all_reduce,
        layers: Sequence[nn.Module] = (),
        parts: Sequence[Any] = (),
    ) -> None:
        super().__init__()
        self.module, self.optimizer, self.parts = module, optimizer, parts
        announce(parts, "before_replication", self)
        first = dist.get_process_group_ranks(process_group or dist.group.WORLD)[0]
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.data, first, process_group)
        self.reducer = InPieces(process_group, all_reduce, piece, sending)
        self.engine = Engine(self.reducer, parts)
        self.due: list[dict[str, Any]] | None = None  # a step: the options to step with
        self.with_gradient: set[Tensor] = set()  # the parameters to step
        self.layers = Layers(module, layers, piece or 0)
        self.homes: list[list[str]] = []  # by bucket: the layers that it is of
        self._add_buckets()
        announce(parts, "after_replication", self)

    def _add_buckets(self) -> None:
        """Give every layer a bucket, and a hook before its forward."""
        bucket_of: dict[Tensor, LiveBucket] = {}
        for group in self.layers.groups:
            parameters = {k: p for n in group for k, p in self.layers.own[n].items()}
            for plan in bucket_plan(parameters.items(), WHOLE, WHOLE):
                bucket = self.engine.add(plan, parameters)
                self.homes.append(group)
                bucket_of |= {slot.parameter: bucket for slot in bucket.slots}
        for name, layer in self.layers.modules.items():
            used = [bucket_of[p] for p in self.layers.uses[name] if p in bucket_of]
            if used:
                register, own = (
                    layer.register_forward_pre_hook,
                    list(dict.fromkeys(used)),
                )
                while_alive(register, self._before_layer, name, own)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; each layer waits for its own parameters."""
        if in_backward():
            return self.module(*inputs, **kwargs)
        announce(self.parts, "before_forward", self)
        if self.due is None:
            self.finish()
        output = self.module(*inputs, **kwargs)
        announce(self.parts, "after_forward", self, output)
        self.finish()  # layers that this forward has left out
        if torch.is_grad_enabled():
            on_backward(tensors_in(output), self._backward_begins)
        return output

    def _backward_begins(self) -> None:
        """Receive the gradients of the last pass: this one adds to them."""
        self.finish()
        self.engine.begin()

    def _before_layer(self, name: str, buckets: Sequence[LiveBucket]) -> None:
        """A layer is about to run: wait for its gradients, and step with them."""
        if in_backward():
            return
        announce(self.parts, "layer_reached", self, name)
        for bucket in buckets:
            if self.due is not None:
                self.receive(bucket)
        announce(self.parts, "before_layer", self, buckets)

    def receive(self, bucket: LiveBucket) -> None:
        """Wait for the gradients of a bucket, and step with them if a step is due."""
        if bucket.index not in self.reducer.under_way:
            return
        members = {slot.parameter for slot in bucket.slots}
        if self.due is None:
            wanted = {p for p in members if p.grad is not None}
            self.reducer.give(bucket, wanted)
            return
        self.reducer.give(bucket, self.with_gradient)
        announce(self.parts, "before_update", self, bucket)
        with only(self.optimizer, members, self.due):
            self.optimizer.step()
        for parameter in members:
            parameter.grad = None
        announce(self.parts, "after_update", self, bucket)
        if not self.reducer.under_way:
            self.due = None

    def step(self, max_norm: float | None = None) -> None:
        """Let the optimizer step with the gradients of the last backward.

        Each layer when it is next used, with the options (`lr`, ...) that hold now. A
        norm over all gradients needs all of them: with `max_norm` they are waited for,
        clipped as by `torch.nn.utils.clip_grad_norm_`, and stepped at once.
        """
        self.optimizer._opt_called = True  # what a scheduler of PyTorch wants to see
        if max_norm is None and self.reducer.under_way:
            self.due = options_of(self.optimizer)
            slots = (slot.parameter for slot in self.engine.slots)
            self.with_gradient = {p for p in slots if p.grad is not None}
            announce(self.parts, "step_due", self)
            return
        self.finish()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only add up."""
        return self.engine.hold()

    def finish(self) -> None:
        """Wait for all that is under way; take the step if one is due.

        Otherwise parameters have their gradients now.
        """
        for bucket in self.engine.buckets:
            self.receive(bucket)
        self.due = None

    def train(self, mode: bool = True) -> Self:
        """Set the mode, as of every module; before evaluation wait for everything."""
        if not mode:
            self.finish()
        return super().train(mode)

    __getstate__ = Averager.__getstate__


def in_backward() -> bool:
    """Return whether a backward pass is running, which recomputes this forward."""
    return torch._C._current_graph_task_id() != -1


# ---- the layers of a module ----------------------------------------------------------


class Layers:
    """All modules of a model that have parameters of their own, by name.

    Args:
        module: the model.
        whole: modules that are one layer with all that is in them.
        piece: bytes; small neighbours travel together as long as they are no more.

    Attributes:
        uses: name -> the parameters that this layer waits for.
        users: parameter -> the names of all layers that use it.
        own: name -> its parameters by their full names; a tied one has one owner.
        groups: names of layers that travel together, those that backward reaches first
            first.
    """

    def __init__(
        self, module: nn.Module, whole: Sequence[nn.Module] = (), piece: float = 0
    ) -> None:
        self.modules = dict(module.named_modules())
        self.uses = {
            name: list(layer.parameters(recurse=layer in whole))
            for name, layer in self.modules.items()
        }
        self.users: dict[Tensor, set[str]] = {}
        owner: dict[Tensor, str] = {}
        for name, parameters in self.uses.items():
            for parameter in parameters:
                owner.setdefault(parameter, name)
                self.users.setdefault(parameter, set()).add(name)
        full = {p: name for name, p in module.named_parameters()}
        self.own = {
            name: {full[p]: p for p in parameters if owner[p] == name}
            for name, parameters in self.uses.items()
        }
        self.groups = groups_of(self.own, piece)


def groups_of(own: Mapping[str, Mapping[str, Tensor]], piece: float) -> list[list[str]]:
    """Return the layers in reverse order; small neighbours fill up a piece."""
    groups, filled = [], math.inf
    for name in reversed([name for name in own if own[name]]):
        nbytes = sum(p.nbytes for p in own[name].values())
        filled += nbytes
        if filled > piece:
            groups, filled = [*groups, []], nbytes
        groups[-1].insert(0, name)
    return groups


# ---- one optimizer that steps some of its parameters now, and others later -----------


@contextmanager
def only(
    optimizer: Optimizer, parameters: set[Tensor], options: Sequence[dict[str, Any]]
) -> Iterator[None]:
    """Let an optimizer have these parameters alone, and its groups these options.

    Its groups are narrowed for a moment: so it stays the one whose state is saved, and
    whose `lr` a scheduler changes.
    """
    groups = optimizer.param_groups
    own = [[p for p in group["params"] if p in parameters] for group in groups]
    pairs = zip(options, own, strict=True)
    optimizer.param_groups = [{**o, "params": some} for o, some in pairs if some]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return a copy of the options of an optimizer's groups, as they are now."""
    return [
        copy.deepcopy({name: o for name, o in group.items() if name != "params"})
        for group in optimizer.param_groups
    ]
