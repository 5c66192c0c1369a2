"""Data parallelism that follows a schedule: the next forward begins layer by layer.

    backward   a layer's gradient is ready: its pieces leave when the order says so
    step       notes that a step is due, and returns at once
    forward    before each layer: wait for its gradient alone, and step its parameters

The order is made of what the first passes took (`plan`), and all ranks keep it
(`pieces` has why). Until then gradients go as they come, and forward waits for all.

Nothing of it may wait in `step`, or at the end of backward as DDP does: then no order
would be better than any other. Chapter 15.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_course.communication_order.one_by_one import only, options_of, problem_with
from ddp_course.communication_order.pieces import WARM, InPieces
from ddp_course.communication_order.plan import plan
from ddp_course.communication_order.schedule import (
    Piece,
    Played,
    Policy,
    Timed,
    priority,
)
from ddp_course.measure import Event, active_logs
from ddp_course.mechanisms.agreement import start_as_replicas
from ddp_course.mechanisms.buckets import LiveBucket, bucket_plan
from ddp_course.mechanisms.engine import Engine
from ddp_course.mechanisms.frozen import Frozen
from ddp_course.mechanisms.hooks import (
    Averager,
    leaves_below,
    on_backward,
    tensors_in,
    while_alive,
)
from ddp_course.mechanisms.parts import announce
from ddp_course.mechanisms.recovery import Recovery
from ddp_course.mechanisms.unused import AgreeUnused

MIB = 1 << 20
WHOLE = 1e9  # MiB: a bucket for each layer, however large


class ScheduledDataParallel(nn.Module):
    """Runs `module` on this rank's part of the batch, and steps it layer by layer.

        model = ScheduledDataParallel(module, torch.optim.AdamW(module.parameters()))
        for x, y in batches:
            loss = model(x, y)
            loss.backward()
            model.step()  # in the place of optimizer.step() and zero_grad()

    After `finish()`, or when a state is saved or loaded, parameters are what
    DistributedDataParallel makes them, bit by bit if the collective adds in the same
    order wherever a gradient is cut (a ring of three ranks or more does not). Between
    `backward` and the next forward gradients are under way: who asks for one gets an
    error that says so. A layer is a module that has parameters of its own; small
    neighbours travel together, up to a piece, as every message has its price.
    Parameters that are used without their module's forward are waited for before the
    whole forward begins. What uses them so and calls the module later is not seen: name
    a module around both in `layers`. Who changes them by hand calls `finish()` first.

    Made by all ranks together. Keep it as long as you train (its hooks go with it), and
    `finish()` before you let it go: the last step may still be due. On a GPU, where
    this was not run, moments are those of its stream.

    Args:
        module: the same on all ranks; rank 0's numbers are taken. Buffers stay each
            rank's own.
        optimizer: of `module.parameters()`; any that steps each parameter for itself.
        policy: by which the order is made; `piece` in bytes. One that waits for all
            lets the forward wait, too.
        process_group: the ranks that share a batch; None are all.
        all_reduce: any of this course, or PyTorch's.
        layers: modules that are one layer with all that is in them.

    Raises ReplicaError, on every rank, if the modules differ or the optimizer cannot
    step layers one by one.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        policy: Policy = priority(MIB),  # noqa: B008  (it cannot be changed)
        process_group: dist.ProcessGroup | None = None,
        all_reduce: Callable[..., Any] = dist.all_reduce,
        layers: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__()
        piece = policy.piece and max(16, int(policy.piece) // 16 * 16)  # whole numbers
        start_as_replicas(module, process_group, problem_with(optimizer), policy=policy)
        self.module, self.optimizer = module, optimizer
        self.policy = replace(policy, piece=piece)
        self.ending = self.make_ending(process_group, all_reduce, piece)
        recovery = Recovery(process_group)
        self.parts = [recovery, AgreeUnused(recovery.show)]
        self.engine = Engine(self.ending, self.parts)
        self.frozen = Frozen(module)
        self.planned: Played | None = None
        self.due: list[dict[str, Any]] | None = None  # of a step: the options then
        self.versions: dict[Tensor, int] = {}  # of the parameters then
        self.called: list[LiveBucket] = []  # by the last forward, in its order
        self.took: Counter[tuple[str, int]] = Counter()  # (op, bucket) -> seconds
        self.homes: list[list[str]] = []  # by bucket: the modules that it is of
        self.begun: set[str] = set()  # modules that the last forward called
        self.stepped: list[LiveBucket] = []  # while it ran
        self.users: dict[Tensor, set[str]] = {}  # the modules that a parameter is in
        self._doing: tuple[str, LiveBucket, float] | None = None  # since when
        self._add_layers(layers)
        for has_state in (*module.modules(), optimizer):
            while_alive(has_state.register_state_dict_pre_hook, self.finish)
            while_alive(has_state.register_load_state_dict_pre_hook, self.finish)

    make_ending = InPieces

    def _add_layers(self, whole: Sequence[nn.Module]) -> None:
        """Give every layer a bucket, and a hook before its forward."""
        names = {p: name for name, p in self.module.named_parameters()}
        layers = dict(self.module.named_modules())
        uses = {n: list(m.parameters(recurse=m in whole)) for n, m in layers.items()}
        home: dict[Tensor, str] = {}  # of a tied one the first module
        for name, parameters in uses.items():
            home = dict.fromkeys(parameters, name) | home
            for parameter in parameters:
                self.users.setdefault(parameter, set()).add(name)
        own = {n: {names[p]: p for p in uses[n] if home[p] == n} for n in layers}
        of: dict[Tensor, LiveBucket] = {}
        for members in self._together(own):
            parameters = {k: p for name in members for k, p in own[name].items()}
            for bucket in bucket_plan(parameters.items(), WHOLE, WHOLE):
                live = self.engine.add(bucket, parameters)
                self.homes.append(members)
                of |= {slot.parameter: live for slot in live.slots}
        for name, layer in layers.items():
            buckets = list(dict.fromkeys(of[p] for p in uses[name] if p in of))
            if buckets:
                register = layer.register_forward_pre_hook
                while_alive(register, self._before_layer, name, buckets)

    def _together(self, own: Mapping[str, Mapping[str, Tensor]]) -> list[list[str]]:
        """Return the layers, the last ones first; small neighbours fill up a piece."""
        groups, filled = [], math.inf
        for name in reversed([name for name in own if own[name]]):
            nbytes = sum(p.nbytes for p in own[name].values())
            filled += nbytes
            if filled > (self.policy.piece or 0):
                groups, filled = [*groups, []], nbytes
            groups[-1].insert(0, name)
        return groups

    # ---- the loop ----------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; each layer waits for its own parameters."""
        if torch._C._current_graph_task_id() != -1:  # backward recomputes this forward
            return self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self.frozen.check()
        announce(self.parts, "before_forward", self)
        if self.planned is None or self.policy.wait_for_all or self.due is None:
            self.finish()
        if self.ending.passes >= WARM and self.planned is None:
            self._plan()
        self._doing, self.called = None, []
        before, self.begun = self.begun, set()
        self.took.clear()
        for bucket in self.engine.buckets:
            if not before.issuperset(self.homes[bucket.index]):
                self._receive(bucket)  # a layer of it does not say when it begins
        self.stepped.clear()
        output = self.module(*inputs, **kwargs)
        announce(self.parts, "after_forward", self, output)
        self._computed()
        self._complain_about_unseen(output)
        self.finish()  # layers that were left out this time
        if torch.is_grad_enabled():
            on_backward(tensors_in(output), self.engine.begin)
        return output

    def step(self, max_norm: float | None = None) -> None:
        """Let the optimizer step with the gradients of the last backward.

        Each layer when it is next used, with the options (`lr`, ...) that hold now. A
        norm over all gradients needs all of them: with `max_norm` they are waited for,
        clipped as by `torch.nn.utils.clip_grad_norm_`, and stepped at once.

        When the step is taken: RuntimeError if a parameter was changed meanwhile.
        """
        self.optimizer._opt_called = True  # what a scheduler of PyTorch wants to see
        if max_norm is None and self.ending.under_way:
            self.due = options_of(self.optimizer)
            self.versions = {p: p._version for p in self.users}
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
            self._receive(bucket)
        self.due = None

    def train(self, mode: bool = True) -> Self:
        """Set the mode, as of every module; before evaluation all is waited for."""
        if not mode:
            self.finish()
        return super().train(mode)

    __getstate__ = Averager.__getstate__

    # ---- layer by layer --------------------------------------------------------------

    def _before_layer(self, name: str, buckets: Sequence[LiveBucket]) -> None:
        """A layer is about to run: see that its parameters are those of this step."""
        if torch._C._current_graph_task_id() != -1:
            return
        self._computed()
        self.begun.add(name)
        for bucket in buckets:
            if self.due is not None:
                self._receive(bucket)
            if bucket not in self.called:
                self.called.append(bucket)
        self._note("forward", buckets[-1])

    def _receive(self, bucket: LiveBucket) -> None:
        """Wait for the gradients of a bucket, and step with them if a step is due."""
        if bucket.index not in self.ending.under_way:
            return
        self.ending.give(bucket)
        if self.due is None:
            return
        for slot in bucket.slots:
            if slot.parameter._version != self.versions[slot.parameter]:
                raise RuntimeError(
                    f"{slot.name} was changed while a step was due, which would be "
                    "taken from there; call finish() before"
                )
        self._note("update", bucket)
        self.stepped.append(bucket)
        parameters = {slot.parameter for slot in bucket.slots}
        with only(self.optimizer, parameters, self.due):
            self.optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        self._computed()
        if not self.ending.under_way:
            self.due = None

    def _complain_about_unseen(self, output: Any) -> None:
        """Raise RuntimeError if forward may have used parameters before their step.

        Their module's forward was called the last time, and was not this time. Their
        step is still due, or was taken when a layer began that travels with them.
        """
        late, buckets = self.ending.under_way if self.due else (), self.engine.buckets
        unseen = [
            slot
            for bucket in [*self.stepped, *(buckets[k] for k in late)]
            for slot in bucket.slots
            if self.begun.isdisjoint(self.users[slot.parameter])
        ]
        reached = leaves_below(tensors_in(output)) if unseen else ()
        for slot in unseen:
            if id(slot.parameter) in reached:
                raise RuntimeError(
                    f"{slot.name} was used, but not by its module's forward, as in the "
                    "last pass: it may have been stepped too late, and this output be "
                    "wrong. Name a module around it in `layers`"
                )

    # ---- what it takes ---------------------------------------------------------------

    def _note(self, op: str, bucket: LiveBucket) -> None:
        """Something is computed from now on, for the layer of a bucket."""
        self._doing = op, bucket, time.perf_counter()

    def _computed(self) -> None:
        """It has been computed."""
        if self._doing is not None:
            (op, bucket, start), self._doing = self._doing, None
            end = time.perf_counter()
            self.took[op, bucket.index] += end - start
            for log in active_logs():
                log.add(op, start, end, lane="compute", bucket=bucket.index)

    def _plan(self) -> None:
        """Make the order that is kept from now on; a collective call."""
        unseen = [b for b in self.engine.buckets[::-1] if b not in self.called]
        layers = unseen + self.called
        self.planned = plan(layers, self.ending, self.took, self.policy)
        places = [bucket.index for bucket in layers]
        self.ending.order = tuple(Piece(places[k], i) for k, i in self.planned.order)
        self.places = {place: k for k, place in enumerate(places)}

    @property
    def order(self) -> tuple[Piece, ...] | None:
        """The order that all ranks keep; None before there are times to make it of."""
        return self.planned and self.planned.order


def recorded(events: Sequence[Event], model: ScheduledDataParallel) -> Played:
    """Return what an `EventLog` has of backward, step and the next forward, as a step.

    In seconds from the begin of backward; sends are there if the collective is one of
    this course, and last from when it starts to when it has ended. Lay it beside
    `model.planned`. Raises ValueError before there is a plan.
    """
    if model.planned is None:
        raise ValueError("there is no plan yet; it is made in the third forward")
    computed = [e for e in events if e.lane == "compute" and "bucket" in e.detail]
    sends = [e for e in events if e.lane == "communication" and e.nbytes]
    start = min(event.start for event in computed)
    found = [(e, e.op, model.places[e.detail["bucket"]], 0) for e in computed]
    found += [(e, "send", *p) for e, p in zip(sends, model.order, strict=False)]
    timed = [Timed(op, *at, e.start - start, e.end - start) for e, op, *at in found]
    timed.sort(key=lambda event: (event.start, event.end))
    planned = model.planned
    return Played(planned.layers, planned.policy, planned.each, tuple(timed))
