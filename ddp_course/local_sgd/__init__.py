"""Floor 2: the ranks train alone for a while, and average what they have become.

Read the modules in this order:

    naive       the loop in ten lines
    local       the same as an optimizer around any optimizer; and DiLoCo's outer steps
    local_sgd   `LocalSGD` and `DiLoCo`: with the parts of real trainings
    simulation  one process plays all ranks, bit by bit

Chapter 14.
"""

from ddp_course.local_sgd.local import (
    LocalSteps,
    OuterSteps,
    average_parameters,
    drift,
)
from ddp_course.local_sgd.local_sgd import DiLoCo, LocalSGD, NotAveragedError
from ddp_course.local_sgd.naive import train_locally
from ddp_course.local_sgd.simulation import Simulated, simulate
