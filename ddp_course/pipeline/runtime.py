"""The runtime: a rank carries out its row of a schedule, whatever the schedule is.

    for action in row:
        received = self.receive(action)
        result = self.compute(action, received)
        self.send(action, result)

    F  get the input, compute, store input and output, pass the output on
    B  get the output's gradient, go backward, pass the input's gradient on

A result goes to the next or the previous stage: as a message, or directly if the same
rank has that stage. B frees what F has stored. `Runtime` runs one batch; `Pipeline` is
a model that is trained this way. Both announce their moments to `parts`;
`PipelineParallel` is built on them. Chapter 10.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.collectives.endpoint import Endpoint, Handle
from ddp_course.mechanisms.parts import announce
from ddp_course.pipeline.schedule import Action, Schedule
from ddp_course.pipeline.stages import Stage, add_layers, spine

Form = tuple[torch.dtype, tuple[int, ...]]  # type and shape of one row's activation


class Runtime:
    """One rank's part of a run, in which one batch passes through the pipeline.

    Args:
        stages: stage number -> stage, for this rank's stages.
        schedule: a schedule for as many ranks as `endpoint` has.
        endpoint: sends messages to the other ranks and receives theirs.
        forms: for each boundary between stages, the form of its activation.
        x: (B, ...), the model's input; y: (B, ...), the targets, or None.
        parts: objects with methods for "before_run", "before_action", "before_compute",
            "after_compute", "before_wait", "after_wait", "before_send", "after_send",
            "after_run".

    Attributes:
        operations: op of an action -> the method that computes it.
        weights: the weight of each microbatch in the mean loss; their sum is 1.
        losses, outputs: microbatch -> the last stage's weighted loss, or its output.
        loss_scale: backward starts from the loss times this number (loss scaling).
        computing: the action that is being computed, or None.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        schedule: Schedule,
        endpoint: Endpoint,
        forms: Sequence[Form],
        x: Tensor,
        y: Tensor | None,
        parts: Sequence[Any] = (),
    ) -> None:
        self.stages, self.schedule, self.endpoint = stages, schedule, endpoint
        self.forms, self.parts, self.device = forms, parts, x.device
        self.last, m = schedule.num_stages - 1, schedule.num_microbatches
        self.x = x.tensor_split(m)
        self.y = [None] * m if y is None else y.tensor_split(m)
        self.weights, self.loss_scale = [len(part) / len(x) for part in self.x], 1.0
        self.operations = {"F": self.forward, "B": self.backward}
        # (stage, microbatch) -> input and output, from F to B
        self.saved: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.results: dict[Action, Tensor] = {}  # inputs of this rank's later actions
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.messages = OrderedMessages(self)
        self.computing: Action | None = None

    def run(self) -> None:
        """Execute this rank's row of the schedule."""
        announce(self.parts, "before_run", self)
        for action in self.schedule.ranks[self.endpoint.rank]:
            announce(self.parts, "before_action", self, action)
            received = self.receive(action)
            result = self.compute(action, received)
            self.send(action, result)
        self.messages.finish()
        announce(self.parts, "after_run", self)

    def receive(self, action: Action) -> Tensor | None:
        """Return the input of `action`: a part of the batch, or another stage's result.

        Backward in the last stage, and W, have no input: None.
        """
        source = self.schedule.source(action)
        if source is None:
            return self.x[action.microbatch] if action.op == "F" else None
        if self.schedule.rank_of(source.stage) != self.endpoint.rank:
            self.messages.receive(source)
        return self.results.pop(source)

    def compute(self, action: Action, received: Tensor | None) -> Tensor | None:
        """Compute an action; return the result for another stage, or None."""
        self.computing = action
        announce(self.parts, "before_compute", self, action)
        operation = self.operations[action.op]
        result = operation(action.stage, action.microbatch, received)
        announce(self.parts, "after_compute", self, action)
        self.computing = None
        return result

    def send(self, action: Action, result: Tensor | None) -> None:
        """Pass the result on to the stage that needs it."""
        if result is not None:
            self.results[action] = result.contiguous()
            if self.schedule.receiver(action) is not None:
                self.messages.send(action)

    def forward(self, stage: int, microbatch: int, x: Tensor) -> Tensor | None:
        """Compute F: a graph from a new leaf to the stage's output.

        In the last stage the graph ends with the microbatch's part of the mean loss.
        """
        training, y = torch.is_grad_enabled(), None
        if stage > 0 and training and (x.is_floating_point() or x.is_complex()):
            x.requires_grad_()
        if stage == self.last:
            y = self.y[microbatch]
        output = self.stages[stage](x) if y is None else self.stages[stage](x, y)
        if y is not None:
            output = output * self.weights[microbatch]
            self.losses[microbatch] = output.detach()
            if self.loss_scale != 1:
                output = output * self.loss_scale
        elif stage == self.last:
            self.outputs[microbatch] = output
        if training:
            self.saved[stage, microbatch] = x, output
        return output.detach() if stage < self.last else None

    def backward(
        self, stage: int, microbatch: int, gradient: Tensor | None
    ) -> Tensor | None:
        """Compute B: backward from the stage's output; return the input's gradient."""
        x, output = self.saved.pop((stage, microbatch))
        if output.requires_grad:
            torch.autograd.backward(output, gradient)
        if stage == 0:
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad

    def allocate(self, action: Action) -> Tensor:
        """Allocate memory for the result of `action`: activation or gradient."""
        dtype, shape = self.forms[action.stage - (action.op != "F")]
        rows = len(self.x[action.microbatch])
        return torch.empty((rows, *shape), dtype=dtype, device=self.device)

    @property
    def loss(self) -> Tensor:
        """The sum of the weighted losses; 0 on ranks without the last stage."""
        loss = torch.zeros((), device=self.device)
        for microbatch in sorted(self.losses):
            loss += self.losses[microbatch]
        return loss


class OrderedMessages:
    """Messages without tags, as over NCCL: the schedule's order identifies them.

    All ranks know the whole schedule, and so the order in which their neighbours send.
    Sends do not block; the tensors are kept until the end.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, schedule, endpoint = runtime, runtime.schedule, runtime.endpoint
        self.expected = {
            peer: iter(schedule.messages(peer, endpoint.rank))
            for peer in range(endpoint.size)
        }
        self.sends: list[tuple[Tensor, Handle]] = []

    def receive(self, source: Action) -> None:
        """Receive messages until the result of `source` is in `runtime.results`."""
        runtime = self.runtime
        peer = runtime.schedule.rank_of(source.stage)
        while source not in runtime.results:
            message = next(self.expected[peer])
            tensor = runtime.results[message] = runtime.allocate(message)
            announce(runtime.parts, "before_wait", runtime, message)
            runtime.endpoint.receive(tensor, peer).wait()
            announce(runtime.parts, "after_wait", runtime, message)

    def send(self, action: Action) -> None:
        """Start to send the result of `action`, without waiting."""
        runtime = self.runtime
        tensor, peer = runtime.results.pop(action), runtime.schedule.receiver(action)
        announce(runtime.parts, "before_send", runtime, action)
        self.sends.append((tensor, runtime.endpoint.send(tensor, peer)))
        announce(runtime.parts, "after_send", runtime, action, tensor)

    def finish(self) -> None:
        """Wait until all messages have left."""
        for _, handle in self.sends:
            handle.wait()


class Pipeline(nn.Module):
    """This rank's layers of `model`, trained with the other ranks by any schedule.

    Args:
        model: the same on all ranks, with a `spine`, and no parameter on two ranks.
        schedule: a schedule of F and B, for as many ranks as the group has.
        sizes: the number of layers of each stage.
        form: shape of an activation between layers, without its rows: (T, C).
        loss_fn: returns a mean over rows, from the last layer's output and the targets.
        group: the ranks of the pipeline, in order; None means all.
        parts: objects with methods for "before_step", "after_step" and `Runtime`'s.

    Attributes:
        stages: stage number -> stage, for this rank's stages.
        module: the layers of these stages, under their names in `model`.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        sizes: Sequence[int],
        form: tuple[int, ...] | None,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        group: dist.ProcessGroup | None = None,
        parts: Sequence[Any] = (),
    ) -> None:
        super().__init__()
        self.schedule, self.form, self.group = schedule, form, group
        self.parts, layers = list(parts), list(spine(model).items())
        own = schedule.stages_of(dist.get_rank(group))
        cuts = {s: layers[sum(sizes[:s]) : sum(sizes[: s + 1])] for s in own}
        self.stages = {s: Stage(dict(cuts[s]).values(), loss_fn) for s in own}
        self.module = add_layers(
            nn.Module(), {name: layer for s in own for name, layer in cuts[s]}
        )
        used = {*self.module.parameters()}
        named = model.named_parameters()
        self.parameters_by_name = {name: p for name, p in named if p in used}
        self.device = next(model.parameters()).device

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Run forward and backward with a batch, and return its mean loss.

        x: (B, T), y: (B, T), the same on all ranks; the first stage uses x, the last
        one y. If B is no multiple of the number of microbatches, the first microbatches
        have one row more, and a larger weight.
        """
        announce(self.parts, "before_step", self, x, y)
        endpoint, x, y = Endpoint(self.group), x.to(self.device), y.to(self.device)
        forms = [(torch.float32, self.form)] * (self.schedule.num_stages - 1)
        parts = self.parts
        runtime = Runtime(self.stages, self.schedule, endpoint, forms, x, y, parts)
        runtime.run()
        announce(self.parts, "after_step", self)
        loss, last = runtime.loss, self.schedule.rank_of(runtime.last)
        dist.broadcast(loss, endpoint.ranks[last], self.group)
        return loss

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters, by their names in `model`."""
        for name, parameter in self.parameters_by_name.items():
            yield prefix + ("." if prefix else "") + name, parameter
