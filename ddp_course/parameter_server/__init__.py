"""Floor 2: a parameter server: workers that need not wait for each other.

Read the modules in this order:

    naive       a server in a few lines: it serves the workers in the order of arrival
    rules       which worker waits for which: synchronous, asynchronous, bounded, backup
    row         parameters side by side in one tensor, for messages
    central     `Server`, on one rank, and `Worker`, on the others
    record      the events of a run, as data
    runs        replay a run from its record, or simulate one
    remedies    corrections of stale gradients
    rows        `RowServer`: sends only the rows of a table that a batch uses
    hogwild     no server: all ranks write into the same memory
    sharded     `ShardedServer`: every rank serves 1/N of the weights

Chapter 13.
"""

from ddp_course.parameter_server.central import Server, ServerGoneError, Worker
from ddp_course.parameter_server.hogwild import hogwild
from ddp_course.parameter_server.naive import serve, work
from ddp_course.parameter_server.record import Record, ServerEvent
from ddp_course.parameter_server.remedies import (
    DelayCompensation,
    by_staleness,
    corrected_momentum,
)
from ddp_course.parameter_server.row import ParameterRow
from ddp_course.parameter_server.rows import RowServer, RowWorker
from ddp_course.parameter_server.rules import (
    ASYNCHRONOUS,
    SYNCHRONOUS,
    Book,
    Rule,
    backup,
    bounded,
)
from ddp_course.parameter_server.runs import replay, simulate_run
from ddp_course.parameter_server.sharded import ShardedServer
