"""Floor 0: the meters. The code that they measure need not be changed.

Read the modules in this order:

    meter       bytes sent, by rank and peer, as the course's collectives count them
    events      timelines: events, and the time in which they overlap
    blocks      the meters and logs that are open now
    pytorch     the collectives that PyTorch calls, and their sizes
    system      the bytes that this process writes, as the operating system counts them
    storages    the memory of tensors, and labels on it
    memory      the bytes that are kept now, by kind
    memory_log  the bytes that are kept over time; `allocations` reports changes
"""

from ddp_course.ledger import KINDS, Ledger
from ddp_course.measure.blocks import active_logs, active_meters
from ddp_course.measure.events import Event, EventLog, busy, overlap
from ddp_course.measure.memory import resident
from ddp_course.measure.memory_log import MemoryLog, Moment
from ddp_course.measure.meter import ByteMeter, Bytes, table
from ddp_course.measure.pytorch import CollectiveCall, TorchCollectives
from ddp_course.measure.storages import label
from ddp_course.measure.system import SystemBytes
