"""Floor 2: ZeRO: what data parallelism keeps N times is cut into N shards.

Read the modules in this order:

    shards        who owns what: plain data
    naive         `NaiveZeroRedundancyOptimizer`: whole parameters have owners
    sharded       what all stages have in common: an optimizer that steps its own part
    stage1        `ZeroRedundancyOptimizer`: optimizer states are sharded
    flat, reducer its memory, and its engine: from autograd's hook to the reduce-scatter
    stage2        `ShardedGradientOptimizer`: and so are gradients
    elementwise, agreed, states, norm
                  their tools: may parts be stepped alone? do all ranks mean the same?
                  state_dict, and the norm of gradients that lie in shards

Chapters 07 and 08.
"""

from ddp_course.zero.elementwise import NotElementwiseError
from ddp_course.zero.naive import NaiveZeroRedundancyOptimizer
from ddp_course.zero.shards import Piece, ShardedBucket, deal, shard_plan
from ddp_course.zero.stage1 import ZeroRedundancyOptimizer
from ddp_course.zero.stage2 import ShardedGradientOptimizer

__all__ = [
    "NaiveZeroRedundancyOptimizer",
    "NotElementwiseError",
    "Piece",
    "ShardedBucket",
    "ShardedGradientOptimizer",
    "ZeroRedundancyOptimizer",
    "deal",
    "shard_plan",
]
