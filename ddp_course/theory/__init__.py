"""Floor 0: what it must cost, as closed forms. Nothing is sent, nothing is measured.

`theory.all_reduce_ring(4, 2**20).over(link)` is the time in seconds that four ranks
need to all-reduce 1 MiB in a ring of such links. Read the modules in this order:

    costs       messages and bytes one after the other, for each collective (chapter 02)
    all_reduce  the same for each all-reduce algorithm (chapter 03)
    volume      how many bytes each rank sends, exactly (chapters 02 and 03)
    bounds      what no algorithm can beat; bus bandwidth; ring or tree (chapter 03)
    fit         from measured times back to alpha and beta (chapter 02)
    memory      parameters, gradients and states per rank, by ZeRO stage (chapter 06)
    activations what forward keeps for backward (chapter 06)
    step_volume what a rank sends in a training step, by ZeRO stage (chapter 07)
    tensor_parallel
                what tensor parallelism sends in a step, and what it keeps (chapter 09)
    models      a few models, as a plan sees them
    plan        which stage fits on which GPU, and what it costs (chapter 08)
    pipeline    time, bubble, activations and bytes of a pipeline (chapters 10 and 11)
    composition what a rank of dp x tp x pp keeps and sends along each axis
    checks: what the formulas ask of their arguments
"""

from ddp_course.theory.activations import (
    RECOMPUTE,
    gpt_activations,
    gpt_peak,
    layer_activations,
    model_activations,
)
from ddp_course.theory.all_reduce import (
    HierarchicalCost,
    all_reduce_double_tree,
    all_reduce_halving_doubling,
    all_reduce_hierarchical,
    all_reduce_naive,
    all_reduce_ring,
    all_reduce_tree,
)
from ddp_course.theory.bounds import (
    bus_bandwidth,
    bus_factor,
    crossover,
    least_bytes,
    least_messages,
    least_seconds,
)
from ddp_course.theory.composition import (
    AxisBytes,
    rank_states,
    rank_units,
    rank_volume,
)
from ddp_course.theory.costs import (
    Cost,
    all_gather,
    all_to_all,
    barrier,
    broadcast_naive,
    broadcast_tree,
    gather,
    reduce_naive,
    reduce_scatter,
    reduce_tree,
    scatter,
    send,
)
from ddp_course.theory.fit import Fit, fit
from ddp_course.theory.memory import (
    OPTIMIZERS,
    PRECISIONS,
    Precision,
    gathered_bytes,
    model_states,
    padding,
    shard_numel,
)
from ddp_course.theory.models import MODELS, Model
from ddp_course.theory.pipeline import (
    PIPELINES,
    PipelineVolume,
    pipeline_activations,
    pipeline_bubble,
    pipeline_time,
    pipeline_volume,
)
from ddp_course.theory.plan import Row, fewest_gpus, plan
from ddp_course.theory.step_volume import StepVolume, step_volume
from ddp_course.theory.tensor_parallel import (
    TensorParallelVolume,
    layer_parameters,
    mlp_volume,
    replicated_parameters,
    tensor_parallel_parameters,
    tensor_parallel_volume,
)
from ddp_course.theory.volume import (
    HierarchicalBytes,
    SharedMemoryBytes,
    bytes_sent,
    children,
    hierarchical_bytes_sent,
    shared_memory_bytes,
)

__all__ = [
    "AxisBytes",
    "layer_parameters",
    "rank_states",
    "rank_units",
    "rank_volume",
    "Cost",
    "Fit",
    "HierarchicalBytes",
    "HierarchicalCost",
    "MODELS",
    "Model",
    "OPTIMIZERS",
    "PIPELINES",
    "PRECISIONS",
    "PipelineVolume",
    "Precision",
    "RECOMPUTE",
    "Row",
    "SharedMemoryBytes",
    "StepVolume",
    "TensorParallelVolume",
    "all_gather",
    "all_reduce_double_tree",
    "all_reduce_halving_doubling",
    "all_reduce_hierarchical",
    "all_reduce_naive",
    "all_reduce_ring",
    "all_reduce_tree",
    "all_to_all",
    "barrier",
    "broadcast_naive",
    "broadcast_tree",
    "bus_bandwidth",
    "bus_factor",
    "bytes_sent",
    "children",
    "crossover",
    "fewest_gpus",
    "fit",
    "gather",
    "gathered_bytes",
    "gpt_activations",
    "gpt_peak",
    "hierarchical_bytes_sent",
    "layer_activations",
    "least_bytes",
    "least_messages",
    "least_seconds",
    "mlp_volume",
    "model_activations",
    "model_states",
    "padding",
    "pipeline_activations",
    "pipeline_bubble",
    "pipeline_time",
    "pipeline_volume",
    "plan",
    "reduce_naive",
    "reduce_scatter",
    "reduce_tree",
    "replicated_parameters",
    "scatter",
    "send",
    "shard_numel",
    "shared_memory_bytes",
    "step_volume",
    "tensor_parallel_parameters",
    "tensor_parallel_volume",
]
