"""Mixtures on several ranks beside one process: numbers, bytes, and waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.experts.dispatch import TokenDispatcher, dispatched_mixture
from ddp_course.experts.gathered import gathered_mixture
from ddp_course.experts.metered import metered_all_to_all_rows
from ddp_course.experts.naive import NaiveMixture, top_k_weights
from ddp_course.experts.segments import compute_segments
from ddp_course.measure import ByteMeter, Event, EventLog, TorchCollectives
from ddp_course.model import MLP, GPTConfig
from ddp_course.theory import dispatch_volume

CONFIG = GPTConfig()
E, K, N, C = 8, 2, 256, CONFIG.d_model  # experts, chosen, tokens of a rank, channels
ROW = 4 * C  # bytes of a token's row

Compute = Callable[[Sequence[nn.Module], Tensor, list[int]], Tensor]


@dataclass(frozen=True)
class Exchange:
    """An observation of one mixture on one rank, forward and backward.

    Attributes:
        error: the largest difference from one process, of outputs and gradients.
        forward, backward: bytes that this rank sent, as metered. They do not include
            the counts of rows, 8 bytes for each expert of another rank.
        away, arriving: rows that this rank sent to others, and received from them.
        computed: rows that this rank's experts computed.
    """

    error: float
    forward: float
    backward: float
    away: int
    arriving: int
    computed: int


def build_mixture(kind: type[NaiveMixture] = NaiveMixture) -> NaiveMixture:
    """Return a mixture of 8 of the GPT's MLPs, with the same weights on all ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(lambda: MLP(CONFIG), C, E, K)


def drawn(hot: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the tokens of four ranks and a gradient of their outputs, (4 N, C) each.

    `hot` moves the tokens towards expert 0's row of the router.
    """
    random = torch.Generator().manual_seed(0)
    x, dout = (torch.randn(4 * N, C, generator=random) for _ in range(2))
    return x + hot * build_mixture().router.weight[0].detach(), dout


def share(whole: Tensor | nn.ModuleList) -> Tensor | nn.ModuleList:
    """Return this rank's part of all tokens, or of all experts."""
    size = len(whole) // dist.get_world_size()
    return whole[dist.get_rank() * size :][:size]


def against_one_process(way: str, hot: float = 0.0) -> Exchange:
    """Run a mixture on this rank's tokens and experts, and compare with one process.

    `way` is "gathered" or "dispatched"; `hot` is passed to `drawn`.
    """
    tokens, dout = drawn(hot)
    whole, mine = build_mixture(), build_mixture()
    experts = share(mine.experts)
    x = share(tokens).clone().requires_grad_()
    chosen, weights = top_k_weights(mine.router(x), K)
    dispatcher = TokenDispatcher(chosen, E, exchange=metered_all_to_all_rows)

    def mixed() -> Tensor:
        if way == "gathered":
            return gathered_mixture(x, chosen, weights, lambda i, t: experts[i](t), E)
        outputs = compute_segments(experts, dispatcher.dispatch(x), dispatcher.counts)
        return dispatcher.combine(outputs, weights)

    y, forward = _counted(mixed, way)
    _, backward = _counted(lambda: y.backward(share(dout)), way)
    dist.all_reduce(mine.router.weight.grad)
    right = whole(tokens.requires_grad_())
    right.backward(dout)
    pairs = [(y, share(right)), (x.grad, share(tokens.grad))]
    pairs += [(mine.router.weight.grad, whole.router.weight.grad)]
    both = experts.parameters(), share(whole.experts).parameters()
    pairs += [(a.grad, b.grad) for a, b in zip(*both, strict=True)]
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    rank, computed = dist.get_rank(), sum(dispatcher.counts)
    away = sum(dispatcher.sent) - dispatcher.sent[rank]
    arriving = computed - dispatcher.received[rank]
    return Exchange(error, forward, backward, away, arriving, computed)


def _counted(function: Callable[[], Tensor | None], way: str) -> tuple[Any, float]:
    """Call a function; return its result and the bytes that this rank sends in it."""
    with ByteMeter() as meter, TorchCollectives() as torch_log:
        result = function()
    if way == "dispatched":  # PyTorch does not record how an all-to-all is split
        return result, meter.total_sent
    return result, sum(call.bytes_sent for call in torch_log.calls)


def in_words(way: str, seen: Exchange) -> str:
    """Describe an observation, and say whether its bytes equal the formula's."""
    volume = dispatch_volume(seen.away, seen.arriving, C, experts=E, ranks=4)
    sent = 2 * 3 * N * ROW if way == "gathered" else volume.backward
    # A gather also sends `other` bytes of weights and twice as many of choices, which
    # are int64; backward sends the weights' gradients.
    other = 3 * N * K * 4 if way == "gathered" else 0
    equal = (seen.forward, seen.backward) == (sent + 3 * other, sent + other)
    return (
        f"{way:10} as one process: {seen.error < 1e-4}; sends {sent // ROW} rows and "
        f"again in backward, as the formula: {equal}"
    )


def waited_forward(hot: float, seconds: float) -> tuple[int, list[Event]]:
    """Run forward with experts that sleep `seconds` for each row.

    Returns the number of rows that this rank's experts had, and the events.
    """
    x = share(drawn(hot)[0])
    chosen, weights = top_k_weights(build_mixture().router(x), K)
    dist.barrier()
    with EventLog() as log, log.span("step"):
        dispatcher = TokenDispatcher(chosen, E)
        with log.span("dispatch", lane="communication"):
            rows = dispatcher.dispatch(x)
        with log.span("experts"):
            time.sleep(seconds * len(rows))
        with log.span("combine", lane="communication"):
            dispatcher.combine(rows, weights)
    return len(rows), log.events


def expert_gradients() -> tuple[Tensor, Tensor]:
    """Return an expert's gradient summed over all ranks' losses, and one process's."""
    (tokens, _), whole, mine = drawn(), build_mixture(), build_mixture()
    x, experts = share(tokens), share(mine.experts)
    chosen, compute = (
        top_k_weights(mine.router(x), K),
        partial(compute_segments, experts),
    )
    dispatched_mixture(x, *chosen, compute, E).square().mean().backward()
    whole(tokens).square().mean().backward()
    return experts[0].up.weight.grad, share(whole.experts)[0].up.weight.grad


def train_step(compute: Compute, favourite: int | None = None) -> bool:
    """Run a step's forward and backward; return whether the router has a gradient.

    With `favourite`, all tokens prefer this expert and the next one.
    """
    mixture, x = build_mixture(), share(drawn()[0])
    scores = mixture.router(x)
    if favourite is not None:
        scores = scores + 99 * torch.eye(E)[favourite : favourite + 2].sum(0)
    chosen, weights = top_k_weights(scores, K)
    experts = share(mixture.experts)
    dispatched_mixture(
        x, chosen, weights, partial(compute, experts), E
    ).sum().backward()
    return mixture.router.weight.grad is not None


def busy_segments(
    experts: Sequence[nn.Module], rows: Tensor, counts: list[int]
) -> Tensor:
    """Return the outputs of the experts that have rows, as `compute_segments` does.

    This is a planted mistake: on a rank without any row, no output depends on the rows,
    and backward skips their exchange. NVIDIA/Megatron-LM#4851 was such a mistake.
    """
    experts = [*experts] * (len(counts) // len(experts))
    parts = zip(experts, rows.split(counts), counts, strict=True)
    outputs = [expert(part) for expert, part, count in parts if count]
    return torch.cat(outputs) if outputs else torch.zeros(0, C)
