"""Chapter 06."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ddp_course.model import GPTConfig


def my_ledger(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of storages by kind, each storage once."""

    def count(tensors: Iterable[Tensor]) -> int:
        storages = [tensor.untyped_storage() for tensor in tensors]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    parameters = list(model.parameters())
    states = [state for kept in optimizer.state.values() for state in kept.values()]
    return {
        "parameters": count(parameters),
        "gradients": count(p.grad for p in parameters if p.grad is not None),
        "optimizer states": count(s for s in states if isinstance(s, Tensor)),
    }


def largest_batch(config: GPTConfig, memory: int) -> int:
    """Return the most rows: what is left beside parameters and states, by rows."""
    t, c = config.block_size, config.d_model
    of_a_block = 16 * c + 4 + config.n_head
    of_the_head = 2 * c + 2 + config.vocab_size
    of_a_row = 4 * t * (config.n_layer * of_a_block + of_the_head)
    always = 12 * config.num_parameters + 8 * t
    return max(0, (memory - always) // of_a_row)


class _Again(torch.autograd.Function):
    """Forward without a graph; backward runs the function again, with one."""

    @staticmethod
    def forward(
        ctx: Any, function: nn.Module, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        """Run it, and remember how the dice lay before."""
        ctx.function, ctx.dice = function, torch.get_rng_state()
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        """Throw the same dice again, and return a gradient for each input."""
        [x] = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.dice)
            y = ctx.function(x)
        inputs = [x, *ctx.function.parameters()]
        trained = [tensor for tensor in inputs if tensor.requires_grad]
        found = iter(torch.autograd.grad(y, trained, gradient))
        return None, *[next(found) if t.requires_grad else None for t in inputs]


def my_recompute(function: nn.Module, x: Tensor) -> Tensor:
    """Return function(x): its parameters are inputs, too, so they get gradients."""
    return _Again.apply(function, x, *function.parameters())


def step_in_backward(
    model: nn.Module, make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
) -> None:
    """Step each parameter as soon as its gradient is there, and free the gradient."""
    optimizers = {p: make_optimizer([p]) for p in model.parameters() if p.requires_grad}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
