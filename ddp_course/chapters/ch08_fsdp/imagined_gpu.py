"""An imagined GPU: a formula says how long its matrix products take. Chapter 08."""

import time
from typing import Any

from torch import nn

from ddp_course.model import build_gpt

FORWARD, BACKWARD = 100e-9, 200e-9  # seconds per weight of a matrix


def gpt_on_an_imagined_gpu() -> nn.Module:
    """Return the course's GPT; each matrix sleeps as long as an imagined GPU computes.

    The sleep is added to the time that the CPU itself takes.
    """

    def compute(layer: nn.Linear, inputs: Any, per_weight: float = FORWARD) -> None:
        time.sleep(per_weight * layer.weight.numel())

    def compute_backward(layer: nn.Linear, gradients: Any) -> None:
        compute(layer, gradients, BACKWARD)

    model = build_gpt("1m")
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(compute)
            layer.register_full_backward_pre_hook(compute_backward)
    return model
