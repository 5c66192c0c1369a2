"""Floor 1: numbers of 16 bits and fewer, and how training survives them.

    formats      what the bits of a number mean; rounding to any format
    rounding     updates that are lost, three cures, and sums in another order
    autocast     which operations may compute in 16 bits: a table
    scaler       gradients that are too small for float16, made larger for a while
    master       16-bit parameters, and their float32 copies that an optimizer steps
    naive        the last three with PyTorch alone: read it first

Chapter 12.
"""

from ddp_course.precision.autocast import Autocast
from ddp_course.precision.formats import FORMATS, Format, bits_of
from ddp_course.precision.master import MasterWeights
from ddp_course.precision.naive import (
    NaiveAutocast,
    NaiveGradScaler,
    NaiveMasterWeights,
)
from ddp_course.precision.scaler import GradScaler
