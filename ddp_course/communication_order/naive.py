"""The naive scheduler: each rank sends its own most urgent gradient.

That is right for one rank, or with a parameter server, which accepts any order (P3).
But all ranks must call the same collectives in the same order, and which gradients are
ready differs: if one rank's backward is a little slower, ranks send different layers at
the same time. Gradients of equal sizes are then added to each other without any error;
with different sizes the course's collectives raise, gloo may not, and NCCL hangs.
Chapter 15.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer


class NaiveScheduledDataParallel(nn.Module):
    """A wrapper that sends the first layers' gradients first; forward waits for each.

    Every layer has an optimizer of its own, `make_optimizer(parameters)`. The ranks do
    not agree on the order of their messages: do not train with it.
    """

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        all_reduce: Callable[..., Any] = dist.all_reduce,
    ) -> None:
        super().__init__()
        self.module, self.all_reduce = module, all_reduce
        self.ready: list[tuple[int, nn.Parameter]] = []  # (layer, parameter) to send
        self.work: dict[nn.Parameter, Any] = {}  # handles of sends under way
        layers = [m for m in module.modules() if [*m.parameters(recurse=False)]]
        for k, layer in enumerate(layers):
            own = [*layer.parameters(recurse=False)]
            step = partial(self._step_layer, own, make_optimizer(own))
            layer.register_forward_pre_hook(lambda *_, step=step: step())
            for p in own:
                dist.broadcast(p.data, 0)
                p.register_post_accumulate_grad_hook(partial(self._add_ready, k))

    def forward(self, *inputs: Any) -> Any:
        """Run the module; each layer waits for its own gradients, and steps."""
        return self.module(*inputs)

    def _add_ready(self, layer: int, parameter: nn.Parameter) -> None:
        """Add a ready gradient; send the most urgent one if none is under way."""
        self.ready.append((layer, parameter))
        if all(work.is_completed() for work in self.work.values()):
            self._send_most_urgent()

    def _send_most_urgent(self) -> None:
        most_urgent = min(self.ready, key=lambda pair: pair[0])
        self.ready.remove(most_urgent)
        parameter = most_urgent[1]
        parameter.grad /= dist.get_world_size()
        self.work[parameter] = self.all_reduce(parameter.grad, async_op=True)

    def step(self) -> None:
        """Send all other gradients, by urgency; each layer steps when it runs next."""
        while self.ready:
            self._send_most_urgent()

    def _step_layer(self, parameters: list[Tensor], optimizer: Optimizer) -> None:
        """Wait for a layer's gradients before it runs, and step with them."""
        for parameter in parameters:
            if parameter in self.work:
                self.work.pop(parameter).wait()
        optimizer.step()
        optimizer.zero_grad()
