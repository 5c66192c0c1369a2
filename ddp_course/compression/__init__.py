"""Floor 1: gradients that travel in fewer bytes. Read the modules in this order:

    hook        what all compressors are: a state with `mean`, and one hook for them
    exchange    what they need of other ranks, and one process that plays all of them
    feedback    what was left out is not lost: it is added to the next gradient
    sixteen     16 bits a number, which an all-reduce can add
    blocks      8 bits a number and a scale for each block: reduced and gathered
    sign        one bit a number
    sparse      the largest, or random ones
    powersgd    matrices of low rank: an all-reduce can add their factors
    named       each of them by a word

    ddp.register_comm_hook(TopK(0.01), compress)

`ddp` may be the course's or PyTorch's. Chapter 14.
"""

from ddp_course.compression.blocks import Int8
from ddp_course.compression.exchange import Exchange, play
from ddp_course.compression.feedback import ErrorFeedback
from ddp_course.compression.hook import Compressor, compress
from ddp_course.compression.named import compressor
from ddp_course.compression.powersgd import PowerSGD
from ddp_course.compression.sign import Sign
from ddp_course.compression.sixteen import SixteenBits
from ddp_course.compression.sparse import RandomK, TopK
