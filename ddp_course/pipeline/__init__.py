"""Floor 2: a model cut between its layers, and microbatches that pass through it.

Three rungs, each of which is read in this order:

    naive         one microbatch after the other, by hand
    schedule, schedules, stages, runtime
                  who computes in which order, who has which layers: plain data; and a
                  rank that carries it out, whatever the order is
    pipeline_parallel
                  `PipelineParallel`, the same with all that one needs, and its tools:
                  overlapped (messages ahead of time, events), split_backward (backward
                  in two halves), shared_gradients (tied weights), partition (where to
                  cut, so that no stage is slower than it must be)

And without any process:

    program, messages, checker, simulate
                  who sends what to whom, and when; is it legal, and what does it cost?
    clocks        what the bubble was, and how to measure one on few cores

Chapters 10 and 11.
"""

from ddp_course.pipeline.checker import Proof, check
from ddp_course.pipeline.clocks import Waiting, bubble
from ddp_course.pipeline.messages import add_messages
from ddp_course.pipeline.naive import NaivePipeline
from ddp_course.pipeline.overlapped import PipelineError
from ddp_course.pipeline.partition import layer_costs, layer_seconds, partition
from ddp_course.pipeline.pipeline_parallel import PipelineParallel
from ddp_course.pipeline.program import Costs, Instruction, Program, Timed, play
from ddp_course.pipeline.runtime import Pipeline, Runtime
from ddp_course.pipeline.schedule import Action, Schedule, ScheduleError, parse
from ddp_course.pipeline.schedules import (
    SCHEDULES,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    zero_bubble,
)
from ddp_course.pipeline.simulate import Simulated, simulate
from ddp_course.pipeline.stages import StagePlan, spine, stage_plan

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Instruction",
    "NaivePipeline",
    "Pipeline",
    "PipelineError",
    "PipelineParallel",
    "Program",
    "Proof",
    "Runtime",
    "Schedule",
    "ScheduleError",
    "Simulated",
    "StagePlan",
    "Timed",
    "Waiting",
    "add_messages",
    "bubble",
    "check",
    "gpipe",
    "interleaved",
    "layer_costs",
    "layer_seconds",
    "naive",
    "one_f_one_b",
    "parse",
    "partition",
    "play",
    "simulate",
    "spine",
    "stage_plan",
    "zero_bubble",
]
