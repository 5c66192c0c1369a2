"""Floor 0: closed forms for time, bytes and memory. Nothing is sent or measured.

`theory.all_reduce_ring(4, 2**20).over(link)` is the time in seconds that four ranks
need to all-reduce 1 MiB in a ring of links like `link`. Read the modules in this order:

    collectives one table: messages, bytes on the critical path, bytes that each rank
                sends; bounds, bus bandwidth, ring or tree (chapters 02 and 03)
    fit         alpha and beta, estimated from measured times (chapter 02)
    memory      stored and sent bytes of a rank, by ZeRO stage (chapters 06 to 08)
    activations bytes that forward keeps for backward (chapter 06)
    offload     the time of a step whose states lie on the host (chapter 08)
    plan        the ZeRO stages that fit on a GPU, and their costs (chapter 08)
    tensor_parallel
                sent and stored bytes of tensor parallelism (chapter 09)
    pipeline    time, bubble, activations and bytes of a pipeline (chapters 10 and 11)
    composition stored and sent bytes of a rank in dp x tp x pp x cp, along each axis
    asynchrony  gradients per second, staleness, stable learning rates (chapter 13)
    compression bytes of compressed gradients, and of local SGD (chapter 14)
    ordering    step times for any order of sending gradients (chapter 15)
    context_parallel
                bytes and work of attention over a divided sequence (chapter 16)
    experts     costs of mixtures, and bytes of sending tokens to experts (chapter 17)
    checks      checks of the formulas' arguments
"""

from ddp_course.theory.activations import (
    gpt_activations,
    gpt_peak,
    layer_activations,
    model_activations,
)
from ddp_course.theory.asynchrony import (
    gradients_per_second,
    implicit_momentum,
    server_bytes,
    stable_lr,
)
from ddp_course.theory.collectives import (
    ALGORITHMS,
    Cost,
    all_gather,
    all_reduce_double_tree,
    all_reduce_halving_doubling,
    all_reduce_hierarchical,
    all_reduce_naive,
    all_reduce_ring,
    all_reduce_tree,
    all_to_all,
    broadcast_naive,
    broadcast_tree,
    bus_factor,
    bytes_sent,
    crossover,
    gather,
    hierarchical_bytes_sent,
    least_bytes,
    reduce_naive,
    reduce_scatter,
    reduce_tree,
    scatter,
)
from ddp_course.theory.composition import ComposedRank
from ddp_course.theory.compression import compressed_bytes, local_sgd_bytes
from ddp_course.theory.context_parallel import (
    attention_volume,
    causal_pairs,
    unfairness,
)
from ddp_course.theory.experts import (
    balanced_rows,
    busiest_rank,
    dispatch_volume,
    dropped_choices,
    mixture_cost,
)
from ddp_course.theory.fit import Fit, fit
from ddp_course.theory.memory import (
    OPTIMIZERS,
    PRECISIONS,
    Precision,
    gathered_bytes,
    model_states,
    shard_numel,
    step_volume,
)
from ddp_course.theory.offload import offloaded_step_time, zero_offload_step_time
from ddp_course.theory.ordering import (
    Layer,
    binding_layer,
    good_piece,
    least_step_time,
    ready_times,
    wait_for_all_time,
)
from ddp_course.theory.pipeline import (
    PIPELINES,
    pipeline_activations,
    pipeline_bubble,
    pipeline_time,
    pipeline_volume,
)
from ddp_course.theory.plan import MODELS, Model, Row, fewest_gpus, plan
from ddp_course.theory.tensor_parallel import (
    mlp_volume,
    replicated_parameters,
    tensor_parallel_parameters,
    tensor_parallel_volume,
)
