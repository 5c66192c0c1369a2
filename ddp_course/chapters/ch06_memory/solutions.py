"""Solutions of the exercises of chapter 06."""

from collections.abc import Callable, Iterable

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
    """Divide the memory left beside parameters and states by the bytes of a row."""
    t, c = config.block_size, config.d_model
    of_a_block = 16 * c + 4 + config.n_head
    of_the_head = 2 * c + 2 + config.vocab_size
    of_a_row = 4 * t * (config.n_layer * of_a_block + of_the_head)
    always = 12 * config.num_parameters + 8 * t
    return max(0, (memory - always) // of_a_row)


def step_in_backward(
    model: nn.Module, make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
) -> None:
    """Step each parameter as soon as its gradient is complete; free the gradient."""
    optimizers = {p: make_optimizer([p]) for p in model.parameters() if p.requires_grad}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
