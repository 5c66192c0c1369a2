"""Floor 2: ZeRO: what data parallelism keeps N times is cut into N shards.

Read the modules in this order:

    naive         `NaiveZeroRedundancyOptimizer`: whole parameters have owners
    shards        who owns what: plain data
    stage1        `Zero1`: optimizer states are sharded
    stage2        `Zero2`: and so are gradients
    zero_redundancy_optimizer, sharded_gradient_optimizer
                  both with all that one trains with: a list of parts
    optimizer_parts, optimizer_guards
                  these parts: what is added, and what is refused
    units         stage 3: which parameters are gathered together: plain data
    stage3_naive  `NaiveFullyShardedDataParallel`: all is gathered, used and freed
    stage3_simple `SimpleFullyShardedDataParallel`: one unit after the other
    unit_storage  their memory, which comes and goes; what stands there meanwhile
    stage3        `FullyShardedDataParallel`: messages under way meanwhile, and parts
    sharded_parts its parts; what to gather next; shards on the CPU
    metered       what meters need of all of them
    sharded_checkpoint
                  saved shards

Chapters 07 and 08.
"""

from ddp_course.mechanisms.elementwise import NotElementwiseError
from ddp_course.zero.naive import NaiveZeroRedundancyOptimizer, deal
from ddp_course.zero.sharded_gradient_optimizer import ShardedGradientOptimizer
from ddp_course.zero.shards import Piece, ShardedBucket, shard_plan
from ddp_course.zero.stage1 import Zero1
from ddp_course.zero.stage2 import Zero2
from ddp_course.zero.stage3 import FullyShardedDataParallel
from ddp_course.zero.stage3_naive import NaiveFullyShardedDataParallel
from ddp_course.zero.stage3_simple import SimpleFullyShardedDataParallel
from ddp_course.zero.unit_storage import ShardedError
from ddp_course.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer
