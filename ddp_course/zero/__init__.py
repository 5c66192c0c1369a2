"""Floor 2: ZeRO: what data parallelism keeps N times is cut into N shards.

Read the modules in this order:

    shards        who owns what: plain data
    naive         `NaiveZeroRedundancyOptimizer`: whole parameters have owners
    sharded       what all stages have in common: an optimizer that steps its own part
    stage1        `ZeroRedundancyOptimizer`: optimizer states are sharded
    flat, reducer its memory, and its engine: from autograd's hook to the reduce-scatter
    stage2        `ShardedGradientOptimizer`: and so are gradients
    elementwise, agreed, alone, states, slots, window
                  their tools: may parts be stepped alone? do all ranks mean the same?
                  state_dict; buckets and where gradients lie in them
    units         stage 3: which parameters are gathered together: plain data
    stage3_naive  `NaiveFullyShardedDataParallel`: gather, use, free; nothing ahead
    freed, gather, live, order
                  its memory, which comes and goes; how shards come together; what next
    stage3        `FullyShardedDataParallel`: the next unit is gathered meanwhile
    offload, sharded_module, full_state, sharded_checkpoint
                  shards on the CPU; the whole state; saved shards

Chapters 07 and 08.
"""

from ddp_course.zero.elementwise import NotElementwiseError
from ddp_course.zero.freed import ShardedError
from ddp_course.zero.naive import NaiveZeroRedundancyOptimizer
from ddp_course.zero.shards import Piece, ShardedBucket, deal, shard_plan
from ddp_course.zero.stage1 import ZeroRedundancyOptimizer
from ddp_course.zero.stage2 import ShardedGradientOptimizer
from ddp_course.zero.stage3 import FullyShardedDataParallel
from ddp_course.zero.stage3_naive import NaiveFullyShardedDataParallel

__all__ = [
    "FullyShardedDataParallel",
    "NaiveFullyShardedDataParallel",
    "NaiveZeroRedundancyOptimizer",
    "NotElementwiseError",
    "Piece",
    "ShardedBucket",
    "ShardedError",
    "ShardedGradientOptimizer",
    "ZeroRedundancyOptimizer",
    "deal",
    "shard_plan",
]
