"""Floor 0: the meters, each beside what it measures and none inside it.

Read the modules in this order:

    meter       bytes, by rank and peer: counted by our own collectives
    events      what happened when: time-lines, overlap, traces for Perfetto
    blocks      which meters and logs are open now
    pytorch     which collectives PyTorch calls, and how large they are
    system      what the operating system saw this process write
    storages    the memory that tensors look at, and labels on it
    memory      which bytes are kept now, by kind
    memory_log  which bytes are kept when, by kind; hears of it from `allocations`
"""

from ddp_course.measure.blocks import active_logs, active_meters
from ddp_course.measure.events import (
    Event,
    EventLog,
    busy,
    chrome_trace,
    overlap,
    save_trace,
)
from ddp_course.measure.memory import Ledger, resident
from ddp_course.measure.memory_log import MemoryLog, Moment
from ddp_course.measure.meter import ByteMeter, Bytes, table
from ddp_course.measure.pytorch import Call, TorchCollectives
from ddp_course.measure.storages import KINDS, label
from ddp_course.measure.system import SystemBytes
