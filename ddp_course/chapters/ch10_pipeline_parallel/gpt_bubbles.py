"""Record a GPT's pipeline steps, on a clock that is fair to ranks that share cores.

Chapter 10.
"""

from ddp_course.data import load_corpus
from ddp_course.measure import Event, EventLog
from ddp_course.model import build_gpt
from ddp_course.pipeline import PipelineParallel, PipelineRecorder, VirtualTime


def recorded_steps(
    sizes: list[int], virtual: bool, microbatches: int = 8
) -> list[list[Event]]:
    """Return this rank's events in three steps of the GPT by GPipe, after two others.

    `sizes`: the number of layers of each stage; `virtual`: whether the virtual clock
    times the events, or the wall clock.
    """
    recorder = VirtualTime() if virtual else PipelineRecorder()
    options = {"sizes": sizes, "recorder": recorder}
    pipeline = PipelineParallel(build_gpt("1m"), "gpipe", microbatches, **options)
    logs = []
    for k in range(5):
        with EventLog() as log:
            pipeline.step(*load_corpus().batch(k, 2 * microbatches, 64))
        logs.append(log.events)
    return logs[2:]
