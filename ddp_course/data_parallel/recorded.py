"""PyTorch's DistributedDataParallel, made to tell what ours tells.

Chapter 05.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel as PyTorchDDP

from ddp_course.mechanisms.hooks import tensors_in
from ddp_course.mechanisms.timeline import Timeline, span


def record_pytorch(ddp: PyTorchDDP) -> None:
    """Let PyTorch's DDP write the same events as ours, to be laid beside them.

    It takes the one communication hook that a DDP can have, and does in it what DDP
    does without: the mean, by an all-reduce that is not waited for. Chapter 05.
    """
    now: list[Timeline] = []  # of the backward pass that is under way

    def outputs_are_there(module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(begin)

    def begin(_: Tensor) -> None:
        if not now:
            now.append(Timeline.begin())
            Variable._execution_engine.queue_callback(end)

    def end() -> None:
        timeline = now.pop()
        timeline.computed()
        with span(timeline, "wait"):
            timeline.all_ended()

    def launch(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if now:
            now[0].computed(bucket=bucket.index())
        flat = bucket.buffer().div_(dist.get_world_size(group))
        start = now[0].now() if now else None
        work = dist.all_reduce(flat, group=group, async_op=True)
        if now:
            now[0].sent(work, flat.nbytes, start, bucket=bucket.index())
            now[0].since = now[0].now()
        return work.get_future().then(lambda future: future.value()[0])

    ddp.register_forward_hook(outputs_are_there)
    ddp.register_comm_hook(ddp.process_group, launch)
