"""Stage 3, step one: gather everything, compute as usual, keep a shard.

Between steps each rank has 1/N of parameters, gradients and optimizer states. During a
step it has all parameters and all gradients, as in data parallelism, so its peak memory
is hardly lower. `stage3_simple` gathers one unit after the other instead. Chapter 08.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

# PyTorch 2.13 renamed this function.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class NaiveFullyShardedDataParallel(nn.Module):
    """A wrapper that shards the parameters of `module` between its passes.

    It gathers all parameters before a forward, and frees them when the backward has
    ended (or at once, if there is none). It averages gradients by an all-reduce, though
    each rank needs only 1/N of the mean. A step sends 3 (N - 1) / N of the model's
    bytes.

    All ranks must construct it together, from equal modules with parameters of one
    type. It checks nothing. Chapter 08.

    Attributes:
        whole: all parameters side by side, padded; 0 bytes long while they are freed.
        shard: this rank's 1/N of `whole`.
        pieces: name -> this rank's part of the parameter, a view of `shard`.
    """

    def __init__(
        self, module: nn.Module, process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.module, self.group = module, process_group
        self.size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.wholes = dict(module.named_parameters())
        flat = torch.cat([p.detach().flatten() for p in self.wholes.values()])
        numel = -(-flat.numel() // self.size)  # elements of a shard
        self.whole = nn.functional.pad(flat, (0, numel * self.size - flat.numel()))
        dist.broadcast(self.whole, group=self.group, group_src=0)
        self.own = slice(rank * numel, (rank + 1) * numel)
        self.shard = self.whole[self.own].clone()
        self.pieces: dict[str, nn.Parameter] = {}
        self.spans: dict[str, slice] = {}  # name -> the piece's range in the shard
        at = 0  # offset of the parameter in `whole`
        for name, p in self.wholes.items():
            p.data = self.whole[at : at + p.numel()].view(p.shape)
            edges = at - self.own.start, at - self.own.start + p.numel()
            self.spans[name] = slice(*(min(max(edge, 0), numel) for edge in edges))
            piece = self.shard[self.spans[name]]
            self.pieces[name] = nn.Parameter(piece, requires_grad=p.requires_grad)
            at += p.numel()
        self._free()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's pieces, for an optimizer to step."""
        yield from self.pieces.items()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Gather all parameters, and run the module."""
        self._free()  # an earlier forward without a backward left old values
        self._gather()
        output = self.module(*inputs, **kwargs)
        tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        recorded = [tensor for tensor in tensors if tensor.requires_grad]
        for tensor in recorded:
            tensor.register_hook(self._begin_backward)
        if not recorded:
            self._free()
        return output

    def _begin_backward(self, gradient: Tensor) -> None:
        if not self.in_backward:
            self.in_backward = True
            self._gather()
            Variable._execution_engine.queue_callback(self._end_backward)

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Free the parameters, average all gradients, and keep this rank's shard."""
        self._free()
        mean = self.whole.new_zeros(self.size * self.shard.numel())
        at = 0
        for p in self.wholes.values():
            if p.grad is not None:
                mean[at : at + p.numel()] = p.grad.flatten() / self.size
                p.grad = None
            at += p.numel()
        dist.all_reduce(mean, group=self.group)
        own = mean[self.own].clone()
        for name, piece in self.pieces.items():
            if piece.requires_grad:
                gradient = own[self.spans[name]]
                piece.grad = gradient if piece.grad is None else piece.grad + gradient

    def _gather(self) -> None:
        if not self.whole.untyped_storage().size():
            nbytes = self.size * self.shard.nbytes
            self.whole.untyped_storage().resize_(nbytes)
            all_gather(self.whole, self.shard, group=self.group)

    def _free(self) -> None:
        """Free the memory of `whole`; the parameters stay views of it."""
        self.in_backward = False
        self.whole.untyped_storage().resize_(0)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the `state_dict` of the unsharded module; all ranks must call it."""
        self._gather()
        state = {key: t.clone() for key, t in self.module.state_dict().items()}
        self._free()
        return state
