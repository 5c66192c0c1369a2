"""Floor 1: numbers of 16 bits and fewer, and how training survives them.

    formats      the bits of a floating-point number; rounding to any format
    rounding     updates that are lost, three cures, and sums in several orders
    autocast     a table of the operations that may compute in 16 bits
    scaler       loss scaling, for gradients that are too small for float16
    master       16-bit parameters, and float32 copies that an optimizer steps
    naive        autocast, scaler and master with PyTorch alone: read it first

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
