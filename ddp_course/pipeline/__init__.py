"""Floor 2: a model cut between its layers, and microbatches that pass through it.

Three rungs, in this order:

    stages, by_hand
                  cut a model between its layers; train one microbatch after the other,
                  with every message written out
    schedule, runtime
                  the order of each rank's actions as plain data, and `Runtime`, which
                  carries out any such order
    pipeline_parallel
                  `PipelineParallel`: the full class, a list of parts. Its plans:
                  schedules (interleaved, zero bubble), program (the messages),
                  stage_plan (layers of each stage, tied weights). Its parts, each of
                  which can be read alone: overlapped (receives posted early), backward
                  (recomputed, or in two halves), batch_checks, forms (of activations)

Without any process:

    player, checker, simulate
                  pass the messages of a program; prove that a schedule is legal;
                  simulate it in virtual time

To measure a run:

    clocks, recorded, virtual_time
                  the bubble; a recorder of each rank's actions; a recorder whose clock
                  is fair to ranks that share cores
    axis          what `parallelize` calls to add the pipeline to a model

To generate text:

    decoding      microbatches go around a ring of stages, once for each token

`full_state_dict` and its companions are functions of `mechanisms.whole_state`.
Chapters 10 and 11.
"""

from ddp_course.mechanisms.whole_state import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from ddp_course.pipeline.by_hand import NaivePipeline
from ddp_course.pipeline.checker import check
from ddp_course.pipeline.clocks import SleepingLayer, bubble
from ddp_course.pipeline.decoding import PipelinedDecoder, decoding_plan
from ddp_course.pipeline.forms import PipelineError
from ddp_course.pipeline.pipeline_parallel import PipelineParallel
from ddp_course.pipeline.program import add_messages
from ddp_course.pipeline.recorded import PipelineRecorder
from ddp_course.pipeline.runtime import Pipeline, Runtime
from ddp_course.pipeline.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    ScheduleError,
    gpipe,
    naive,
    one_f_one_b,
)
from ddp_course.pipeline.schedules import interleaved, parse, zero_bubble
from ddp_course.pipeline.simulate import Costs, simulate_schedule
from ddp_course.pipeline.stage_plan import partition, stage_plan
from ddp_course.pipeline.stages import spine
from ddp_course.pipeline.virtual_time import VirtualTime
