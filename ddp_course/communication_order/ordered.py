"""Data parallelism that keeps an order: the next forward begins layer by layer.

    backward   sends the pieces of a ready gradient when it is their turn
    step       records that a step is due, and returns at once
    forward    before each layer: waits for its gradient only, and steps its parameters

Unlike in DDP, neither `step` nor the end of backward waits: otherwise all orders would
be equally good. Parts (`scheduled`) choose the order, check that the ranks agree, and
protect gradients that are being sent. Chapter 15.
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
from ddp_course.mechanisms.graph import tensors_in
from ddp_course.mechanisms.hooks import Averager, on_backward, while_alive
from ddp_course.mechanisms.parts import announce

WHOLE = 1e9  # MiB: a bucket for each layer, however large


class OrderedDataParallel(nn.Module):
    """A wrapper that averages gradients in a stated order, and steps layer by layer.

    Args:
        module: the same on all ranks; all get rank 0's values.
        optimizer: any optimizer of `module.parameters()` that can step each parameter
            without the others.
        piece: bytes of a piece; None sends a layer's gradient as a whole.
        process_group: the ranks that share a batch; None means all.
        sending: a second process group of the same ranks, for gradients only.
        all_reduce: any all-reduce of this course, or PyTorch's.
        layers: modules that count as one layer with all their submodules.
        parts: objects with methods for the moments of the `Engine`, and for:

            before_replication(model)        the ranks' modules may still differ
            after_replication(model)         modules are equal, and `engine` exists
            before_forward(model), after_forward(model, output)
            layer_reached(model, name)       a layer's forward has been called
            before_layer(model, buckets)     the layer's parameters are up to date
            step_due(model)                  the program has called `step`
            before_update(model, bucket), after_update(model, bucket)

    All ranks follow `reducer.order`; it may be replaced between two passes.
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
        self.reducer = InPieces(process_group, all_reduce, piece, sending)
        announce(parts, "before_replication", self)
        first = dist.get_process_group_ranks(process_group or dist.group.WORLD)[0]
        for tensor in [*module.parameters(), *module.buffers()]:
            numbers = tensor.data.contiguous()  # a slice has gaps in memory
            dist.broadcast(numbers, first, process_group)
            tensor.data.copy_(numbers)
        self.engine = Engine(self.reducer, parts)
        self.due: list[dict[str, Any]] | None = None  # options of a due step
        self.with_gradient: set[Tensor] = set()  # the parameters to step
        self.layers = Layers(module, layers, piece or 0)
        self.homes: list[list[str]] = []  # by bucket: names of its layers
        self._add_buckets()
        announce(parts, "after_replication", self)

    def _add_buckets(self) -> None:
        """Add a bucket for every layer, and a hook before its forward."""
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
        self.finish()  # layers that this forward did not use
        if torch.is_grad_enabled():
            on_backward(tensors_in(output), self._backward_begins)
        return output

    def _backward_begins(self) -> None:
        """Receive the gradients of the last pass, since this pass adds to them."""
        self.finish()
        self.engine.begin()

    def _before_layer(self, name: str, buckets: Sequence[LiveBucket]) -> None:
        """Wait for a layer's gradients before it runs, and step with them."""
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
            self.reducer.set_gradients(bucket, wanted)
            return
        self.reducer.set_gradients(bucket, self.with_gradient)
        announce(self.parts, "before_update", self, bucket)
        with limit_optimizer(self.optimizer, members, self.due):
            self.optimizer.step()
        for parameter in members:
            parameter.grad = None
        announce(self.parts, "after_update", self, bucket)
        if not self.reducer.under_way:
            self.due = None

    def step(self, max_norm: float | None = None) -> None:
        """Let the optimizer step with the gradients of the last backward.

        Each layer steps when it is next used, with the present options (`lr`, ...). A
        norm over all gradients needs all of them: with `max_norm` this method waits for
        them, clips as `torch.nn.utils.clip_grad_norm_` does, and steps at once.
        """
        self.optimizer._opt_called = True  # PyTorch's schedulers check this flag
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
        """Return a context manager in which backward passes only accumulate."""
        return self.engine.defer()

    def finish(self) -> None:
        """Wait for all gradients that are being sent; take the step if one is due.

        If no step is due, parameters have their gradients afterwards.
        """
        for bucket in self.engine.buckets:
            self.receive(bucket)
        self.due = None

    def train(self, mode: bool = True) -> Self:
        """Set the mode of every module; finish the step before evaluation."""
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
        whole: modules that count as one layer with all their submodules.
        piece: bytes; small neighbouring layers are sent together, up to this size.

    Attributes:
        uses: name -> the parameters that this layer waits for.
        users: parameter -> the names of all layers that use it.
        own: name -> the layer's parameters, by full name; a tied parameter belongs to
            the first layer that uses it.
        groups: names of layers that are sent together, in the order of backward.
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
    """Return groups of layers' names, last layer first; small ones share a piece."""
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
def limit_optimizer(
    optimizer: Optimizer, parameters: set[Tensor], options: Sequence[dict[str, Any]]
) -> Iterator[None]:
    """Limit an optimizer to these parameters, and give its groups these options.

    The groups are limited only inside the block, so the optimizer's state can still be
    saved, and a scheduler can still change its `lr`.
    """
    groups = optimizer.param_groups
    own = [[p for p in group["params"] if p in parameters] for group in groups]
    pairs = zip(options, own, strict=False)  # groups may have been added since
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
