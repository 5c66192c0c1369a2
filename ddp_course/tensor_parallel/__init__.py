"""Floor 2: tensor parallelism: one matrix product on several ranks.

Read the modules in this order:

    naive       `NaiveModelParallel`: layers on different ranks, who work in turn;
                `NaiveParallelMLP`: a product is cut, and gathered at once
    ops         entering and leaving a parallel region: pairs of autograd operations
    layers      `ColumnParallelLinear`, `RowParallelLinear`, `VocabParallelEmbedding`
    loss        cross-entropy of logits that are never gathered
    layout      which parameter is cut along which dimension: plain data
    gpt         `tensor_parallel`: the spine's GPT, cut; and `plain`, put together again
    products    a product and its communication in one operation, which is faster
    norm, state, random, tokens
                clipping; whole states; dropout; do all ranks have the same batch?

How ranks sum and join tensors is `mechanisms.exchange`. Chapter 09.
"""

from ddp_course.tensor_parallel.gpt import TensorParallelGPT, plain, tensor_parallel
from ddp_course.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    SequenceParallelLayerNorm,
    VocabParallelEmbedding,
)
from ddp_course.tensor_parallel.layout import Cut, layout
from ddp_course.tensor_parallel.loss import vocab_parallel_cross_entropy
from ddp_course.tensor_parallel.naive import (
    NaiveModelParallel,
    NaiveParallelMLP,
    ParallelMLP,
)
from ddp_course.tensor_parallel.ops import (
    copies_to_group,
    copy_to_group,
    gather_from_group,
    gather_sequence,
    reduce_from_group,
    scatter_sequence,
    split_to_group,
)
from ddp_course.tensor_parallel.random import parallel_rng

__all__ = [
    "ColumnParallelLinear",
    "Cut",
    "NaiveModelParallel",
    "NaiveParallelMLP",
    "ParallelMLP",
    "RowParallelLinear",
    "SequenceParallelLayerNorm",
    "TensorParallelGPT",
    "VocabParallelEmbedding",
    "copies_to_group",
    "copy_to_group",
    "gather_from_group",
    "gather_sequence",
    "layout",
    "parallel_rng",
    "plain",
    "reduce_from_group",
    "scatter_sequence",
    "split_to_group",
    "tensor_parallel",
    "vocab_parallel_cross_entropy",
]
