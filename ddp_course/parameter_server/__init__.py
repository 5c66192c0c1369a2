"""Floor 2: a parameter server: training in which not everybody waits for everybody.

Read the modules in this order:

    naive       a server in a few lines: whoever comes next is served next
    rules       who waits for whom: synchronous, asynchronous, bounded, backup; a ledger
    central     `Server`, on one rank, and `Worker`, on the others
    row         parameters side by side, as messages have them
    record      what happened, as data
    runs        repeat a run from its record; or `simulate` one
    remedies    what a step takes in place of a stale gradient
    rows        `RowServer`: only the rows of a table that a batch touches are sent
    hogwild     no server at all: everybody writes into the same memory
    sharded     `ShardedServer`: every rank serves 1/N

Chapter 13.
"""

from ddp_course.parameter_server.central import Server, ServerGoneError, Worker
from ddp_course.parameter_server.hogwild import hogwild
from ddp_course.parameter_server.naive import serve, work
from ddp_course.parameter_server.record import Event, Record
from ddp_course.parameter_server.remedies import (
    DelayCompensation,
    by_staleness,
    corrected_momentum,
)
from ddp_course.parameter_server.row import Row
from ddp_course.parameter_server.rows import RowServer, RowWorker
from ddp_course.parameter_server.rules import (
    ASYNCHRONOUS,
    SYNCHRONOUS,
    Book,
    Rule,
    backup,
    bounded,
)
from ddp_course.parameter_server.runs import replay, simulate
from ddp_course.parameter_server.sharded import ShardedServer
