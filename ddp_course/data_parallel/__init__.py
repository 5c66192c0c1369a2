"""Floor 2: data parallelism: every rank has the whole model and a part of the batch.

Read the modules in this order:

    dp            `DataParallel`: one process, a thread for each replica
    scatter_gather, moves
                  tools of `dp`: cut and join a batch; count bytes through replica 0
    naive, flat   `DistributedDataParallel`, steps one and two: average after backward
    bucketed      step three: send buckets while backward still runs
    ddp           the full class: `bucketed` and a list of parts
    same_model, unused, buffers
                  the parts of `ddp` that no other strategy uses
    sampler       which rank gets which sample
    recorded      recorders for the naive classes and for PyTorch's
    averages      loss, learning rate and seeds over all ranks
    axis          what `parallelize` calls to add data parallelism to a model

`mechanisms` contains the modules that several strategies share: agreement, buckets,
engine, hooks, parts, recovery, timeline. Chapters 04 (dp to flat) and 05.
"""

from ddp_course.data_parallel.averages import (
    Average,
    MeanOverRanks,
    loss_weight,
    scaled_lr,
    seed_for,
)
from ddp_course.data_parallel.bucketed import BucketedDistributedDataParallel
from ddp_course.data_parallel.ddp import DistributedDataParallel
from ddp_course.data_parallel.dp import DataParallel
from ddp_course.data_parallel.flat import FlatDistributedDataParallel
from ddp_course.data_parallel.moves import Move, Moves
from ddp_course.data_parallel.naive import NaiveDistributedDataParallel
from ddp_course.data_parallel.recorded import record_naive, record_pytorch
from ddp_course.data_parallel.sampler import DistributedSampler, Share, shares
from ddp_course.data_parallel.scatter_gather import part_sizes
from ddp_course.data_parallel.unused import UnusedParametersError
from ddp_course.mechanisms.agreement import ReplicaError
from ddp_course.mechanisms.buckets import Bucket, bucket_plan
