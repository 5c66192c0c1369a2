"""Parts of a real training layer by layer: what they check, and what they wait for.

    SameStart      the ranks' modules and policies are the same; the optimizer can do it
    StatesFinish   whoever saves or loads a state gets the numbers of all steps
    Unchanged      nobody changes a parameter while its step is due
    NotYet         nobody computes with a gradient that is under way
    Seen           parameters that are used without their module's forward

Chapter 15.
"""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_course.collectives import meeting
from ddp_course.communication_order.ordered import only, options_of
from ddp_course.mechanisms.agreement import agreed, check_module, form_of
from ddp_course.mechanisms.hooks import leaves_below, tensors_in, while_alive


class SameStart:
    """Compare modules and `form` on all ranks, and try the optimizer."""

    def __init__(self, group: dist.ProcessGroup | None, **form: Any) -> None:
        self.group, self.form = group, form

    def before_replication(self, model: Any) -> None:
        """Raise ReplicaError, on every rank, if the ranks differ or cannot train."""

        def check() -> None:
            check_module(model.module)
            check_one_by_one(model.optimizer)

        agreed(check, self.group, **form_of(model.module, **self.form))


class StatesFinish:
    """Let a state dict wait for all that is due."""

    def before_replication(self, model: Any) -> None:
        """Register hooks; they go with the model."""
        for has_state in (*model.module.modules(), model.optimizer):
            while_alive(has_state.register_state_dict_pre_hook, model.finish)
            while_alive(has_state.register_load_state_dict_pre_hook, model.finish)


class Unchanged:
    """Raise RuntimeError if a parameter was changed between `step` and its update."""

    def step_due(self, model: Any) -> None:
        """Remember the parameters as they are."""
        self.before = {p: (p._version, p.data_ptr()) for p in model.layers.users}

    def before_update(self, model: Any, bucket: Any) -> None:
        """Compare those of a bucket."""
        for slot in bucket.slots:
            now = slot.parameter._version, slot.parameter.data_ptr()
            if now != self.before[slot.parameter]:
                raise RuntimeError(
                    f"{slot.name} was changed while a step was due, which would be "
                    "taken from there; call finish() before"
                )


class UnderWay(Tensor):
    """Stands for a gradient that is under way: nobody can compute with it."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        """Raise RuntimeError, whatever is asked; also by autograd, which adds to it."""
        raise RuntimeError(
            "this gradient is still under way. Layers are stepped one by one, after "
            "model.step(), without optimizer.step(); what needs all gradients at once, "
            "such as a global norm, must wait for them: model.step(max_norm=...), or "
            "model.finish() before it"
        )

    __torch_function__ = __torch_dispatch__


class NotYet:
    """Put an `UnderWay` in the place of every gradient, until it has arrived."""

    def after_backward(self, engine: Any) -> None:
        """Replace what the reducer has set."""
        for slot in engine.slots:
            if slot.parameter.grad is not None:
                nothing = slot.view.new_empty(()).expand(slot.view.shape)
                slot.parameter.grad = nothing.as_subclass(UnderWay)


class Seen:
    """Wait early for parameters that are used without their module's forward.

    What uses them so and calls the module later, in another pass, is noticed by the
    output: then forward may have used parameters before their step.
    """

    def __init__(self) -> None:
        self.begun: set[str] = set()  # layers that the last forward has called
        self.stepped: list[Any] = []  # buckets that were updated while it ran

    def before_forward(self, model: Any) -> None:
        """Receive buckets of layers that the last forward has not called."""
        before, self.begun = self.begun, set()
        for bucket in model.engine.buckets:
            if not before.issuperset(model.homes[bucket.index]):
                model.receive(bucket)
        self.stepped = []

    def layer_reached(self, model: Any, name: str) -> None:
        """Note that a layer's forward was called."""
        self.begun.add(name)

    def after_update(self, model: Any, bucket: Any) -> None:
        """Note that a bucket was updated."""
        self.stepped.append(bucket)

    def after_forward(self, model: Any, output: Any) -> None:
        """Raise RuntimeError if parameters may have been used before their step.

        Their module's forward was called the last time, and was not this time. Their
        step is still due, or was taken when a layer began that travels with them.
        """
        late = model.reducer.under_way if model.due else ()
        unseen = [
            slot
            for bucket in [*self.stepped, *(model.engine.buckets[k] for k in late)]
            for slot in bucket.slots
            if self.begun.isdisjoint(model.layers.users[slot.parameter])
        ]
        reached = leaves_below(tensors_in(output)) if unseen else ()
        for slot in unseen:
            if id(slot.parameter) in reached:
                raise RuntimeError(
                    f"{slot.name} was used, but not by its module's forward, as in the "
                    "last pass: it may have been stepped too late, and this output be "
                    "wrong. Name a module around it in `layers`"
                )


# ---- helpers -------------------------------------------------------------------------


def check_one_by_one(optimizer: Optimizer) -> None:
    """Raise ValueError if an optimizer cannot step parameters one by one: try it.

    What looks at several at once, or keeps in its options what it learns, cannot.
    """
    start, name = torch.linspace(-1, 1, 12).view(3, 4), type(optimizer).__name__
    options = options_of(optimizer)[0]
    if "lr" in options:
        options["lr"] = options["lr"] * 0 + 0.1  # the real one may begin at 0
    accepted = inspect.signature(type(optimizer)).parameters

    def stepped(one_by_one: bool) -> list[Tensor]:
        params = [nn.Parameter(start * k) for k in (1, 2)]
        known = {key: value for key, value in options.items() if key in accepted}
        own = type(optimizer)(params, **known)
        own.param_groups[0].update(options)
        for step in (1, 2, 3):
            for k, parameter in enumerate(params):
                parameter.grad = torch.cos(start * step + k)
            for some in [{p} for p in params] if one_by_one else [set(params)]:
                with only(own, some, options_of(own)):
                    own.step()
        return params

    try:
        together, apart = stepped(False), stepped(True)
    except Exception as error:  # whatever somebody's optimizer raises
        raise ValueError(
            f"{name} cannot step parameters one by one: tried, it says {error!r}"
        ) from error
    if not all(map(torch.equal, together, apart)):
        raise ValueError(
            f"{name} cannot step parameters one by one: tried, it made another step"
        )


def beside(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return another process group of the same ranks, made at the first call.

    A collective call of these ranks. Raises ReplicaError if some are members of more
    groups than others: PyTorch would give the new one other names there, and hang.
    """
    its = meeting(group)
    if "beside" not in its.kept:
        count = len(dist.distributed_c10d._world.pg_names)
        agreed(lambda: None, group, **{"process groups that it is in": count})
        everyone = its.size == dist.get_world_size()
        other = dist.new_group(
            None if everyone else its.ranks, use_local_synchronization=not everyone
        )
        meeting(other)  # a collective call, too
        its.kept["beside"] = other
    return its.kept["beside"]
