"""The course's GPT, cut over ranks: `tensor_parallel` returns this rank's part.

    parallel = tensor_parallel(build_gpt())      # on all ranks: the same seed
    optimizer = AdamW(parallel.parameters())     # this rank's parts
    _, loss = parallel(x, y)                     # the same x and y on all ranks
    loss.backward()
    parallel.clip_grad_norm_(1.0)
    optimizer.step()

It is the same GPT with other layers in it; no line of `model` is changed. Every rank
computes some heads, some columns of the MLP and a part of the vocabulary's logits, for
all tokens. Each block needs four all-reduces in a step:

    forward     attn.proj: sum of the heads     mlp.down: sum of the columns
    backward    attn.qkv: gradient of its input   mlp.up: gradient of its input

The rows of `qkv` are ordered head by head, so a part of the rows gives the queries,
keys and values of some heads; the same part of the columns of `proj` multiplies these
heads' results. Attention itself needs no change.

With `sequence_parallel`, each rank computes everything else (norms, residuals, dropout)
for T/tp tokens; each all-reduce becomes a reduce-scatter at the end of a parallel
region and an all-gather at the beginning of the next. Chapter 09.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.collectives.meeting import meeting
from ddp_course.collectives.patience import patient, threads_of
from ddp_course.mechanisms.divided import DividedModule, PlainModel
from ddp_course.mechanisms.exchange import MessageExchange
from ddp_course.mechanisms.parts import announce
from ddp_course.mechanisms.placements import (
    Replicate,
    Shard,
    leave_behind,
    place,
)
from ddp_course.model import GPT, GPTConfig
from ddp_course.tensor_parallel.checks import FailedPasses, SameTokens, check_model
from ddp_course.tensor_parallel.fused import (
    FusedColumnParallelLinear,
    FusedRowParallelLinear,
)
from ddp_course.tensor_parallel.layers import ParallelLayer
from ddp_course.tensor_parallel.ops import (
    SequenceParallelLayerNorm,
    SequenceParallelPositions,
    gather_from_group,
    summed_together,
)
from ddp_course.tensor_parallel.vocabulary import (
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)

# The modules of the GPT that are cut, and how: like the plan of parallelize_module.
PLAN: MappingProxyType[str, type[ParallelLayer]] = MappingProxyType(
    {
        "embed.tokens": VocabParallelEmbedding,
        "attn.qkv": FusedColumnParallelLinear,
        "attn.proj": FusedRowParallelLinear,
        "mlp.up": FusedColumnParallelLinear,
        "mlp.down": FusedRowParallelLinear,
        "head.out": FusedColumnParallelLinear,
    }
)


def placement_of(name: str) -> Shard | Replicate:
    """Return how the parameter of this name is cut; pure."""
    module, _, last = name.rpartition(".")
    layer = PLAN.get(".".join(module.split(".")[-2:]))
    dim = None if layer is None else layer.CUTS[last]
    return Replicate() if dim is None else Shard(dim)


class Ends:
    """The two ends of a cut GPT, its tokens and its logits, without its layers.

    A pipeline calls the layers one by one, and this object for the rest.

    Announces before_forward(ends, idx, targets, problem).
    """

    def __init__(
        self,
        config: GPTConfig,
        exchange: MessageExchange,
        sequence_parallel: bool = False,
        parts: Iterable[Any] = (),
    ) -> None:
        self.config, self.exchange, self.parts = config, exchange, tuple(parts)
        self.sequence_parallel = sequence_parallel

    def check_tokens(
        self, idx: Tensor, targets: Tensor | None = None, problem: str | None = None
    ) -> None:
        """Announce the tokens, and `problem`: what is wrong on this rank, or None."""
        announce(self.parts, "before_forward", self, idx, targets, problem)

    def loss_fn(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of the head's logits, (B, T, V/tp)."""
        return vocab_parallel_cross_entropy(logits, targets, self.exchange)

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Return all logits, (B, T, V), from the head's (B, T, V/tp)."""
        return gather_from_group(logits, -1, self.exchange)


class TensorParallelGPT(DividedModule, nn.Module):
    """This rank's part of a GPT: `parameters()` are its slices. See `tensor_parallel`.

    Announces what `Ends` announces, after_forward(model, logits) and
    forward_failed(model, error).

    Attributes:
        exchange: how the ranks exchange tensors.
        sequence_parallel: whether norms and residuals are cut along the sequence.
        parts: the objects that it announces to.
        ends: what a pipeline needs besides the layers.
    """

    def __init__(
        self,
        full: GPT,
        exchange: MessageExchange,
        sequence_parallel: bool = False,
        parts: Iterable[Any] = (),
    ) -> None:
        super().__init__()
        self.config, self.exchange, self.parts = full.config, exchange, tuple(parts)
        self.sequence_parallel, self.token_check = sequence_parallel, full.token_check
        self.pipeline_parts = getattr(full, "pipeline_parts", ())
        self.ends = Ends(full.config, exchange, sequence_parallel, self.parts)
        group = dist.group.WORLD if exchange.group is None else exchange.group
        self.plain, self.groups = PlainModel.of(full), (group,)
        memo: dict[int, Any] = {}
        for name, module in full.named_modules():
            layer = self._layer_for(name, module)
            if layer is not None:
                memo[id(module)] = layer
        for name, child in full.named_children():
            # By `memo` the copy has the parallel layers in place of the plain ones.
            setattr(self, name, copy.deepcopy(child, memo))
        if full.head.out.weight is full.embed.tokens.weight:
            self.head.out.weight = self.embed.tokens.weight
        whole = dict(full.named_parameters())
        for name, parameter in self.named_parameters():
            how = {"like": whole[name], "name": name}
            place(parameter, group, placement_of(name), **how)
        self.train(full.training)

    def _layer_for(self, name: str, module: nn.Module) -> ParallelLayer | None:
        """Return the layer that replaces a plain one, or None to keep the plain one."""
        kind = PLAN.get(".".join(name.split(".")[-2:]))
        if kind is not None:
            how = {"sequence_parallel": self.sequence_parallel}
            return kind(module, self.exchange, **how)
        if self.sequence_parallel and isinstance(module, nn.LayerNorm):
            return SequenceParallelLayerNorm(module, self.exchange)
        if self.sequence_parallel and name == "embed.positions":
            return SequenceParallelPositions(module, self.exchange)
        return None

    def forward(
        self, idx: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the logits (B, T, V) for `idx` (B, T), or the mean loss.

        With `targets` (B, T) it returns no logits: no rank has all, and none needs
        them. Without targets, the logits are gathered. All ranks must call it with the
        same tokens. Raises CollectiveError, on every rank, if the tokens differ or do
        not fit.
        """
        self.check_tokens(idx, targets)
        try:
            with self.summed_gradients():
                x = self.embed(idx)  # (B, T, C), or (B, T/tp, C) from here to the head
                for block in self.blocks:
                    x = block(x)  # (B, T, C)
                logits = self.head(x)  # (B, T, V/tp)
            announce(self.parts, "after_forward", self, logits)
            if targets is None:
                return self.gather_logits(logits), None
            return None, self.loss_fn(logits, targets)
        except Exception as error:
            announce(self.parts, "forward_failed", self, error)
            raise

    def summed_gradients(self) -> AbstractContextManager:
        """Return a context that sums whole parameters' gradients in one all-reduce."""
        if not self.sequence_parallel:
            return nullcontext()
        return summed_together(self, self.exchange)

    def check_tokens(self, idx: Tensor, targets: Tensor | None = None) -> None:
        """Announce the tokens; a part may compare them over the ranks."""
        self.ends.check_tokens(idx, targets, self.find_unplaced())

    def loss_fn(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of the head's logits, (B, T, V/tp)."""
        return self.ends.loss_fn(logits, targets)

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Return all logits, (B, T, V), from the head's (B, T, V/tp)."""
        return self.ends.gather_logits(logits)


def tensor_parallel(
    model: GPT,
    group: dist.ProcessGroup | None = None,
    *,
    sequence_parallel: bool = False,
    all_reduce: Callable[..., Any] | None = None,
) -> TensorParallelGPT:
    """Return this rank's part of `model`, to be called and trained like the whole.

    All ranks must call it together, with the same model (`build_gpt` with the same
    seed). `model` is not changed: delete it to free the other ranks' parts. An
    optimizer that looks at whole tensors (Adafactor, Muon, LAMB) is refused at its
    first step. (PyTorch's DTensor would show it the other ranks' parts.) If a program
    computes a gradient's norm itself, that is the norm of this rank's part.

    Args:
        model: a plain GPT, on the CPU or on this rank's GPU.
        group: the ranks that share it; None means all.
        sequence_parallel: cut norms and residuals along the sequence, too.
        all_reduce: called as `all_reduce(tensor, op, group=..., async_op=...)`; if
            `async_op`, it returns an object with `wait()`. None means PyTorch's.

    Raises ReplicaError, on every rank, if the models differ (in a single number) or
    cannot be cut. Like torch.distributed.tensor.parallel.parallelize_module. Chapter
    09.
    """
    check_model(model, group, sequence_parallel, all_reduce)
    group_meeting = meeting(group)
    # gloo's threads do not interrupt this rank while it waits for them.
    waiting = partial(patient, threads_of(group_meeting))
    exchange = MessageExchange(group, all_reduce, waiting)
    parts = SameTokens(group_meeting), FailedPasses(group_meeting)
    parallel = TensorParallelGPT(model, exchange, sequence_parallel, parts)
    leave_behind(model.parameters(), "tensor_parallel(model)")
    return parallel
