"""Floor 2: tensor parallelism: one matrix product on several ranks.

Three rungs, in this order:

    naive       a matrix cut by columns or rows; whole tensors before and after it
    layers      `ColumnParallelLinear`, `RowParallelLinear`, with f and g: the idea
    gpt         `tensor_parallel`: the course's GPT, cut

`gpt` uses these modules:

    ops         pairs of operations at the borders of a parallel region; norms and
                positions of T/tp tokens
    vocabulary  an embedding that is cut; cross-entropy without gathered logits
    fused       a product and its communication in one operation, which is faster
    random      dropout inside of a region
    checks      checks of the model, of each batch, and of passes that fail
    axis        what `parallelize` calls to cut a model

`mechanisms.exchange` sums and joins tensors over the ranks; `mechanisms.whole_state`
has `full_state_dict` and its companions, `mechanisms.placements` clipping. Chapter 09.
"""

from ddp_course.mechanisms.whole_state import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
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
