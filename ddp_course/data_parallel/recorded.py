"""Recorders for classes that record nothing: the naive DDPs, and PyTorch's.

They write the same events as `mechanisms.timeline.RecordBackward`, from outside: hooks
on the outputs notice that backward begins, and a wrapper times the collective. Chapters
04 and 05.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel as PyTorchDDP

from ddp_course.data_parallel.naive import NaiveDistributedDataParallel
from ddp_course.mechanisms.graph import tensors_in
from ddp_course.mechanisms.timeline import Timeline, span


class Recorder:
    """A recorder with the timeline of the current backward pass of one DDP."""

    def __init__(self, ddp: nn.Module) -> None:
        self.timeline = Timeline(())
        self.running = False  # whether a backward pass is under way
        ddp.register_forward_hook(self._watch)

    def _watch(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.running = False  # a backward that failed leaves True behind
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._begin)

    def _begin(self, _: Tensor) -> None:
        if not self.running:
            self.timeline, self.running = Timeline.begin(), True
            Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self.running = False
        self.timeline.record_compute()
        with span(self.timeline, "wait"):
            self.timeline.finish()


def record_naive(ddp: NaiveDistributedDataParallel) -> NaiveDistributedDataParallel:
    """Record the events of a naive or flat DDP; return the DDP. Chapter 04."""
    if not isinstance(ddp, NaiveDistributedDataParallel):
        must = "it must be a NaiveDistributedDataParallel, or a flat one"
        raise ValueError(f"ddp is a {type(ddp).__name__}; {must}")
    recorder, all_reduce = Recorder(ddp), ddp.all_reduce

    def recorded(flat: Tensor, group: dist.ProcessGroup | None) -> None:
        timeline = recorder.timeline
        start = timeline.now()
        work = all_reduce(flat, group=group, async_op=True)
        timeline.record_send(work, flat.nbytes, start)
        if work is not None:
            work.wait()
        timeline.finish()

    ddp.all_reduce = recorded
    return ddp


def record_pytorch(ddp: PyTorchDDP) -> None:
    """Record the events of PyTorch's DDP.

    This uses up the one communication hook that a DDP can have. The hook does what DDP
    does without a hook: divide by the number of ranks, and launch an all-reduce.
    Chapter 05.
    """
    if not isinstance(ddp, PyTorchDDP):
        must = "it must be PyTorch's DistributedDataParallel"
        raise ValueError(
            f"ddp is a {type(ddp).__module__}.{type(ddp).__name__}; {must}"
        )
    recorder = Recorder(ddp)

    def launch(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        timeline = recorder.timeline
        timeline.record_compute(bucket=bucket.index())
        flat = bucket.buffer().div_(dist.get_world_size(group))
        start = timeline.now()
        work = dist.all_reduce(flat, group=group, async_op=True)
        timeline.record_send(work, flat.nbytes, start, bucket=bucket.index())
        timeline.since = timeline.now()
        return work.get_future().then(lambda future: future.value()[0])

    ddp.register_comm_hook(ddp.process_group, launch)
