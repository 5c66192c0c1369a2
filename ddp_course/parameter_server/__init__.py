"""Floor 2: a parameter server: training in which not everybody waits for everybody.

Read the modules in this order:

    rules     who waits for whom: synchronous, asynchronous, bounded, backup; a ledger
    central   `Server`, on one rank, and `Worker`, on the others
    record    what happened, as data: `replay` it, or `simulate` what would happen

Chapter 13.
"""

from ddp_course.parameter_server.central import Server, ServerGoneError, Worker
from ddp_course.parameter_server.record import Record, Row, replay, simulate
from ddp_course.parameter_server.rules import (
    ASYNCHRONOUS,
    SYNCHRONOUS,
    Book,
    Event,
    Rule,
    backup,
    bounded,
)

__all__ = [
    "ASYNCHRONOUS",
    "SYNCHRONOUS",
    "Book",
    "Event",
    "Record",
    "Row",
    "Rule",
    "Server",
    "ServerGoneError",
    "Worker",
    "backup",
    "bounded",
    "replay",
    "simulate",
]
