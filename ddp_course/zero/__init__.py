"""Floor 2: ZeRO: shard the states that data parallelism stores on every rank.

Read the modules in this order:

    naive         `NaiveZeroRedundancyOptimizer`: each parameter has one owner
    shards        which rank owns which elements: plain data
    stage1        `Zero1`: optimizer states are sharded
    stage2        `Zero2`: gradients are sharded, too
    zero_redundancy_optimizer, sharded_gradient_optimizer
                  stages 1 and 2 with PyTorch's features: a list of parts
    optimizer_parts, optimizer_guards
                  these parts: added features, and errors for mistakes
    units         stage 3: which parameters are gathered together: plain data
    stage3_naive  `NaiveFullyShardedDataParallel`: gather, use and free everything
    stage3_simple `SimpleFullyShardedDataParallel`: one unit after the other
    unit_storage  the memory of units: allocated by a gather, freed after use
    stage3        `FullyShardedDataParallel`: overlapped messages, options, parts
    sharded_parts the parts of stage 3; the order of prefetches; shards on the CPU
    metered       byte meters, memory ledgers and event logs for all these classes
    offloaded     stage 3 with its shards on the host, behind an emulated link
    offloaded_optimizer
                  ZeRO-Offload for one device: gradients out, parameters back
    sharded_checkpoint
                  save and load shards
    axis          what `parallelize` calls to add ZeRO to a model

`full_state_dict` and its companions are functions of `mechanisms.whole_state`.
Chapters 07 and 08.
"""

from ddp_course.mechanisms.elementwise import NotElementwiseError
from ddp_course.mechanisms.whole_state import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from ddp_course.zero.naive import NaiveZeroRedundancyOptimizer, deal
from ddp_course.zero.offloaded_optimizer import OffloadedOptimizer
from ddp_course.zero.sharded_gradient_optimizer import ShardedGradientOptimizer
from ddp_course.zero.shards import RowPiece, ShardedBucket, shard_plan
from ddp_course.zero.stage1 import Zero1
from ddp_course.zero.stage2 import Zero2
from ddp_course.zero.stage3 import FullyShardedDataParallel
from ddp_course.zero.stage3_naive import NaiveFullyShardedDataParallel
from ddp_course.zero.stage3_simple import SimpleFullyShardedDataParallel
from ddp_course.zero.unit_storage import ShardedError
from ddp_course.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer
