"""Floor 2: a parameter server: training in which not everybody waits for everybody.

Read the modules in this order:

    rules     who waits for whom: synchronous, asynchronous, bounded, backup; a ledger
    central   `Server`, on one rank, and `Worker`, on the others
    record    what happened, as data: `replay` it, or `simulate` what would happen
    remedies  what a server may take in place of a stale gradient
    memory    the same on one machine, through memory
    rows      `RowServer`: only the rows of a table that are touched are sent
    hogwild   no server at all: everybody writes into the same memory
    sharded   `ShardedServer`: every rank serves 1/N

Chapter 13.
"""

from ddp_course.parameter_server.central import Server, ServerGoneError, Worker
from ddp_course.parameter_server.hogwild import hogwild
from ddp_course.parameter_server.memory import MemoryServer, MemoryWorker
from ddp_course.parameter_server.record import Record, Row, replay, simulate
from ddp_course.parameter_server.remedies import (
    DelayCompensation,
    by_staleness,
    corrected_momentum,
)
from ddp_course.parameter_server.rows import RowServer, RowWorker
from ddp_course.parameter_server.rules import (
    ASYNCHRONOUS,
    SYNCHRONOUS,
    Book,
    Event,
    Rule,
    backup,
    bounded,
)
from ddp_course.parameter_server.sharded import ShardedServer
