"""Functions for tests that run them under torchrun."""

import time
from types import SimpleNamespace

import torch.distributed as dist

from ddp_course import train as train_module
from ddp_course.launch import torchrun


def bad_luck_on_rank_1():
    """Train, until rank 1 raises in the third step, before it talks to the others.

    The others wait twenty times as long for torchrun to end them: it may be busy.
    """
    torchrun.time = SimpleNamespace(sleep=lambda seconds: time.sleep(20 * seconds))
    average, steps = train_module.average, []

    def unlucky(tensor):
        steps.append(tensor)
        if dist.get_rank() == 1 and len(steps) == 3:
            raise ZeroDivisionError("rank 1 has bad luck")
        return average(tensor)

    train_module.average = unlucky
    train_module.train(10, data_parallel="average")
