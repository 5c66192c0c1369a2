"""Floor 2: a model cut between its layers, and microbatches that pass through it.

Read the modules in this order:

    stages        the model's layers, cut into stages: plain data, and a rank's slices
    schedule      who computes what in which order: plain data
    schedules     naive, GPipe, 1F1B, interleaved, zero bubble
    program       who sends what to whom, and when: plain data
    play, rendezvous, checker, simulate
                  is it legal, and what does it cost? without any process
    cut           where to cut, so that no stage is slower than it must be
    pipeline_parallel
                  `PipelineParallel`: the same on real ranks
    runtime       how a rank carries out its row of a program, whatever it is
    messages, split_backward, gradients, full_state
                  its tools: sent without waiting; backward in two halves; what is left
                  to do with gradients; the state of one process, and back
    clocks, waiting
                  what the bubble was, and how to measure one on few cores

Chapters 10 and 11.
"""

from ddp_course.pipeline.checker import Proof, check
from ddp_course.pipeline.clocks import bubble
from ddp_course.pipeline.cut import cut, layer_costs, layer_seconds
from ddp_course.pipeline.pipeline_parallel import PipelineParallel
from ddp_course.pipeline.play import Costs, Event, play
from ddp_course.pipeline.program import Program, Step, program
from ddp_course.pipeline.rendezvous import rendezvous
from ddp_course.pipeline.runtime import PipelineError
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
from ddp_course.pipeline.waiting import Waiting

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Event",
    "PipelineError",
    "PipelineParallel",
    "Program",
    "Proof",
    "Schedule",
    "ScheduleError",
    "Simulated",
    "StagePlan",
    "Step",
    "Waiting",
    "bubble",
    "check",
    "cut",
    "gpipe",
    "interleaved",
    "layer_costs",
    "layer_seconds",
    "naive",
    "one_f_one_b",
    "parse",
    "play",
    "program",
    "rendezvous",
    "simulate",
    "spine",
    "stage_plan",
    "zero_bubble",
]
