"""Floor 2: the ranks step independently, and average their parameters now and then.

Read the modules in this order:

    naive       the loop in ten lines
    local       `LocalSteps` around any optimizer, and DiLoCo's `OuterSteps`
    local_sgd   `LocalSGD` and `DiLoCo`: the full classes, with parts
    simulation  run all ranks in one process, with the same bits
    axis        what `parallelize` calls to add local steps to a model

Chapter 14.
"""

from ddp_course.local_sgd.local import LocalSteps, OuterSteps
from ddp_course.local_sgd.local_sgd import DiLoCo, LocalSGD, NotAveragedError
from ddp_course.local_sgd.naive import train_locally
from ddp_course.local_sgd.simulation import SimulatedTraining, simulate_training
