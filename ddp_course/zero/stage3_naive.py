"""Stage 3 in its first step: gather everything, compute as usual, keep a shard.

Between steps each rank has 1/N of parameters, gradients and states. During a step it
has all parameters and all gradients, as in data parallelism, and so its peak is hardly
lower. What to do about that is in `stage3_simple`. Chapter 08.
"""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from ddp_course.mechanisms.agreement import on_any_rank
from ddp_course.mechanisms.frozen import check_first_order
from ddp_course.mechanisms.hooks import on_backward, tensors_in
from ddp_course.zero.sharded_module import ShardedModule


class NaiveFullyShardedDataParallel(ShardedModule):
    """Runs `module`, whose parameters are in shards outside of forward and backward.

    All units are gathered before a forward, and freed when its backward has ended (or
    at once, if there is none). Gradients are averaged by an all-reduce, of which each
    rank needs 1/N. A step sends 3 (N - 1) / N of the model's bytes.

    Called like `module`, and made by all ranks together, with the numbers of rank 0.
    Raises ReplicaError, on every rank, before anything is sent. Chapter 08.
    """

    running = False  # a backward pass is under way

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Gather all units, and run the module."""
        self._free_all()  # an earlier forward had no backward, and a step may have come
        self.check_kept()
        for unit in self.units:
            unit.gather()
        output = self.module(*inputs, **kwargs)
        for unit in self.units:
            self.check_unchanged(unit)
        if any(tensor.requires_grad for tensor in tensors_in(output)):
            on_backward(tensors_in(output), self._backward_begins)
        else:
            self._free_all()
        return output

    def _backward_begins(self) -> None:
        if not self.running:
            check_first_order()
            self.running = True
            Variable._execution_engine.queue_callback(self._backward_has_ended)

    @torch.no_grad()
    def _backward_has_ended(self) -> None:
        """Average all gradients, keep the own shard of them, and free everything."""
        flats = [flat for unit in self.units for flat in unit.trainable]
        have = on_any_rank([flat.has_gradients for flat in flats], self.process_group)
        for flat in itertools.compress(flats, have):
            flat.collect()
            dist.all_reduce(flat.sum, group=self.process_group)
            flat.reduced()
        self._forget_unused()
        self._free_all()

    def _free_all(self) -> None:
        self.running = False
        for unit in self.units:
            unit.free()
