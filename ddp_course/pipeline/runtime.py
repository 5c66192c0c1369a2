"""The runtime: a rank carries out its row of a schedule, whatever the schedule is.

    for action in row:
        given = self.receive(action)
        made = self.compute(action, given)
        self.send(action, made)

    F  take the input, compute, keep input and output, hand the output over
    B  take the output's gradient, go backward, hand the input's gradient over

A stage hands over to the stage after it or before it, as a message or, on the same
rank, just so. What F keeps is dropped by B: nothing is kept that the schedule does not
ask for. `Runtime` makes one step, `Pipeline` is a model that is trained so; what else
one may want of it is in `PipelineParallel`. Chapter 10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from ddp_course.collectives.port import Handle, Port
from ddp_course.model import cross_entropy
from ddp_course.pipeline.schedule import Action, Schedule
from ddp_course.pipeline.stages import Stage, part_of_model, spine, stage_plan
from ddp_course.precision.autocast import autocast_dtype

Form = tuple[torch.dtype, tuple[int, ...]]  # of an activation, without its rows


class Runtime:
    """One batch on its way through a pipeline, as far as one rank sees it.

    Args:
        pipeline: has this rank's stages and knows the other ranks.
        schedule: for as many ranks.
        x: (B, ...), the model's input; y: (B, ...), the targets, or None.
    """

    def __init__(
        self, pipeline: Pipeline, schedule: Schedule, x: Tensor, y: Tensor | None
    ) -> None:
        self.pipeline, self.stages, self.schedule = pipeline, pipeline.stages, schedule
        self.port, self.forms = pipeline.port, pipeline.forms_of(x)
        self.last, m = schedule.num_stages - 1, schedule.num_microbatches
        self.x = x.to(pipeline.device).tensor_split(m)
        self.y = [None] * m if y is None else y.to(pipeline.device).tensor_split(m)
        self.weights = [len(part) / len(x) for part in self.x]  # of the loss; sum 1
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # from F to B
        self.made: dict[Action, Tensor] = {}  # here, or come from another rank
        self.coming = {
            peer: iter(schedule.messages(peer, self.port.rank))
            for peer in range(schedule.num_ranks)
        }
        self.leaving: list[tuple[Tensor, Handle]] = []
        self.losses: dict[int, Tensor] = {}  # of the last stage, weighted
        self.outputs: dict[int, Tensor] = {}  # of the last stage, without targets

    def run(self) -> None:
        """Carry out this rank's row."""
        for action in self.schedule.ranks[self.port.rank]:
            given = self.receive(action)
            made = self.compute(action, given)
            self.send(action, made)
        for _, handle in self.leaving:
            handle.wait()

    def receive(self, action: Action) -> Tensor | None:
        """Return what another stage has made for `action`, or the batch; else None."""
        source = self.schedule.source(action)
        if source is None:
            return self.x[action.microbatch] if action.op == "F" else None
        peer = self.schedule.rank_of(source.stage)
        while source not in self.made:  # messages have no names: they come in order
            coming = next(self.coming[peer])
            self.made[coming] = self.room_for(coming)
            self.port.receive(self.made[coming], peer).wait()
        return self.made.pop(source)

    def compute(self, action: Action, given: Tensor | None) -> Tensor | None:
        """Go forward or backward; return what is made for another stage, or None."""
        do = self.forward if action.op == "F" else self.backward
        return do(action.stage, action.microbatch, given)

    def send(self, action: Action, made: Tensor | None) -> None:
        """Hand over what was made; nobody waits, its memory is kept until the end."""
        peer = self.schedule.receiver(action)
        if peer is not None:
            made = made.contiguous()
            self.leaving.append((made, self.port.send(made, peer)))
        elif made is not None:
            self.made[action] = made  # for another stage of this rank

    def forward(self, stage: int, microbatch: int, x: Tensor) -> Tensor | None:
        """F: the graph of this stage begins with a new leaf, and ends with its output.

        Of the last stage, it ends with the microbatch's part of the batch's mean loss.
        """
        training = torch.is_grad_enabled()
        if stage > 0 and training and x.is_floating_point():
            x.requires_grad_()
        y = self.y[microbatch] if stage == self.last else None
        output = self.call(stage, x) if y is None else self.call(stage, x, y)
        if y is not None:
            output = output * self.weights[microbatch]
            self.losses[microbatch] = output.detach()
            if self.pipeline.loss_scale != 1:
                output = output * self.pipeline.loss_scale
        elif stage == self.last:
            self.outputs[microbatch] = output
        if training:
            self.kept[stage, microbatch] = x, output
        return output.detach() if stage < self.last else None

    def call(self, stage: int, *arguments: Tensor) -> Tensor:
        """Compute a stage."""
        return self.stages[stage](*arguments)

    def backward(
        self, stage: int, microbatch: int, gradient: Tensor | None
    ) -> Tensor | None:
        """B: enter the graph at its output; return the gradient of its input."""
        x, output = self.kept.pop((stage, microbatch))
        if output.requires_grad:
            torch.autograd.backward(output, gradient)
        if stage == 0:
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad

    def room_for(self, action: Action) -> Tensor:
        """Return memory for what `action` makes: an activation, or its gradient."""
        before_boundary = action.stage - (action.op != "F")
        dtype, shape = self.forms[before_boundary]
        rows = len(self.x[action.microbatch])
        return torch.empty((rows, *shape), dtype=dtype, device=self.pipeline.device)


class Pipeline(nn.Module):
    """This rank's layers of `model`, trained with the other ranks by any schedule.

    Args:
        model: the same on all ranks, with a `spine`, and no parameter on two ranks.
        schedule: of F and B, for as many ranks as the group has.
        sizes: for each stage the number of its layers.
        group: the ranks of the pipeline, in order; None are all.
        loss_fn: from the last layer's output and the targets to a mean over rows.

    Attributes:
        stages: this rank's, by number; `module` has their layers by their plain names.
        loss_scale: backward is that of the loss times this number (loss scaling).
    """

    loss_scale = 1.0

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        sizes: Sequence[int],
        group: dist.ProcessGroup | None = None,
        loss_fn: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    ) -> None:
        super().__init__()
        self.schedule, self.group = schedule, group
        self.plan = stage_plan(model, sizes, schedule.ranks_of_stages)
        rank, layers, names = self.port.rank, spine(model), self.plan.layers
        own = schedule.stages_of(rank)
        self.stages = {s: Stage([layers[n] for n in names[s]], loss_fn) for s in own}
        self.module = part_of_model({n: layers[n] for s in own for n in names[s]})
        named, users = model.named_parameters(), self.plan.holders
        self.parameters_by_name = {n: p for n, p in named if rank in users[n]}
        self.device = next(model.parameters()).device
        self._forms: dict[tuple, dict[int, Form]] = {}

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Go forward and backward with a batch, and return its mean loss.

        x: (B, T), y: (B, T), the same on all ranks; the first stage uses x, the last
        one y. If B is no multiple of the number of microbatches, the first have one row
        more, and count as much more.
        """
        runtime = Runtime(self, self.schedule, x, y)
        runtime.run()
        loss = self.own_loss(runtime)
        dist.broadcast(loss, self.port.ranks[self.plan.ranks[-1]], self.group)
        return loss

    def own_loss(self, runtime: Runtime) -> Tensor:
        """Return the sum of the microbatches' losses; 0 without the last stage."""
        loss = torch.zeros((), device=self.device)
        for microbatch in sorted(runtime.losses):
            loss += runtime.losses[microbatch]
        return loss

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters, by their names in the plain model."""
        for name, parameter in self.parameters_by_name.items():
            yield prefix + ("." if prefix else "") + name, parameter

    @property
    def port(self) -> Port:
        """How messages leave and arrive, counted by the meters that are open now."""
        return Port(self.group)

    @torch.no_grad()
    def forms_of(self, x: Tensor) -> dict[int, Form]:
        """Return the forms of what passes each boundary; called by all ranks.

        For a kind of batch that is new, every stage is given one row of the right form,
        of zeros but for the first one, and tells what it returns. Its layers are in
        evaluation mode meanwhile, and have copies of their buffers: they draw no random
        numbers, and nothing that they count or average is changed.
        """
        kind = x.dtype, x.shape[1:], autocast_dtype(self.device.type)
        if kind not in self._forms:
            row, ranks, forms = x[:1].to(self.device), self.port.ranks, {}
            for stage, home in enumerate(self.plan.ranks[:-1]):
                form = [None]
                if stage in self.stages:
                    with evaluating(self.stages[stage]) as module:
                        copies = {k: b.clone() for k, b in module.named_buffers()}
                        made = functional_call(module, copies, row)
                    form = [(made.dtype, tuple(made.shape[1:]))]
                dist.broadcast_object_list(form, ranks[home], self.group)
                dtype, shape = forms[stage] = form[0]
                row = torch.zeros((1, *shape), dtype=dtype, device=self.device)
            self._forms[kind] = forms
        return self._forms[kind]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[nn.Module]:
    """Within this block, have `module` in evaluation mode."""
    training = {one: one.training for one in module.modules()}
    try:
        yield module.eval()
    finally:
        for one, was in training.items():
            one.training = was
