"""Floor 1: send gradients in fewer bytes.

Read the modules in this order:

    naive       16 bits, and low rank, for one tensor in a few lines each
    exchange    the collectives that a compressor needs
    feedback    error feedback: add what was left out to the next gradient
    hook        `Compressor`, the base class, and the hook that calls it
    sixteen     16 bits a number, which an all-reduce can add
    blocks      8 bits a number and a scale for each block: reduced and gathered
    sign        one bit a number
    sparse      the largest numbers, or random ones
    powersgd    matrices of low rank: an all-reduce can add their factors
    course_exchange
                this course's metered collectives, which run during backward
    play        run the compressors of all ranks in one process
    named       compressors by name, such as "topk:0.01"

    ddp.register_comm_hook(TopK(0.01), compress)

`ddp` may be the course's or PyTorch's. Chapter 14.
"""

from ddp_course.compression.blocks import Int8
from ddp_course.compression.course_exchange import CourseExchange
from ddp_course.compression.exchange import Exchange
from ddp_course.compression.feedback import ErrorFeedback
from ddp_course.compression.hook import Compressor, compress
from ddp_course.compression.naive import mean_in_16_bits, mean_in_low_rank
from ddp_course.compression.named import compressor
from ddp_course.compression.play import play
from ddp_course.compression.powersgd import PowerSGD
from ddp_course.compression.sign import Sign
from ddp_course.compression.sixteen import SixteenBits
from ddp_course.compression.sparse import RandomK, TopK
