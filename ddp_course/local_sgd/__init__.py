"""Floor 2: the ranks train alone for a while, and average what they have become.

Read the modules in this order:

    local       the loop in ten lines; `LocalSGD`, around any optimizer; `DiLoCo`
    simulation  one process plays all ranks, bit by bit

Chapter 14.
"""

from ddp_course.local_sgd.local import (
    DiLoCo,
    LocalSGD,
    NotAveragedError,
    average_parameters,
    drift,
    train_locally,
)
from ddp_course.local_sgd.simulation import Simulated, simulate
