"""Beside the floors: what the notebooks need (and the figures of `ddp-course bench`).

show_source, show_diff     the package's own source, and what changed
Prediction                 a number that is written down before it is measured
check_..., show_solution   the exercises
cluster, collective, ...   schematic figures, drawn by `Drawing`
gallery, explore           a figure for some settings, and with sliders
plot_..., style            figures of measured data
"""

from ddp_course.lab.ch00 import check_my_average, check_my_slice
from ddp_course.lab.ch01 import (
    check_global_rank,
    check_node_group,
    check_peer_on_next_node,
    check_place,
)
from ddp_course.lab.ch02 import (
    check_my_all_gather,
    check_my_broadcast,
    check_my_transpose,
    check_swap,
)
from ddp_course.lab.ch03 import (
    check_hierarchical_sum,
    check_ring_reduce_scatter,
    check_ring_transfers,
    check_tree_or_ring,
)
from ddp_course.lab.ch04 import (
    check_average_gradients_flat,
    check_make_replicas,
    check_replicas_agree,
    check_through_replica_0,
)
from ddp_course.lab.ch05 import (
    check_accumulate,
    check_mean_loss,
    check_mini_ddp,
    check_my_bucket_plan,
)
from ddp_course.lab.ch06 import (
    check_largest_batch,
    check_my_ledger,
    check_my_recompute,
    check_step_in_backward,
)
from ddp_course.lab.ch07 import (
    check_clip_shards,
    check_my_pieces,
    check_sharded_step,
    check_stored_and_sent,
)
from ddp_course.lab.ch08 import (
    check_my_schedule,
    check_ranks_needed,
    check_sharded_linear,
    check_who_reads_what,
)
from ddp_course.lab.ch09 import (
    check_copy_to_ranks,
    check_plan_cuts,
    check_row_linear,
    check_vocab_loss,
)
from ddp_course.lab.ch10 import (
    check_microbatch_loss,
    check_my_cut,
    check_my_gpipe,
    check_my_stage_step,
)
from ddp_course.lab.ch11 import (
    check_my_one_f_one_b,
    check_place_weights,
    check_who_waits,
)
from ddp_course.lab.drawing import Drawing
from ddp_course.lab.exercises import show_solution
from ddp_course.lab.figures import (
    before_after,
    buckets,
    cluster,
    collective,
    course_map,
    dp_step,
    fsdp_step,
    fsdp_timeline,
    groups,
    hierarchy,
    matrix_cut,
    memory_calculator,
    one_or_many,
    pipeline_timeline,
    plan_step,
    plan_steps,
    rendezvous,
    schedule_view,
    shard_map,
    timeline,
    who_works,
)
from ddp_course.lab.figures.ch11_more import memory_against_bubble
from ddp_course.lab.measured import plot_fit, plot_sizes
from ddp_course.lab.measured_buckets import plot_bucket_sweep, plot_buckets
from ddp_course.lab.measured_dp import plot_gil, plot_moves
from ddp_course.lab.measured_ledgers import ledgers, memory_against_communication
from ddp_course.lab.measured_memory import plot_memory
from ddp_course.lab.measured_pipelines import activation_peaks, bubble_curve, bubbles
from ddp_course.lab.palette import RANK_COLORS, rank_color
from ddp_course.lab.per_rank import plot_bytes, plot_timeline
from ddp_course.lab.plots import plot_losses, plot_pairs, style
from ddp_course.lab.predict import Prediction
from ddp_course.lab.source import show_diff, show_source
from ddp_course.lab.widgets import explore, gallery

__all__ = [
    "RANK_COLORS",
    "Drawing",
    "Prediction",
    "activation_peaks",
    "before_after",
    "bubble_curve",
    "bubbles",
    "buckets",
    "check_accumulate",
    "check_average_gradients_flat",
    "check_clip_shards",
    "check_copy_to_ranks",
    "check_global_rank",
    "check_hierarchical_sum",
    "check_largest_batch",
    "check_make_replicas",
    "check_mean_loss",
    "check_microbatch_loss",
    "check_mini_ddp",
    "check_my_all_gather",
    "check_my_average",
    "check_my_broadcast",
    "check_my_bucket_plan",
    "check_my_cut",
    "check_my_gpipe",
    "check_my_ledger",
    "check_my_one_f_one_b",
    "check_my_pieces",
    "check_my_recompute",
    "check_my_schedule",
    "check_my_slice",
    "check_my_stage_step",
    "check_my_transpose",
    "check_node_group",
    "check_peer_on_next_node",
    "check_place",
    "check_place_weights",
    "check_plan_cuts",
    "check_ranks_needed",
    "check_replicas_agree",
    "check_ring_reduce_scatter",
    "check_ring_transfers",
    "check_row_linear",
    "check_sharded_linear",
    "check_sharded_step",
    "check_step_in_backward",
    "check_stored_and_sent",
    "check_swap",
    "check_through_replica_0",
    "check_tree_or_ring",
    "check_vocab_loss",
    "check_who_reads_what",
    "check_who_waits",
    "cluster",
    "collective",
    "course_map",
    "dp_step",
    "explore",
    "fsdp_step",
    "fsdp_timeline",
    "gallery",
    "groups",
    "hierarchy",
    "ledgers",
    "matrix_cut",
    "memory_against_bubble",
    "memory_against_communication",
    "memory_calculator",
    "one_or_many",
    "pipeline_timeline",
    "plan_step",
    "plan_steps",
    "plot_bucket_sweep",
    "plot_buckets",
    "plot_bytes",
    "plot_fit",
    "plot_gil",
    "plot_losses",
    "plot_memory",
    "plot_moves",
    "plot_pairs",
    "plot_sizes",
    "plot_timeline",
    "rank_color",
    "rendezvous",
    "schedule_view",
    "shard_map",
    "show_diff",
    "show_solution",
    "show_source",
    "style",
    "timeline",
    "who_works",
]
