"""A part of `PipelineParallel`: gradients of parameters that several ranks use.

The tied GPT's output matrix is its token embedding, so the first and the last rank of a
pipeline both have it, and a part of its gradient each: the gradient is the sum. Chapter
10.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ddp_course.collectives.port import Port
from ddp_course.pipeline.runtime import Runtime


class SharedGradients:
    """Sums the gradients of parameters that several ranks use, over these ranks.

    Every rank sends its part to each of the others, and all add in the order of the
    ranks: they get the same bits, and what was equal before a step is equal after it.
    Bytes sent by each of k ranks: k - 1 times the gradient's.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shared: Mapping[str, Sequence[int]],
        rank: int,
    ) -> None:
        self.rank = rank
        self.shared = {
            parameters[name]: list(ranks)
            for name, ranks in shared.items()
            if rank in ranks and parameters[name].requires_grad
        }
        self.before: dict[nn.Parameter, Tensor | None] = {}

    def before_run(self, runtime: Runtime) -> None:
        """Put aside the gradients of earlier steps: they have been summed already."""
        if torch.is_grad_enabled():
            self.before = {parameter: parameter.grad for parameter in self.shared}
            for parameter in self.before:
                parameter.grad = None

    def after_run(self, runtime: Runtime) -> None:
        """Sum the gradients of this step; in an evaluation there are none."""
        if torch.is_grad_enabled():
            self.sum(runtime.port)

    @torch.no_grad()
    def sum(self, port: Port) -> None:
        """Replace each gradient by its sum over the ranks, and add what was there."""
        for parameter, ranks in self.shared.items():
            own = parameter.grad
            own = torch.zeros_like(parameter) if own is None else own.contiguous()
            parts = {r: own if r == self.rank else torch.empty_like(own) for r in ranks}
            others = [r for r in ranks if r != self.rank]
            port.exchange([(own, r) for r in others], [(parts[r], r) for r in others])
            parameter.grad = parts[ranks[0]].clone()
            for r in ranks[1:]:
                parameter.grad += parts[r]
            if self.before[parameter] is not None:
                parameter.grad += self.before[parameter]
        self.before = {}
