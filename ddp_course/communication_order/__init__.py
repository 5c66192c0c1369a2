"""Floor 2: the order in which gradients are sent, simulated and on real ranks.

Read the modules in this order:

    schedule    layers, pieces, policies; a step simulated in exact fractions
    judge       check whether a step is legal; its critical path; the best order
    naive       on ranks: each sends its own most urgent gradient, and why that fails
    pieces      a reducer of the engine that sends pieces in an agreed order
    ordered     OrderedDataParallel: the next forward begins layer by layer
    plan        a part that derives the order from measured times
    guards      parts that check and wait
    scheduled   ScheduledDataParallel, the full class; a recorded step, as a schedule
    waiting     layers that sleep for stated times, to compare plan and record

Formulas are in `theory.ordering`. Chapter 15.
"""

from ddp_course.communication_order.judge import (
    best_order,
    check,
    critical_path,
)
from ddp_course.communication_order.naive import NaiveScheduledDataParallel
from ddp_course.communication_order.ordered import OrderedDataParallel
from ddp_course.communication_order.schedule import (
    FIFO,
    WAIT_FOR_ALL,
    GradientPiece,
    OrderError,
    Policy,
    StepEvent,
    TimedStep,
    pieces_of,
    priority,
    simulate_step,
)
from ddp_course.communication_order.scheduled import ScheduledDataParallel, recorded
from ddp_course.communication_order.waiting import SleepingStack
from ddp_course.theory import Layer
