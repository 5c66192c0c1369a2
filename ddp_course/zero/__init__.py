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
    unit_storage, sharded_module
                  their memory, which comes and goes; what all stage 3 modules are
    stage3_naive  `NaiveFullyShardedDataParallel`: gather, use, free; nothing ahead
    stage3_simple `SimpleFullyShardedDataParallel`: one unit after the other
    stage3        `FullyShardedDataParallel`: the next unit is gathered meanwhile
    order, offload, sharded_checkpoint
                  what comes next; shards on the CPU; saved shards

Chapters 07 and 08.
"""

from ddp_course.zero.elementwise import NotElementwiseError
from ddp_course.zero.naive import NaiveZeroRedundancyOptimizer
from ddp_course.zero.sharded_module import ShardedError
from ddp_course.zero.shards import Piece, ShardedBucket, deal, shard_plan
from ddp_course.zero.stage1 import ZeroRedundancyOptimizer
from ddp_course.zero.stage2 import ShardedGradientOptimizer
from ddp_course.zero.stage3 import FullyShardedDataParallel
from ddp_course.zero.stage3_naive import NaiveFullyShardedDataParallel
from ddp_course.zero.stage3_simple import SimpleFullyShardedDataParallel

__all__ = [
    "FullyShardedDataParallel",
    "NaiveFullyShardedDataParallel",
    "NaiveZeroRedundancyOptimizer",
    "NotElementwiseError",
    "Piece",
    "ShardedBucket",
    "ShardedError",
    "ShardedGradientOptimizer",
    "SimpleFullyShardedDataParallel",
    "ZeroRedundancyOptimizer",
    "deal",
    "shard_plan",
]
