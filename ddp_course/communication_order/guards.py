"""Parts of ScheduledDataParallel that check, or that wait for gradients.

    SameStart      raises unless modules and policies are equal, and the optimizer fits
    StatesFinish   finishes the step before a state is saved or loaded
    Unchanged      raises if a parameter is changed while its step is due
    NotYet         raises if a gradient is used while it is being sent
    StepFirst      takes a parameter's step before anything else uses the parameter

Chapter 15.
"""

import copy
import inspect
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_course.collectives import meeting
from ddp_course.communication_order.ordered import limit_optimizer, options_of
from ddp_course.mechanisms.agreement import agreed
from ddp_course.mechanisms.graph import tensors_in
from ddp_course.mechanisms.hooks import while_alive
from ddp_course.mechanisms.replicable import check_module, form_of


class SameStart:
    """A part that compares modules and `form` on all ranks, and tests the optimizer."""

    def __init__(self, group: dist.ProcessGroup | None, **form: Any) -> None:
        self.group, self.form = group, form

    def before_replication(self, model: Any) -> None:
        """Raise ReplicaError, on every rank, if the ranks differ or cannot train."""

        def check() -> None:
            check_module(model.module)
            check_one_by_one(model.optimizer)
            groups = model.optimizer.param_groups
            stepped = {p for group in groups for p in group["params"]}
            if stepped.isdisjoint(model.module.parameters()):
                raise ValueError(
                    "the optimizer has none of the module's parameters; construct it "
                    "with module.parameters()"
                )

        agreed(check, self.group, **form_of(model.module, **self.form))

    def step_due(self, model: Any) -> None:
        """Raise RuntimeError for a gradient of a parameter that no layer steps."""
        stepped = [p for group in model.optimizer.param_groups for p in group["params"]]
        for p in stepped:
            if p.grad is not None and p not in model.layers.users:
                raise RuntimeError(
                    f"the optimizer has a parameter of shape {list(p.shape)} that does "
                    "not belong to the model; layers step one by one, and none would "
                    "step it. Give it an optimizer of its own"
                )


class StatesFinish:
    """A part that finishes the step before a state dict is read or loaded."""

    def before_replication(self, model: Any) -> None:
        """Register hooks, which are removed with the model."""
        for has_state in (*model.module.modules(), model.optimizer):
            while_alive(has_state.register_state_dict_pre_hook, model.finish)
            while_alive(has_state.register_load_state_dict_pre_hook, model.finish)


class Unchanged:
    """A part that raises if a parameter was changed between `step` and its update.

    It detects changes through a view; a change of the parameter itself takes the step
    first (`StepFirst`).
    """

    def step_due(self, model: Any) -> None:
        """Record the versions and addresses of the parameters."""
        self.before = {p: (p._version, p.data_ptr()) for p in model.layers.users}

    def before_update(self, model: Any, bucket: Any) -> None:
        """Compare the versions and addresses of a bucket's parameters."""
        for slot in bucket.slots:
            now = slot.parameter._version, slot.parameter.data_ptr()
            if now != self.before[slot.parameter]:
                raise RuntimeError(
                    f"{slot.name} was changed while a step was due, which would begin "
                    "with the changed values; call finish() before you change it"
                )


class UnderWay(Tensor):
    """A placeholder for a gradient that is being sent; any use of it raises."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        """Raise RuntimeError from any function, also when autograd accumulates."""
        raise RuntimeError(
            "this gradient is still under way: call model.step() in place of "
            "optimizer.step(). To clip gradients, call model.step(max_norm=...), and "
            "before anything else that reads them, call model.finish()"
        )

    __torch_function__ = __torch_dispatch__


class NotYet:
    """A part that replaces every gradient with an `UnderWay` until it has arrived."""

    def after_backward(self, engine: Any) -> None:
        """Replace the gradients that the reducer has set."""
        for slot in engine.slots:
            if slot.parameter.grad is not None:
                nothing = slot.view.new_empty(()).expand(slot.view.shape)
                slot.parameter.grad = nothing.as_subclass(UnderWay)

    def step_due(self, model: Any) -> None:
        """Raise RuntimeError for a gradient that the step would ignore."""
        for index in model.reducer.under_way:
            for slot in model.engine.buckets[index].slots:
                gradient = slot.parameter.grad
                if gradient is not None and not isinstance(gradient, UnderWay):
                    raise RuntimeError(
                        f"the gradient of {slot.name} was replaced while the one that "
                        "backward has computed is under way: the step would ignore the "
                        "new one. Call finish() before you write a gradient"
                    )


# Reading or replacing .grad, as zero_grad does, is no use of the parameter.
GRADIENTS = Tensor.grad.__get__, Tensor.grad.__set__


class StepDue(nn.Parameter):
    """A parameter with a due step, which is taken before any use of the parameter.

    Its layer waits for the gradient in any case. This class is for all other uses: a
    penalty in the loss, an average of weights, a tied matrix, a change by hand. Its
    `grad` belongs to the next step already.
    """

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Step the parameters among the arguments; then call the function."""
        for tensor in () if function in GRADIENTS else tensors_in([args, kwargs]):
            if isinstance(tensor, StepDue):
                tensor.take_step()
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def take_step(self) -> None:
        """Step, and become an ordinary parameter again."""
        self.__class__ = nn.Parameter
        weak, bucket = self.__dict__.pop("receive"), self.__dict__.pop("bucket")
        if (receive := weak()) is not None:
            receive(bucket)

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy the parameter as it is after the step."""
        self.take_step()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the parameter as it is after the step."""
        self.take_step()
        return self.__reduce_ex__(protocol)


class StepFirst:
    """A part that takes a parameter's step before anything else uses the parameter."""

    def step_due(self, model: Any) -> None:
        """Mark the parameters whose gradients are under way."""
        for bucket in [model.engine.buckets[k] for k in model.reducer.under_way]:
            for slot in bucket.slots:
                if type(slot.parameter) is nn.Parameter:
                    slot.parameter.receive = WeakMethod(model.receive)
                    slot.parameter.bucket = bucket
                    slot.parameter.__class__ = StepDue
                else:  # a subclass cannot be marked
                    model.receive(bucket)

    def before_update(self, model: Any, bucket: Any) -> None:
        """Restore the class of the parameters of a bucket."""
        for slot in bucket.slots:
            if isinstance(slot.parameter, StepDue):
                slot.parameter.take_step()


# ---- helpers -------------------------------------------------------------------------


def check_one_by_one(optimizer: Optimizer) -> None:
    """Test an optimizer; raise ValueError if it cannot step parameters one by one.

    An optimizer cannot do so if it uses several parameters at once, or stores state in
    its options.
    """
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(
            f"optimizer is {optimizer!r}; it must be an optimizer of the module's "
            "parameters, such as torch.optim.SGD(module.parameters(), lr=0.1)"
        )
    start, name = torch.linspace(-1, 1, 12).view(3, 4), type(optimizer).__name__
    options = options_of(optimizer)[0]
    if "lr" in options:
        options["lr"] = options["lr"] * 0 + 0.1  # the real rate may begin at 0
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
                with limit_optimizer(own, some, options_of(own)):
                    own.step()
        return params

    try:
        together, apart = stepped(False), stepped(True)
    except Exception as error:  # whatever somebody's optimizer raises
        raise ValueError(
            f"{name} cannot step parameters one by one: a test raised {error!r}"
        ) from error
    if not all(map(torch.equal, together, apart)):
        raise ValueError(
            f"{name} cannot step parameters one by one: its steps of single parameters "
            "differ from its step of all parameters"
        )


def second_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return another process group of the same ranks, created at the first call.

    All these ranks call it together. Raises ReplicaError if some ranks are members of
    more groups than others: PyTorch would then name the new group differently on them,
    and hang.
    """
    first = meeting(group)
    if "second group" not in first.kept:
        count = len(dist.distributed_c10d._world.pg_names)
        agreed(lambda: None, group, **{"process groups that it is in": count})
        everyone = first.size == dist.get_world_size()
        other = dist.new_group(
            None if everyone else first.ranks, use_local_synchronization=not everyone
        )
        meeting(other)  # a collective call, too
        first.kept["second group"] = other
    return first.kept["second group"]
