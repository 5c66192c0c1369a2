"""Floor 2: a model cut between its layers, and microbatches that pass through it.

Three rungs, each of which is read in this order:

    by_hand, stages
                  one microbatch after the other, and every message written out; how a
                  model is cut between its layers
    schedule, runtime
                  who computes what in which order, as plain data; and a rank that
                  carries it out, whatever the order is
    pipeline_parallel
                  `PipelineParallel`: the same and its parts, each of which can be read
                  alone: overlapped (messages ahead of time), backward (recomputed, or
                  in two halves), batch_checks, forms (of activations); and what is
                  decided first: schedules (interleaved, zero bubble), program (who
                  sends what to whom), stage_plan (who has which layers, and whose
                  weights are tied)

And without any process:

    player, checker, simulate
                  what happens when; is it legal, and what does it cost?
    clocks, recorded, virtual_time
                  what the bubble was; what each rank did and when; the same on a clock
                  that is fair to ranks that share cores

Chapters 10 and 11.
"""

from ddp_course.pipeline.by_hand import NaivePipeline
from ddp_course.pipeline.checker import Proof, check
from ddp_course.pipeline.clocks import Waiting, bubble
from ddp_course.pipeline.forms import PipelineError
from ddp_course.pipeline.pipeline_parallel import PipelineParallel
from ddp_course.pipeline.player import Costs, play
from ddp_course.pipeline.program import Instruction, Program, Timed, add_messages
from ddp_course.pipeline.recorded import Recorded
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
from ddp_course.pipeline.simulate import Simulated, simulate
from ddp_course.pipeline.stage_plan import StagePlan, partition, stage_plan
from ddp_course.pipeline.stages import spine
from ddp_course.pipeline.virtual_time import VirtualTime
