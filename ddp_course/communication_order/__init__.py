"""Floor 2: in which order gradients travel, as data and on ranks. Read in this order:

    schedule    layers, pieces, policies; a step played through in fractions
    judge       is it legal, what holds it up, is there a better order?
    naive       on ranks: each sends what is most urgent of its own; what comes of it
    pieces      a reducer of the engine: gradients leave in pieces, by an agreed order
    ordered     OrderedDataParallel: the next forward begins layer by layer
    plan        a part: from measured times to the order
    guards      parts: what real trainings check
    scheduled   ScheduledDataParallel: both together; a recorded step, as a schedule
    waiting     layers that wait for stated times, to lay the one beside the other

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
    OrderError,
    Piece,
    Played,
    Policy,
    Timed,
    follow,
    pieces_of,
    priority,
    simulate,
)
from ddp_course.communication_order.scheduled import ScheduledDataParallel, recorded
from ddp_course.communication_order.waiting import Waiting
from ddp_course.theory import Layer
