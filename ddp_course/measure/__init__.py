"""Floor 0: the meters, each beside what it measures and none inside it.

Read the modules in this order:

    meter       bytes, by rank and peer: counted by our own collectives
    events      what happened when: time-lines, overlap, traces for Perfetto
    blocks      which meters and logs are open now
    pytorch     which collectives PyTorch calls, and how large they are
    system      what the operating system saw this process write
"""

from ddp_course.measure.events import (
    Event,
    EventLog,
    active_logs,
    busy,
    chrome_trace,
    overlap,
    save_trace,
)
from ddp_course.measure.meter import (
    ByteMeter,
    Bytes,
    active_meters,
    table,
    unmatched,
)
from ddp_course.measure.pytorch import Call, TorchCollectives
from ddp_course.measure.system import SystemBytes

__all__ = [
    "ByteMeter",
    "Bytes",
    "Call",
    "Event",
    "EventLog",
    "SystemBytes",
    "TorchCollectives",
    "active_logs",
    "active_meters",
    "busy",
    "chrome_trace",
    "overlap",
    "save_trace",
    "table",
    "unmatched",
]
