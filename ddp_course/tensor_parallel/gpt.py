"""The spine's GPT, cut: `tensor_parallel` makes it, `plain` puts it together again.

    parallel = tensor_parallel(build_gpt())      # on all ranks: the same seed
    optimizer = AdamW(parallel.parameters())     # this rank's parts
    _, loss = parallel(x, y)                     # the same x and y on all ranks
    loss.backward()
    parallel.clip_grad_norm_(1.0)
    optimizer.step()

It is the same GPT with other layers in it; no line of `model` is changed. Every rank
computes some heads, some columns of the MLP and some of the vocabulary, of all tokens.
In each block and step that takes four all-reduces:

    forward     attn.proj: sum of the heads     mlp.down: sum of the columns
    backward    attn.qkv: gradient of its input   mlp.up: gradient of its input

With `sequence_parallel`, what is not cut so (norms, residuals, dropout) is computed of
T/tp tokens on each rank; each all-reduce becomes a reduce-scatter where one leaves a
parallel region, and an all-gather where one enters the next. Chapter 09.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.collectives import communicator
from ddp_course.mechanisms.batches import digest
from ddp_course.mechanisms.exchange import MessageExchange
from ddp_course.mechanisms.memory_exchange import MemoryExchange, memory_problem
from ddp_course.mechanisms.replicas import check_same, form_of, problem_with
from ddp_course.mechanisms.whole import HasWholeState
from ddp_course.model import GPT, build_gpt
from ddp_course.tensor_parallel import state
from ddp_course.tensor_parallel.layers import (
    ParallelLayer,
    SequenceParallelLayerNorm,
    SequenceParallelPositions,
)
from ddp_course.tensor_parallel.layout import Cut, indivisible, layer_for, layout
from ddp_course.tensor_parallel.loss import vocab_parallel_cross_entropy
from ddp_course.tensor_parallel.norm import clip_grad_norm_
from ddp_course.tensor_parallel.ops import gather_from_group
from ddp_course.tensor_parallel.tokens import same_tokens


class TensorParallelGPT(HasWholeState, GPT):
    """This rank's part of a GPT: `parameters()` are its slices. See `tensor_parallel`.

    Attributes:
        layout: which parameter is cut how (`layout.Cut`), in the plain model's order.
        exchange: how the ranks exchange tensors.
        sequence_parallel: whether norms and residuals are cut along the sequence.
    """

    GATHERING = state

    def __init__(
        self, full: GPT, exchange: MessageExchange, sequence_parallel: bool = False
    ) -> None:
        nn.Module.__init__(self)  # not GPT's, which would make all parameters
        self.config, self.exchange = full.config, exchange
        self.sequence_parallel = sequence_parallel
        self.layout: tuple[Cut, ...] = layout(full, exchange.size)
        memo: dict[int, Any] = {}
        for name, module in full.named_modules():
            layer = self._layer_for(name, module)
            if layer is not None:
                memo[id(module)] = layer
        for name, child in full.named_children():
            # A copy in which the layers that are cut are already made.
            setattr(self, name, copy.deepcopy(child, memo))
        if full.head.out.weight is full.embed.tokens.weight:
            self.head.out.weight = self.embed.tokens.weight
        self.train(full.training)

    def _layer_for(self, name: str, module: nn.Module) -> ParallelLayer | None:
        """Return the layer that takes the place of a plain one; None: it stays."""
        kind, sp = layer_for(name), self.sequence_parallel
        if kind is not None:
            return kind(module, self.exchange, sequence_parallel=sp)
        if sp and isinstance(module, nn.LayerNorm):
            return SequenceParallelLayerNorm(module, self.exchange)
        if sp and name == "embed.positions":
            return SequenceParallelPositions(module, self.exchange)
        return None

    def forward(
        self, idx: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the logits (B, T, V) for `idx` (B, T), or the mean loss.

        With `targets` (B, T) there are no logits: no rank has them all, and none needs
        them. Without, they are gathered. Called by all ranks with the same tokens.
        Raises CollectiveError, on every rank, if they are not the same, or do not fit.
        """
        sp = self.sequence_parallel
        same_tokens(self.exchange.comm, self.config, idx, targets, sp)
        x = self.embed(idx)  # (B, T, C), or (B, T/tp, C) from here to the head
        for block in self.blocks:
            x = block(x)  # (B, T, C)
        logits = self.head(x)  # (B, T, V/tp)
        if targets is None:
            return gather_from_group(logits, -1, self.exchange), None
        return None, vocab_parallel_cross_entropy(logits, targets, self.exchange)

    # ---- gradients -------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return it.

        The norm is that of the whole model's gradient, as it was before; called by all
        ranks. As torch.nn.utils.clip_grad_norm_.
        """
        return clip_grad_norm_(self, max_norm, norm_type)

    def extra_repr(self) -> str:
        """Tell what is cut, and how."""
        return "\n".join(map(str, self.layout))


def tensor_parallel(
    model: GPT,
    group: dist.ProcessGroup | None = None,
    *,
    sequence_parallel: bool = False,
    all_reduce: Callable[..., Any] | None = None,
    in_shared_memory: bool = False,
) -> TensorParallelGPT:
    """Return this rank's part of `model`, to be called and trained like the whole.

    Called by all ranks together, with the same model (`build_gpt` with the same seed);
    it stays as it is: drop it, and the memory of what other ranks have is free.

    Args:
        model: a plain GPT, on the CPU or on this rank's GPU.
        group: the ranks that share it; None are all.
        sequence_parallel: cut norms and residuals along the sequence, too.
        all_reduce: called as `all_reduce(tensor, op, group=..., async_op=...)`; if
            `async_op`, what it returns has a `wait()`. None is PyTorch's.
        in_shared_memory: exchange nothing by messages, all through memory that the
            ranks of one machine share; on the CPU only.

    Raises ReplicaError, on every rank, if the models differ (in a single number) or
    cannot be cut so. As torch.distributed.tensor.parallel.parallelize_module. Chapter
    09.
    """
    problem = _problem_with(model, group, all_reduce, in_shared_memory)
    form = {}
    if not problem:
        form = form_of(
            model,
            config=model.config,
            sequence_parallel=bool(sequence_parallel),
            all_reduce=getattr(all_reduce, "__module__", None),
            in_shared_memory=bool(in_shared_memory),
        )
        form |= {f"numbers of {n}": digest(p) for n, p in model.named_parameters()}
    check_same(form, problem, group)
    if in_shared_memory:
        return TensorParallelGPT(model, MemoryExchange(group), sequence_parallel)
    return TensorParallelGPT(
        model, MessageExchange(group, all_reduce), sequence_parallel
    )


def _problem_with(
    model: Any, group: dist.ProcessGroup | None, all_reduce: Any, in_shared_memory: bool
) -> str | None:
    """Return why this cannot be done, or None."""
    comm = communicator(group)
    if not isinstance(model, GPT) or isinstance(model, TensorParallelGPT):
        return f"model is a {type(model).__name__}; it must be a plain GPT"
    if wrong := problem_with(model) or indivisible(model.config, comm.size):
        return wrong
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        return f"the model is on {', '.join(devices)}; it must be on one device"
    if in_shared_memory and all_reduce is not None:
        return "all_reduce and in_shared_memory are both given; it can be one of them"
    return memory_problem(group, set(devices)) if in_shared_memory else None


def plain(model: TensorParallelGPT) -> GPT:
    """Return the whole model, as one process has it, on every rank; called by all.

    It lies where the parts do, with the same parameters trainable. Chapter 09.
    """
    whole = model.full_state_dict()
    own = dict(model.named_parameters())
    gpt = build_gpt(model.config)
    for name, parameter in gpt.named_parameters():
        parameter.data = whole[name].to(own[name].device)
        parameter.requires_grad_(own[name].requires_grad)
    return gpt.train(model.training)
