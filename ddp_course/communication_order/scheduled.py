"""Data parallelism that follows a schedule: the next forward begins layer by layer.

    backward   a layer's gradient is ready: its pieces leave when the order says so
    step       notes that a step is due, and returns at once
    forward    before each layer: wait for its gradient alone, and step its parameters

The order is made by `simulate`, from what the first passes took: all ranks show their
times, the slowest counts, and all make the same plan of the same numbers (`pieces` has
why). Until then gradients go as they come, and forward waits for all of them.

Wrong in PriorityDataParallel's place would be to wait in `step`, as DDP waits at the
end of backward: then no order is better than any other. Chapter 15.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_course.collectives import communicator
from ddp_course.communication_order.pieces import WARM, InPieces
from ddp_course.communication_order.schedule import (
    Piece,
    Played,
    Policy,
    Timed,
    priority,
    simulate,
)
from ddp_course.measure import Event, active_logs
from ddp_course.mechanisms.agreement import start_as_replicas
from ddp_course.mechanisms.buckets import LiveBucket, bucket_plan
from ddp_course.mechanisms.engine import Engine
from ddp_course.mechanisms.habits import Frozen
from ddp_course.mechanisms.hooks import Averager, leaves_below, on_backward, tensors_in
from ddp_course.theory import Layer

MIB = 1 << 20
WHOLE = 1e9  # MiB: a bucket for each layer, however large


class ScheduledDataParallel(nn.Module):
    """Runs `module` on this rank's part of the batch, and steps it layer by layer.

        model = ScheduledDataParallel(module, torch.optim.AdamW(module.parameters()))
        for x, y in batches:
            loss = model(x, y)
            loss.backward()
            model.step()  # in the place of optimizer.step() and zero_grad()

    After `finish()`, or when a state is saved, parameters are what
    DistributedDataParallel makes them, bit by bit if the collective adds in the same
    order wherever a gradient is cut (a ring of three ranks or more does not). Between
    `backward` and the next forward gradients are under way: who asks for one gets an
    error that says so. A layer is a module that has parameters of its own. Parameters
    that are used without their module's forward are waited for before the whole forward
    begins.

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
        self.comm = communicator(process_group)
        self.policy = replace(policy, piece=piece)
        self.ending = self.make_ending(process_group, all_reduce, piece)
        self.engine = Engine(self.ending)
        self.frozen = Frozen(module)
        self.planned: Played | None = None
        self.due: list[dict[str, Any]] | None = None  # of a step: the options then
        self.called: list[LiveBucket] = []  # by the last forward, in its order
        self.names: list[str] = []  # of the layers, in the order of `planned`
        self.took: Counter[tuple[str, int]] = Counter()  # (op, bucket) -> seconds
        self._doing: tuple[str, LiveBucket, float] | None = None  # since when
        self._add_layers(layers)
        for has_state in (module, optimizer):
            has_state.register_state_dict_pre_hook(_weakly(self.finish))

    make_ending = InPieces

    def _add_layers(self, whole: Sequence[nn.Module]) -> None:
        """Give every layer its bucket, and a hook before its forward."""
        names = {p: name for name, p in self.module.named_parameters()}
        home: dict[Tensor, nn.Module] = {}
        uses: dict[nn.Module, list[Tensor]] = {}
        for layer in self.module.modules():
            uses[layer] = list(layer.parameters(recurse=layer in whole))
            for parameter in uses[layer]:
                home.setdefault(parameter, layer)
        of: dict[Tensor, LiveBucket] = {}
        for layer in reversed(uses):
            own = {names[p]: p for p in uses[layer] if home[p] is layer}
            for plan in bucket_plan(own.items(), WHOLE, WHOLE):
                bucket = self.engine.add(plan, own)
                of |= {slot.parameter: bucket for slot in bucket.slots}
        for layer, parameters in uses.items():
            buckets = list(dict.fromkeys(of[p] for p in parameters if p in of))
            if buckets:
                layer.register_forward_pre_hook(_weakly(self._before_layer, buckets))

    # ---- the loop ----------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; each layer waits for its own parameters."""
        if torch._C._current_graph_task_id() != -1:  # backward recomputes this forward
            return self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self.frozen.check()
        self.engine.recover()
        if self.planned is None or self.policy.wait_for_all or self.due is None:
            self.finish()
        if self.ending.passes >= WARM and self.planned is None:
            self._plan()
        self._doing, before, self.called = None, self.called, []
        self.took.clear()
        for bucket in self.engine.buckets:
            if bucket not in before:  # its layer does not say when it begins
                self._receive(bucket)
        with self.engine.counted():
            output = self.module(*inputs, **kwargs)
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
        """
        self.optimizer._opt_called = True  # what a scheduler of PyTorch wants to see
        if max_norm is None and self.ending.under_way:
            self.due = options_of(self.optimizer)
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

    def train(self, mode: bool = True) -> ScheduledDataParallel:
        """Set the mode, as of every module; before evaluation all is waited for."""
        if not mode:
            self.finish()
        return super().train(mode)

    __getstate__ = Averager.__getstate__

    # ---- layer by layer --------------------------------------------------------------

    def _before_layer(self, buckets: Sequence[LiveBucket]) -> None:
        """A layer is about to run: see that its parameters are those of this step."""
        if torch._C._current_graph_task_id() != -1:
            return
        self._computed()
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
        self._note("update", bucket)
        parameters = {slot.parameter for slot in bucket.slots}
        with only(self.optimizer, parameters, self.due):
            self.optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        self._computed()
        if not self.ending.under_way:
            self.due = None

    def _complain_about_unseen(self, output: Any) -> None:
        """Raise RuntimeError if forward used parameters that are still to be stepped.

        Their module's forward was called the last time, and was not this time.
        """
        left = self.ending.under_way if self.due is not None else ()
        reached = leaves_below(tensors_in(output)) if left else ()
        for slot in (slot for k in left for slot in self.engine.buckets[k].slots):
            if id(slot.parameter) in reached:
                raise RuntimeError(
                    f"{slot.name} was used, but not by its module's forward, as in the "
                    "last pass: it has not been stepped yet, and this output is wrong. "
                    "Name a module around it in `layers`"
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
        """Make the order: every rank of the same numbers, those of the slowest one."""
        unseen = [b for b in self.engine.buckets[::-1] if b not in self.called]
        layers = unseen + self.called  # in the order of forward
        ready, count = self.ending.ready_after(), len(layers)
        own = [max(ready[b.index] for b in layers[k:]) for k in range(count)]
        own += [self.took["forward", bucket.index] for bucket in layers]
        own += [self.took["update", bucket.index] for bucket in layers]
        all_told = zip(*self.comm.exchange((*own, *self._link())), strict=True)
        *told, each, per_byte = (Fraction(f"{max(one):.12f}") for one in all_told)
        there, forward, update = (told[k * count : (k + 1) * count] for k in range(3))
        costs = [
            Layer(forward[k], before - after, bucket.flat.nbytes * per_byte, update[k])
            for k, bucket in enumerate(layers)
            for before, after in [(there[k], (*there, 0)[k + 1])]
        ]
        piece = self.policy.piece and self.policy.piece * per_byte
        self.planned = simulate(costs, replace(self.policy, piece=piece), each=each)
        places = [bucket.index for bucket in layers]
        self.ending.order = tuple(Piece(places[k], i) for k, i in self.planned.order)
        self.names = [self._name_of(bucket) for bucket in layers]
        self.places = {place: k for k, place in enumerate(places)}

    def _link(self) -> tuple[float, float]:
        """Measure what a piece takes beside its length, and what a byte takes."""
        few, many = 1, max(cut[0].numel() for cut in self.ending.cut)
        device = self.engine.buckets[0].flat.device

        def seconds(numel: int) -> float:
            tensor = torch.zeros(numel, device=device)
            start = time.perf_counter()
            self.ending.all_reduce(tensor, group=self.ending.sending)
            if tensor.is_cuda:
                torch.cuda.synchronize()
            return time.perf_counter() - start

        short, long = (min(seconds(n) for _ in range(3)) for n in (few, many))
        return short, max(0.0, long - short) / (4 * many) + 1e-12

    def _name_of(self, bucket: LiveBucket) -> str:
        return bucket.plan.parameters[0].rpartition(".")[0] or "the module itself"

    @property
    def order(self) -> tuple[Piece, ...] | None:
        """The order that all ranks keep; None before there are times to make it of."""
        return self.planned and self.planned.order


# ---- tools ---------------------------------------------------------------------------


def recorded(events: Sequence[Event], model: ScheduledDataParallel) -> Played:
    """Return what an `EventLog` has of backward, step and the next forward, as a step.

    In seconds from the begin of backward; sends are there if the collective is one of
    this course, and last from when it starts to when it has ended. Lay it beside
    `model.planned`.
    """
    computed = [e for e in events if e.lane == "compute" and "bucket" in e.detail]
    sends = [e for e in events if e.lane == "communication" and e.nbytes]
    start = min(event.start for event in computed)
    found = [(e, e.op, model.places[e.detail["bucket"]], 0) for e in computed]
    found += [(e, "send", *p) for e, p in zip(sends, model.order, strict=False)]
    timed = [Timed(op, *at, e.start - start, e.end - start) for e, op, *at in found]
    timed.sort(key=lambda event: (event.start, event.end))
    planned = model.planned
    return Played(planned.layers, planned.policy, planned.each, tuple(timed))


@contextmanager
def only(
    optimizer: Optimizer, parameters: set[Tensor], options: Sequence[dict[str, Any]]
) -> Iterator[None]:
    """Let an optimizer have these parameters alone, and its groups these options."""
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


def problem_with(optimizer: Optimizer) -> str | None:
    """Return why an optimizer cannot step parameters one by one, or None: it is tried.

    What looks at several at once, or keeps in its options what it learns, cannot.
    """
    start = torch.linspace(-1, 1, 12).view(3, 4)

    def stepped(one_by_one: bool) -> list[Tensor]:
        params = [nn.Parameter(start * k) for k in (1, 2)]
        own = object.__new__(type(optimizer))
        options = options_of(optimizer)[0]
        if "lr" in options:
            options["lr"] = options["lr"] * 0 + 0.1  # the real one may begin at 0
        group = {**options, "params": params}
        state = {"state": defaultdict(dict), "param_groups": [group]}
        own.__dict__.update(vars(optimizer) | state)
        for step in (1, 2, 3):
            for k, parameter in enumerate(params):
                parameter.grad = torch.cos(start * step + k)
            for some in [{p} for p in params] if one_by_one else [set(params)]:
                with only(own, some, options_of(own)):
                    own.step()
        return params

    name = type(optimizer).__name__
    try:
        together, apart = stepped(False), stepped(True)
    except Exception as error:  # whatever somebody's optimizer raises
        return f"{name} cannot step parameters one by one: tried, it says {error!r}"
    if all(map(torch.equal, together, apart)):
        return None
    return f"{name} cannot step parameters one by one: tried, it made another step"


def _weakly(method: Callable[..., Any], *args: Any) -> Callable[..., None]:
    """Return a hook that calls the bound `method(*args)` while its object lives."""
    weak = weakref.WeakMethod(method)

    def hook(*_: Any) -> None:
        if (alive := weak()) is not None:
            alive(*args)

    return hook
