"""Floor 2: tensor parallelism: one matrix product on several ranks.

The ladder:

    naive       a matrix cut by columns or rows; whole tensors before and after it
    layers      `ColumnParallelLinear`, `RowParallelLinear`, with f and g: the idea
    gpt         `tensor_parallel`: the spine's GPT, cut, with all that follows

The last one is made of:

    ops         the other pairs of operations, where tensors enter and leave a region;
                norms and positions of T/tp tokens
    vocabulary  an embedding that is cut; cross-entropy of logits never gathered
    fused       a product and its communication in one operation, which is faster
    random      dropout inside of a region

How ranks sum and join tensors is `mechanisms.exchange`; whole states and clipping
follow from `mechanisms.placements`. Chapter 09.
"""

from ddp_course.tensor_parallel.gpt import TensorParallelGPT, tensor_parallel
from ddp_course.tensor_parallel.layers import (
    ColumnParallelLinear,
    ParallelMLP,
    RowParallelLinear,
    copy_to_group,
    reduce_from_group,
)
from ddp_course.tensor_parallel.naive import (
    NaiveColumnLinear,
    NaiveParallelMLP,
    NaiveRowLinear,
)
from ddp_course.tensor_parallel.ops import (
    SequenceParallelLayerNorm,
    gather_from_group,
    gather_sequence,
    scatter_sequence,
    split_to_group,
)
from ddp_course.tensor_parallel.random import parallel_rng
from ddp_course.tensor_parallel.vocabulary import (
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
