"""ZeRO-Offload for one device: the CPU runs the optimizer's step. Chapter 08.

    backward   each gradient is copied to the host as soon as it is complete
    step       the CPU updates its own copy of the parameters
               the new parameters return to the device

The device keeps parameters and activations only. Ren et al. 2021, "ZeRO-Offload",
sections 3 and 4. (In the paper, parameters and gradients on the device have 16 bits.
With several devices, each has a part of the gradients, as in stage 2, and all gather
the parameters.)
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class OffloadedOptimizer:
    """An optimizer whose gradients, states and master parameters are on the host.

    Args:
        parameters: the parameters on the device that computes.
        optimizer: such as `torch.optim.AdamW`.
        host: a `mechanisms.host_memory.HostMemory`.
        options: the optimizer's options.

    Attributes:
        masters: copies of the parameters on the host, which the optimizer steps.
    """

    @torch.no_grad()
    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: Callable[..., torch.optim.Optimizer],
        host: Any,
        **options: Any,
    ) -> None:
        self.host = host
        self.parameters = [p for p in parameters if p.requires_grad]
        self.masters = [host.empty_like(p).copy_(p) for p in self.parameters]
        self.optimizer = optimizer(self.masters, **options)
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            leave = partial(self._leave, master)
            parameter.register_post_accumulate_grad_hook(leave)

    def _leave(self, master: Tensor, parameter: Tensor) -> None:
        """Send a gradient to the host, and free it on the device."""
        gradient, parameter.grad = parameter.grad, None
        home = self.host.empty_like(gradient)
        self.host.to_host.copy(home, gradient)
        if master.grad is not None:  # a second backward before the step
            self.host.settle()
            home += master.grad
        master.grad = home

    @torch.no_grad()
    def step(self) -> None:
        """Update on the CPU; return when the device has the new parameters."""
        self.host.settle()
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            self.host.to_device.copy(parameter, master)
        self.host.to_device.wait()

    def zero_grad(self) -> None:
        """Free the gradients on the host."""
        self.optimizer.zero_grad()
